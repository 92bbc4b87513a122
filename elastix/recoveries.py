"""PURE: what each recovery cost, computed from the events of the machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastix.machine import (
    Committed,
    Diagnosing,
    Dispatched,
    Event,
    Finishing,
    Prepared,
    Probed,
    Restoring,
    Slices,
    SlicesLost,
    Starting,
    State,
    StepStuck,
    Training,
    Tried,
    Waiting,
)

PHASES = ("detect", "wait", "restore", "compile", "first_step")
"""Where the seconds of a recovery go, in their order."""


@dataclass
class Recovery:
    """One change of the mesh, from what was noticed to the next committed step.

    `step` is the last one committed when it was noticed, `resumed_at` the one restored;
    `steps_lost` is their difference. `seconds` has detect (from the dispatch of the step that
    failed), wait, restore, compile and first_step.
    """

    kind: str
    cause: str
    step: int
    lost: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    resumed_at: int | None = None
    steps_lost: int = 0
    steps_abandoned: int = 0
    source: str | None = None
    slices: list[int] = field(default_factory=list)
    compiles: int = 0
    warming: bool = False
    """Whether what was compiled was on its way before it was needed."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


class Recoveries:
    """Folds (state, event, next state) into recoveries; `open` is under way."""

    def __init__(self) -> None:
        self.done: list[Recovery] = []
        self.open: Recovery | None = None
        self.started = False
        """Whether a step was ever committed."""
        self._dispatched_at: dict[int, float] = {}
        self._mark = 0.0
        self._old_mesh: Slices = frozenset()

    def update(self, before: State, event: Event, after: State) -> Recovery | None:
        """Returns the recovery that this event completed, if it did."""
        if isinstance(event, Dispatched):
            self._dispatched_at[event.step] = event.at
        self.started |= isinstance(event, Committed)
        self._leave(before, event, after)
        self._follow(before, event, after)
        trained = isinstance(event, Committed) and not isinstance(after, Waiting | Restoring)
        if self.open and trained and event.epoch == self._epoch(before):
            return self._close(event.at)
        return None

    @staticmethod
    def _epoch(state: State) -> int:
        return state.ledger.epoch if isinstance(state, Training) else -1

    def _leave(self, before: State, event: Event, after: State) -> None:
        """A mesh was given up: a recovery begins, or the open one goes on."""
        if isinstance(before, Starting) or not isinstance(after, Diagnosing | Waiting | Restoring):
            return
        old: Slices = getattr(before, "mesh", frozenset())
        lost = self._lost(event) & old
        if isinstance(before, Training | Finishing):
            committed = event.step if isinstance(event, Committed) else before.train_state.step
            kind, cause = _kind(before, event, lost)
            self.open = Recovery(kind, cause, committed)
            if isinstance(before, Training):
                self.open.steps_abandoned = before.dispatched - committed
            failed_at = self._dispatched_at.get(committed + 1, event.at)
            self._add("detect", event.at - failed_at if kind in ("loss", "stuck") else 0.0)
            self._old_mesh, self._mark = old, event.at
        if self.open and lost:
            corrupt = isinstance(event, SlicesLost) and event.corrupt
            self.open.kind = "corrupt" if corrupt else "loss"
            self.open.lost = sorted({*self.open.lost, *lost})

    def _lost(self, event: Event) -> Slices:
        if isinstance(event, SlicesLost):
            return event.slices
        if isinstance(event, Probed):
            return event.emptied | event.down
        return event.stuck if isinstance(event, Tried) else frozenset()

    def _follow(self, before: State, event: Event, after: State) -> None:
        if not self.open:
            return
        if isinstance(before, Waiting | Diagnosing) and type(after) is not type(before):
            phase = "wait" if isinstance(before, Waiting) else "detect"
            self._add(phase, event.at - self._mark)
            self._mark = event.at
        if isinstance(after, Restoring):
            self.open.source = str(after.source.tier)
            self.open.resumed_at = after.source.step
            self.open.steps_lost = max(0, self.open.step - after.source.step)
            self.open.slices = sorted(after.mesh)
            self.open.found = sorted(after.mesh - self._old_mesh)
            if self.open.kind == "leave":
                self.open.lost = sorted(self._old_mesh - after.mesh)
        if isinstance(event, Prepared):
            self._add("restore", event.at - self._mark - event.compile_seconds)
            self._add("compile", event.compile_seconds)
            self.open.compiles += event.compiles
            self.open.warming |= event.warming
            self._mark = event.at

    def _close(self, at: float) -> Recovery:
        assert self.open
        self._add("first_step", at - self._mark)
        done, self.open = self.open, None
        self.done.append(done)
        return done

    def _add(self, phase: str, seconds: float) -> None:
        assert self.open
        self.open.seconds[phase] += max(0.0, seconds)


def _kind(before: Training | Finishing, event: Event, lost: Slices) -> tuple[str, str]:
    """(kind, how it was noticed) of a recovery that begins with this event."""
    if isinstance(event, StepStuck):
        return "stuck", f"{event.during} did not finish in its time"
    if lost:
        kind = "corrupt" if isinstance(event, SlicesLost) and event.corrupt else "loss"
        return kind, event.cause if isinstance(event, SlicesLost) else "a probe"
    if before.ledger.noticed & before.mesh:
        return "leave", "a notice that the slices will be taken away"
    return "regrow", "the slices answer probes again"
