"""Planted defect: the random keys depend on the slice that computes."""

from dataclasses import replace

import jax

from elastix import Recipe
from tests.recipes import tiny


def loss(model, batch, keys):
    me = jax.lax.axis_index("slice")
    return tiny.squared_error(model, batch, jax.vmap(lambda k: jax.random.fold_in(k, me))(keys))


def recipe() -> Recipe:
    """Nothing is redone (`live`), so that no repeated step gives the defect away."""
    whole = tiny.recipe()
    return replace(whole, loss=loss, policy=replace(whole.policy, lookback="live"))
