"""Effects in, events out: the one thread that runs what the machine decided.

The driver decides nothing: every branch here is about how to do an effect, or which event says
what happened.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import jax

from elastix.arrays import Arrays
from elastix.backends import Backend, Health, slices_of
from elastix.checkpoints import CheckpointError, UnreadableHereError
from elastix.classification import (
    SliceLostError,
    failure_event,
    first_line,
    naming,
    trace_of,
)
from elastix.evaluation import Evaluation, Evaluations
from elastix.feed import Batch, Feed
from elastix.machine import (
    Abandon,
    Committed,
    Compile,
    DataFailed,
    Dispatched,
    Done,
    Effect,
    Evaluate,
    Evaluated,
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
    Snapshot,
    SnapshotMissing,
    Snapshotted,
    Starting,
    State,
    TrainStateName,
    Tried,
    Try,
    WakeAt,
    Warm,
    transition,
)
from elastix.metrics import MetricsLog, Row
from elastix.notices import Announcements
from elastix.pending import Pending
from elastix.progress import Progress
from elastix.saver import Saver
from elastix.steps import Steps

_BLINK = 0.5
"""Longest time, in seconds, without a look at signals and finished saves."""

Observer = Callable[[State, Event, State, tuple[Effect, ...]], None]
"""Called after each transition with (before, event, after, effects)."""


class Driver:
    """Runs one recipe from its first event to `Done` or `Failed`.

    Args:
        saver: the durable tier, or None for a run that keeps nothing on disk.
        announced: the preemptions that the world announces.
        evaluations: what `Policy.eval_every` asks for.
    """

    def __init__(
        self,
        arrays: Arrays,
        feed: Feed,
        backend: Backend,
        policy: Policy,
        metrics: MetricsLog,
        saver: Saver | None,
        observers: tuple[Observer, ...] = (),
        announced: Announcements | None = None,
        evaluations: Evaluations | None = None,
    ):
        self._arrays, self._feed, self._backend = arrays, feed, backend
        self._policy, self._metrics, self._saver = policy, metrics, saver
        self._observers, self._evaluations = observers, evaluations
        self._mesh: Slices = frozenset()
        self._epoch = 0
        self._steps = Steps()
        self._ran: set[Slices] = set()
        """The meshes on which a step has finished: the first may take longer."""
        self._evaluation: Evaluation | None = None
        self._pending = Pending(backend.ended)
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
            self._steps.forget({s.step for s in state.ledger.sources})

    def _next(self) -> Event:
        """The next thing that happened: an answer, a wake-up, or the oldest step's results."""
        while True:
            if notice := self._announced.next(self._backend.now(), self._epoch):
                return notice
            # Before others: the disk may have let go of what an older answer names.
            if saved := self._saver.answer() if self._saver else None:
                return saved
            # Before another step is begun: its dispatch may find a slice gone.
            if self._arrays.snapshot_begun <= self._steps.committed:
                self._guarded(self._finish_snapshot)
            if told := self._pending.next(self._backend.now()):
                return told
            if self._steps.in_flight:
                self._guarded(self._commit)
            elif self._evaluation:
                self._guarded(self._evaluate, self._evaluation)
            else:
                self._pass_time()

    def _pass_time(self) -> None:
        """Nothing is in the foreground: wait for a save or for the next wake-up."""
        saver = self._saver if self._saver and self._saver.pending else None
        left = max(0.0, self._pending.wakes_at - self._backend.now())
        if left == inf and saver is None:
            raise ProtocolError("the machine is live, but no answer is outstanding")
        if saver is None:
            self._backend.idle(min(left, _BLINK))
        elif answer := saver.answer(timeout=_BLINK / 10):
            self._pending.tell(answer)
        else:
            self._backend.idle(min(left, _BLINK / 50))

    def _emit(self, kind: type[Event], **fields: Any) -> None:
        self._pending.tell(kind(at=self._backend.now(), epoch=self._epoch, **fields))

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
                self._evaluation = None
                self._guarded(self._begin_snapshot, effect)
            case Evaluate():
                assert self._evaluations
                self._evaluation = self._evaluations.begin(effect.step, self._backend.now())
            case Save():
                self._save(effect)
            case Abandon():
                assert self._saver
                self._saver.abandon(effect)
            case Probe():
                self._guarded(self._probe, effect)
            case Try():
                self._guarded(self._try, effect)
            case WakeAt():
                self._pending.wake_at(effect)
            case Compile():
                self._pending.when_compiled(effect, self._arrays.compiling(effect.mesh))
            case Warm():
                self._arrays.warm(effect.sets)
            case _:
                raise ProtocolError(f"no handler for {type(effect).__name__}")

    def _begin_epoch(self, epoch: int) -> None:
        """What was in flight is abandoned; its answers would be stale."""
        self._epoch = epoch
        self._give_up()
        self._feed.reset()
        self._pending.begin_epoch()
        self._arrays.warm(())  # what is needed now comes first

    def _give_up(self) -> None:
        """Nobody waits for what was in the foreground any more."""
        self._arrays.give_up_snapshot()
        self._steps.in_flight.clear()
        self._evaluation = None

    @property
    def committed(self) -> int:
        """The last committed step."""
        return self._steps.committed

    def progress(self, step: int) -> Progress | None:
        """What was consumed up to `step`, if this process has seen it and may still need it."""
        return self._steps.progress.get(step)

    def final_state(self, name: TrainStateName | None) -> dict[str, Any] | None:
        """The whole leaves that a finished run ended with; None if it ended without a mesh."""
        return self._arrays.final(name.step, name.holders) if name else None

    # --- failures ---------------------------------------------------------------------------

    def _guarded(self, do: Callable[..., None], *args: Any) -> None:
        """Do it, and turn what it raises into the event that says what happened."""
        try:
            do(*args)
        except (Exception, SystemExit) as error:  # a user's code may call sys.exit
            self._give_up()
            gone = lambda mesh: slices_of(self._ask(mesh), Health.DOWN, Health.EMPTIED)  # noqa: E731
            kind, fields = failure_event(error, self._mesh, gone)
            self._emit(kind, **fields)

    def _ask(self, slices: Slices) -> dict[int, Health]:
        return self._backend.probe(sorted(slices), self._policy.probe_deadline)

    # --- steps ------------------------------------------------------------------------------

    def _run_step(self, effect: RunStep) -> None:
        if (batch := self._batch(self._feed, effect.step - 1, effect.step)) is None:
            return
        self._backend.check(self._mesh)
        results = self._arrays.step(self._epoch, effect.step, self._mesh, batch)
        ran, policy = self._mesh in self._ran, self._policy
        deadline = policy.step_deadline if ran else policy.prepare_deadline
        self._steps.dispatched(effect.step, results, self._backend.now(), deadline)
        self._emit(Dispatched, step=effect.step)
        self._backend.dispatched(effect.step, self._mesh)

    def _batch(self, feed: Feed, number: int, step: int) -> Batch | None:
        """Batch `number`, for `step`. None if the data gives none, which is told then."""
        try:
            return feed.take(number, self._mesh, self._policy.step_deadline)
        except (SliceLostError, jax.errors.JaxRuntimeError):
            raise
        except (Exception, SystemExit) as error:
            feed.reset()
            self._evaluation = None
            self._emit(DataFailed, step=step, reason=first_line(error), trace=trace_of(error))
            return None

    def _commit(self) -> None:
        """Read the oldest step in flight; what came back says which examples it consumed."""
        step = self._steps.in_flight[0]
        with naming(f"step {step.step}"):
            results = self._backend.read(step.results, self._mesh, step.deadline)
        ids = self._arrays.consumed_ids(results.pop("example_id"))
        seconds = self._steps.commit(ids, self._backend.now())
        self._ran.add(self._mesh)
        self._backend.committed(step.step)
        row = Row.of(step.step, results, len(self._mesh), seconds)
        if mismatch := self._metrics.commit(row):
            self._emit(ProgramFailed, reason=mismatch)
        else:
            self._emit(Committed, step=step.step, finite=bool(results["finite"]))

    def _evaluate(self, evaluation: Evaluation) -> None:
        """One more batch: between two, notices and finished saves are heard."""
        assert self._evaluations
        step = evaluation.step
        if (batch := self._batch(self._evaluations.feed, evaluation.done, step)) is None:
            return
        self._backend.check(self._mesh)
        sums = self._arrays.evaluate(self._epoch, step, self._mesh, batch)
        with naming(f"the evaluation after step {step}"):
            sums = self._backend.read(sums, self._mesh, self._policy.prepare_deadline)
        if evaluation.add(sums, len(batch["example_id"])):
            self._evaluation = None
            self._evaluations.log.record(evaluation.row(len(self._mesh), self._backend.now()))
            self._emit(Evaluated, step=step)

    # --- other effects ------------------------------------------------------------------------

    def _prepare(self, effect: Prepare) -> None:
        start, before = self._backend.now(), self._arrays.compiles
        self._backend.admit(effect.mesh - effect.source.holders)
        warming = self._arrays.compile(effect.mesh)
        compiled = self._backend.now()
        source, known = effect.source, self._steps.progress
        try:
            with naming(f"restoring {source.tier} step {source.step}"):
                progress = self._arrays.restore(source, self._epoch, effect.mesh, known)
        except UnreadableHereError:
            raise  # the checkpoint may be good: that is no reason to go back to an older one
        except CheckpointError as error:
            return self._emit(RestoreFailed, source=source, reason=str(error))
        if progress is None:
            return self._emit(SnapshotMissing, source=source)
        self._steps.restored(source.step, progress)
        self._emit(
            Prepared,
            step=source.step,
            restore_seconds=self._backend.now() - compiled,
            compile_seconds=compiled - start,
            compiles=self._arrays.compiles - before,
            warming=warming,
        )

    def _begin_snapshot(self, effect: Snapshot) -> None:
        self._backend.check(self._mesh)
        with naming(f"the host snapshot of step {effect.step}"):
            self._arrays.begin_snapshot(self._epoch, effect.step, self._mesh)

    def _finish_snapshot(self) -> None:
        with naming(f"the host snapshot of step {self._arrays.snapshot_begun}"):
            step = self._arrays.finish_snapshot()
        self._emit(Snapshotted, step=step, holders=self._mesh)

    def _try(self, effect: Try) -> None:
        """A step on each slice alone, from the seed and thrown away: who does not finish it?"""
        stuck = frozenset(s for s in sorted(effect.slices) if not self._arrays.finishes_alone(s))
        self._backend.suspend(stuck)
        self._emit(Tried, stuck=stuck)

    def _save(self, effect: Save) -> None:
        assert self._saver
        copy = self._backend.host_memory(effect.holder).get(effect.step)
        progress = self._steps.progress[effect.step].to_json()
        self._saver.save(effect, copy, {"progress": progress, "mesh": sorted(self._mesh)})

    def _probe(self, effect: Probe) -> None:
        health = self._ask(effect.slices)
        self._emit(Probed, **{kind.value: slices_of(health, kind) for kind in Health})
