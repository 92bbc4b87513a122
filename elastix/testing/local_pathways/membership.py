"""PURE: which slices are there. What happened to a slice's process in, what to do about it out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

BUSY = 20.0
"""Seconds for which a process that runs may miss its heartbeats on a busy machine. One that is
stopped by a signal has no such excuse."""


class Phase(Enum):
    """Of a slice's process."""

    STARTING = "starting"
    UP = "up"
    ENDED = "ended, and nobody noticed yet"
    SILENT = "declared lost while its process is there"
    DOWN = "down"


@dataclass(frozen=True)
class Rules:
    """Seconds: until silence is a loss, and until a process that ended is started again, if so."""

    heartbeat: float
    restart_after: float | None


@dataclass(frozen=True)
class Member:
    """One slice: its phase since when, when it was last heard, and the number of its process."""

    phase: Phase
    since: float
    heard: float
    generation: int = 0


# What happened.
@dataclass(frozen=True)
class Joined:
    """The process serves."""


@dataclass(frozen=True)
class Heard:
    """It answered a heartbeat."""


@dataclass(frozen=True)
class Exited:
    """The process ended; `noticed` if a request was under way, which fails with it."""

    noticed: bool


@dataclass(frozen=True)
class Asked:
    """A request needs the slice: it fails at once when the process is not there."""


@dataclass(frozen=True)
class Ticked:
    """Time passed; `stopped` if a signal has stopped the process."""

    stopped: bool


@dataclass(frozen=True)
class Returned:
    """Someone gives the slice back."""


Event = Joined | Heard | Exited | Asked | Ticked | Returned


# What to do.
class Decision(Enum):
    """In the order in which it is to be done."""

    LOSE_ENDED = "everything on it is lost: its process ended"
    LOSE_SILENT = "everything on it is lost: no heartbeat"
    KILL = "end its process"
    START = "start a process"
    WELCOME = "it is back"


Outcome = tuple[Member, tuple[Decision, ...]]


def starting(now: float, generation: int = 0) -> Member:
    """A slice whose process was just started."""
    return Member(Phase.STARTING, now, now, generation)


def transition(member: Member, event: Event, now: float, rules: Rules) -> Outcome:
    """What becomes of a slice, and what to do, in order.

    Raises:
        ValueError: `Returned` of a slice that is up.
    """
    match member.phase, event:
        case _, Returned():
            return _give_back(member, now)
        case Phase.STARTING, Joined():
            return replace(member, phase=Phase.UP, since=now, heard=now), (Decision.WELCOME,)
        case Phase.STARTING | Phase.SILENT, Exited():
            return _become(member, Phase.DOWN, now), ()
        case Phase.UP, Heard():
            return replace(member, heard=now), ()
        case Phase.UP, Exited(noticed=True):
            return _become(member, Phase.DOWN, now), (Decision.LOSE_ENDED,)
        case Phase.UP, Exited(noticed=False):
            return _become(member, Phase.ENDED, now), ()
        case Phase.UP, Ticked(stopped) if _is_silent(member, stopped, now, rules):
            return _become(member, Phase.SILENT, now), (Decision.LOSE_SILENT,)
        case Phase.ENDED, Asked():
            return _become(member, Phase.DOWN, now), (Decision.LOSE_ENDED,)
        case Phase.ENDED, Ticked() if now - member.since >= rules.heartbeat:
            return _become(member, Phase.DOWN, now), (Decision.LOSE_ENDED,)
        case Phase.SILENT, Heard():  # it was given up: what it remembers is not wanted
            return _restart(member, now, Decision.KILL)
        case Phase.DOWN, Ticked() if _is_due(member, now, rules):
            return _restart(member, now)
    return member, ()


def _become(member: Member, phase: Phase, now: float) -> Member:
    return replace(member, phase=phase, since=now)


def _restart(member: Member, now: float, *first: Decision) -> Outcome:
    return starting(now, member.generation + 1), (*first, Decision.START)


def _give_back(member: Member, now: float) -> Outcome:
    match member.phase:
        case Phase.UP:
            raise ValueError("it is there: kill it first")
        case Phase.STARTING:
            return member, ()
        case Phase.ENDED:
            return _restart(member, now, Decision.LOSE_ENDED)
        case Phase.SILENT:
            return _restart(member, now, Decision.KILL)
    return _restart(member, now)


def _is_silent(member: Member, stopped: bool, now: float, rules: Rules) -> bool:
    return now - member.heard > rules.heartbeat + (0.0 if stopped else BUSY)


def _is_due(member: Member, now: float, rules: Rules) -> bool:
    return rules.restart_after is not None and now - member.since >= rules.restart_after
