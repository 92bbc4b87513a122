"""What happened in a measured run, and what follows from it: arithmetic, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of a run.

    `kind` is dispatched, committed, lost, prepared or snapshotted; `at` is in seconds of the
    backend's clock; `slices` is how many the mesh had. So far in the process, `programs` were asked
    of XLA, compiled or found in JAX's persistent cache, and `cpu` seconds were used.
    """

    kind: str
    at: float
    step: int
    slices: int
    programs: int
    cpu: float


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the mesh, of `kind` loss, regrow or leave.

    `known` is the seconds from the loss being known to the next committed step, `new` to the next
    one that had not been committed before; for a regrow or a leave, both from the last committed
    step. `pause` is from the last step committed before to the next one after. `slices` is how
    many there were after it. `programs` were asked of XLA meanwhile.
    """

    kind: str
    known: float
    new: float
    pause: float
    redone: int
    abandoned: int
    slices: int
    programs: int


Gap = tuple[Moment, Moment, tuple[Moment, ...]]
"""Two steps committed one after the other, and what happened in between."""


def gaps(moments: Sequence[Moment]) -> Iterator[Gap]:
    """Each committed step with the next one, and what happened in between."""
    before: Moment | None = None
    between: list[Moment] = []
    for moment in moments:
        if moment.kind != "committed":
            between.append(moment)
            continue
        if before:
            yield before, moment, tuple(between)
        before, between = moment, []


def is_undisturbed(gap: Gap) -> bool:
    """Whether nothing but the dispatch of steps happened in it, on one mesh."""
    before, after, between = gap
    calm = all(moment.kind == "dispatched" for moment in between)
    return calm and before.slices == after.slices


def steady_steps(moments: Sequence[Moment]) -> dict[int, float]:
    """The median seconds of an undisturbed step, by the number of slices. One that follows
    something else than a step does not count."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for one, two in pairwise(gaps(moments)):
        if is_undisturbed(one) and is_undisturbed(two):
            seconds[two[1].slices].append(two[1].at - two[0].at)
    return {slices: median(found) for slices, found in sorted(seconds.items())}


def changes(moments: Sequence[Moment]) -> list[Change]:
    """The changes of the mesh, in their order."""
    found, furthest = [], 0
    dispatched = [m.step for m in moments if m.kind == "dispatched"][:1] or [0]
    for before, after, between in gaps(moments):
        furthest = max(furthest, before.step)
        lost = next((m for m in between if m.kind == "lost"), None)
        if lost or before.slices != after.slices:
            begun = lost or before
            new = _new(moments, begun.at, furthest)
            known = (after.at - begun.at, (new or after).at - begun.at)
            pause, redone = after.at - before.at, before.step + 1 - after.step
            end = "lost" if lost else "prepared"
            abandoned = _dispatched_by(end, between, dispatched[-1]) - before.step
            programs = after.programs - begun.programs
            kind = _kind(before, after, lost)
            found.append(Change(kind, *known, pause, redone, abandoned, after.slices, programs))
        dispatched += [m.step for m in between if m.kind == "dispatched"]
    return found


def _kind(before: Moment, after: Moment, lost: Moment | None) -> str:
    if lost:
        return "loss"
    return "regrow" if after.slices > before.slices else "leave"


def _new(moments: Sequence[Moment], since: float, furthest: int) -> Moment | None:
    """The first step committed that never was before."""
    later = (m for m in moments if m.kind == "committed" and m.at > since)
    return next((m for m in later if m.step > furthest), None)


def _dispatched_by(end: str, between: Sequence[Moment], last: int) -> int:
    """The last step dispatched when the first moment of kind `end` came."""
    for moment in between:
        if moment.kind == end:
            break
        last = moment.step if moment.kind == "dispatched" else last
    return last


def of_kind(found: Sequence[Change], kind: str) -> list[dict[str, Any]]:
    """The changes of one kind, as JSON values."""
    return [asdict(change) for change in found if change.kind == kind]


def count(moments: Sequence[Moment], kind: str) -> int:
    return sum(moment.kind == kind for moment in moments)


def cpu_of_steps(moments: Sequence[Moment], skip: int = 3) -> dict[int, list[float]]:
    """CPU seconds of a step by number of slices: the mean of each stretch of undisturbed steps,
    without the first `skip` of it."""
    found: dict[int, list[float]] = defaultdict(list)
    stretch: list[Moment] = []

    def close() -> None:
        kept = stretch[skip:]
        if len(kept) > skip:
            found[kept[0].slices].append((kept[-1].cpu - kept[0].cpu) / (len(kept) - 1))

    for gap in gaps(moments):
        if not is_undisturbed(gap):
            close()
            stretch = []
        stretch = [*(stretch or [gap[0]]), gap[1]] if is_undisturbed(gap) else stretch
    close()
    return dict(found)


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of them do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, -(-int(share * 100) * len(ranked) // 100) - 1)]
