"""Slices without devices: health, host memory and a clock, all of them the world's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from elastix.backends import Health
from elastix.classification import StuckError
from elastix.leaf_hash import hashes_of
from elastix.testing.schedules import ERRORS, Kind, Phase
from elastix.testing.world import POISON, Ghost, World

STEP_SECONDS = 1.0
PROBE_SECONDS = 0.05
"""For all slices that are asked at once, if each answers."""

_CONNECTION = frozenset({Kind.UNAVAILABLE})
"""All that a probe may raise: of everything else it says which slice does not answer."""


class GhostCopy:
    """A host copy of a train state in the host memory of one slice."""

    def __init__(self, step: int, ghost: Ghost):
        self.step, self.ghost, self._hashed = step, ghost, ghost

    def whole(self, shapes: Any = None) -> dict[str, np.ndarray]:
        return to_leaves(self.ghost)

    @property
    def hashes(self) -> dict[str, str]:
        """Of what was copied, whatever became of the copy."""
        return ghost_hashes(self._hashed)


def to_leaves(ghost: Ghost) -> dict[str, np.ndarray]:
    """A ghost as what is written to disk. Integers: no check for NaN tells poison from a state."""
    return {"ghost": np.array(ghost, np.int64)}


@lru_cache(maxsize=4096)
def ghost_hashes(ghost: Ghost) -> dict[str, str]:
    return hashes_of(to_leaves(ghost))


def from_leaves(leaves: dict[str, np.ndarray]) -> Ghost:
    return tuple(leaves["ghost"].tolist())


class GhostBackend:
    """Slices without devices. Losses surface as on the simulated backend."""

    name = "ghost"
    transfers: Any = None
    """Ghosts do not travel: `GhostArrays` asks for none."""

    def __init__(self, world: World):
        self._world = world
        self.devices = {s: (s,) for s in range(world.schedule.num_slices)}
        self._memory: dict[int, dict[int, Any]] = {s: {} for s in self.devices}
        world.on_loss.append(self._wipe)
        world.on_return.append(lambda slice_id: self._memory[slice_id].clear())

    def now(self) -> float:
        return self._world.clock.now()

    def idle(self, seconds: float) -> None:
        self._world.idle(seconds)

    def ended(self, jobs: Sequence[Any]) -> bool:
        return all(job.done() for job in jobs)

    def probe(self, slices: Iterable[int], deadline: float) -> dict[int, Health]:
        asked = sorted(slices)
        silent = ask(self._world, asked, deadline)
        return {s: Health.DOWN if s in silent else self._health(s) for s in asked}

    def _health(self, slice_id: int) -> Health:
        self._world.point(Phase.PROBE, raises=_CONNECTION)
        return self._world.health(slice_id)

    def admit(self, slices: Iterable[int]) -> None:
        for slice_id in sorted(slices):
            self._world.point()
            self._world.emptied.discard(slice_id)

    def check(self, slices: Iterable[int]) -> None:
        self._world.point(Phase.DISPATCH)
        dead, emptied = self._world.dead, self._world.emptied
        noticed = [s for s in sorted(slices) if dead.get(s) == "dispatch" or s in emptied]
        if noticed:
            raise data_loss(noticed, "dispatch")

    def dispatched(self, step: int, slices: Iterable[int]) -> None:
        self._world.point(Phase.DISPATCH)

    def committed(self, step: int) -> None:
        self._world.committed(step)

    def read(self, results: Any, slices: Iterable[int], deadline: float) -> Any:
        phases = results["phases"]
        self._world.point(*phases, raises=ERRORS)
        self.wait(results, slices, deadline)
        self._world.pass_time(STEP_SECONDS)
        self._world.point(*phases, raises=ERRORS)
        self._raise_if_dead(sorted(slices))
        return dict(results)

    def wait(self, arrays: Any, slices: Iterable[int], deadline: float) -> None:
        ids = sorted(slices)
        self._raise_if_dead(ids)
        self._withhold(ids, deadline)

    def _withhold(self, slices: list[int], deadline: float) -> None:
        """Let time pass until the deadline, or until a loss is known."""
        give_up = self.now() + deadline
        while self._world.hung.keys() & set(slices):
            left = give_up - self.now()
            if left <= 0:
                raise StuckError
            self.idle(left)
            self._raise_if_dead(slices)

    def suspend(self, slices: Iterable[int]) -> None:
        self._world.suspended |= self._world.hung.keys() & set(slices)

    def _raise_if_dead(self, slices: list[int]) -> None:
        dead = [s for s in slices if not self._world.alive(s)]
        if dead:
            raise data_loss(dead, "reading a result")

    def check_faults(self, faults: Sequence[object], num_steps: int) -> None:
        if faults:
            raise ValueError("what goes wrong here is in the schedule")

    def script_faults(self, faults: Sequence[object]) -> None:
        """There are none."""

    def unfired_faults(self) -> Sequence[Any]:
        return ()

    def host_memory(self, slice_id: int) -> dict[int, Any]:
        return self._memory[slice_id]

    def _wipe(self, slice_id: int) -> None:
        for copy in self._memory[slice_id].values():
            copy.ghost = POISON


def ask(world: World, slices: list[int], deadline: float) -> frozenset[int]:
    """Probe these slices at once, in the time it takes; returns those that do not answer."""
    for _ in slices:
        world.point(Phase.PROBE, raises=_CONNECTION)
    silent = world.take_silent(slices)
    if not world.saving:
        world.pass_time(deadline if silent else PROBE_SECONDS)
    return silent


def data_loss(slices: list[int], where: str) -> jax.errors.JaxRuntimeError:
    names = ", ".join(map(str, slices))
    return jax.errors.JaxRuntimeError(f"DATA_LOSS: slice {names} is gone ({where})")
