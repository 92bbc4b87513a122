"""A tiny net with all that a recovery could get wrong: dropout, uneven weights, fsdp-sharded
layers. It is no language model, and compiles in about a second."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from elastix import AdamW, Policy, Recipe
from elastix.data import Stream, stream

DIM = 8


class Net(eqx.Module):
    """Two layers with dropout in between."""

    first: jax.Array
    second: jax.Array
    bias: jax.Array
    dropout: float = eqx.field(static=True)

    def __call__(self, x, key):
        hidden = jax.nn.gelu(x @ self.first)
        keep = jax.random.bernoulli(key, 1.0 - self.dropout, hidden.shape)
        return jnp.where(keep, hidden, 0.0) @ self.second + self.bias


@dataclass(frozen=True)
class NetConfig:
    hidden: int = 16
    dropout: float = 0.1

    def build(self, key):
        first, second = jax.random.split(key)
        return Net(
            jax.random.normal(first, (DIM, self.hidden)) * 0.3,
            jax.random.normal(second, (self.hidden, DIM)) * 0.3,
            jnp.zeros(DIM),
            self.dropout,
        )

    def sharding_rules(self):
        return ((r"\.first$", (None, "fsdp")), (r"\.second$", ("fsdp", None)))


class Waves:
    """Records `x` and a target that can be learned from it, made from their index."""

    def __init__(self, size: int):
        self._size = size

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        x = np.random.default_rng(index).standard_normal(DIM).astype(np.float32)
        return {"x": x, "y": np.sin(2 * x)[::-1].copy(), "w": np.float32(1 + index % 3)}


@dataclass(frozen=True)
class WavesConfig:
    size: int = 200

    def build(self, global_batch: int, seed: int) -> Stream:
        fingerprint = {"kind": "waves", "size": self.size}
        return stream(
            Waves(self.size), global_batch=global_batch, seed=seed, fingerprint=fingerprint
        )


def loss(model, batch, keys):
    """Weighted squared error of one logical replica."""
    out = jax.vmap(model)(batch["x"], keys)
    error = jnp.sum((out - batch["y"]) ** 2, axis=-1)
    return jnp.sum(batch["w"] * error), jnp.sum(batch["w"]), {"absolute": jnp.sum(jnp.abs(error))}


def recipe() -> Recipe:
    return Recipe(
        model=NetConfig(),
        data=WavesConfig(),
        optimizer=AdamW(peak=1e-2, warmup=5, decay=60),
        loss=loss,
        num_steps=40,
        global_batch=24,
        num_replicas=12,
        policy=Policy(snapshot_every=5, checkpoint_every=10, probe_every=0.001, warm="off"),
    )
