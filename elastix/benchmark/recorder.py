"""An observer of a run that notes what happens and when, and takes slices away by a plan."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastix.backends.simulated import SimulatedBackend
from elastix.benchmark.history import Moment
from elastix.compile_cache import count_compiles
from elastix.machine import (
    Committed,
    Dispatched,
    Event,
    Prepared,
    SlicesLost,
    Snapshotted,
    State,
    Training,
)
from elastix.metrics import Row
from elastix.notices import post
from elastix.summary import NoDisplay, RunInfo

_KINDS: dict[type[Event], str] = {
    Dispatched: "dispatched",
    Committed: "committed",
    SlicesLost: "lost",
    Prepared: "prepared",
    Snapshotted: "snapshotted",
}
_NOTICE_SECONDS = 0.5
"""How long before it is taken away a slice is asked to be left."""


@dataclass(frozen=True)
class Plan:
    """What is done to the slices: first each is lost once, so that every set was trained on; when
    nothing has been compiled for `period` steps, `losses` are lost, each slice in turn, and then
    `leaves` are left after a notice.

    One is taken away every `period` steps, at the `offset`th of them, if all train by then. A lost
    slice is back after `away` steps.
    """

    losses: int
    leaves: int = 0
    period: int = 15
    offset: int = 7
    away: int = 4


class Recorder(NoDisplay):
    """The display of a measured run.

    Args:
        say: told of progress, in a few words.
        run_dir: where notices are posted.
    """

    def __init__(
        self,
        backend: SimulatedBackend,
        plan: Plan,
        say: Callable[[str], None],
        run_dir: Path,
    ):
        self.moments: list[Moment] = []
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.info: RunInfo
        self.tokens = 0.0
        """Tokens of a step."""
        self._measured_from: int | None = None
        self._backend, self._plan, self._say, self._run_dir = backend, plan, say, run_dir
        self._all = frozenset(backend.devices)
        self._taken = 0
        self._back_at: int | None = None
        self._noticed: frozenset[int] = frozenset()
        """The slice that was asked to be left, until it is."""
        self._quiet_since = self._commits = 0
        self._programs = 0

    @property
    def measured(self) -> list[Moment]:
        """The moments since each slice was lost once and nothing was compiled any more."""
        return self.moments[self._measured_from :] if self._measured_from is not None else []

    def started(self, run: RunInfo) -> None:
        self.info = run

    def step(self, row: Row) -> None:
        self.tokens = row.tokens

    def event(self, before: State, event: Event, after: State) -> None:
        """What fails in here must end the run, and not this observer alone."""
        try:
            self._note(before, event, after)
        except Exception as error:
            self.error = self.error or error
            self.stop.set()

    def _note(self, before: State, event: Event, after: State) -> None:
        kind = _KINDS.get(type(event))
        if kind is None:
            return
        of = after if kind == "prepared" else before
        mesh: frozenset[int] = getattr(of, "mesh", frozenset())
        step, programs = getattr(event, "step", 0), sum(count_compiles())
        cpu = time.process_time()
        self.moments.append(Moment(kind, event.at, step, len(mesh), programs, cpu))
        if kind == "committed":
            self._committed(mesh, programs)
        elif kind == "dispatched" and isinstance(after, Training):
            self._dispatched(step, after)

    # --- the plan -----------------------------------------------------------------------------

    def _committed(self, mesh: frozenset[int], programs: int) -> None:
        self._commits += 1
        self._noticed &= mesh
        if programs != self._programs:
            self._programs, self._quiet_since = programs, self._commits
        if self._back_at == self._commits:
            self._back_at = None
            for slice_id in self._all - mesh:
                self._backend.give_back(slice_id)
        visited = self._taken >= len(self._all) and mesh == self._all
        quiet = self._commits - self._quiet_since >= self._plan.period
        if self._measured_from is None and visited and quiet:
            self._measured_from = len(self.moments) - 1

    def _dispatched(self, step: int, state: Training) -> None:
        """Where a script's fault strikes: after the dispatch of a step and before it is read."""
        due = step % self._plan.period == self._plan.offset % self._plan.period
        if not due or state.mesh != self._all or self._back_at is not None or self._noticed:
            return
        turn = self._taken - len(self._all)
        if turn < 0 or (self._measured_from is not None and turn < self._plan.losses):
            self._lose(turn)
        elif self._measured_from is not None and turn < self._plan.losses + self._plan.leaves:
            self._noticed = frozenset({self._taken % len(self._all)})
            post(self._run_dir, self._noticed, _NOTICE_SECONDS)
            self._taken += 1
        elif self._measured_from is not None:
            self.stop.set()

    def _lose(self, turn: int) -> None:
        if turn < 0 or turn % 5 == 0:
            what = f"loss {turn + 1} of {self._plan.losses}" if turn >= 0 else "visiting each set"
            self._say(what)
        self._backend.lose(self._taken % len(self._all), "read")
        self._back_at = self._commits + self._plan.away
        self._taken += 1


def say_to_stderr(name: str) -> Callable[[str], None]:
    """Progress in lines of standard error, after what it is of."""
    return lambda words: print(f"{name}: {words}", file=sys.stderr, flush=True)
