"""Planted defect: after a loss, the train state is taken from the slices that are gone."""

from dataclasses import replace

import elastix.snapshots
from elastix import Recipe
from tests.recipes import tiny

_move = elastix.snapshots.move


def move_from_the_dead(leaves, donors, shardings):
    dead = {d for array in leaves.values() for d in array.sharding.device_set} - donors
    return _move(leaves, frozenset(dead) or donors, shardings)


elastix.snapshots.move = move_from_the_dead


def recipe() -> Recipe:
    whole = tiny.recipe()
    return replace(whole, policy=replace(whole.policy, lookback="live"))
