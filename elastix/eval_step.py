"""The evaluation of one batch: the loss of R logical replicas, and no gradient.

As in the train step, each replica is computed alike whatever slice it falls on, and what they give
is folded in the order of the replicas: the same bits on any number of slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from elastix.mesh import SLICE
from elastix.reduction import fold
from elastix.step import Loss, Work
from elastix.train_state import Leaves, StateSpec, TrainState


@dataclass(frozen=True)
class EvalStep:
    """Builds the evaluation of one batch for any mesh."""

    spec: StateSpec
    loss: Loss
    global_batch: int
    num_replicas: int

    def __call__(self, mesh: Mesh) -> Callable[[Leaves, dict[str, Array]], dict[str, Any]]:
        """`evaluate(leaves, batch) -> sums` on `mesh`, to be compiled.

        `batch` is arranged as for the train step. Of the whole batch, `total` is the sum of the
        weighted losses, `weight` the sum of the weights, and `metrics` are sums.
        """
        work = Work(self.global_batch, self.num_replicas, mesh.shape[SLICE])

        def evaluate(leaves: Leaves, batch: dict[str, Array]) -> dict[str, Any]:
            state = self.spec.unflatten(leaves)
            sums = lax.optimization_barrier(self._replicas(mesh, work)(state, batch))
            return jax.tree.map(lambda x: fold(x, self.num_replicas), sums)

        return evaluate

    def _replicas(self, mesh: Mesh, work: Work) -> Callable[[TrainState, Any], dict[str, Any]]:
        def run(state: TrainState, batch: dict[str, Array]) -> dict[str, Any]:
            base = jax.random.fold_in(state.key, state.step)
            model = eqx.combine(state.model, self.spec.static_model)
            columns = {k: v for k, v in batch.items() if k not in ("replica", "example_id")}

            def one(_, row):
                replica, columns = lax.optimization_barrier(row)
                index = replica * work.examples + jnp.arange(work.examples, dtype=jnp.int32)
                keys = jax.vmap(lambda i: jax.random.fold_in(base, i))(index)
                total, weight, metrics = self.loss(model, columns, keys)
                sums = {"total": total, "weight": weight, "metrics": metrics}
                sums = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), sums)
                return None, lax.optimization_barrier(sums)

            return lax.scan(one, None, (batch["replica"], columns))[1]

        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(P(), P(SLICE)),
            out_specs=P(SLICE),
            axis_names={SLICE},
            check_vma=False,
        )
