"""How much memory of the devices a run holds, at most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax

from elastix.backends.simulated import SimulatedBackend
from elastix.benchmark.parts import DEVICES_PER_SLICE, NUM_SLICES, Task, measured_recipe, policy
from elastix.benchmark.recorder import Plan
from elastix.benchmark.recovery import disturb
from elastix.program import Program
from elastix.recipe import Recipe

LOOKBACKS = (("live", 2), ("live", 1), ("host", 2))


class Weighed(SimulatedBackend):
    """Simulated slices that look how much they hold whenever something on them is waited for: the
    results of a step, a snapshot, or a state that is restored."""

    most = 0
    """The most bytes that one slice held."""

    def wait(self, arrays: Any, slices: Iterable[int], deadline: float) -> None:
        super().wait(arrays, slices, deadline)
        self.most = max(self.most, self.weigh(jax.live_arrays()))

    def weigh(self, arrays: Iterable[jax.Array]) -> int:
        """Bytes of the buffers of `arrays` on the slice with most of them, each buffer once."""
        owner = {device: s for s, group in self.devices.items() for device in group}
        held: dict[int, dict[int, int]] = defaultdict(dict)
        for array in arrays:
            if array.is_deleted() or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
                continue  # a key's data is an array as well
            for shard in array.addressable_shards:
                if shard.data.nbytes and shard.device in owner:
                    place = shard.data.unsafe_buffer_pointer()
                    held[owner[shard.device]][place] = shard.data.nbytes
        return max(sum(buffers.values()) for buffers in held.values())


def held(task: Task, recipe: Recipe) -> dict[str, Any]:
    """The most that a slice held in runs in which each slice is lost once and comes back."""
    found: dict[str, Any] = {"one_copy": _one_copy(recipe)}
    for lookback, inflight in LOOKBACKS:
        backend = Weighed(NUM_SLICES, DEVICES_PER_SLICE)
        chosen = policy(recipe, lookback=lookback, inflight=inflight)
        disturb(task, measured_recipe(recipe, chosen), Plan(losses=0), backend)
        found[f"{lookback}-{inflight}"] = {"most": backend.most, "inflight": inflight}
    return found


def _one_copy(recipe: Recipe) -> int:
    """Bytes of one state on one slice. A leaf that is not sharded lies on each of its devices."""
    backend = Weighed(NUM_SLICES, DEVICES_PER_SLICE)
    sample = next(recipe.data.build(recipe.global_batch, recipe.seed).batches(0))
    program = Program(recipe, sample, backend.devices)
    return backend.weigh(program.initial(frozenset(backend.devices)).values())
