"""Leaves of every kind in one train state: through each tier, and on any number of slices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from elastix import train
from elastix.checkpoints import CheckpointStore
from elastix.leaf_hash import hashes_of
from elastix.recipe import Recipe
from elastix.testing.slices import SteppingBackend
from elastix.train_state import all_finite
from tests.recipes import net
from tests.recovery.test_lessons_on_arrays import (
    NET,
    Watching,
    assert_same,
    run,
    run_through_all_tiers,
)

PARTS = ("int2", "int4", "uint2", "uint4")
"""Narrower than a byte."""
RESTORES_PARTS = jax.__version_info__ >= (0, 12)
COUNTED = (
    *("complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "bfloat16"),
    *("int8", "int16", "uint16", "uint32", "bool", *(PARTS if RESTORES_PARTS else ())),
)
"""What the optimizer below counts in."""


def narrow(values, dtype: str):
    """In that dtype, if this JAX restores it; else in the least that is of whole bytes."""
    return jnp.array(values, dtype_of(dtype if RESTORES_PARTS else dtype.rstrip("24") + "8"))


class Odd(eqx.Module):
    """Trained weights, and all else that a model may keep: some split over `fsdp`, some empty."""

    weights: jax.Array
    nothing: jax.Array
    quarter_bytes: jax.Array
    half_bytes: jax.Array
    unsigned: jax.Array
    flags: jax.Array
    void: jax.Array
    keys: jax.Array

    def __call__(self, x, key):
        scale = jnp.where(self.flags, self.half_bytes[0].astype(jnp.float32), 1.0)
        noise = jax.random.normal(jax.random.fold_in(self.keys[1], self.unsigned[3]), (net.DIM,))
        return (x @ self.weights) * scale + 0.1 * noise + jnp.sum(self.nothing)


@dataclass(frozen=True)
class OddConfig:
    def build(self, key):
        return Odd(
            weights=0.3 * jax.random.normal(key, (net.DIM, net.DIM)),
            nothing=jnp.zeros((0, 3)),
            quarter_bytes=narrow([-2, -1, 0, 1], "int2"),
            half_bytes=narrow([[-8, -1, 0, 1, 2, 3, 6, 7]] * 2, "int4"),
            unsigned=narrow([0, 1, 7, 15], "uint4"),
            flags=jnp.arange(net.DIM) % 3 == 0,
            void=jnp.zeros((2, 0), jnp.int8),
            keys=jax.random.split(jax.random.key(5, impl="rbg"), 3),
        )

    def sharding_rules(self):
        return ((r"\.half_bytes$", (None, "fsdp")), (r"\.flags$", ("fsdp",)))


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def counted(count, dtype: str):
    """[4] values of a dtype that tell one count from the next, some of them below zero."""
    values = (count + jnp.arange(4)) % 7 - 3
    if dtype == "complex64":
        return values * (1.0 + 2.0j)
    if dtype == "float8_e8m0fnu":  # nothing but powers of two
        return jnp.exp2(values).astype(dtype_of(dtype))
    signed = jnp.abs(values) if dtype.startswith("u") else values
    return jnp.asarray(signed, jnp.float32).astype(dtype_of(dtype))


@dataclass(frozen=True)
class Counting:
    """Gradient descent whose state counts the updates in every dtype."""

    def build(self):
        def state(count):
            return {"count": count, **{name: counted(count, name) for name in COUNTED}}

        def update(grads, before, params=None):
            steps = jax.tree.map(lambda g: -1e-2 * g, grads)
            return steps, state(before["count"] + 1)

        return optax.GradientTransformation(lambda params: state(jnp.int32(0)), update)


ODD = replace(NET, model=OddConfig(), optimizer=Counting())


def lies(leaves):
    """How each leaf is split, and in which kind of memory it is."""
    return tuple((path, x.sharding.spec, x.sharding.memory_kind) for path, x in leaves.items())


@pytest.fixture(scope="module")
def undisturbed():
    return run(ODD)


def test_every_dtype_survives_every_tier(undisturbed, tmp_path):
    places = set()
    backend = Watching(saw=lambda leaves: places.add(lies(leaves)))
    summary = run_through_all_tiers(ODD, tmp_path / "run", backend=backend)
    assert_same(summary, undisturbed)
    assert len(places) == 1, "a restore puts each leaf where it lay, in the memory it was in"
    leaves, metadata = CheckpointStore(tmp_path / "run/checkpoints", keep=3).load(NET.num_steps)
    assert metadata["leaf_hashes"] == hashes_of(leaves)
    for name in COUNTED:
        wanted = np.asarray(counted(NET.num_steps, name))
        found = leaves[f".opt_state['{name}']"]
        assert (found.dtype, found.tobytes()) == (wanted.dtype, wanted.tobytes()), name
    start = OddConfig().build(jax.random.key(0))
    for name in ("quarter_bytes", "half_bytes", "unsigned", "flags", "void", "nothing"):
        wanted, found = np.asarray(getattr(start, name)), leaves[f".model.{name}"]
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes(), name
    data = np.asarray(jax.random.key_data(start.keys))
    assert leaves[".model.keys"].tobytes() == data.tobytes()


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_the_state_has_one_hash_on_any_number_of_slices(undisturbed, slices):
    assert run(ODD, backend=SteppingBackend(slices, 2)).state_sha256 == undisturbed.state_sha256


def test_what_is_not_finite_is_found_in_every_dtype_that_can_say_so():
    for name in ("float16", "bfloat16", "float32", "float64", "float8_e5m2", "complex64"):
        values = np.ones(3, dtype_of(name))
        assert all_finite({"x": values})
        values[1] = np.nan
        assert not all_finite({"x": values}), name
    assert all_finite({"x": np.array([1e300])}), "it is wider than float32, and finite"
    assert not all_finite({"x": np.array([complex(0, np.inf)], np.complex64)})
    assert all_finite({"x": np.array([1], ml_dtypes.int4), "y": np.zeros(0, np.float32)})


# --- what cannot be trained -----------------------------------------------------------------------


@dataclass(frozen=True)
class Cast:
    """The net, with one of its leaves in another dtype."""

    dtype: str

    def build(self, key):
        made = net.NetConfig().build(key)
        return eqx.tree_at(lambda m: m.bias, made, made.bias.astype(dtype_of(self.dtype)))


@dataclass(frozen=True)
class Quantized:
    """The net, and beside it a table in a dtype that is not trained."""

    dtype: str

    def build(self, key):
        return Both(net.NetConfig().build(key), jnp.zeros(8, dtype_of(self.dtype)))


class Both(eqx.Module):
    net: net.Net
    table: jax.Array

    def __call__(self, x, key):
        return self.net(x, key)


@pytest.mark.skipif(RESTORES_PARTS, reason="this JAX restores them")
@pytest.mark.parametrize("dtype", PARTS)
def test_what_this_jax_cannot_restore_is_refused_by_its_path_and_dtype(dtype, tmp_path):
    refused(
        replace(NET, model=Quantized(dtype)), tmp_path, rf"^\.model\.table is {dtype}, which JAX"
    )


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_a_leaf_that_cannot_be_trained_is_refused_by_its_path_and_dtype(dtype, reduction, tmp_path):
    recipe = replace(NET, model=Cast(dtype), reduction=reduction)
    refused(recipe, tmp_path, rf"^\.model\.bias is {dtype}, which .* make it float32 or bfloat16")


def test_double_precision_is_not_rounded_in_silence(tmp_path):
    with jax.enable_x64(True):
        refused(
            replace(NET, model=Cast("float64")), tmp_path, r"^\.model\.first is float64, which "
        )


def refused(recipe: Recipe, tmp_path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        train(recipe, backend=SteppingBackend(4, 2), run_dir=tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_half_precision_can_be_trained():
    summary = run(replace(NET, model=Cast("float16"), num_steps=2))
    assert summary.outcome == "done"
