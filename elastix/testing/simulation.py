"""`simulate`: one schedule, run by the real driver, from its first process to its end."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastix.backends import Backend
from elastix.driver import Driver
from elastix.evaluation import EvalLog, EvalRow
from elastix.event_log import EventLog
from elastix.machine import Done, Effect, Event, Failed, State
from elastix.metrics import MetricsLog
from elastix.saver import Saver
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
from elastix.testing.invariants import Invariants, Rules
from elastix.testing.knowledge import violated
from elastix.testing.process import Process, evaluations_due, require
from elastix.testing.schedules import Kind, Phase, Schedule
from elastix.testing.world import Violation, World, expected


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
        processes: the rows of each process, (event, state, effects).
    """

    schedule: Schedule
    ends: tuple[Done | Failed, ...]
    violation: Violation | None
    hits: Counter[tuple[Phase, Kind]]
    transitions: int
    processes: tuple[tuple[tuple[Event, State, tuple[Effect, ...]], ...], ...] = field(repr=False)

    @property
    def log(self) -> str:
        """The event logs of the processes, one after another, as `events.jsonl` has them."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "events.jsonl")
            for rows in self.processes:
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
    processes: list[_Ghosts] = []
    violation = None
    try:
        while not processes or processes[-1].goes_on(len(processes)):
            processes.append(_Ghosts(world, metrics, evaluated, parts or Parts()))
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


class _Ghosts(Process):
    """A process that runs on ghosts."""

    def __init__(self, world: World, metrics: MetricsLog, evaluated: EvalLog, parts: Parts):
        self._parts = parts
        super().__init__(world, metrics, evaluated)

    def _make(self) -> tuple[Backend, Saver | None, Rules, Driver]:
        world, parts = self.world, self._parts
        backend = parts.backend(world)
        saver = parts.saver(world, backend) if world.schedule.durable else None
        arrays = parts.arrays(world, backend, saver)
        rules = Invariants(world, backend, arrays)
        driver = parts.driver(
            arrays,
            parts.feed(world),
            backend,
            world.schedule.policy,
            self.metrics,
            saver,
            (self.record, rules),
            self._announced,
            self.evaluations(GhostEvalFeed(world), EVAL_BATCHES),
        )
        return backend, saver, rules, driver

    def _check_final(self, final: dict[str, Any] | None) -> None:
        ghost = from_leaves(final) if final else None
        right = ghost == expected(self.world.schedule.num_steps)
        require(right, "nothing dead is done", f"the state is {ghost}")
