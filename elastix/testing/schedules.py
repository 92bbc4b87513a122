"""Fault schedules: a job, its policy and what goes wrong in it, as one frozen value.

A fault strikes in a phase of the run, at the n-th point of that phase that the run comes by: the
points lie before, after and in the middle of each operation, so that a slice can die when a
restore is half done. `random_schedule` draws a schedule from a seed.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any, Literal

from elastix.machine import Policy

Surfaces = Literal["read", "dispatch"]
"""Where a loss is noticed."""

FOREVER = 9000.0
"""A deadline, in seconds, that no return in a random schedule misses."""


class Phase(StrEnum):
    """What the run is doing when a fault strikes."""

    DISPATCH = "dispatch"
    SYNC = "sync"
    SNAPSHOT = "snapshot"
    SAVE = "save"
    RESTORE = "restore"
    REGROW = "regrow"
    COMPILE = "compile"
    PROBE = "probe"
    DATA = "data"
    EVALUATION = "evaluation"
    FIRST_STEP = "first step"
    LAST_STEP = "last step"


class Kind(StrEnum):
    """What goes wrong."""

    LOSS = "loss"
    """One slice dies, and is gone until it returns."""
    LOSSES = "losses"
    """Several slices die at once."""
    UNSEEN = "unseen return"
    """A slice dies and is back, with empty memory, before anybody asked."""
    SILENT = "silence"
    """A slice lives, and does not answer its next probe in time."""
    STALL = "stall"
    """What this process does by itself, a compile, a read or a write, hangs for a while."""
    HANG = "hang"
    """A slice answers probes and finishes no step, until it returns."""
    DATA_LOSS = "DATA_LOSS"
    """An error with this status, though every slice lives; so the next two."""
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    PROGRAM = "program error"
    """An exception of the user's code."""
    DATA = "data error"
    """The data source raises."""
    ROT = "rot"
    """The newest checkpoint on disk no longer loads."""
    DISK_FULL = "disk full"
    """A checkpoint cannot be written."""
    NOTICE = "notice"
    """Slices will die in a few seconds, and it is said before."""
    PREEMPTION = "preemption"
    """The whole job is asked to stop."""


LOSSES = frozenset({Kind.LOSS, Kind.LOSSES, Kind.UNSEEN})
"""Kinds that strike slices."""
ERRORS = frozenset({Kind.DATA_LOSS, Kind.INTERNAL, Kind.UNAVAILABLE, Kind.PROGRAM})
QUIET = LOSSES | {
    Kind.SILENT,
    Kind.HANG,
    Kind.STALL,
    Kind.ROT,
    Kind.NOTICE,
    Kind.PREEMPTION,
}
"""Kinds that raise nothing where they strike: they are noticed later."""
NAMING = LOSSES | {Kind.SILENT, Kind.HANG, Kind.NOTICE}

_COMPUTING = frozenset(Phase) - {Phase.PROBE, Phase.DATA}
_PROBING = frozenset({Phase.PROBE, Phase.SNAPSHOT, Phase.SAVE, Phase.RESTORE, Phase.REGROW})
_WHERE: dict[Kind, frozenset[Phase]] = {
    **{kind: frozenset(Phase) for kind in QUIET},
    **dict.fromkeys(ERRORS, _COMPUTING),
    Kind.UNAVAILABLE: _COMPUTING | {Phase.PROBE},
    Kind.SILENT: _PROBING,
    Kind.DATA: frozenset({Phase.DATA, Phase.EVALUATION, Phase.FIRST_STEP, Phase.LAST_STEP}),
    Kind.STALL: frozenset({Phase.DATA, Phase.EVALUATION, Phase.COMPILE, Phase.SAVE, Phase.RESTORE}),
    Kind.DISK_FULL: frozenset({Phase.SAVE, Phase.LAST_STEP}),
}
CELLS = tuple((phase, kind) for phase in Phase for kind in Kind if phase in _WHERE[kind])
"""The matrix: every phase with every kind that can occur in it. A probe answers for each slice
and raises only if the controller's connection is gone; only the disk can be full."""


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, and the phase and the point in it at which it strikes.

    Args:
        visit: strikes at the first point, from the visit-th of this phase on, at which it can.
        slices: the victims of a loss, a silence or a notice.
        returns: seconds until they are back, or the stall is over; None: never. An unseen return
            takes none.
        after: counts points from the commit of this step on.
        warning: seconds from a notice to the death that it announces.
        surfaces: where a loss is noticed, at the next dispatch already or when a result is read.
    """

    phase: Phase
    kind: Kind
    visit: int = 1
    slices: tuple[int, ...] = ()
    returns: float | None = 1.0
    warning: float = 1.0
    surfaces: Surfaces = "read"
    after: int = 0

    def __post_init__(self) -> None:
        if self.phase not in _WHERE[self.kind]:
            raise ValueError(f"{self.kind} does not occur in {self.phase}")
        if self.visit < 1:
            raise ValueError(f"visit={self.visit}: points count from 1")
        if not self.slices and self.kind in NAMING:
            raise ValueError(f"{self.kind}: name the slices that it strikes")


@dataclass(frozen=True)
class Schedule:
    """A job and what goes wrong in it.

    Args:
        save_seconds: virtual seconds that one checkpoint takes to be written.
        on_disk: steps whose checkpoints are there when the run begins; those before them that
            were due are evaluated.
        durable: whether the run keeps checkpoints at all.
    """

    num_slices: int
    num_steps: int
    policy: Policy = Policy()
    faults: tuple[Fault, ...] = ()
    save_seconds: float = 1.0
    on_disk: tuple[int, ...] = ()
    durable: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.policy.min_slices <= self.num_slices:
            raise ValueError(f"min_slices={self.policy.min_slices} of {self.num_slices} slices")
        if self.num_steps < 1 or any(not 0 < s <= self.num_steps for s in self.on_disk):
            raise ValueError(f"on_disk={self.on_disk} in a run of {self.num_steps} steps")
        if list(self.on_disk) != sorted(set(self.on_disk)):
            raise ValueError(f"on_disk={self.on_disk}: name each step once, in order")
        if self.on_disk and not self.durable:
            raise ValueError("a run that keeps nothing on disk cannot begin with checkpoints")
        for fault in self.faults:
            if any(not 0 <= s < self.num_slices for s in fault.slices):
                raise ValueError(f"{fault}: there are {self.num_slices} slices")

    def __str__(self) -> str:
        """The schedule as Python, to be pasted into a test."""
        return as_python(self)


def as_python(value: Any) -> str:
    """A tree of frozen values as the Python that builds it; defaults are left out."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        inner = ", ".join(as_python(v) for v in value)
        return f"({inner},)" if value else "()"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    given = (
        f"{f.name}={as_python(getattr(value, f.name))}"
        for f in dataclasses.fields(value)
        if getattr(value, f.name) != f.default
    )
    return f"{type(value).__name__}({', '.join(given)})"


# --- random schedules ---------------------------------------------------------------------------


def random_schedule(seed: int, slices: int = 4) -> Schedule:
    """The schedule of a seed: up to `slices` slices, one to eight faults and what leads to them."""
    rng = random.Random(seed)
    num_slices = slices if rng.random() < 0.6 else rng.randint(1, slices)
    num_steps = rng.randint(2, 12)
    impatient = rng.random() < 0.1  # a run that may miss its deadline
    cells = [rng.choice(CELLS) for _ in range(rng.choice((1, 1, 1, 2, 2, 2, 3, 3, 4, 8)))]
    faults = [f for cell in cells for f in _faults(rng, cell, num_slices, num_steps, impatient)]
    slow = any(kind in (Kind.HANG, Kind.STALL) for _, kind in cells)
    deadline = 600.0 if slow else FOREVER
    if impatient:
        deadline = rng.choice((0.0, 2.0, 10.0, 30.0))
    grows = any(phase is Phase.REGROW for phase, _ in cells)
    durable = rng.random() < 0.95 or any(k in (Kind.ROT, Kind.DISK_FULL) for _, k in cells)
    rots = any(kind is Kind.ROT for _, kind in cells)
    on_disk: list[int] = []
    if durable and rng.random() < (0.8 if rots else 0.2):
        most = num_steps if num_steps == 1 or rng.random() < 0.1 else num_steps - 1
        on_disk = sorted(rng.sample(range(1, most + 1), rng.randint(1, min(3, most))))
    policy = _policy(rng, num_slices, grows, deadline)
    if any(phase is Phase.EVALUATION for phase, _ in cells):
        policy = replace(policy, eval_every=rng.randint(1, 3))
    policy = replace(policy, checkpoint_every=1) if rots and grows else policy
    save_seconds = rng.choice((0.1, 0.7, 2.5, 6.0))
    if rng.random() < 0.1:
        policy = replace(policy, checkpoint_seconds=rng.choice((0.001, 2.5, 6.0)))
    return Schedule(
        num_slices=num_slices,
        num_steps=num_steps,
        policy=policy,
        faults=tuple(faults),
        save_seconds=save_seconds,
        on_disk=tuple(on_disk),
        durable=durable,
    )


def _policy(rng: random.Random, num_slices: int, grows: bool, deadline: float) -> Policy:
    min_slices = 1 if grows else rng.choice((1, 1, rng.randint(1, num_slices), num_slices))
    max_slices = rng.randint(min_slices, num_slices) if rng.random() < 0.3 and not grows else None
    return Policy(
        min_slices=min_slices,
        max_slices=max_slices,
        patience=0.0 if grows else rng.choice((0.0, 0.0, 0.0, 1.5, 8.0)),
        deadline=deadline,
        lookback=rng.choice(("live", "host")),
        inflight=rng.randint(1, 3),
        snapshot_every=rng.randint(1, 5),
        checkpoint_every=rng.choice((0, 1, 2, 3, 5)),
        keep_checkpoints=rng.randint(1, 3),
        eval_every=rng.choice((0, 0, 1, 2, 5)),
        max_losses=rng.randint(1, 3) if rng.random() < 0.1 else 10,
        probe_every=rng.choice((0.5, 0.5, 2.0, 5.0)),
        stable_probes=1 if grows else rng.randint(1, 3),
    )


def _faults(
    rng: random.Random,
    cell: tuple[Phase, Kind],
    num_slices: int,
    num_steps: int,
    impatient: bool,
) -> list[Fault]:
    """The fault of one cell and, where nothing would be restored or grown without it, a loss."""
    phase, kind = cell
    faults = []
    if phase is Phase.REGROW or (phase in (Phase.RESTORE, Phase.PROBE) and rng.random() < 0.9):
        early = rng.randint(1, 2 * max(1, num_steps // 2))
        victim = (rng.randrange(num_slices),)
        faults.append(Fault(Phase.SYNC, Kind.LOSS, early, victim, rng.choice((0.2, 1.0, 2.0))))
    at = 1 + int(rng.expovariate(1 / _points(phase, num_slices, num_steps)))
    victims: tuple[int, ...] = ()
    if kind in NAMING:
        most = num_slices if kind in (Kind.LOSSES, Kind.NOTICE) else 1
        count = rng.randint(min(2, most), most)
        victims = tuple(sorted(rng.sample(range(num_slices), count)))
    never = impatient and rng.random() < 0.5
    returns = None if never else rng.choice((0.1, 0.5, 2.0, 5.0, 20.0))
    if kind in (Kind.HANG, Kind.STALL):
        returns = rng.choice((5.0, 25.0, 50.0, 300.0))
    warning = rng.choice((0.0, 1.0, 4.0, 15.0))
    surfaces: Surfaces = rng.choice(("read", "dispatch"))
    faults.append(Fault(phase, kind, at, victims, returns, warning, surfaces))
    if kind is Kind.DATA and rng.random() < 0.3:  # a source that is broken for good
        faults += [replace(faults[-1], phase=Phase.DATA, visit=at + n) for n in (1, 2)]
    return faults


def _points(phase: Phase, num_slices: int, num_steps: int) -> float:
    """About how far into the points of a phase a fault should strike."""
    match phase:
        case Phase.DISPATCH | Phase.SYNC | Phase.DATA | Phase.EVALUATION:
            return 0.5 * num_steps
        case Phase.RESTORE:
            return 2.5 * num_slices
        case Phase.SNAPSHOT | Phase.REGROW | Phase.PROBE:
            return 1.0 * num_slices
    return 2.0
