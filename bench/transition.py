"""What one decision of the machine costs: the time of `transition`, by state and event.

The events are those of real histories: fault schedules of the simulator, and one long run in which
nothing happens. Nothing here is a test; the figures go to standard output.

    python bench/transition.py --seeds 0:300 --steps 3000
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastix.machine import Policy, is_stale, transition
from elastix.testing import Schedule, random_schedule, simulate
from elastix.testing.coverage import Decided, histories

SLICES = 8
MOST_OF_A_KIND = 400
"""Transitions of one (state, event) that are timed; all are counted."""
CALLS, REPEATS = 20, 9
"""Calls in a row for one reading of the clock, and readings, of which the least counts."""

Kind = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Yardstick:
    """A small frozen value: to build and hash one is what a machine's speed is told by."""

    step: int
    epoch: int
    holders: frozenset[int]


@dataclass(frozen=True)
class Line:
    """One row of the table; `share` is the kind's part of all transitions, times in µs."""

    kind: str
    count: int
    share: float
    median: float
    p95: float


def main(argv: list[str] | None = None) -> int:
    """Measure, and print the table."""
    given = _parse(argv)
    faulty = [d for seed in given.seeds for d in decided(random_schedule(seed, SLICES))]
    quiet = decided(undisturbed(given.steps))
    unit = 1e-3 * yardstick()
    print(f"Python {platform.python_version()} on {platform.machine()}")
    print(f"yardstick: {unit:.3f} us to build and hash a frozen dataclass of three fields")
    for name, history in (
        (f"a quiet run of {given.steps} steps", quiet),
        (f"{len(given.seeds)} faulty runs on up to {SLICES} slices", faulty),
    ):
        print(f"\n{name}: {len(history)} transitions\n" + table(measure(history), unit))
    return 0


def undisturbed(num_steps: int) -> Schedule:
    """A run on all slices to which nothing happens, with snapshots and checkpoints."""
    policy = Policy(snapshot_every=10, checkpoint_every=100)
    return Schedule(SLICES, num_steps, policy)


def decided(schedule: Schedule) -> list[Decided]:
    """The transitions of a simulated run, the stale ones too."""
    return [decision for history in histories(simulate(schedule)) for decision in history]


def measure(history: Iterable[Decided]) -> list[Line]:
    """The times of each kind of transition, the most frequent first, and of all together."""
    by_kind: dict[Kind, list[Decided]] = defaultdict(list)
    for decision in history:
        by_kind[_kind(decision)].append(decision)
    total = sum(map(len, by_kind.values()))
    lines, weighted = [], []
    for kind, decisions in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        times = [time_of(d) for d in _spread(decisions)]
        weight = len(decisions) / len(times)
        weighted += [(t, weight) for t in times]
        count = len(decisions)
        lines.append(Line(", ".join(kind), count, count / total, median(times), _p95(times)))
    middle, high = (_quantile(weighted, share) for share in (0.5, 0.95))
    return [*lines, Line("all, as often as they come", total, 1.0, middle, high)]


def time_of(decision: Decided) -> float:
    """Microseconds of one transition, without what the clock costs."""
    before, event, policy = decision.before, decision.event, decision.policy
    return _least(lambda: transition(before, event, policy)) / 1e3


def yardstick() -> float:
    """Nanoseconds to build and hash one."""
    holders = frozenset(range(SLICES))
    return min(_least(lambda: hash(Yardstick(40, 3, holders))) for _ in range(20))


def table(lines: list[Line], unit: float) -> str:
    """As text: counts, microseconds, and how many yardsticks the median is."""
    names = [field.name for field in fields(Line)][1:]
    head = f"{'state, event':<34}" + "".join(f"{name:>9}" for name in [*names, "units"])
    rows = (
        f"{line.kind:<34}{line.count:>9}{line.share:>9.1%}{line.median:>9.2f}{line.p95:>9.2f}"
        f"{line.median / unit:>9.1f}"
        for line in lines
    )
    return "\n".join([head, *rows])


def _kind(decision: Decided) -> Kind:
    names = type(decision.before).__name__, type(decision.event).__name__
    return (names[0], f"{names[1]} (stale)") if is_stale(*decision[:2]) else names


def _spread(decisions: list[Decided]) -> list[Decided]:
    """At most `MOST_OF_A_KIND` of them, from everywhere."""
    return decisions[:: -(-len(decisions) // MOST_OF_A_KIND)]


def _least(do: Callable[[], object]) -> float:
    """Nanoseconds of one call: warm, no garbage collection, the least of some readings; the same
    reading of a call that does nothing is taken off."""
    return max(_reading(do) - _reading(_nothing), 0.0)


def _nothing() -> None:
    return None


def _reading(do: Callable[[], object]) -> float:
    on, readings = gc.isenabled(), []
    gc.disable()
    try:
        do()
        for _ in range(REPEATS):
            start = perf_counter_ns()
            for _ in range(CALLS):
                do()
            readings.append((perf_counter_ns() - start) / CALLS)
    finally:
        if on:
            gc.enable()
    return min(readings)


def _p95(times: list[float]) -> float:
    return quantiles(times, n=20)[-1] if len(times) > 1 else times[0]


def _quantile(weighted: list[tuple[float, float]], share: float) -> float:
    """The time below which this share of all transitions lies."""
    total, seen = sum(weight for _, weight in weighted), 0.0
    for time, weight in sorted(weighted):
        seen += weight
        if seen >= share * total:
            return time
    raise ValueError("there is nothing to measure")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--seeds", metavar="A:B", type=_seeds, default="0:300", help="of the faulty runs")
    add("--steps", metavar="N", type=_steps, default="3000", help="of the quiet run")
    return parser.parse_args(argv)


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r}: write A:B, such as 0:300")
    return range(int(first), int(last))


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use 1 step or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
