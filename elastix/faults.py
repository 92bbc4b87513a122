"""Fault scripts: which slice is lost and returned, at which step or second.

Pure values and the clock that tells when they are due; what a fault does to devices is the
simulated backend's matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Scripted:
    """What happens to a slice at step `step`, or at second `time`.

    `written` says where, for a fault of a script: `fault script, line 3`.
    """

    slice: int
    step: int | None = None
    time: float | None = None
    written: str = field(default="", compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if (self.step is None) == (self.time is None):
            raise ValueError(f"{type(self).__name__}({self.slice}): give either step or time")
        if self.step is not None and self.step < 1:
            raise ValueError(f"{self}: steps count from 1")
        if self.time is not None and not self.time >= 0:
            raise ValueError(f"{self}: use a time of 0 seconds or later")

    def __str__(self) -> str:
        when = str(self.step) if self.step is not None else f"{self.time:g}s"
        return f"--{type(self).__name__.lower()} {self.slice}@{when}"

    @property
    def told(self) -> str:
        """The fault in the words in which it was given, after the place if that was a script."""
        return f"{self.written}: {script_line(self)}" if self.written else str(self)


@dataclass(frozen=True, slots=True)
class Lose(Scripted):
    """Lose a slice after step `step` was dispatched and before it is read, or at second `time`.

    `surfaces` says where the loss is noticed: when a result is read, or at the next dispatch.
    """

    surfaces: Literal["read", "dispatch"] = "read"


@dataclass(frozen=True, slots=True)
class Hang(Scripted):
    """From step `step` or second `time` on, a slice answers probes and finishes no step, until it
    is lost or returned."""


@dataclass(frozen=True, slots=True)
class Corrupt(Scripted):
    """Flip one bit of each array of floats that a slice holds after step `step` was dispatched, or
    at second `time`, and tell nobody."""


@dataclass(frozen=True, slots=True)
class Return(Scripted):
    """Bring a slice back, with empty memory, when step `step` commits or at second `time`."""


Fault = Lose | Hang | Corrupt | Return


def parse(kind: type[Fault], text: str) -> Fault:
    """`1@40` is slice 1 at step 40, `1@12.5s` is slice 1 at second 12.5.

    Raises:
        ValueError: the text is not of that form.
    """
    match = re.fullmatch(r"(\d+)@(?:(\d+)|(\d+(?:\.\d+)?)s)", text.strip())
    flag = f"--{kind.__name__.lower()}"
    if match is None:
        raise ValueError(f"{flag} {text!r}: write SLICE@STEP such as 1@40, or SLICE@SECONDSs")
    slice_id, step, time = match.groups()
    if step is not None:
        return kind(int(slice_id), step=int(step))
    return kind(int(slice_id), time=float(time))


_KINDS: dict[str, type[Fault]] = {
    "lose": Lose,
    "hang": Hang,
    "corrupt": Corrupt,
    "return": Return,
}


def parse_script(text: str, source: str = "fault script") -> tuple[Fault, ...]:
    """A fault a line, such as `lose 1@12`, `hang 0@20` or `return 1@12.5s`; `#` begins a comment.

    Args:
        source: what the script is called in messages.

    Raises:
        ValueError: a line is not of that form; the message names it.
    """
    numbered = ((n, line.partition("#")[0]) for n, line in enumerate(text.splitlines(), 1))
    return tuple(_line(line, f"{source}, line {n}") for n, line in numbered if line.strip())


def _line(line: str, written: str) -> Fault:
    kind, _, when = " ".join(line.split()).partition(" ")
    try:
        if kind not in _KINDS:
            raise ValueError(
                f"{line.strip()!r}: write lose, hang, corrupt or return, then SLICE@STEP such as "
                "1@40, or SLICE@SECONDSs"
            )
        return replace(parse(_KINDS[kind], when), written=written)
    except ValueError as error:
        raise ValueError(f"{written}: {str(error).removeprefix('--')}") from error


def script_line(fault: Scripted | str) -> str:
    """A fault, or one as `unfired_faults` of a summary has it, as a line of a script."""
    return str(fault).removeprefix("--")


def validate(faults: Iterable[Fault], slices: Iterable[int], num_steps: int) -> None:
    """Refuse a script that cannot happen.

    Raises:
        ValueError: a slice that does not exist, a step after the last, a return of a slice that
            was not lost before, or a second loss without a return in between.
    """
    known, faults = sorted(slices), sorted(faults, key=_order)
    steps = {f.slice for f in faults if f.step is not None}
    unordered = steps & {f.slice for f in faults if f.time is not None}
    down: dict[int, Fault] = {}
    for fault in faults:
        if fault.slice not in known:
            raise ValueError(f"{fault.told}: there are slices {known[0]} to {known[-1]} only")
        if fault.step is not None and fault.step > num_steps:
            raise ValueError(f"{fault.told}: the run has {num_steps} steps only")
        if fault.slice in unordered:
            continue  # which comes first, a step or a second, only the run can tell
        if isinstance(fault, Corrupt):
            if fault.slice in down:
                raise ValueError(f"{fault.told}: slice {fault.slice} is lost before that")
        elif not isinstance(fault, Return):
            if fault.slice in down and not isinstance(down[fault.slice], Hang):
                raise ValueError(
                    f"{fault.told}: slice {fault.slice} was lost before; return it first"
                )
            down[fault.slice] = fault
        elif down.pop(fault.slice, None) is None:
            raise ValueError(
                f"{fault.told}: slice {fault.slice} is not lost before that; lose it first"
            )


def _order(fault: Fault) -> tuple[float, float, bool]:
    time = fault.time if fault.time is not None else 0.0
    step = fault.step if fault.step is not None else 0
    return (step, time, isinstance(fault, Return))


_TICK = 1e-3
"""Least time, in seconds, that passes for a fault: a float of less might not move a clock."""


class Script:
    """The faults that have not struck yet, and the script's step clock.

    The clock is the furthest committed step. It never goes back, and while nothing trains it goes
    on by one step for each median step time, so that a return still comes.
    """

    def __init__(self, faults: Iterable[Fault]):
        self.pending: list[Fault] = sorted(faults, key=_order)
        self._clock = 0.0
        self._step_times: list[float] = []
        self._last_commit: float | None = None

    @property
    def step_seconds(self) -> float:
        """The median time from commit to commit; 0.1 s before there is one."""
        times = sorted(self._step_times)
        # A virtual clock may stand still while steps run.
        return (times[len(times) // 2] if times else 0.0) or 0.1

    def dispatched(self, step: int) -> list[Lose | Hang | Corrupt]:
        """The faults that strike now that `step` was dispatched."""
        return [f for f in self.pending if not isinstance(f, Return) and f.step == step]

    def committed(self, step: int, now: float) -> list[Return]:
        """The returns that are due now that `step` committed at second `now`."""
        if self._last_commit is not None:
            self._step_times = [*self._step_times[-98:], now - self._last_commit]
        self._last_commit = now
        self._clock = max(self._clock, float(step))
        return self.returns_due()

    def idled(self, seconds: float) -> None:
        """Nothing trained for so long."""
        self._clock += seconds / self.step_seconds
        self._last_commit = None

    def returns_due(self) -> list[Return]:
        return [
            f
            for f in self.pending
            if isinstance(f, Return) and f.step is not None and f.step <= self._clock
        ]

    def timed_due(self, now: float) -> list[Fault]:
        """Faults whose second has come."""
        return [f for f in self.pending if f.time is not None and f.time <= now]

    def next_return_in(self, now: float) -> float | None:
        """Seconds until the next scripted event if nothing trains; None if there is none.

        What is due and did not strike, such as the return of a slice that is not lost yet, waits
        for something else than time.
        """
        waits = [
            (f.step - self._clock) * self.step_seconds
            for f in self.pending
            if isinstance(f, Return) and f.step is not None
        ]
        waits += [f.time - now for f in self.pending if f.time is not None]
        waits = [wait for wait in waits if wait > 0]
        return max(_TICK, min(waits)) if waits else None

    def struck(self, fault: Fault) -> None:
        self.pending.remove(fault)
