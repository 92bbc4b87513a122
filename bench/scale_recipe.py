"""A recipe whose state has a given size and whose step does little else than touch it all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from elastix import AdamW, Lose, Policy, Recipe, Return
from elastix.data import Stream, stream
from elastix.faults import Fault

BYTES_PER_PARAMETER = 12
"""A weight and Adam's two moments, all f32."""


class Weights(eqx.Module):
    """A vector of weights."""

    weights: jax.Array


@dataclass(frozen=True)
class WeightsConfig:
    """So many weights."""

    size: int

    def build(self, key: Any) -> Weights:
        return Weights(jax.random.normal(key, (self.size,)))


@dataclass(frozen=True)
class Ones:
    """Examples that are all the number 1."""

    size: int = 4096

    def build(self, global_batch: int, seed: int) -> Stream:
        points = [{"x": np.float32(1)} for _ in range(self.size)]
        return stream(points, global_batch=global_batch, seed=seed, fingerprint={"kind": "ones"})


def mean_square(model: Weights, batch: dict[str, jax.Array], keys: jax.Array) -> Any:
    """The mean square of the weights, once for each example."""
    examples = jnp.sum(batch["x"])
    return examples * jnp.mean(model.weights**2), examples, {}


def recipe(megabytes: float, slices: int, repeats: int, period: int) -> Recipe:
    """One loss every `period` steps, `repeats` of them and one before."""
    size = max(1, round(megabytes * 2**20 / BYTES_PER_PARAMETER))
    return Recipe(
        model=WeightsConfig(size),
        data=Ones(),
        optimizer=AdamW(peak=1e-3),
        loss=mean_square,
        num_steps=period * (repeats + 2),
        global_batch=slices,
        num_replicas=slices,
        policy=Policy(
            snapshot_every=4, checkpoint_every=0, probe_every=0.001, stable_probes=1, deadline=1e5
        ),
    )


def faults(repeats: int, period: int) -> list[Fault]:
    """Slice 1 is lost after half a period and back after three quarters, again and again."""
    cycles = range(repeats + 1)
    losses = [Lose(1, period * n + period // 2) for n in cycles]
    return [*losses, *(Return(1, period * n + 3 * period // 4) for n in cycles)]
