"""Effects in, events out: the one thread that runs what the machine decided.

The driver decides nothing: every branch here is about how to do an effect, or which event says
what happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elastix.arrays import Arrays
from elastix.backends import Backend, Health, slices_of
from elastix.checkpoints import CheckpointError, UnreadableHereError
from elastix.classification import (
    SliceLostError,
    StuckError,
    failure_event,
    first_line,
    status_code,
)
from elastix.compile_cache import count_compiles
from elastix.data import Stream
from elastix.machine import (
    Abandon,
    Committed,
    DataFailed,
    Dispatched,
    Done,
    Effect,
    Event,
    Failed,
    Policy,
    Prepare,
    Prepared,
    Probe,
    Probed,
    ProgramFailed,
    ProtocolError,
    RestoreFailed,
    RunStep,
    Save,
    Slices,
    SlicesLost,
    Snapshot,
    SnapshotMissing,
    Snapshotted,
    Starting,
    State,
    StepStuck,
    TrainStateName,
    Tried,
    Try,
    WakeAt,
    Woke,
    transition,
)
from elastix.metrics import MetricsLog, Row
from elastix.notices import Announcements
from elastix.program import Batch
from elastix.progress import Progress
from elastix.saver import Saver

_BLINK = 0.5
"""Longest time, in seconds, without a look at signals and finished saves."""

Observer = Callable[[State, Event, State, tuple[Effect, ...]], None]
"""Called after each transition with (before, event, after, effects)."""


@dataclass(frozen=True)
class InFlight:
    """A dispatched step whose results have not been read."""

    step: int
    results: Any
    dispatched_at: float


class Driver:
    """Runs one recipe from its first event to `Done` or `Failed`.

    Args:
        saver: the durable tier, or None for a run that keeps nothing on disk.
        announced: the preemptions that the world announces.
    """

    def __init__(
        self,
        arrays: Arrays,
        stream: Stream,
        backend: Backend,
        policy: Policy,
        metrics: MetricsLog,
        saver: Saver | None,
        observers: tuple[Observer, ...] = (),
        announced: Announcements | None = None,
    ):
        self._arrays, self._stream, self._backend = arrays, stream, backend
        self._policy, self._metrics, self._saver = policy, metrics, saver
        self._observers = observers
        self._mesh: Slices = frozenset()
        self._epoch = 0
        self._inflight: deque[InFlight] = deque()
        self._batches: Iterator[Batch] | None = None
        self._progress: dict[int, Progress] = {0: Progress()}
        self._committed = 0
        self._last_commit: float | None = None
        self._events: deque[Event] = deque()
        self._wake: WakeAt | None = None
        self._announced = announced or Announcements()

    # --- the loop ---------------------------------------------------------------------------

    def run(self, state: State, first: Event) -> Done | Failed:
        """Feed events to the machine until it ends."""
        event = first
        while True:
            before = state
            state, effects = transition(before, event, self._policy)
            for observe in self._observers:
                observe(before, event, state, effects)
            if isinstance(event, Snapshotted):
                self._arrays.published(event.step)
            self._release(state)
            if isinstance(state, Done | Failed):
                return state
            for effect in effects:
                self._start(effect)
            event = self._next()

    def _release(self, state: State) -> None:
        self._arrays.release(state)
        if not isinstance(state, Starting | Done | Failed):
            oldest = min([self._committed, *(s.step for s in state.ledger.sources)])
            for step in [s for s in self._progress if s < oldest]:
                del self._progress[step]

    def _next(self) -> Event:
        """The next thing that happened: an answer, a wake-up, or the oldest step's results."""
        while True:
            notice = self._announced.next(self._backend.now(), self._epoch)
            if notice:
                return notice
            saved = self._saver.answer() if self._saver else None
            if saved:  # first: the disk may have let go of what an older answer names
                return saved
            if self._events:
                return self._events.popleft()
            if self._wake and self._backend.now() >= self._wake.at:
                epoch, self._wake = self._wake.epoch, None
                return Woke(at=self._backend.now(), epoch=epoch)
            if self._inflight:
                self._guarded(self._commit)
            else:
                self._pass_time()

    def _pass_time(self) -> None:
        """Nothing is in the foreground: wait for a save or for the next wake-up."""
        saving = self._saver is not None and self._saver.pending > 0
        if self._wake is None and not saving:
            raise ProtocolError("the machine is live, but no answer is outstanding")
        left = self._wake.at - self._backend.now() if self._wake else _BLINK
        if not saving:
            self._backend.idle(min(left, _BLINK))
        elif self._saver and (answer := self._saver.answer(timeout=_BLINK / 10)):
            self._events.append(answer)
        elif self._wake:
            self._backend.idle(min(left, _BLINK / 10))

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
                if self._saver:
                    self._saver.abandon(effect)
            case Probe():
                self._guarded(self._probe, effect)
            case Try():
                self._guarded(self._try, effect)
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

    @property
    def committed(self) -> int:
        """The last committed step."""
        return self._committed

    def progress(self, step: int) -> Progress:
        """What was consumed up to `step`, the last committed one or one that is still a source."""
        return self._progress[step]

    def final_state(self, name: TrainStateName | None) -> dict[str, Any] | None:
        """The whole leaves that a finished run ended with; None if it ended without a mesh."""
        return self._arrays.final(name.step, name.holders) if name else None

    # --- failures ---------------------------------------------------------------------------

    def _guarded(self, do: Callable[..., None], *args: Any) -> None:
        """Do it, and turn what it raises into the event that says what happened."""
        try:
            do(*args)
        except SliceLostError as error:
            self._inflight.clear()
            self._emit(SlicesLost, slices=error.slices, cause=error.cause)
        except StuckError as error:
            during = f"step {self._inflight[0].step}" if self._inflight else str(error)
            self._inflight.clear()
            self._emit(StepStuck, during=during)
        except (Exception, SystemExit) as error:  # a user's code may call sys.exit
            self._inflight.clear()
            self._guarded(self._explain, error)  # to ask the slices may fail as well

    def _explain(self, error: BaseException) -> None:
        connected = status_code(error) != "UNAVAILABLE"
        gone = self._gone(self._mesh) if connected else frozenset()
        kind, fields = failure_event(error, self._mesh, gone)
        self._emit(kind, **fields)

    def _gone(self, slices: Slices) -> Slices:
        health = self._backend.probe(sorted(slices))
        return slices_of(health, Health.DOWN, Health.EMPTIED)

    # --- steps ------------------------------------------------------------------------------

    def _run_step(self, effect: RunStep) -> None:
        try:
            batch = self._next_batch(effect.step)
        except (Exception, SystemExit) as error:
            self._batches = None
            self._emit(DataFailed, step=effect.step, reason=first_line(error))
            return
        self._backend.check(self._mesh)
        results = self._arrays.step(self._epoch, effect.step, self._mesh, batch)
        self._inflight.append(InFlight(effect.step, results, self._backend.now()))
        self._emit(Dispatched, step=effect.step)
        self._backend.dispatched(effect.step, self._mesh)

    def _next_batch(self, step: int) -> Batch:
        """The batch of `step`. The position of the stream is the step: nothing else is kept."""
        if self._batches is None:
            self._batches = self._stream.batches(step - 1)
        return next(self._batches)

    def _commit(self) -> None:
        """Read the oldest step in flight; what came back says which examples it consumed."""
        step = self._inflight[0]
        deadline = self._policy.step_deadline
        results = self._backend.read(step.results, self._mesh, deadline)
        self._inflight.popleft()
        ids = self._arrays.consumed_ids(results.pop("example_id"))
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

    # --- other effects ------------------------------------------------------------------------

    def _prepare(self, effect: Prepare) -> None:
        start, before = self._backend.now(), count_compiles()[0]
        self._backend.admit(effect.mesh - effect.source.holders)
        self._arrays.compile(effect.mesh)
        compiled = self._backend.now()
        source = effect.source
        try:
            progress = self._arrays.restore(source, self._epoch, effect.mesh, self._progress)
        except UnreadableHereError:
            raise  # the checkpoint may be good: that is no reason to go back to an older one
        except CheckpointError as error:
            return self._emit(RestoreFailed, source=source, reason=str(error))
        if progress is None:
            return self._emit(SnapshotMissing, source=source)
        self._progress[source.step] = progress
        self._committed = source.step
        self._emit(
            Prepared,
            step=source.step,
            restore_seconds=self._backend.now() - compiled,
            compile_seconds=compiled - start,
            compiles=count_compiles()[0] - before,
        )

    def _snapshot(self, effect: Snapshot) -> None:
        self._backend.check(self._mesh)
        self._arrays.snapshot(self._epoch, effect.step, self._mesh)
        self._emit(Snapshotted, step=effect.step, holders=self._mesh)

    def _try(self, effect: Try) -> None:
        """A step on each slice alone, from the seed and thrown away: who does not finish it?"""
        stuck = set()
        for slice_id in sorted(effect.slices):
            alone = frozenset({slice_id})
            try:
                results = self._arrays.trial(alone)
                self._backend.read(results, alone, self._policy.step_deadline)
            except StuckError:
                stuck.add(slice_id)
        self._backend.suspend(stuck)
        self._emit(Tried, stuck=frozenset(stuck))

    def _save(self, effect: Save) -> None:
        assert self._saver
        copy = self._backend.host_memory(effect.holder).get(effect.step)
        progress = self._progress[effect.step].to_json()
        self._saver.save(effect, copy, {"progress": progress, "mesh": sorted(self._mesh)})

    def _probe(self, effect: Probe) -> None:
        health = self._backend.probe(sorted(effect.slices))
        self._emit(
            Probed,
            up=slices_of(health, Health.UP),
            emptied=slices_of(health, Health.EMPTIED),
            down=slices_of(health, Health.DOWN),
        )
