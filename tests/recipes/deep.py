"""A small net that compiles in no time, on data that come as slowly as they are asked to: what is
run on slices that are processes of their own, each of which compiles it."""

import time
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from elastix import Policy, Recipe
from elastix.data import Stream, stream
from tests.recipes import tiny

SIZE = 200
GLOBAL_BATCH = 8


class Deep(eqx.Module):
    """A layer, and a large matrix product, in which a step can be killed, that moves its input by a
    hair."""

    turn: jax.Array
    out: jax.Array

    def __call__(self, x, key):
        square = jnp.broadcast_to(x[:1], (SIZE, SIZE))
        hair = 1e-9 * jax.lax.stop_gradient(jnp.max(square @ square))
        return jnp.tanh((x + hair) @ self.turn) @ self.out


@dataclass(frozen=True)
class DeepConfig:
    width: int = 4

    def build(self, key):
        return Deep(0.5 * jax.random.normal(key, (4, self.width)), jnp.ones(self.width))


class SlowDisk:
    """64 points in 4 dims and the sines of their sums, each of which takes some seconds."""

    def __init__(self, seconds: float):
        self._x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        self._seconds = seconds

    def __len__(self):
        return len(self._x)

    def __getitem__(self, index):
        time.sleep(self._seconds)
        return {"x": self._x[index], "y": np.sin(self._x[index].sum())}


@dataclass(frozen=True)
class SlowPoints:
    """Args:
    pace: seconds that a batch takes to come, at least.
    """

    pace: float = 0.0

    def build(self, global_batch: int, seed: int) -> Stream:
        source = SlowDisk(self.pace / GLOBAL_BATCH)
        what = {"kind": "slow points"}
        return stream(source, global_batch=global_batch, seed=seed, fingerprint=what)


@dataclass(frozen=True)
class Momentum:
    peak: float = 1e-2

    def build(self) -> optax.GradientTransformation:
        return optax.sgd(self.peak, momentum=0.9)


def recipe() -> Recipe:
    """Thirty steps, a snapshot every 3 and a checkpoint every 6."""
    return Recipe(
        model=DeepConfig(),
        data=SlowPoints(),
        optimizer=Momentum(),
        loss=tiny.squared_error,
        num_steps=30,
        global_batch=GLOBAL_BATCH,
        num_replicas=4,
        policy=Policy(
            warm="off",
            snapshot_every=3,
            checkpoint_every=6,
            probe_every=0.1,
            max_losses=50,
            keep_checkpoints=20,
        ),
    )


def live() -> Recipe:
    """The same, and after a loss it goes back to the last step on the slices that are left."""
    at_start = recipe()
    return replace(at_start, policy=replace(at_start.policy, lookback="live"))
