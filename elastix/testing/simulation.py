"""`simulate`: one schedule, run by the real driver, from its first process to its end."""

from __future__ import annotations

import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastix.backends import Health, slices_of
from elastix.driver import Driver
from elastix.evaluation import EvalLog, EvalRow, Evaluations
from elastix.event_log import EventLog
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
)
from elastix.metrics import MetricsLog
from elastix.notices import Announcements
from elastix.testing.ghost_backend import GhostBackend, from_leaves
from elastix.testing.ghost_saver import GhostSaver
from elastix.testing.ghosts import (
    EVAL_BATCHES,
    GhostArrays,
    GhostEvalFeed,
    GhostFeed,
    eval_loss,
    loss_of,
)
from elastix.testing.invariants import Invariants
from elastix.testing.knowledge import violated
from elastix.testing.schedules import FOREVER, Kind, Phase, Schedule
from elastix.testing.world import PLANTED, Ghost, Violation, World, expected

MOST_PROCESSES = 12


@dataclass(frozen=True)
class Parts:
    """What a run is made of; a test of the simulator puts a defective part here."""

    driver: Callable[..., Driver] = Driver
    backend: Callable[..., GhostBackend] = GhostBackend
    arrays: Callable[..., GhostArrays] = GhostArrays
    saver: Callable[..., GhostSaver] = GhostSaver
    feed: Callable[..., Any] = GhostFeed


@dataclass(frozen=True)
class Result:
    """How a simulated run went.

    Args:
        ends: how each process of the run ended; after a preemption or a failure the same command
            runs again, where there is something on disk.
        violation: the invariant that did not hold, or None.
        hits: how often each kind of fault struck in each phase.
        transitions: of the machine, in all processes.
    """

    schedule: Schedule
    ends: tuple[Done | Failed, ...]
    violation: Violation | None
    hits: Counter[tuple[Phase, Kind]]
    transitions: int
    _rows: tuple[tuple[tuple[Event, State, tuple[Effect, ...]], ...], ...] = field(repr=False)

    @property
    def log(self) -> str:
        """The event logs of the processes, one after another, as `events.jsonl` has them."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "events.jsonl")
            for rows in self._rows:
                log = EventLog(path, self.schedule.policy, pid=0)
                for row in rows:
                    log.append(*row)
                log.close()
            return path.read_text(encoding="utf-8") if path.exists() else ""


def simulate(schedule: Schedule, parts: Parts | None = None) -> Result:
    """Run the real driver on ghosts through a schedule, and check the invariants on the way.

    Deterministic: the same schedule gives the same events, byte for byte. No device, no thread
    and no real time is involved.
    """
    world = World(schedule)
    metrics = MetricsLog(None)
    metrics.losses = [loss_of(expected(n)) for n in range(1, 1 + max((0, *schedule.on_disk)))]
    evaluated = _evaluated(schedule)
    processes: list[_Process] = []
    violation = None
    try:
        while not processes or processes[-1].goes_on(len(processes)):
            processes.append(_Process(world, metrics, evaluated, parts or Parts()))
            processes[-1].run()
    except Violation as error:
        violation = error
    return Result(
        schedule,
        tuple(p.end for p in processes if p.end),
        violation,
        world.hits,
        sum(len(p.rows) for p in processes),
        tuple(tuple(p.rows) for p in processes),
    )


def _evaluated(schedule: Schedule) -> EvalLog:
    """The record of evaluations, which outlives processes; each row must be due, and right."""

    def check(row: EvalRow) -> None:
        right = row.loss == eval_loss(row.step) and row.examples == 2 * EVAL_BATCHES
        if not right or row.step not in evaluations_due(schedule, schedule.num_steps):
            violated("an evaluation is right", f"{row}")

    log = EvalLog(None, (check,))
    for step in evaluations_due(schedule, max((0, *schedule.on_disk))):
        log.record(EvalRow(step, eval_loss(step), 1.0, 2 * EVAL_BATCHES, 1, 0.0))
    return log


def evaluations_due(schedule: Schedule, done: int) -> list[int]:
    """The steps, up to `done`, after which the policy evaluates."""
    every, last = schedule.policy.eval_every, schedule.num_steps
    return [n for n in range(1, done + 1) if every and (n % every == 0 or n == last)]


class _Process:
    """One process of a run: its memory is new, the world and the disk are not."""

    def __init__(self, world: World, metrics: MetricsLog, evaluated: EvalLog, parts: Parts):
        self.world, self.metrics, self.evaluated = world, metrics, evaluated
        self.end: Done | Failed | None = None
        self.rows: list[tuple[Event, State, tuple[Effect, ...]]] = []
        self._struck_before = len(world.struck)
        world.on_loss, world.on_return = [], []
        world.restoring, world.disconnected = Phase.RESTORE, False
        schedule = world.schedule
        self._backend = parts.backend(world)
        self._saver = parts.saver(world, self._backend) if schedule.durable else None
        arrays = parts.arrays(world, self._backend, self._saver)
        self._invariants = Invariants(world, self._backend, arrays)
        self._evaluations = Evaluations(GhostEvalFeed(world), EVAL_BATCHES, evaluated)
        stop = threading.Event()
        world.preempt = stop.set
        self._driver = parts.driver(
            arrays,
            parts.feed(world),
            self._backend,
            schedule.policy,
            metrics,
            self._saver,
            (self._record, self._invariants),
            Announcements(stop, world.take_notice),
            self._evaluations,
        )
        self._invariants.driver = self._driver

    def _record(
        self, before: State, event: Event, after: State, effects: tuple[Effect, ...]
    ) -> None:
        self.rows.append((event, after, effects))

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
                self._check_done(self.end, from_leaves(final) if final else None)
            case _:
                self._check_preempted(self.end)

    # --- how it ended -----------------------------------------------------------------------

    def _struck(self, *kinds: Kind) -> int:
        """How many faults of these kinds struck while this process ran."""
        return sum(f.kind in kinds for f in self.world.struck[self._struck_before :])

    def _check_done(self, end: Done, final: Ghost | None) -> None:
        steps = self.world.schedule.num_steps
        name = end.train_state
        at = name.step if name else None
        _require(at == end.iterator_state == steps, "done is done", f"ended at {end}")
        _require(len(self.metrics.losses) == steps, "one row a step", f"{self.metrics.losses}")
        rotten = final is None and steps in self.world.rotten
        good = rotten or final == expected(steps)
        _require(good, "nothing dead is done", f"the state is {final}")
        self._check_on_disk(steps)
        self._check_evaluated(steps)

    def _check_evaluated(self, steps: int) -> None:
        rows = [(r["step"], r["loss"]) for r in self.evaluated.rows]
        due = evaluations_due(self.world.schedule, steps)
        right = [(n, eval_loss(n)) for n in due]
        _require(rows == right, "each evaluation is recorded once", f"{rows}, not {right}")

    def _check_preempted(self, end: Done) -> None:
        _require(self._struck(Kind.PREEMPTION), "it was asked to stop", f"{end}")
        if end.train_state:
            step = end.train_state.step
            _require(step == end.iterator_state, "one meaning of step", f"{end}")
            self._check_on_disk(step)

    def _check_on_disk(self, step: int) -> None:
        if self._saver:
            good = self.world.good_checkpoint(step) or step in self.world.rotten
            _require(good, "the end is on disk", f"no good checkpoint of step {step}")

    def _check_failed(self, reason: str) -> None:
        _require(self._fits(reason), "a failure fits the schedule", reason)

    def _fits(self, reason: str) -> bool:
        policy, since = self.world.schedule.policy, self._invariants.knowledge.harm_at_commit
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
            return PLANTED in reason or "it was not written in" in reason
        return PLANTED in reason and self._struck(Kind.PROGRAM, Kind.INTERNAL) > 0


def _require(holds: object, rule: str, message: str) -> None:
    if not holds:
        violated(rule, message)
