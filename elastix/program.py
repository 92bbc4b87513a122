"""A recipe made runnable on the slices of a backend: executables and arrays for any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from elastix.compile_cache import Build, Compilation, CompileCache
from elastix.eval_step import EvalStep
from elastix.leaf_hash import hashes_on_device
from elastix.mesh import SLICE
from elastix.recipe import Recipe
from elastix.snapshots import LocalTransfers, Transfers
from elastix.step import TrainStep, Work, batch_spec
from elastix.train_state import EXACT, Leaves, StateSpec

Slices = frozenset[int]
Batch = dict[str, np.ndarray]
Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]


class Program:
    """Compiled steps and initial states of one recipe, keyed by the set of slices.

    Args:
        sample: one global batch of the recipe's stream, for shapes and dtypes.
        devices: the devices of each slice.
        eval_sample: one global batch of the recipe's evaluation data, if it has any.
        transfers: how batches get to these devices; by default they are of this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        sample: Batch,
        devices: Mapping[int, Sequence[Any]],
        eval_sample: Batch | None = None,
        transfers: Transfers | None = None,
    ):
        self._recipe, self._devices = recipe, devices
        self._transfers = transfers or LocalTransfers()
        self._sample = _shapes(sample)
        self._eval_sample = _shapes(eval_sample) if eval_sample else None
        self._rules = tuple(getattr(recipe.model, "sharding_rules", tuple)())
        self.spec = StateSpec(recipe.model.build, recipe.optimizer.build(), recipe.seed)
        self.shapes = {leaf.path: leaf.shape for leaf in self.spec.leaves}
        self._step = TrainStep(
            self.spec,
            recipe.loss,
            recipe.global_batch,
            recipe.num_replicas,
            recipe.reduction,
            getattr(recipe.optimizer, "learning_rate", None),
            recipe.microbatches,
        )
        self._eval_step = EvalStep(
            self.spec, recipe.eval_loss or recipe.loss, recipe.global_batch, recipe.num_replicas
        )
        self.donates = recipe.policy.lookback == "host"
        self._cache = CompileCache(recipe.policy.compiled_bytes)
        self._meshes: dict[Slices, Mesh] = {}
        each = len(next(iter(devices.values())))
        self.layout = list(recipe.mesh.inner_shape(each))
        """Sizes of the mesh axes inside a slice."""
        self.shardings(frozenset(devices))  # refuses a bad sharding rule before anything runs

    def mesh(self, slices: Slices) -> Mesh:
        if slices not in self._meshes:
            self._meshes[slices] = self._recipe.mesh.build(self._devices, slices)
        return self._meshes[slices]

    def devices(self, slices: Slices) -> frozenset[Any]:
        return frozenset(d for s in slices for d in self._devices[s])

    def shardings(self, slices: Slices) -> dict[str, NamedSharding]:
        """Where each leaf of the train state lies on the mesh of `slices`."""
        return self.spec.shardings(self._rules, self.mesh(slices))

    def initial(self, slices: Slices) -> Leaves:
        """The seed's train state."""
        return self.compiling_init(slices).result()()

    def step(self, slices: Slices) -> Any:
        """The executable `(leaves, batch) -> (leaves, results)` for `slices`."""
        return self.compiling_step(slices).result()

    def evaluate(self, slices: Slices) -> Any:
        """The executable `(leaves, batch) -> sums` for `slices`."""
        return self.compiling_eval(slices).result()

    def snapshot(self, leaves: Leaves, slices: Slices) -> tuple[Any, Leaves]:
        """What each slice holds, hashed, uint32[slices, leaves, 2]; and the leaves to make a host
        snapshot of: copies, if the transfers have a program make them. All of it as futures."""
        hashes, copies = self.compiling_snapshot(slices).result()(leaves)
        return hashes, copies or leaves

    def compiling_snapshot(self, slices: Slices) -> Compilation:
        """The executable of `snapshot`, which is compiled in the background."""
        return self._cache.get(self._build_snapshot(slices))

    def compiling_init(self, slices: Slices) -> Compilation:
        """The executable of `initial`, which is compiled in the background."""
        lower = lambda: self.spec.lower_init(self._rules, self.mesh(slices))  # noqa: E731
        return self._cache.get(Build("init", slices, lower))

    def compiling_step(self, slices: Slices) -> Compilation:
        """The executable of `step`, which is compiled in the background."""
        return self._cache.get(self._build_step(slices))

    def compiling_eval(self, slices: Slices) -> Compilation:
        """The executable of `evaluate`, which is compiled in the background."""
        return self._cache.get(self._build_eval(slices))

    def is_compiling(self, slices: Slices) -> bool:
        """Whether an executable for `slices` is on its way."""
        return self._cache.is_making(slices)

    def warm(self, sets: Iterable[Slices]) -> None:
        """Compile all that training on these sets needs, one after another in the background, and
        nothing that was to be warmed before."""
        builds = [self._build_step, self._build_snapshot]
        if self._eval_sample:
            builds.append(self._build_eval)
        self._cache.warm([build(slices) for slices in sets for build in builds])

    def _build_step(self, slices: Slices) -> Build:
        return Build("step", slices, lambda: self.lower_step(slices))

    def _build_snapshot(self, slices: Slices) -> Build:
        return Build("snapshot", slices, lambda: self._lower_snapshot(slices))

    def _build_eval(self, slices: Slices) -> Build:
        return Build("evaluate", slices, lambda: self._lower_eval(slices))

    def lower_step(self, slices: Slices) -> Any:
        """The step lowered for `slices`, from shapes alone."""
        mesh = self.mesh(slices)
        step = self._step(mesh, self.spec.specs(self._rules, mesh))
        arguments = self._abstract(self._sample, slices)
        # Left to itself, XLA may split a replicated leaf, and the next step would refuse it.
        kept = jax.jit(
            step,
            donate_argnums=0 if self.donates else (),
            out_shardings=(self.shardings(slices), None),
            compiler_options=EXACT,
        )
        return kept.lower(*arguments)

    def _lower_eval(self, slices: Slices) -> Any:
        assert self._eval_sample
        evaluate = self._eval_step(self.mesh(slices))
        return jax.jit(evaluate, compiler_options=EXACT).lower(
            *self._abstract(self._eval_sample, slices)
        )

    def _lower_snapshot(self, slices: Slices) -> Any:
        def of_slice(leaves: Leaves) -> Any:
            return hashes_on_device([leaves[leaf.path] for leaf in self.spec.leaves])[None]

        mesh, shardings = self.mesh(slices), self.shardings(slices)
        each = jax.shard_map(
            of_slice,
            mesh=mesh,
            in_specs=P(),
            out_specs=P(SLICE),
            axis_names={SLICE},
            check_vma=False,
        )
        host = self._transfers.copied(shardings)

        def snapshot(leaves: Leaves) -> tuple[Any, Leaves]:
            copies = {path: jax.device_put(leaves[path], place) for path, place in host.items()}
            return each(leaves), copies

        lowering = jax.jit(snapshot, out_shardings=(None, host))
        return lowering.lower(self.spec.abstract(shardings))

    def _abstract(self, sample: Shapes, slices: Slices) -> tuple[Any, Any]:
        """(state, arranged batch) as shapes on the mesh of `slices`."""
        mesh = self.mesh(slices)
        batch = {
            k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=_batch_sharding(v, mesh))
            for k, v in self._arrange(_zeros(sample), mesh).items()
        }
        return self.spec.abstract(self.shardings(slices)), batch

    def zeros(self) -> Batch:
        """A global batch of the stream's shapes, all zero."""
        return _zeros(self._sample)

    def put_batch(self, batch: Batch, slices: Slices) -> Leaves:
        """A global batch on the mesh of `slices`, replica by replica."""
        mesh = self.mesh(slices)
        arranged = self._arrange(batch, mesh)
        shardings = {k: _batch_sharding(v, mesh) for k, v in arranged.items()}
        return self._transfers.put(arranged, shardings)

    def consumed_ids(self, ids: np.ndarray) -> np.ndarray:
        """The example ids that came back from a step: int64[global_batch], padding left out."""
        real = ids[: self._recipe.num_replicas].reshape(-1, 2).astype(np.uint64)
        return (real[:, 0] | (real[:, 1] << np.uint64(32))).astype(np.int64)

    def _arrange(self, batch: Batch, mesh: Mesh) -> Batch:
        """[global_batch, ...] -> [padded, examples, ...]; padding repeats the first replica, so
        that it computes on real values, and is masked by its replica index."""
        work = Work(self._recipe.global_batch, self._recipe.num_replicas, mesh.shape[SLICE])
        index = np.arange(work.padded, dtype=np.int32)
        rows = np.where(index < work.num_replicas, index, 0)
        columns = dict(batch)
        ids = columns.pop("example_id").astype(np.int64).view(np.uint64)
        mask = np.uint64(0xFFFFFFFF)
        halves = np.stack([ids & mask, ids >> np.uint64(32)], axis=-1).astype(np.uint32)
        columns["example_id"] = halves
        shape = (work.num_replicas, work.examples)
        arranged = {k: _device_dtype(v).reshape(shape + v.shape[1:]) for k, v in columns.items()}
        return {"replica": index, **{k: v[rows] for k, v in arranged.items()}}


def _shapes(batch: Batch) -> Shapes:
    return {name: (value.shape, value.dtype) for name, value in batch.items()}


def _zeros(sample: Shapes) -> Batch:
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in sample.items()}


def _device_dtype(array: np.ndarray) -> np.ndarray:
    """The dtype JAX would give the array (no 64 bits unless x64 is on)."""
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _batch_sharding(array: np.ndarray, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, batch_spec(array.shape, mesh))
