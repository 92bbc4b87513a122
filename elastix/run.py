"""`train`: one recipe on one backend, from the run directory to the summary."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from elastix.arrays import Arrays
from elastix.backends import Backend, Health, slices_of
from elastix.compile_cache import count_compiles
from elastix.driver import Driver
from elastix.evaluation import EvalLog, Evaluations
from elastix.event_log import EventLog
from elastix.faults import Fault
from elastix.feed import StreamFeed
from elastix.jsonl import append, read_rows
from elastix.lineage import Origin, fork
from elastix.machine import (
    DataFailed,
    Done,
    Effect,
    Event,
    Failed,
    Prepared,
    ProgramFailed,
    Source,
    Started,
    Starting,
    State,
    Tier,
)
from elastix.metrics import MetricsLog, Row
from elastix.notices import Announcements, Inbox
from elastix.recipe import Hook, Recipe
from elastix.recoveries import Recoveries, Recovery
from elastix.refusals import (
    build_data,
    build_eval_data,
    build_program,
    first_batch,
    refuse_leaves_of_another,
)
from elastix.retraction import retract_wrong_steps
from elastix.run_directory import RunDirectory
from elastix.saver import Saver
from elastix.summary import Display, NoDisplay, QuietDisplay, RunInfo, Summary, quiet
from elastix.train_state import all_finite

VERSIONED = ("elastix-jax", "jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain")


def train(
    recipe: Recipe,
    *,
    backend: Backend | None = None,
    faults: Sequence[Fault] = (),
    run_dir: str | Path | None = None,
    fork_from: Origin | None = None,
    display: Display | None = None,
    stop: threading.Event | None = None,
) -> Summary:
    """Run a recipe to its end, through every loss and return of slices.

    Args:
        backend: where to run; by default four simulated slices of two CPU devices.
        faults: for simulated slices: what is lost and returned, and when, besides what the
            backend was made with.
        run_dir: where checkpoints, logs and the summary go, a path or gs://BUCKET/FOLDER; a run
            that is there already is resumed. None keeps nothing.
        fork_from: the checkpoint of another run from which this one begins, in a new `run_dir`.
        stop: set it to end the run after the steps in flight; by default SIGTERM and the first
            Ctrl-C do, if this is the main thread.

    Returns:
        The summary; how the run ended is a value (`outcome`), not an exception.

    Raises:
        ValueError: bad input, with the value and the remedy, before anything is changed.
    """
    count_compiles()
    backend = backend or default_backend()
    recipe.check_slices(len(backend.devices))
    recipe.check_vocabulary()
    backend.check_faults(faults, recipe.num_steps)
    stream = build_data(recipe)
    sample = first_batch("data", stream, recipe, backend)
    evaluated = build_eval_data(recipe)
    eval_sample = first_batch("eval_data", evaluated[0], recipe, backend) if evaluated else None
    program = build_program(recipe, sample, eval_sample, backend)
    with contextlib.ExitStack() as stack:
        directory = None
        if fork_from and not run_dir:
            raise ValueError(f"fork_from={fork_from}: name the run_dir of the new run")
        if run_dir:
            numerics = {
                "versions": versions(),
                "layout": program.layout,
                "device": next(iter(backend.devices.values()))[0].device_kind,
            }
            if fork_from:
                fork(fork_from, run_dir, recipe, program.spec, stream.fingerprint, numerics)
            directory = RunDirectory.open(run_dir, recipe, stream.fingerprint, numerics)
            stack.callback(directory.close)
            refuse_leaves_of_another(directory, program)
        backend.script_faults(faults)
        stop = stop or stack.enter_context(_stop_on_signals())
        if directory:
            directory.when_lost(stop.set)
        shown = QuietDisplay(display) if display else NoDisplay()
        run = _Run(recipe, program, stream, evaluated, backend, directory, shown, stop)
        return run.execute()


def default_backend() -> Backend:
    """Four simulated slices of two CPU devices."""
    from elastix.backends.simulated import SimulatedBackend, simulate_devices

    simulate_devices(8)
    return SimulatedBackend(4, 2)


def versions() -> dict[str, str]:
    """Versions of what decides the bits of a run."""
    return {"python": sys.version.split()[0], **{name: version(name) for name in VERSIONED}}


class _Run:
    """One process of a run: its logs, its driver and its summary."""

    def __init__(self, recipe, program, stream, evaluated, backend, directory, display, stop):
        self._stop, self._evaluated = stop, evaluated
        self._recipe, self._program, self._stream = recipe, program, stream
        self._backend, self._directory, self._display = backend, directory, display
        self._recoveries = Recoveries()
        self._recovered = read_rows(directory.recoveries) if directory else []
        self._store = directory.store if directory else None
        steps = self._store.steps() if self._store else ()
        self._sources = (Source(Tier.SEED, 0), *(Source(Tier.DISK, s) for s in steps))
        self._resumed_at = 0
        self._trace = ""

    def execute(self) -> Summary:
        recipe, backend = self._recipe, self._backend
        path = self._directory.metrics if self._directory else None
        exact_from = self._directory.exact_from if self._directory else 1
        if recipe.reduction == "fast":
            exact_from = recipe.num_steps + 1
        listeners = (self._display.step, *map(_row_hook, recipe.hooks))
        metrics = MetricsLog(path, exact_from, listeners)
        events = self._directory.events if self._directory else None
        log = EventLog(events, recipe.policy, os.getpid())
        record = quiet(log.append)  # a full disk costs the log, and not the run
        saver, evaluations = self._saver(), self._evaluations()
        logs = (metrics, evaluations.log) if evaluations else (metrics,)
        if self._store:
            self._store.hold_while(lambda: _missing_rows(*logs))
        feed = StreamFeed(self._stream, backend)
        driver = Driver(
            Arrays(self._program, backend, saver, recipe.policy),
            feed,
            backend,
            recipe.policy,
            metrics,
            saver,
            (
                lambda _, event, after, effects: record(event, after, effects),
                retract_wrong_steps(*logs),
                self._watch,
            ),
            self._announcements(),
            evaluations,
        )
        self._display.started(self._info())
        with contextlib.ExitStack() as stack:
            for closed in (metrics, log, saver, feed, evaluations):
                if closed:
                    stack.callback(closed.close)
            end = driver.run(Starting(), self._started(evaluations))
            for written in logs:
                written.flush()
            if isinstance(end, Done) and (missing := _missing_rows(*logs)):
                end = Failed(missing)
            summary = self._summarise(end, driver, metrics, evaluations)
        if self._directory:
            quiet(self._directory.write_summary)(asdict(summary))
        self._display.finished(summary)
        return summary

    def _announcements(self) -> Announcements:
        if self._directory is None:
            return Announcements(self._stop)
        return Announcements(self._stop, Inbox(self._directory.path).take)

    def _saver(self) -> Saver | None:
        if self._store is None:
            return None
        metadata = self._checkpoint_metadata()
        policy = self._recipe.policy
        program = self._program
        misfit = program.spec.misfit
        return Saver(self._store, self._backend, program.shapes, metadata, policy, misfit)

    def _evaluations(self) -> Evaluations | None:
        if self._evaluated is None:
            return None
        stream, num_batches = self._evaluated
        path = self._directory.evaluations if self._directory else None
        log = EvalLog(path, (self._display.evaluated,))
        if self._store:
            self._store.keep_best(self._recipe.policy.keep_best, log.loss)
        return Evaluations(StreamFeed(stream, self._backend), num_batches, log)

    def _started(self, evaluations: Evaluations | None) -> Started:
        deadline = self._recipe.policy.probe_deadline
        health = self._backend.probe(self._backend.devices, deadline)
        return Started(
            at=self._backend.now(),
            num_steps=self._recipe.num_steps,
            slices=frozenset(self._backend.devices),
            up=slices_of(health, Health.UP, Health.EMPTIED),
            sources=self._sources,
            durable=self._store is not None,
            evaluated=evaluations.log.last if evaluations else 0,
        )

    def _info(self) -> RunInfo:
        devices, spec = self._backend.devices, self._program.spec
        return RunInfo(
            self._recipe,
            self._directory.name if self._directory else None,
            len(devices),
            len(next(iter(devices.values()))),
            sum(math.prod(s.shape) for s in spec.leaves if s.path in spec.trainable_paths),
            spec.nbytes,
            self._store.steps() if self._store else (),
        )

    def _checkpoint_metadata(self) -> dict[str, Any]:
        return {
            "recipe_sha256": self._recipe.identity_sha256(),
            "data": self._stream.fingerprint,
            "seed": self._recipe.seed,
            "global_batch": self._recipe.global_batch,
            "versions": versions(),
        }

    def _watch(self, before: State, event: Event, after: State, _: tuple[Effect, ...]) -> None:
        if isinstance(event, Prepared) and not self._recoveries.started:
            self._resumed_at = event.step
        if isinstance(event, ProgramFailed | DataFailed):
            self._trace = event.trace
        recovery = self._recoveries.update(before, event, after)
        self._display.event(before, event, after)
        if recovery:
            quiet(self._record)(recovery)
            self._display.recovered(recovery)

    def _record(self, recovery: Recovery) -> None:
        """Kept on disk at once: the process may not live to write a summary."""
        self._recovered.append(asdict(recovery))
        if self._directory:
            with self._directory.recoveries.open("a", encoding="utf-8") as file:
                append(file, asdict(recovery))

    def _summarise(
        self,
        end: Done | Failed,
        driver: Driver,
        metrics: MetricsLog,
        evaluations: Evaluations | None,
    ) -> Summary:
        steps = end.iterator_state if isinstance(end, Done) else driver.committed
        final = driver.final_state(end.train_state) if isinstance(end, Done) else None
        if isinstance(end, Done) and end.train_state and final is None:
            # All who held it died since, and what is on disk, if anything is, cannot be read.
            end = Failed(f"the state after step {steps} was lost before it was read")
        compiles, hits = count_compiles()
        progress = driver.progress(steps)
        return Summary(
            outcome=end.outcome,
            reason=end.reason if isinstance(end, Failed) else None,
            steps=steps,
            state_sha256=self._program.spec.sha256(final) if final else None,
            finite=all_finite(final) if final else None,
            consumed=progress.to_json() if progress else {},
            losses=metrics.losses[:steps],
            evaluations=evaluations.log.rows if evaluations else [],
            recoveries=self._recovered,
            compiles=compiles,
            compile_cache_hits=hits,
            unfired_faults=[str(f) for f in self._backend.unfired_faults()],
            seconds=self._backend.now(),
            resumed_at=self._resumed_at,
            pid=os.getpid(),
            versions=versions(),
            trace=self._trace if isinstance(end, Failed) else "",
        )


def _missing_rows(*logs: MetricsLog | EvalLog) -> str | None:
    """Why a log lacks rows on disk, if one does: a run that ends so has failed."""
    return next((problem for log in logs if (problem := log.problem())), None)


def _row_hook(hook: Hook) -> Callable[[Row], None]:
    """A user's hook as a listener, which never stops training."""
    call = quiet(hook)
    return lambda row: call(asdict(row))


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first Ctrl-C set; the second Ctrl-C interrupts at once. Only
    the main thread can take signals."""
    stop, numbers = threading.Event(), (signal.SIGTERM, signal.SIGINT)

    def ask(number: int, _: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
