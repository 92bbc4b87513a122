"""One process of a run under a schedule: its parts, its checks, and how it may end."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any

from elastix.backends import Backend, Health, slices_of
from elastix.driver import Driver
from elastix.evaluation import EvalLog, Evaluations
from elastix.machine import (
    Done,
    Effect,
    Event,
    Failed,
    Source,
    Started,
    Starting,
    State,
    Tier,
    TrainStateName,
)
from elastix.metrics import MetricsLog
from elastix.notices import Announcements
from elastix.retraction import retract_wrong_steps
from elastix.saver import Saver
from elastix.testing.invariants import Rules
from elastix.testing.knowledge import TOO_LATE, violated
from elastix.testing.schedules import FOREVER, Kind, Phase, Schedule
from elastix.testing.world import PLANTED, Violation, World

MOST_PROCESSES = 12


def evaluations_due(schedule: Schedule, done: int) -> list[int]:
    """The steps, up to `done`, after which the policy evaluates."""
    every, last = schedule.policy.eval_every, schedule.num_steps
    return [n for n in range(1, done + 1) if every and (n % every == 0 or n == last)]


class Process:
    """One process: its memory is new, the world, the disk and the records are not.

    What it is made of, and what is true, is said by those who derive from it.
    """

    def __init__(self, world: World, metrics: MetricsLog, evaluated: EvalLog):
        self.world, self.metrics, self.evaluated = world, metrics, evaluated
        self.end: Done | Failed | None = None
        self.rows: list[tuple[Event, State, tuple[Effect, ...]]] = []
        self._struck_before = len(world.struck)
        world.on_loss, world.on_return = [], []
        world.restoring, world.disconnected = Phase.RESTORE, False
        stop = threading.Event()
        world.preempt = stop.set
        self._announced = Announcements(stop, world.take_notice)
        self._backend, self._saver, self._rules, self._driver = self._make()
        self._rules.driver = self._driver

    def _make(self) -> tuple[Backend, Saver | None, Rules, Driver]:
        """The parts; each is made for this process."""
        raise NotImplementedError

    def _check_final(self, final: dict[str, Any] | None) -> None:
        """A run that is done ended with this state: is it the right one?"""
        raise NotImplementedError

    def record(
        self, before: State, event: Event, after: State, effects: tuple[Effect, ...]
    ) -> None:
        """An observer of the driver."""
        self.rows.append((event, after, effects))
        retract_wrong_steps(self.metrics, self.evaluated)(before, event, after, effects)

    def evaluations(self, feed: Any, num_batches: int) -> Evaluations:
        return Evaluations(feed, num_batches, self.evaluated)

    def goes_on(self, processes: int) -> bool:
        """Whether the same command is run again, with every slice brought back."""
        done = isinstance(self.end, Done) and self.end.outcome == "done"
        if done or not self.world.schedule.durable:
            return False
        if processes == MOST_PROCESSES:
            raise Violation("the run ends", f"{processes} processes did not end it: {self.end}")
        self.world.repair()
        return True

    def run(self) -> None:
        health = {s: self.world.health(s) for s in self._backend.devices}
        started = Started(
            at=self._backend.now(),
            num_steps=self.world.schedule.num_steps,
            slices=frozenset(self._backend.devices),
            up=slices_of(health, Health.UP, Health.EMPTIED),
            sources=(
                Source(Tier.SEED, 0),
                *(Source(Tier.DISK, s) for s in sorted(self.world.disk)),
            ),
            durable=self._saver is not None,
            evaluated=self.evaluated.last,
        )
        try:
            self.end = self._driver.run(Starting(), started)
            name = self.end.train_state if isinstance(self.end, Done) else None
            final = self._driver.final_state(name)
            if self._saver:
                self._saver.close()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            message = f"{type(error).__name__} at {place}: {error}"
            raise Violation("nothing escapes", message) from error
        match self.end:
            case Failed():
                self._check_failed(self.end.reason)
            case Done(outcome="done"):
                self._check_done(self.end, final)
            case _:
                self._check_preempted(self.end)

    # --- how it ended -----------------------------------------------------------------------

    def _struck(self, *kinds: Kind) -> int:
        """How many faults of these kinds struck while this process ran."""
        return sum(f.kind in kinds for f in self.world.struck[self._struck_before :])

    def _check_done(self, end: Done, final: dict[str, Any] | None) -> None:
        steps = self.world.schedule.num_steps
        name = end.train_state
        at = name.step if name else None
        require(at == end.iterator_state == steps, "done is done", f"ended at {end}")
        require(len(self.metrics.losses) == steps, "one row a step", f"{self.metrics.losses}")
        assert name
        if final is not None or not self._is_lost(name):
            self._check_final(final)
        self._check_on_disk(steps)
        self._check_evaluated(steps)

    def _is_lost(self, name: TrainStateName) -> bool:
        """Whether every copy of the final state was lost after the run had ended."""
        silent = self._struck(Kind.SILENT, Kind.UNAVAILABLE)  # nobody answers when it is read
        held = not silent and any(self.world.alive(s) for s in name.holders)
        stalled = self._struck(Kind.STALL)  # the disk does not give it in time
        return not held and (self._saver is None or bool(stalled) or self._is_rotten(name.step))

    def _is_rotten(self, step: int) -> bool:
        """Whether the checkpoint went bad after it was written; one that was read is set aside."""
        aside = step not in self.world.disk and self._struck(Kind.ROT)
        return step in self.world.rotten or bool(aside)

    def _check_evaluated(self, steps: int) -> None:
        rows = [r["step"] for r in self.evaluated.rows]
        due = evaluations_due(self.world.schedule, steps)
        require(rows == due, "each evaluation is recorded once", f"{rows}, not {due}")

    def _check_preempted(self, end: Done) -> None:
        require(self._struck(Kind.PREEMPTION), "it was asked to stop", f"{end}")
        if end.train_state:
            step = end.train_state.step
            require(step == end.iterator_state, "one meaning of step", f"{end}")
            self._check_on_disk(step)

    def _check_on_disk(self, step: int) -> None:
        if self._saver:
            good = self.world.good_checkpoint(step) or self._is_rotten(step)
            require(good, "the end is on disk", f"no good checkpoint of step {step}")

    def _check_failed(self, reason: str) -> None:
        require(self._fits(reason), "a failure fits the schedule", reason)

    def _fits(self, reason: str) -> bool:
        policy, since = self.world.schedule.policy, self._rules.knowledge.harm_at_commit
        if "were up after" in reason:
            return policy.deadline < FOREVER
        if "losses in a row" in reason:
            return self.world.harm - since > policy.max_losses
        if "the controller lost its devices" in reason:
            return self._struck(Kind.UNAVAILABLE) > 0
        if reason.startswith("stuck:"):
            return self._struck(Kind.HANG, Kind.STALL) > 0
        if "data failed twice" in reason or "data stream failed twice" in reason:
            return self._struck(Kind.DATA) > 1 or self._struck(Kind.STALL) > 0
        if "the last checkpoint could not be written" in reason:
            return PLANTED in reason or TOO_LATE in reason
        return PLANTED in reason and self._struck(Kind.PROGRAM, Kind.INTERNAL) > 0


def require(holds: object, rule: str, message: str) -> None:
    if not holds:
        violated(rule, message)
