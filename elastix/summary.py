"""What a run tells: at its start, while it goes on, and how it ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastix.evaluation import EvalRow
from elastix.machine import Event, State
from elastix.metrics import Row
from elastix.recipe import Recipe
from elastix.recoveries import Recovery


class Display(Protocol):
    """What shows a run to a person while it goes on."""

    def started(self, run: RunInfo) -> None: ...

    def step(self, row: Row) -> None: ...

    def evaluated(self, row: EvalRow) -> None: ...

    def event(self, before: State, event: Event, after: State) -> None: ...

    def recovered(self, recovery: Recovery) -> None: ...

    def finished(self, summary: Summary) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """What is known when training begins."""

    recipe: Recipe
    run_dir: str | None
    num_slices: int
    devices_per_slice: int
    num_params: int
    state_bytes: int
    checkpoints: tuple[int, ...]
    """Steps found on disk; the run resumes from the newest good one."""


@dataclass(frozen=True)
class Summary:
    """How a run ended, as in `summary.json`."""

    outcome: str
    """done, failed, or preempted: the same command goes on from disk."""
    reason: str | None
    """Why it failed, or lost what it ran on; None if it was asked to stop."""
    steps: int
    state_sha256: str | None
    finite: bool | None
    consumed: dict[str, Any]
    """Up to `steps`: the number of examples and their chained hash; empty if this process trained
    nothing."""
    losses: list[float]
    evaluations: list[dict[str, Any]]
    recoveries: list[dict[str, Any]]
    compiles: int
    compile_cache_hits: int
    unfired_faults: list[str]
    seconds: float
    resumed_at: int
    pid: int
    versions: dict[str, str]
    trace: str = field(default="", repr=False)

    @property
    def exit_status(self) -> int:
        """0 done, 75 preempted, 1 failed."""
        return {"done": 0, "preempted": 75}.get(self.outcome, 1)


class NoDisplay:
    """Shows nothing."""

    def started(self, run: RunInfo) -> None: ...

    def step(self, row: Row) -> None: ...

    def evaluated(self, row: EvalRow) -> None: ...

    def event(self, before: State, event: Event, after: State) -> None: ...

    def recovered(self, recovery: Recovery) -> None: ...

    def finished(self, summary: Summary) -> None: ...


def quiet(call: Callable[..., None]) -> Callable[..., None]:
    """What shows or records a run never stops it: at its first failure it is reported, and off."""
    off = False

    def guarded(*args: Any) -> None:
        nonlocal off
        if off:
            return
        try:
            call(*args)
        except (Exception, SystemExit) as error:  # rich exits when its pipe is closed
            off = True
            with contextlib.suppress(OSError):
                name = getattr(call, "__qualname__", repr(call))
                closed = isinstance(error, SystemExit | BrokenPipeError)
                why = "its output was closed" if closed else error
                print(f"elastix: {name} failed and is off from now on: {why}", file=sys.stderr)

    return guarded


class QuietDisplay:
    """A display whose failures, such as a closed terminal, do not reach the run."""

    def __init__(self, display: Display):
        self.started = quiet(display.started)
        self.step = quiet(display.step)
        self.evaluated = quiet(display.evaluated)
        self.event = quiet(display.event)
        self.recovered = quiet(display.recovered)
        self.finished = quiet(display.finished)
