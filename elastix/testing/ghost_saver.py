"""The durable tier of a simulated run: the real `Saver`, on a thread and a disk of ghosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from elastix.backends import Backend
from elastix.checkpoints import CheckpointError
from elastix.machine import Save
from elastix.saver import Place, SaveAnswer, Saver, keep
from elastix.testing.ghost_backend import from_leaves, ghost_hashes, to_leaves
from elastix.testing.ghosts import progress_after
from elastix.testing.schedules import ERRORS, Kind, Phase
from elastix.testing.world import PLANTED, Violation, World

LOAD_SECONDS = 0.5
REMOVE_SECONDS = 0.1


class Job:
    """Something submitted to the virtual thread."""

    def __init__(self, do: Callable[[], Any], finish: Callable[[Job], None]):
        self._do, self.finish = do, finish
        self.seconds = 0.0
        """What its calls to the store take."""
        self.done = False
        self._value: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._value = self._do()
        except Exception as error:
            self._error = error

    def value(self) -> Any:
        if self._error:
            raise self._error
        return self._value


class VirtualThread:
    """Runs jobs one after another in virtual time, as an executor with one thread does.

    A job reads and decides when it begins; what it leaves on disk and its answer are there when
    its seconds have passed.
    """

    def __init__(self, world: World):
        self._world = world
        self._jobs: deque[Job] = deque()
        self.current: Job | None = None
        self._closed = False

    def submit(self, do: Callable[..., Any], *args: Any) -> _Future:
        return self.add(lambda: do(*args), lambda job: None)

    def add(self, do: Callable[[], Any], finish: Callable[[Job], None]) -> _Future:
        if self._closed:
            raise RuntimeError("the thread was shut down")
        job = Job(do, finish)
        self._jobs.append(job)
        if self.current is None and len(self._jobs) == 1:
            self._world.at(0.0, self._begin)
        return _Future(self._world, job)

    def close(self, timeout: float | None = None) -> None:
        self._closed = True
        while timeout is None and (self._jobs or self.current):
            self._world.pass_time(self._world.next_due() or 0.0)

    def _begin(self) -> None:
        job = self.current = self._jobs.popleft()
        job.run()
        self._world.at(job.seconds, self._end)

    def _end(self) -> None:
        job, self.current = self.current, None
        assert job
        job.finish(job)
        job.done = True
        if self._jobs:
            self._world.at(0.0, self._begin)


class _Future:
    def __init__(self, world: World, job: Job):
        self._world, self._job = world, job

    def result(self) -> Any:
        """Let time pass until the job is done."""
        while not self._job.done:
            due = self._world.next_due()
            if due is None:
                raise Violation("the run ends", "it waits for a job that nothing will finish")
            self._world.pass_time(due)
        return self._job.value()


class GhostStore:
    """A disk of ghosts, as `CheckpointStore`; it outlives the processes of a run."""

    def __init__(self, world: World, thread: VirtualThread):
        self._world, self._thread = world, thread
        self._written: tuple[int, Any] | None = None

    def write(self, step: int, leaves: dict[str, np.ndarray], metadata: dict[str, object]) -> None:
        self._spend(self._world.schedule.save_seconds + self._world.stalls(Phase.SAVE))
        last = self._world.step_phases(step, first=False)
        self._world.point(*last, raises=ERRORS | {Kind.DISK_FULL})
        self._written = step, (from_leaves(leaves), metadata)

    def commit(self) -> None:
        """What was written is complete from now on."""
        if self._written is None:
            return
        (step, written), self._written = self._written, None
        self._world.disk[step] = written
        self._world.rotten.discard(step)

    def retire(self, step: int) -> None:
        keep = self._world.schedule.policy.keep_checkpoints
        for old in sorted(self._world.disk)[:-keep]:
            if old < step:
                self.remove(old)

    def stream(self, step: int) -> tuple[Iterator[tuple[str, np.ndarray]], dict[str, object]]:
        self._spend(LOAD_SECONDS)
        self._world.point()
        if step not in self._world.disk:
            raise CheckpointError(f"there is no checkpoint of step {step}")
        if step in self._world.rotten:
            raise CheckpointError(f"the checkpoint of step {step} is damaged, {PLANTED}")
        ghost, metadata = self._world.disk[step]
        known = {"progress": progress_after(step).to_json(), "leaf_hashes": ghost_hashes(ghost)}
        own: dict[str, object] = {"checkpoint": {"leaves": []}}
        return iter(to_leaves(ghost).items()), {**known, **metadata, **own}

    def set_aside(self, step: int, why: str) -> None:
        if self._world.disk.pop(step, None) is None:
            raise CheckpointError(f"step {step} cannot be set aside: {why}")
        self._world.rotten.discard(step)

    def remove(self, step: int) -> None:
        self._spend(REMOVE_SECONDS)
        self._world.disk.pop(step, None)
        self._world.rotten.discard(step)

    def _spend(self, seconds: float) -> None:
        if self._thread.current:
            self._thread.current.seconds += seconds


class GhostSaver(Saver):
    """`Saver` itself, with the thread, the disk and the answers in virtual time."""

    _thread: Any
    _store: Any

    def __init__(self, world: World, backend: Backend):
        self._world, self._backend = world, backend
        self._shapes, self._metadata, self._policy = {}, {}, world.schedule.policy
        self._thread = VirtualThread(world)
        self._store = GhostStore(world, self._thread)
        self._misfit = lambda rows: None
        self._abandoned, self._due, self._begun, self._hangs = set(), {}, 0, False
        self._ready: deque[Any] = deque()

    def _submit(self, number: int, effect: Save, copy: Any, metadata: dict[str, Any]) -> None:
        self._thread.add(lambda: (number, self._try(effect, copy, metadata)), self._answered)

    def _try(self, effect: Save, copy: Any, extra: dict[str, Any]) -> SaveAnswer:
        """What the thread of the real saver does."""
        with self._world.within(Phase.SAVE):
            return self._saved(effect, copy, extra)

    def _write(self, effect: Save, copy: Any, metadata: dict[str, Any]) -> None:
        self._world.point(raises=ERRORS)
        super()._write(effect, copy, metadata)

    def _answered(self, job: Job) -> None:
        with self._world.within(Phase.SAVE):
            self._world.point()
        self._store.commit()
        number, event = job.value()
        self._ready.append((number, replace(event, at=self._world.clock.now())))

    def _take(self, timeout: float) -> tuple[int, SaveAnswer] | None:
        if not self._ready and timeout:
            due = self._world.next_due()
            self._world.pass_time(timeout if due is None else min(timeout, due))
        return self._ready.popleft() if self._ready else None

    def load(self, step: int, place: Place = keep) -> tuple[dict[str, Any], dict[str, object]]:
        self._world.stall(Phase.RESTORE, self._policy.prepare_deadline, f"reading step {step}")
        return self._thread.submit(self._load, step, place).result()
