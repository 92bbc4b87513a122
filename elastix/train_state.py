"""What training changes, as one pytree of arrays, and its flat form keyed by path."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, PyTree

from elastix.mesh import SLICE, ShardingRules, partition_spec
from elastix.user_code import building

Leaves = dict[str, Any]
"""The flat form: one raw array for each key path. Typed keys stand as their key data."""

EXACT = {"xla_allow_excess_precision": False}
"""Compiler options with which bits do not depend on the mesh: XLA may else leave out a rounding
to bfloat16, and does so in the program of one device where it does not in that of two slices."""


class TrainState(eqx.Module):
    """Model and optimizer arrays, the number of updates applied, and the base random key."""

    model: PyTree[Array]
    opt_state: PyTree[Array]
    step: Int[Array, ""]
    key: Key[Array, ""]


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of the flat form. `key_impl` names the PRNG of a typed key, whose `shape` and
    `dtype` here are those of its key data; `dtype_name` is then `key<impl>`."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    key_impl: str | None
    dtype_name: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class StateSpec:
    """The structure of a train state: what is static in it, and how it flattens.

    Arrays are kept outside as `Leaves`, so that snapshots, checkpoints and hashes all speak of
    paths, and nothing depends on an unpickled treedef.
    """

    def __init__(
        self,
        build_model: Callable[[Array], PyTree],
        optimizer: optax.GradientTransformation,
        seed: int,
    ):
        self._build_model, self.optimizer, self._seed = build_model, optimizer, seed
        config = getattr(build_model, "__self__", build_model)
        with building(f"model {config!r}"):
            model = eqx.filter_eval_shape(build_model, jax.eval_shape(lambda: jax.random.key(0)))
        _refuse_negative(f"model {config!r}", model)
        is_struct = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
        _, self.static_model = eqx.partition(model, is_struct)
        with building("the state of the optimizer"):
            abstract = jax.eval_shape(self._init)
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(abstract)
        self.leaves = tuple(_leaf_spec(jax.tree_util.keystr(path), leaf) for path, leaf in flat)
        self.paths = tuple(leaf.path for leaf in self.leaves)
        self.trainable_paths = tuple(
            leaf.path
            for leaf in self.leaves
            if leaf.path.startswith(".model") and jnp.issubdtype(leaf.dtype, jnp.inexact)
        )
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)

    def _init(self) -> TrainState:
        base = jax.random.key(self._seed)
        model = eqx.filter(self._build_model(jax.random.fold_in(base, 0)), eqx.is_array)
        opt_state = self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return TrainState(model, opt_state, jnp.zeros((), jnp.int32), jax.random.fold_in(base, 1))

    def flatten(self, state: TrainState) -> Leaves:
        """The raw leaves of `state` (traceable)."""
        leaves = jax.tree.leaves(state)
        return {
            spec.path: jax.random.key_data(x) if spec.key_impl else x
            for spec, x in zip(self.leaves, leaves, strict=True)
        }

    def unflatten(self, leaves: Mapping[str, Array]) -> TrainState:
        """The train state of raw `leaves` (traceable)."""
        typed = [
            jax.random.wrap_key_data(leaves[s.path], impl=s.key_impl)
            if s.key_impl
            else leaves[s.path]
            for s in self.leaves
        ]
        return jax.tree.unflatten(self._treedef, typed)

    def misfit(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """How the leaves of a checkpoint differ from those here, in words; None if they do not.

        Args:
            rows: path, dtype and shape of each leaf, as a checkpoint's metadata have them.
        """
        there = {row["path"]: f"{row['dtype']}{list(row['shape'])}" for row in rows}
        here = {leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in self.leaves}
        found = [
            f"{path} is {there.get(path, 'not there')}, and the recipe has {here.get(path, 'none')}"
            for path in sorted({*there, *here})
            if there.get(path) != here.get(path)
        ]
        return "; ".join([*found[:4], *(["..."] if len(found) > 4 else [])]) or None

    def specs(self, rules: ShardingRules, mesh: Mesh) -> dict[str, PartitionSpec]:
        """The partition spec of each leaf; none names `slice`."""
        sizes = dict(mesh.shape)
        return {s.path: partition_spec(s.path, s.shape, rules, sizes) for s in self.leaves}

    def shardings(self, rules: ShardingRules, mesh: Mesh) -> dict[str, NamedSharding]:
        return {p: NamedSharding(mesh, spec) for p, spec in self.specs(rules, mesh).items()}

    def abstract(self, shardings: Mapping[str, NamedSharding]) -> Leaves:
        """Shapes, dtypes and shardings of the flat form, for compiling ahead of time."""
        return {
            s.path: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=shardings[s.path])
            for s in self.leaves
        }

    def compile_init(self, rules: ShardingRules, mesh: Mesh) -> Callable[[], Leaves]:
        """The seed's train state on `mesh`."""
        return self.lower_init(rules, mesh).compile()

    def lower_init(self, rules: ShardingRules, mesh: Mesh) -> Any:
        """The seed's train state, lowered for `mesh`.

        Every slice computes the whole state by itself (manual over `slice`), so the bits do not
        depend on how many slices there are.
        """
        alone = jax.shard_map(
            lambda: self.flatten(self._init()),
            mesh=mesh,
            in_specs=(),
            out_specs=PartitionSpec(),
            axis_names={SLICE},
            check_vma=False,
        )
        shardings = self.shardings(rules, mesh)
        return jax.jit(alone, out_shardings=shardings, compiler_options=EXACT).lower()

    def sha256(self, leaves: Mapping[str, np.ndarray]) -> str:
        """Hash of all leaves, sorted by path: `path NUL dtype NUL shape NUL` and the
        little-endian C-order bytes of each."""
        digest = hashlib.sha256()
        for spec in sorted(self.leaves, key=lambda s: s.path):
            array = np.asarray(leaves[spec.path])
            shape = str(spec.shape if not spec.key_impl else spec.shape[:-1])
            digest.update(f"{spec.path}\0{spec.dtype_name}\0{shape}\0".encode())
            digest.update(little_endian_bytes(array))
        return digest.hexdigest()


def little_endian_bytes(array: np.ndarray) -> bytes:
    """The C-order bytes of a whole array, in little-endian order."""
    big = array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big")
    return (array.byteswap() if big else array).tobytes()


def _refuse_negative(what: str, model: PyTree) -> None:
    """JAX lets shapes with negative dims pass until they are used."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if isinstance(leaf, jax.ShapeDtypeStruct) and min(leaf.shape, default=0) < 0:
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"{what} cannot be built: {where} would have shape {leaf.shape}: correct its values"
            )


def _leaf_spec(path: str, leaf: jax.ShapeDtypeStruct) -> LeafSpec:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return LeafSpec(path, leaf.shape, np.dtype(leaf.dtype), None, str(np.dtype(leaf.dtype)))
    impls: list[str] = []

    def data(key: Array) -> Array:
        impls.append(str(jax.random.key_impl(key)))  # a name only a traced key tells
        return jax.random.key_data(key)

    raw = jax.eval_shape(data, leaf)
    return LeafSpec(path, raw.shape, np.dtype(raw.dtype), impls[0], str(leaf.dtype))


def all_finite(leaves: Mapping[str, np.ndarray]) -> bool:
    """Whether no value of the state is NaN or infinite, or, if it is complex, has such a part."""
    inexact = (np.asarray(x) for x in leaves.values() if jnp.issubdtype(x.dtype, jnp.inexact))
    return all(bool(np.isfinite(_as_numpy_knows(x)).all()) for x in inexact)


def _as_numpy_knows(array: np.ndarray) -> np.ndarray:
    """An extension type, all of which are narrower, as float32."""
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
