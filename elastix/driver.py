"""Effects in, events out: the one thread that runs what the machine decided.

The driver keeps the arrays under the names the machine uses, and frees what no state names. It
decides nothing: every branch here is about how to do an effect, or which event describes what
happened.
"""

from __future__ import annotations

import queue
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from elastix.backends import Backend, Health, slices_of
from elastix.checkpoints import CheckpointError, CheckpointStore
from elastix.compile_cache import count_compiles
from elastix.data import Stream
from elastix.machine import (
    Abandon,
    Committed,
    ControllerLost,
    DataFailed,
    Dispatched,
    Done,
    Effect,
    Event,
    Failed,
    Finishing,
    Policy,
    PreemptionNoticed,
    Prepare,
    Prepared,
    Probe,
    Probed,
    ProgramFailed,
    ProtocolError,
    RestoreFailed,
    Restoring,
    RunStep,
    Save,
    Saved,
    SaveFailed,
    SlicesLost,
    Slices,
    Snapshot,
    SnapshotMissing,
    Snapshotted,
    Source,
    State,
    Tier,
    Training,
    WakeAt,
    Woke,
    transition,
)
from elastix.metrics import MetricsLog, Row
from elastix.program import Program
from elastix.progress import Progress
from elastix.snapshots import copy_to_host, move, to_devices
from elastix.train_state import Leaves, all_finite

Observer = Callable[[State, Event, State, tuple[Effect, ...]], None]
"""Called after each transition with (before, event, after, effects)."""


class SliceLostError(Exception):
    """The memory of these slices is gone: the world's doing, nobody's defect."""

    def __init__(self, slices: Slices, cause: str):
        super().__init__(cause)
        self.slices, self.cause = slices, cause


@dataclass(frozen=True)
class InFlight:
    """A dispatched step whose results have not been read."""

    step: int
    results: Any
    dispatched_at: float


@dataclass(frozen=True)
class HostCopyOfState:
    """Whole leaves on the host, after `step` updates."""

    step: int
    leaves: dict[str, np.ndarray]


class Driver:
    """Runs one recipe from its first event to `Done` or `Failed`.

    Args:
        store: the durable tier, or None for a run that keeps nothing on disk.
        durable: metadata that goes into each checkpoint beside the run's progress.
    """

    def __init__(
        self,
        program: Program,
        stream: Stream,
        backend: Backend,
        policy: Policy,
        metrics: MetricsLog,
        store: CheckpointStore | None,
        checkpoint_metadata: dict[str, Any],
        observers: tuple[Observer, ...] = (),
    ):
        self._program, self._stream, self._backend = program, stream, backend
        self._policy, self._metrics, self._store = policy, metrics, store
        self._metadata, self._observers = checkpoint_metadata, observers
        self._mesh: Slices = frozenset()
        self._epoch = 0
        self._states: dict[tuple[int, int], Leaves] = {}
        self._inflight: deque[InFlight] = deque()
        self._progress: dict[int, Progress] = {0: Progress()}
        self._batches: Iterator[dict[str, np.ndarray]] | None = None
        self._events: deque[Event] = deque()
        self._finished_io: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._io = ThreadPoolExecutor(1, thread_name_prefix="elastix-checkpoints")
        self._saves = 0
        self._abandoned: set[tuple[int, int]] = set()
        self._unpublished: set[int] = set()
        self._wake: WakeAt | None = None
        self._last_commit: float | None = None
        self._committed = 0
        self.stop_requested = False

    # --- the loop ---------------------------------------------------------------------------

    def run(self, state: State, first: Event) -> Done | Failed:
        """Feed events to the machine until it ends."""
        event = first
        try:
            while True:
                before = state
                state, effects = transition(before, event, self._policy)
                for observe in self._observers:
                    observe(before, event, state, effects)
                if isinstance(event, Snapshotted):
                    self._unpublished.discard(event.step)
                self._release(state)
                if isinstance(state, Done | Failed):
                    return state
                for effect in effects:
                    self._start(effect)
                event = self._next()
        finally:
            self._io.shutdown(wait=True)

    def _next(self) -> Event:
        """The next thing that happened: an answer, a wake-up, or the oldest step's results."""
        while True:
            if self.stop_requested:
                self.stop_requested = False
                return PreemptionNoticed(at=self._backend.now(), epoch=self._epoch)
            if self._events:
                return self._events.popleft()
            if self._wake and self._backend.now() >= self._wake.at:
                epoch, self._wake = self._wake.epoch, None
                return Woke(at=self._backend.now(), epoch=epoch)
            if not self._finished_io.empty():
                self._saves -= 1
                return self._finished_io.get()
            if self._inflight:
                self._guarded(self._commit)
            else:
                self._pass_time()

    def _pass_time(self) -> None:
        """Nothing is in the foreground: wait for a save or for the next wake-up."""
        if self._wake is None and not self._saves:
            raise ProtocolError("the machine is live, but no answer is outstanding")
        left = self._wake.at - self._backend.now() if self._wake else 0.5
        if not self._saves:
            self._backend.idle(min(left, 0.5))
            return
        try:
            self._finished_io.put(self._finished_io.get(timeout=min(max(left, 0.0), 0.05)))
        except queue.Empty:
            if self._wake:
                self._backend.idle(min(max(left, 0.0), 0.05))

    def _emit(self, kind: type[Event], **fields: Any) -> None:
        self._events.append(kind(at=self._backend.now(), epoch=self._epoch, **fields))

    def _start(self, effect: Effect) -> None:
        if effect.epoch > self._epoch:
            self._begin_epoch(effect.epoch)
        match effect:
            case Prepare():
                self._mesh = effect.mesh
                self._guarded(self._prepare, effect)
            case RunStep():
                self._guarded(self._run_step, effect)
            case Snapshot():
                self._guarded(self._snapshot, effect)
            case Save():
                self._save(effect)
            case Abandon():
                self._abandoned.add((effect.epoch, effect.step))
                self._io.submit(self._remove, effect)
            case Probe():
                self._probe(effect)
            case WakeAt():
                self._wake = effect
            case _:
                raise ProtocolError(f"no handler for {type(effect).__name__}")

    def _begin_epoch(self, epoch: int) -> None:
        """What was in flight is abandoned; its answers would be stale."""
        self._epoch = epoch
        self._inflight.clear()
        self._batches = None
        self._wake = None

    def progress(self) -> Progress:
        """What was consumed up to the last committed step."""
        return self._progress[self._committed]

    def final_state(self) -> HostCopyOfState | None:
        """The state that a finished run ended with, as whole host arrays, from a snapshot whose
        slice was alive after the copy; None if the run ended without a mesh."""
        for memory in map(self._backend.host_memory, sorted(self._mesh)):
            if self._committed in memory:
                whole = memory[self._committed].whole(self._program.shapes)
                return HostCopyOfState(self._committed, whole)
        return None

    # --- failures ---------------------------------------------------------------------------

    def _guarded(self, do: Callable[..., None], *args: Any) -> None:
        """Do it, and turn what it raises into the event that says what happened."""
        try:
            do(*args)
        except SliceLostError as error:
            self._inflight.clear()
            self._emit(SlicesLost, slices=error.slices, cause=error.cause)
        except Exception as error:
            self._inflight.clear()
            self._classify(error)

    def _classify(self, error: Exception) -> None:
        """A loss, a lost controller, or a defect of the program.

        By the status code at the head of the message, through `__cause__`; then by asking the
        slices. An error with every canary intact is the program's.
        """
        code = status_code(error)
        cause = f"{code}: {first_line(error)}" if code else first_line(error)
        if code == "UNAVAILABLE":
            return self._emit(ControllerLost, reason=first_line(error))
        gone = self._gone(self._mesh)
        if code == "DATA_LOSS":
            return self._emit(SlicesLost, slices=gone or self._mesh, cause=first_line(error))
        if code and gone:
            return self._emit(SlicesLost, slices=gone, cause=cause)
        text = "".join(traceback.format_exception(error))
        self._emit(ProgramFailed, reason=f"{type(error).__name__}: {first_line(error)}", trace=text)

    def _gone(self, slices: Slices) -> Slices:
        health = self._backend.probe(slices)
        return slices_of(health, Health.DOWN, Health.EMPTIED)

    def _require(self, slices: Slices, during: str) -> None:
        """What was just read or written is only good if these slices are alive after it."""
        gone = self._gone(slices)
        if gone:
            names = ", ".join(map(str, sorted(gone)))
            raise SliceLostError(gone, f"slice {names} does not hold its canary after {during}")

    # --- steps ------------------------------------------------------------------------------

    def _run_step(self, effect: RunStep) -> None:
        try:
            batch = self._next_batch(effect.step)
        except Exception as error:
            self._batches = None
            self._emit(DataFailed, step=effect.step, reason=first_line(error))
            return
        self._backend.check(self._mesh)
        before = (self._epoch, effect.step - 1)
        leaves, results = self._program.step(self._mesh)(
            self._states[before], self._program.put_batch(batch, self._mesh)
        )
        if self._program.donates:
            del self._states[before]
        self._states[self._epoch, effect.step] = leaves
        self._inflight.append(InFlight(effect.step, results, self._backend.now()))
        self._emit(Dispatched, step=effect.step)
        self._backend.dispatched(effect.step, self._mesh)

    def _next_batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of `step`. The position of the stream is the step: nothing else is kept."""
        if self._batches is None:
            self._batches = self._stream.batches(step - 1)
        return next(self._batches)

    def _commit(self) -> None:
        """Read the oldest step in flight; what came back says which examples it consumed."""
        step = self._inflight[0]
        results = self._backend.read(step.results, self._mesh)
        self._inflight.popleft()
        ids = self._program.consumed_ids(results.pop("example_id"))
        self._progress[step.step] = self._progress[step.step - 1].consume(ids)
        self._committed = step.step
        self._backend.committed(step.step)
        now = self._backend.now()
        seconds, self._last_commit = now - (self._last_commit or step.dispatched_at), now
        row = Row.of(step.step, results, len(self._mesh), seconds)
        mismatch = self._metrics.commit(row)
        if mismatch:
            self._emit(ProgramFailed, reason=mismatch)
        else:
            self._emit(Committed, step=step.step, finite=bool(results["finite"]))

    # --- the train state ----------------------------------------------------------------------

    def _prepare(self, effect: Prepare) -> None:
        start, before = self._backend.now(), count_compiles()[0]
        source, mesh = effect.source, effect.mesh
        self._backend.admit(mesh - source.holders)
        self._program.step(mesh)
        compiled = self._backend.now()
        try:
            leaves, progress = self._restore(source, mesh)
        except CheckpointError as error:
            assert self._store
            self._store.set_aside(source.step, str(error))
            return self._emit(RestoreFailed, source=source, reason=str(error))
        if leaves is None:
            return self._emit(SnapshotMissing, source=source)
        jax.block_until_ready(leaves)
        self._require(mesh | source.holders, "restoring")
        self._states[self._epoch, source.step] = leaves
        self._progress[source.step] = progress
        self._committed = source.step
        self._emit(
            Prepared,
            step=source.step,
            restore_seconds=self._backend.now() - compiled,
            compile_seconds=compiled - start,
            compiles=count_compiles()[0] - before,
        )

    def _restore(self, source: Source, mesh: Slices) -> tuple[Leaves | None, Progress]:
        """The leaves of `source` on `mesh`; None if no holder has them."""
        progress = self._progress.get(source.step, Progress())
        shardings = self._program.shardings(mesh)
        match source.tier:
            case Tier.SEED:
                return self._program.initial(mesh), Progress()
            case Tier.LIVE:
                leaves = self._states.get((source.epoch, source.step))
                donors = self._program.devices(source.holders)
                return (move(leaves, donors, shardings) if leaves else None), progress
            case Tier.HOST:
                memories = (self._backend.host_memory(s) for s in sorted(source.holders))
                copy = next((m[source.step] for m in memories if source.step in m), None)
                whole = copy.whole(self._program.shapes) if copy else None
                return (to_devices(whole, shardings) if whole else None), progress
            case Tier.DISK:
                assert self._store
                whole, metadata = self._store.load(source.step)
                return to_devices(whole, shardings), Progress.from_json(metadata["progress"])

    def _snapshot(self, effect: Snapshot) -> None:
        """A whole copy of the committed state to the host memory of every slice."""
        leaves = self._states[self._epoch, effect.step]
        self._backend.check(self._mesh)
        copies = {
            s: copy_to_host(leaves, self._program.devices(frozenset({s})), effect.step)
            for s in sorted(self._mesh)
        }
        self._require(self._mesh, "a host snapshot")
        for slice_id, copy in copies.items():
            self._backend.host_memory(slice_id)[effect.step] = copy
        self._unpublished.add(effect.step)
        self._emit(Snapshotted, step=effect.step, holders=self._mesh)

    def _release(self, state: State) -> None:
        """Free the arrays and host copies that the state does not name."""
        if isinstance(state, Done | Failed):
            return
        ledger = state.ledger
        live = {(s.epoch, s.step) for s in ledger.sources if s.tier is Tier.LIVE}
        first = state.train_state.step if isinstance(state, Training | Finishing) else 0
        current = isinstance(state, Training | Finishing | Restoring)
        for epoch, step in list(self._states):
            named = current and epoch == ledger.epoch and step >= first
            if not named and (epoch, step) not in live:
                del self._states[epoch, step]
        hosted = {s.step for s in ledger.sources if s.tier is Tier.HOST} | self._unpublished
        if ledger.saving:
            hosted.add(ledger.saving.step)
        for slice_id in self._backend.devices:
            memory = self._backend.host_memory(slice_id)
            for step in set(memory) - hosted:
                del memory[step]
        oldest = min({first, *(s.step for s in ledger.sources)})
        for step in [s for s in self._progress if s < oldest]:
            del self._progress[step]

    # --- the durable tier -----------------------------------------------------------------------

    def _save(self, effect: Save) -> None:
        """Write the host copy of one slice in the background."""
        assert self._store
        copy = self._backend.host_memory(effect.holder).get(effect.step)
        metadata = {
            **self._metadata,
            "progress": self._progress[effect.step].to_json(),
            "mesh": sorted(self._mesh),
        }
        self._saves += 1
        self._io.submit(self._write, effect, copy, metadata)

    def _write(self, effect: Save, copy: Any, metadata: dict[str, Any]) -> None:
        """On the I/O thread: a checkpoint counts only if its slice was alive after the copy."""
        assert self._store
        reason = None
        ticket = (effect.epoch, effect.step)
        try:
            if copy is None:
                raise CheckpointError(f"slice {effect.holder} has no snapshot of {effect.step}")
            whole = copy.whole(self._program.shapes)
            alive = self._backend.probe([effect.holder])[effect.holder] is Health.UP
            if not alive:
                raise CheckpointError(f"slice {effect.holder} died while its copy was written")
            if not all_finite(whole):
                raise CheckpointError(f"the state of step {effect.step} is not finite")
            if ticket not in self._abandoned:
                self._store.save(effect.step, whole, metadata)
        except Exception as error:
            reason = first_line(error)
        at = self._backend.now()
        if reason is None:
            self._finished_io.put(Saved(at=at, epoch=effect.epoch, step=effect.step))
        else:
            failed = SaveFailed(at=at, epoch=effect.epoch, step=effect.step, reason=reason)
            self._finished_io.put(failed)

    def _remove(self, effect: Abandon) -> None:
        """On the I/O thread, behind the save that was given up: what it wrote goes, even if it
        looks committed."""
        assert self._store
        self._store.remove(effect.step)
        self._abandoned.discard((effect.epoch, effect.step))

    # --- health ---------------------------------------------------------------------------------

    def _probe(self, effect: Probe) -> None:
        health = self._backend.probe(sorted(effect.slices))
        self._emit(
            Probed,
            up=slices_of(health, Health.UP),
            emptied=slices_of(health, Health.EMPTIED),
            down=slices_of(health, Health.DOWN),
        )


def status_code(error: BaseException | None) -> str | None:
    """The status code at the head of a JAX runtime error, looked for through `__cause__`."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            head = str(error).split(":", 1)[0].strip()
            return head if head.isupper() and " " not in head else "UNKNOWN"
        error = error.__cause__
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
