"""A regression on made-up points that trains in a second: what the tests run elastix on."""

import os
import signal
import time
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from elastix import AdamW, Policy, Recipe
from elastix.data import DataError, Stream, stream


class MLP(eqx.Module):
    """One hidden layer, with noise on it that depends on the example's random key."""

    hidden: jax.Array
    out: jax.Array

    def __call__(self, x, key):
        noise = 0.1 * jax.random.normal(key, (self.hidden.shape[1],))
        return jnp.tanh(x @ self.hidden + noise) @ self.out


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of the regression.

    Args:
        width: units of the hidden layer.
    """

    width: int = 8

    def build(self, key):
        one, two = jax.random.split(key)
        hidden = jax.random.normal(one, (4, self.width))
        return MLP(hidden, jax.random.normal(two, (self.width,)) / self.width)


@dataclass(frozen=True)
class Points:
    """`size` points in 4 dims and the sines of their sums."""

    size: int = 64

    def build(self, global_batch: int, seed: int) -> Stream:
        if self.size < 1:
            raise DataError(f"data.size={self.size}: use 1 point or more")
        x = np.random.default_rng(0).normal(size=(self.size, 4)).astype(np.float32)
        points = [{"x": row, "y": np.sin(row.sum())} for row in x]
        what = {"kind": "points", "size": self.size}
        return stream(points, global_batch=global_batch, seed=seed, fingerprint=what)


def squared_error(model, batch, keys):
    errors = jax.vmap(model)(batch["x"], keys) - batch["y"]
    weight = jnp.asarray(errors.size, jnp.float32)
    return jnp.sum(errors**2), weight, {"error": jnp.sum(jnp.abs(errors))}


def recipe() -> Recipe:
    """Forty steps, a snapshot every 5 and a checkpoint every 10."""
    return Recipe(
        model=MLPConfig(),
        data=Points(),
        optimizer=AdamW(peak=1e-2),
        loss=squared_error,
        num_steps=40,
        global_batch=8,
        num_replicas=4,
        policy=Policy(snapshot_every=5, checkpoint_every=10, probe_every=0.01, warm="off"),
    )


def killed() -> Recipe:
    """The same run, killed the hard way at the step that KILL_AT names."""

    def kill(row):
        if row["step"] == int(os.environ["KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)

    return replace(recipe(), hooks=(kill,))


def interrupted() -> Recipe:
    """The same run, which interrupts itself as often as INTERRUPTS says, by Ctrl-C or SIGTERM."""

    def interrupt(row):
        if row["step"] == 20:
            for name in os.environ["INTERRUPTS"].split():
                signal.raise_signal(getattr(signal, name))
                heard = time.monotonic() + 0.3  # the main thread listens ten times a second
                while time.monotonic() < heard:
                    pass

    return replace(recipe(), hooks=(interrupt,))


def no_error(model, batch, keys):
    total, weight, metrics = squared_error(model, batch, keys)
    return 0 * total, weight, metrics


def idle() -> Recipe:
    """Trains nothing: its gradients are zero."""
    return replace(recipe(), loss=no_error, optimizer=AdamW(weight_decay=0.0))


def broken_loss(model, batch, keys):
    raise TypeError("no such column")


def broken() -> Recipe:
    """A program error: its loss raises when it is traced."""
    return replace(recipe(), loss=broken_loss)


def unsplittable() -> Recipe:
    """A batch that its replicas cannot share."""
    return replace(recipe(), global_batch=9)
