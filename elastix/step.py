"""The train step: R logical replicas, a reduction over slices, one update.

The step is three parts with a barrier between them, so that each is compiled to the same
arithmetic whatever the number of slices: the gradients of each slice's replicas, their sum across
slices, and the update, which every slice does by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree, Shaped

from elastix.mesh import FSDP, SLICE
from elastix.reduction import fold, sum_over_replicas
from elastix.train_state import Leaves, StateSpec, TrainState

Loss = Callable[[PyTree, dict[str, Array], Array], tuple[Array, Array, dict[str, Array]]]
"""`loss(model, batch, keys) -> (sum, weight, metrics)` for one logical replica: the sum of its
weighted losses, the sum of the weights, and sums to be logged over the global weight. `keys` has
one key for each example."""

Reduction = Literal["ordered", "fast"]


@dataclass(frozen=True)
class Work:
    """The fixed work of a step and how it falls on `num_slices` slices.

    `global_batch` examples in `num_replicas` logical replicas; each slice takes
    `per_slice = ceil(num_replicas / num_slices)` of them, and padding has weight zero.
    """

    global_batch: int
    num_replicas: int
    num_slices: int

    @property
    def per_slice(self) -> int:
        return -(-self.num_replicas // self.num_slices)

    @property
    def padded(self) -> int:
        """Replicas computed, padding included."""
        return self.per_slice * self.num_slices

    @property
    def examples(self) -> int:
        """Examples in one logical replica."""
        return self.global_batch // self.num_replicas

    @property
    def useful(self) -> float:
        """The share of the computed replicas that is not padding."""
        return self.num_replicas / self.padded


@dataclass(frozen=True)
class TrainStep:
    """Builds the step of one recipe for any mesh."""

    spec: StateSpec
    loss: Loss
    global_batch: int
    num_replicas: int
    reduction: Reduction
    learning_rate: Callable[[Array], Array] | None
    microbatches: int = 1

    def __call__(self, mesh: Mesh, leaf_specs: dict[str, P]) -> Callable[[Leaves, Any], Any]:
        """`step(leaves, batch) -> (leaves, results)` on `mesh`, to be compiled.

        `batch` has `replica: int32[padded]`, `example_id: uint32[padded, examples, 2]` and the
        user's columns as `[padded, examples, ...]`, all split over `slice` by their first dim.
        """
        work = Work(self.global_batch, self.num_replicas, mesh.shape[SLICE])

        def step(leaves: Leaves, batch: dict[str, Array]) -> tuple[Leaves, dict[str, Any]]:
            state = self.spec.unflatten(leaves)
            sums, ids = self._gradients(mesh, work)(state, batch)
            sums, ids = lax.optimization_barrier((sums, ids))
            if self.reduction == "ordered":
                specs = self._gradient_specs(leaf_specs)
                grads = sum_over_replicas(sums.grads, specs, mesh, self.num_replicas)
            else:
                grads = jax.tree.map(lambda g: jnp.sum(g, axis=0), sums.grads)
            sums = replace(sums, grads=lax.optimization_barrier(grads))
            state, results = self._update(mesh)(state, sums)
            return self.spec.flatten(state), {**results, "example_id": ids}

        return step

    def _gradient_specs(self, leaf_specs: dict[str, P]) -> list[P]:
        return [leaf_specs[path] for path in self.spec.trainable_paths]

    def _gradients(
        self, mesh: Mesh, work: Work
    ) -> Callable[[TrainState, dict[str, Array]], tuple[Sums, Array]]:
        """The part of each slice: its own replicas, one after another, each in `microbatches`.

        `ordered` keeps the gradient of each replica, `fast` their sum on this slice.
        """
        ordered = self.reduction == "ordered"

        def run(state: TrainState, batch: dict[str, Array]) -> tuple[Sums, Array]:
            base = jax.random.fold_in(state.key, state.step)
            columns = {k: v for k, v in batch.items() if k not in ("replica", "example_id")}

            def one(acc, row):
                replica, ids, columns = lax.optimization_barrier(row)
                sums = self._replica(state.model, columns, base, replica, work.examples)
                sums, ids = lax.optimization_barrier((sums, ids))
                if ordered:
                    return None, (sums, ids)
                valid = replica < self.num_replicas
                acc = jax.tree.map(lambda a, g: jnp.where(valid, a + g, a), acc, sums.grads)
                return acc, (replace(sums, grads=None), ids)

            zero = jax.tree.map(jnp.zeros_like, eqx.filter(state.model, eqx.is_inexact_array))
            rows = (batch["replica"], batch["example_id"], columns)
            acc, (sums, ids) = lax.scan(one, None if ordered else zero, rows)
            if not ordered:
                sums = replace(sums, grads=jax.tree.map(lambda g: g[None], acc))
            return sums, ids

        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(P(), P(SLICE)),
            out_specs=P(SLICE),
            axis_names={SLICE},
            check_vma=False,
        )

    def _replica(
        self,
        arrays: PyTree[Array],
        columns: dict[str, Array],
        base: Array,
        replica: Int[Array, ""],
        examples: int,
    ) -> Sums:
        """Gradients of one logical replica. Keys come from the step and the example's index in
        the global batch, never from a device or a microbatch."""
        index = replica * examples + jnp.arange(examples, dtype=jnp.int32)
        if self.microbatches == 1:
            return self._differentiate(arrays, columns, base, index)
        parts = jax.tree.map(lambda x: split(x, self.microbatches), (columns, index))

        def add(acc, part):
            columns, index = lax.optimization_barrier(part)
            sums = self._differentiate(arrays, columns, base, index)
            return jax.tree.map(lambda a, x: a + x, acc, lax.optimization_barrier(sums)), None

        first = jax.tree.map(lambda x: x[0], parts)
        like = jax.eval_shape(
            lambda part: self._differentiate(arrays, part[0], base, part[1]), first
        )
        zero = jax.tree.map(lambda x: jnp.full(x.shape, -0.0, jnp.float32), like)
        total, _ = lax.scan(add, zero, parts)
        return jax.tree.map(lambda x, one: x.astype(one.dtype), total, like)

    def _differentiate(
        self, arrays: PyTree[Array], columns: dict[str, Array], base: Array, index: Array
    ) -> Sums:
        """Gradients of some examples, whose indices in the global batch are `index`."""
        keys = jax.vmap(lambda i: jax.random.fold_in(base, i))(index)

        def objective(arrays):
            model = eqx.combine(arrays, self.spec.static_model)
            total, weight, metrics = self.loss(model, columns, keys)
            return total, (weight, metrics)

        differentiate = eqx.filter_value_and_grad(objective, has_aux=True)
        (total, (weight, metrics)), grads = differentiate(arrays)
        return Sums(grads, total, jnp.asarray(weight, jnp.float32), metrics)

    def _update(
        self, mesh: Mesh
    ) -> Callable[[TrainState, Sums], tuple[TrainState, dict[str, Any]]]:
        """The part that every slice does alike, on the sums of all replicas."""

        def run(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, Any]]:
            total, weight, metrics = (
                jax.tree.map(lambda x: fold(x, self.num_replicas), part)
                for part in (sums.total, sums.weight, sums.metrics)
            )
            grads = jax.tree.map(lambda g: (g / weight).astype(g.dtype), sums.grads)
            grad_norm = optax.tree.norm(grads)
            trainable = eqx.filter(state.model, eqx.is_inexact_array)
            updates, opt_state = self.spec.optimizer.update(grads, state.opt_state, trainable)
            # Unlike Equinox's, this keeps the dtype of a parameter whose moments are wider.
            model = eqx.combine(optax.apply_updates(trainable, updates), state.model)
            loss = total / weight
            results = {
                "loss": loss,
                "grad_norm": grad_norm,
                "weight": weight,
                "finite": jnp.isfinite(loss) & jnp.isfinite(grad_norm),
                "metrics": jax.tree.map(lambda m: m / weight, metrics),
            }
            if self.learning_rate is not None:
                rate = self.learning_rate(state.step)
                results["learning_rate"] = jnp.asarray(rate, jnp.float32)
            new = TrainState(model, opt_state, state.step + 1, state.key)
            return lax.optimization_barrier((new, results))

        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            axis_names={SLICE},
            check_vma=False,
        )


class Sums(eqx.Module):
    """What replicas add up to: stacked over replicas, or already summed."""

    grads: PyTree[Array]
    total: Float[Array, "..."]
    weight: Float[Array, "..."]
    metrics: dict[str, Array]


def split(
    column: Shaped[Array, "examples ..."], parts: int
) -> Shaped[Array, "parts examples_of_one ..."]:
    """The examples of a replica in equal parts, dealt out in turn.

    Consecutive examples would be cheaper to explain, but lie on one device of a slice: so every
    device has its share of each part, and no example moves.
    """
    return column.reshape(-1, parts, *column.shape[1:]).swapaxes(0, 1)


def batch_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Replicas over `slice`, and the examples of a replica over `fsdp` where that divides."""
    split = len(shape) > 1 and shape[1] % mesh.shape[FSDP] == 0
    return P(SLICE, FSDP) if split else P(SLICE)
