"""The parts of a simulated run on arrays: the real ones, with points at which faults strike.

Time is virtual, and what a fault does to a slice is done to its devices and its host memory: what a
dead slice held is overwritten. Compiles, batches and checkpoints are made by the thread that asks
for them, so that the same schedule gives the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from elastix.arrays import Arrays
from elastix.backends import Health
from elastix.backends.simulated import SimulatedBackend
from elastix.checkpoints import CheckpointStore
from elastix.classification import StuckError
from elastix.data import Stream
from elastix.machine import Policy, Slices, Source
from elastix.program import Batch, Program
from elastix.progress import Progress
from elastix.saver import Saver
from elastix.testing.compiles import TimedCompiles
from elastix.testing.ghost_backend import STEP_SECONDS, ask
from elastix.testing.ghost_saver import GhostSaver
from elastix.testing.ghosts import RESTORE_SECONDS, SNAPSHOT_SECONDS
from elastix.testing.schedules import ERRORS, Kind, Phase
from elastix.testing.world import World, expected


class ArrayBackend(SimulatedBackend):
    """Simulated slices that the world takes and gives back."""

    def __init__(self, world: World, devices_per_slice: int):
        emptied = sorted(world.emptied)  # since an earlier process
        self._world = world
        super().__init__(world.schedule.num_slices, devices_per_slice, clock=world.clock)
        self._phases: dict[int, tuple[Phase, ...]] = {}
        world.on_loss.append(lambda s: self.lose(s, world.dead[s]))
        world.on_return.append(self.give_back)
        for slice_id in emptied:
            self.give_back(slice_id)
        world.emptied.update(emptied)

    def ended(self, jobs: Sequence[Any]) -> bool:
        return all(job.done() for job in jobs)  # at some second of the world's clock

    def idle(self, seconds: float) -> None:
        self._world.idle(seconds)

    def probe(self, slices: Iterable[int], deadline: float) -> dict[int, Health]:
        asked = sorted(slices)
        silent = ask(self._world, asked, deadline)
        down = silent | self._world.suspended
        return {s: Health.DOWN if s in down else self._health(s) for s in asked}

    def admit(self, slices: Iterable[int]) -> None:
        for slice_id in sorted(slices):
            self._world.point()
            self._world.emptied.discard(slice_id)
            super().admit([slice_id])

    def check(self, slices: Iterable[int]) -> None:
        self._world.point(Phase.DISPATCH)
        super().check(sorted(slices))

    def dispatched(self, step: int, slices: Iterable[int]) -> None:
        self._world.point(Phase.DISPATCH)

    def committed(self, step: int) -> None:
        self._world.committed(step)

    def reading(self, results: dict[str, Any], *phases: Phase) -> dict[str, Any]:
        """Remember what the reading of these results is a part of."""
        self._phases[id(results)] = phases
        return results

    def read(self, results: Any, slices: Iterable[int], deadline: float) -> Any:
        phases, ids = self._phases.pop(id(results), ()), sorted(slices)
        self._world.point(*phases, raises=ERRORS)
        values = super().read(results, ids, deadline)
        self._world.pass_time(STEP_SECONDS)
        self._world.point(*phases, raises=ERRORS)
        self._raise_if_dead(ids)
        return values

    def wait(self, arrays: Any, slices: Iterable[int], deadline: float) -> None:
        ids = sorted(slices)
        self._raise_if_dead(ids)
        give_up = self.now() + deadline
        while self._world.hung.keys() & set(ids):
            left = give_up - self.now()
            if left <= 0:
                raise StuckError
            self.idle(left)
            self._raise_if_dead(ids)
        super().wait(arrays, ids, deadline)

    def suspend(self, slices: Iterable[int]) -> None:
        self._world.suspended |= self._world.hung.keys() & set(slices)


class PointedArrays(Arrays):
    """Arrays with points before, after and in the middle of each operation."""

    _backend: ArrayBackend

    def __init__(self, world: World, program: Program, backend: ArrayBackend, saver: Saver | None):
        super().__init__(program, backend, saver, world.schedule.policy)
        self._world = world
        self._compiles_of = TimedCompiles(world)
        self._first: int | None = None
        self._mesh: Slices = frozenset()
        """The slices whose snapshot was begun last."""

    def compile(self, mesh: Slices) -> bool:
        warming = self._compiles_of.is_making(mesh)
        with self._world.within(self._world.restoring):
            self._world.point(Phase.COMPILE, raises=ERRORS)
            self._world.stall(Phase.COMPILE, self._policy.prepare_deadline, "compiling")
            super().compile(mesh)
            self._compiles_of.wait(mesh)
            self._world.point(Phase.COMPILE, raises=ERRORS)
        return warming

    def compiling(self, mesh: Slices) -> Sequence[Any]:
        return [self._compiles_of.begin(mesh, super().compiling(mesh))]

    def warm(self, sets: Sequence[Slices]) -> None:
        """As on ghosts, nothing is made before it is needed."""

    def _await(self, job: Future[Any], mesh: Slices, what: str) -> Any:
        return job.result()  # however long it takes, no time passes

    def step(self, epoch: int, step: int, mesh: Slices, batch: Batch) -> dict[str, Any]:
        self._first = self._first or step
        phases = self._world.step_phases(step, step == self._first)
        self._world.point(Phase.DISPATCH, *phases, raises=ERRORS)
        results = super().step(epoch, step, mesh, batch)
        self._world.point(Phase.DISPATCH, *phases, raises=ERRORS)
        return self._backend.reading(results, Phase.SYNC, *phases)

    def evaluate(self, epoch: int, step: int, mesh: Slices, batch: Batch) -> dict[str, Any]:
        self._world.point(Phase.EVALUATION, raises=ERRORS)
        results = super().evaluate(epoch, step, mesh, batch)
        return self._backend.reading(results, Phase.EVALUATION)

    def trial(self, slices: Slices) -> dict[str, Any]:
        self._world.point(raises=ERRORS)
        return super().trial(slices)

    def restore(
        self, source: Source, epoch: int, mesh: Slices, known: dict[int, Progress]
    ) -> Progress | None:
        with self._world.within(self._world.restoring):
            return super().restore(source, epoch, mesh, known)

    def _build(self, source: Source, mesh: Slices, known: dict[int, Progress]) -> Any:
        self._world.point(raises=ERRORS)
        built = super()._build(source, mesh, known)
        for _ in mesh:
            self._world.point(raises=ERRORS)
            self._world.pass_time(RESTORE_SECONDS / len(mesh))
        return built

    def begin_snapshot(self, epoch: int, step: int, mesh: Slices) -> None:
        with self._copying(step):
            self._world.point(raises=ERRORS)
            super().begin_snapshot(epoch, step, mesh)
            self._mesh = mesh

    def finish_snapshot(self) -> int:
        with self._copying(int(self.snapshot_begun)):
            for _ in self._mesh:
                self._world.point(raises=ERRORS)
                self._world.pass_time(SNAPSHOT_SECONDS / len(self._mesh))
            return super().finish_snapshot()

    def _copying(self, step: int) -> AbstractContextManager[None]:
        return self._world.within(
            Phase.SNAPSHOT, *self._world.step_phases(step, step == self._first)
        )


class ArrayFeed:
    """The batches of a stream, read by the thread that asks for them."""

    def __init__(self, world: World, stream: Stream, phase: Phase):
        self._world, self._stream, self._phase = world, stream, phase
        self._batches: Iterator[Batch] | None = None
        self._first: int | None = None

    def take(self, number: int, slices: Iterable[int], deadline: float) -> Batch:
        phases: tuple[Phase, ...] = ()
        if self._phase is Phase.DATA:
            self._first = self._first or number + 1
            phases = self._world.step_phases(number + 1, number + 1 == self._first)
        self._world.point(self._phase, *phases, raises=frozenset({Kind.DATA}))
        self._world.stall(self._phase, deadline, f"reading batch {number}")
        if self._batches is None:
            self._batches = self._stream.batches(number)
        return next(self._batches)

    def reset(self) -> None:
        self._batches = None


class ArrayStore:
    """The real store. What is written is on disk when the seconds of a save have passed."""

    def __init__(self, world: World, thread: Any, directory: Path, policy: Policy):
        self._world, self._thread = world, thread
        self._real = CheckpointStore(directory, keep=policy.keep_checkpoints)
        self._directory = directory
        self._write: Callable[[], object] | None = None

    def write(self, step: int, leaves: dict[str, np.ndarray], metadata: dict[str, object]) -> None:
        self._spend(self._world.schedule.save_seconds + self._world.stalls(Phase.SAVE))
        last = self._world.step_phases(step, first=False)
        self._world.point(*last, raises=ERRORS | {Kind.DISK_FULL})
        self._write = lambda: self._real.write(step, leaves, metadata)

    def commit(self) -> None:
        if self._write is None:
            return
        write, self._write = self._write, None
        write()
        self._note()

    def retire(self, step: int) -> None:
        self._real.retire(step)
        self._note()

    def stream(self, step: int) -> tuple[Iterator[tuple[str, np.ndarray]], dict[str, object]]:
        self._world.point()
        if step in self._world.rotten:
            self._rot(step)
        return self._real.stream(step)

    def set_aside(self, step: int, why: str) -> None:
        self._real.set_aside(step, why)
        self._note()

    def remove(self, step: int) -> None:
        self._real.remove(step)
        self._note()

    def _note(self) -> None:
        """The world knows what is on disk by its steps alone."""
        steps = self._real.steps()
        self._world.disk = {s: (expected(s), {}) for s in steps}
        self._world.rotten.intersection_update(steps)

    def _rot(self, step: int) -> None:
        """Flip one bit of each file of a checkpoint."""
        for path in (self._directory / str(step)).rglob("*"):
            if path.is_file() and (data := bytearray(path.read_bytes())):
                data[len(data) // 2] ^= 1
                path.write_bytes(data)

    def _spend(self, seconds: float) -> None:
        if self._thread.current:
            self._thread.current.seconds += seconds


class ArraySaver(GhostSaver):
    """`Saver` on the real store, with its thread and its answers in virtual time."""

    def __init__(self, world: World, backend: ArrayBackend, program: Program, directory: Path):
        super().__init__(world, backend)
        self._shapes = program.shapes
        self._store = ArrayStore(world, self._thread, directory, self._policy)
