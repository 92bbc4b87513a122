"""Ghosts in place of arrays and data: the driver runs on them as on the real ones.

A train state is the tuple of batches it consumed, held once for each slice. What a dead slice
held is overwritten with poison, so that code which reads it is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np

from elastix.arrays import Arrays
from elastix.machine import Slices, Source, Tier
from elastix.progress import Progress
from elastix.saver import Saver
from elastix.testing.compiles import TimedCompiles
from elastix.testing.ghost_backend import GhostBackend, GhostCopy, from_leaves
from elastix.testing.schedules import ERRORS, Kind, Phase
from elastix.testing.world import POISON, Ghost, Violation, World, expected

RESTORE_SECONDS = 0.8
SNAPSHOT_SECONDS = 0.2

EVAL_BATCHES = 2

Held = dict[int, Ghost]
"""What each slice holds of one train state."""

Donor = Callable[[int], Ghost]
"""What a slice is given in a restore."""


class _NoProgram:
    """What `Arrays` asks of a program beside what `GhostArrays` does itself."""

    shapes: dict[str, tuple[int, ...]] = {}  # noqa: RUF012


class GhostArrays(Arrays):
    """`Arrays` with ghosts: its own rules of what is restored, required and freed, and points at
    which a slice can die before, after and in the middle of each operation."""

    _states: dict[tuple[int, int], Any]

    def __init__(self, world: World, backend: GhostBackend, saver: Saver | None):
        program: Any = _NoProgram()
        super().__init__(program, backend, saver, world.schedule.policy)
        self._world = world
        self._donates = world.schedule.policy.lookback == "host"
        self._compiles_of = TimedCompiles(world)
        self._made: Held = {}
        """What is being restored, slice by slice."""
        self._begun: tuple[int, Held] | None = None
        """The step whose snapshot was begun, and what each slice has of it."""
        self._first: int | None = None
        world.on_loss.append(self._wipe)

    # --- what the driver asks for -----------------------------------------------------------

    def compile(self, mesh: Slices) -> bool:
        warming = self._compiles_of.is_making(mesh)
        with self._world.within(self._world.restoring):
            self._world.point(Phase.COMPILE, raises=ERRORS)
            self._world.stall(Phase.COMPILE, self._policy.prepare_deadline, "compiling")
            self._compiles_of.wait(mesh)
            self._world.point(Phase.COMPILE, raises=ERRORS)
        return warming

    def compiling(self, mesh: Slices) -> list[Any]:
        return [self._compiles_of.begin(mesh)]

    def warm(self, sets: Sequence[Slices]) -> None:
        """Nothing is made before it is needed, so that compiles stay where faults strike."""

    def step(self, epoch: int, step: int, mesh: Slices, batch: Any) -> dict[str, Any]:
        if self._first is None:
            self._first = step
        phases = self._world.step_phases(step, step == self._first)
        self._world.point(Phase.DISPATCH, *phases, raises=ERRORS)
        before = self._states[epoch, step - 1]
        after = self._update(before, mesh, int(batch["example_id"][0]) // 2)
        if self._donates:
            del self._states[epoch, step - 1]
        self._states[epoch, step] = {
            s: after if self._world.alive(s) else POISON for s in sorted(mesh)
        }
        self._world.point(Phase.DISPATCH, *phases, raises=ERRORS)
        return {
            **_results(after),
            "example_id": batch["example_id"],
            "phases": (Phase.SYNC, *phases),
        }

    def _update(self, before: Held, mesh: Slices, number: int) -> Ghost:
        """Every slice takes part in a step, so that poison on one of them spoils all."""
        inputs = {before[s] if self._world.alive(s) else POISON for s in mesh}
        if len(inputs - {POISON}) > 1:
            raise Violation("one train state", f"the slices of {sorted(mesh)} hold {inputs}")
        state = POISON if POISON in inputs else inputs.pop()
        return (*state, number)

    def trial(self, slices: Slices) -> dict[str, Any]:
        self._world.point(raises=ERRORS)
        self.compile(slices)
        return {**_results(()), "phases": ()}

    def evaluate(self, epoch: int, step: int, mesh: Slices, batch: Any) -> dict[str, Any]:
        self._world.point(Phase.EVALUATION, raises=ERRORS)
        held = self._states[epoch, step]
        inputs = {held[s] if self._world.alive(s) else POISON for s in mesh}
        state = POISON if POISON in inputs else inputs.pop()
        number = int(batch["example_id"][0]) // 2
        sums = {"total": loss_of(state) + number, "weight": 1.0, "metrics": {}}
        return {**sums, "phases": (Phase.EVALUATION,)}

    def consumed_ids(self, ids: np.ndarray) -> np.ndarray:
        return ids

    def restore(
        self, source: Source, epoch: int, mesh: Slices, known: dict[int, Progress]
    ) -> Progress | None:
        with self._world.within(self._world.restoring):
            return super().restore(source, epoch, mesh, known)

    def _build(self, source: Source, mesh: Slices, known: dict[int, Progress]) -> Any:
        self._world.point(raises=ERRORS)
        donor, progress = self._read(source, known)
        if donor is None:
            return None, progress
        self._made = {}
        for slice_id in sorted(mesh):
            self._world.point(raises=ERRORS)
            self._world.pass_time(RESTORE_SECONDS / len(mesh))
            self._made[slice_id] = donor(slice_id) if self._world.alive(slice_id) else POISON
        self._world.point(raises=ERRORS)
        return self._made, progress  # the backend waits for it, as long as a slice hangs

    def _read(self, source: Source, known: dict[int, Progress]) -> tuple[Donor | None, Progress]:
        match source.tier:
            case Tier.SEED:
                return lambda _: (), Progress()
            case Tier.LIVE:
                held = self._states.get((source.epoch, source.step))
                return _nearest(held, source.holders) if held else None, known[source.step]
            case Tier.HOST:
                whole = self._host_copy(source.step, source.holders)
                return _always(whole) if whole else None, known[source.step]
        assert self._saver
        whole, metadata = self._saver.load(source.step)
        return _always(whole), Progress.from_json(metadata["progress"])

    def begin_snapshot(self, epoch: int, step: int, mesh: Slices) -> None:
        with self._copying(step):
            self._world.point(raises=ERRORS)
            self._begun = step, {s: self._states[epoch, step][s] for s in sorted(mesh)}

    @property
    def snapshot_begun(self) -> float:
        return self._begun[0] if self._begun else inf

    def give_up_snapshot(self) -> None:
        self._begun = None

    def finish_snapshot(self) -> int:
        assert self._begun
        step, held = self._begun
        mesh = frozenset(held)
        with self._copying(step):
            self._backend.wait(held, mesh, self._policy.step_deadline)
            for _ in mesh:
                self._world.point(raises=ERRORS)
                self._world.pass_time(SNAPSHOT_SECONDS / len(mesh))
            self._world.point(raises=ERRORS)
            self._require(mesh, "a host snapshot")
        for slice_id, ghost in held.items():
            memory: dict[int, Any] = self._backend.host_memory(slice_id)
            memory[step] = GhostCopy(step, ghost if self._world.alive(slice_id) else POISON)
        self._begun = None
        self._unpublished.add(step)
        return step

    def _copying(self, step: int) -> AbstractContextManager[None]:
        return self._world.within(
            Phase.SNAPSHOT, *self._world.step_phases(step, step == self._first)
        )

    # --- what the invariants ask for ----------------------------------------------------------

    def held(self, epoch: int, step: int) -> Held | None:
        """What each slice holds of a train state, or None if it was freed."""
        return self._states.get((epoch, step))

    def _wipe(self, slice_id: int) -> None:
        copies = self._begun[1] if self._begun else {}
        for held in (*self._states.values(), self._made, copies):
            if slice_id in held:
                held[slice_id] = POISON


def _nearest(held: Held, holders: Slices) -> Donor:
    """A holder keeps what it has; the others copy, from what is held when it is read."""
    ids = sorted(holders)
    return lambda s: held[s] if s in holders else held[ids[s % len(ids)]]


def _always(whole: dict[str, np.ndarray]) -> Donor:
    ghost = from_leaves(whole)
    return lambda _: ghost


def loss_of(ghost: Ghost) -> float:
    """The loss of the step that led to a state: it tells states apart."""
    return float("nan") if POISON[0] in ghost else float(hash(ghost) % 9973)


def eval_loss(step: int) -> float:
    """The loss of the evaluation of an undisturbed run after `step`: see `GhostArrays.evaluate`."""
    return loss_of(expected(step)) + sum(range(EVAL_BATCHES)) / EVAL_BATCHES


def _results(ghost: Ghost) -> dict[str, Any]:
    return {
        "loss": loss_of(ghost),
        "finite": True,
        "weight": 1.0,
        "grad_norm": 1.0,
        "learning_rate": None,
        "metrics": {},
    }


class GhostFeed:
    """Numbered batches of two examples each, for steps."""

    def __init__(self, world: World):
        self._world = world
        self._first: int | None = None

    def take(self, number: int, slices: Any, deadline: float) -> dict[str, np.ndarray]:
        first = number + 1 if self._first is None else self._first
        self._first = first
        phases = self._world.step_phases(number + 1, number + 1 == first)
        self._world.point(Phase.DATA, *phases, raises=frozenset({Kind.DATA}))
        self._world.stall(Phase.DATA, deadline, f"reading batch {number}")
        return {"example_id": examples(number)}

    def reset(self) -> None:
        """Nothing is read ahead."""


class GhostEvalFeed(GhostFeed):
    """The same, for evaluations."""

    def take(self, number: int, slices: Any, deadline: float) -> dict[str, np.ndarray]:
        self._world.point(Phase.EVALUATION, raises=frozenset({Kind.DATA}))
        self._world.stall(Phase.EVALUATION, deadline, f"reading batch {number}")
        return {"example_id": examples(number)}


@lru_cache(maxsize=4096)
def examples(number: int) -> np.ndarray:
    """The ids of the examples in a batch."""
    return np.array([2 * number, 2 * number + 1], np.int64)


@lru_cache(maxsize=4096)
def progress_after(step: int) -> Progress:
    """What an undisturbed run has consumed after `step` updates."""
    if step == 0:
        return Progress()
    return progress_after(step - 1).consume(examples(step - 1))
