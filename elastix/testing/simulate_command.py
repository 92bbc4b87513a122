"""`elastix simulate`: run many random schedules, and show the smallest one that fails."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from elastix.testing.schedules import CELLS, Kind, Phase, Schedule, random_schedule
from elastix.testing.shrinking import shrink
from elastix.testing.simulation import Result, simulate

MOST_SLICES = 64
Hits = Counter[tuple[Phase, Kind]]


def main(argv: Sequence[str]) -> int:
    """Run the seeds: 0 if every invariant held, 1 at the first that did not, 2 for bad input."""
    try:
        seeds, slices, verbose = _parse(argv)
    except (argparse.ArgumentError, ValueError) as error:
        print(f"elastix: {error} (elastix simulate --help)", file=sys.stderr)
        return 2
    progress, hits = _Progress(len(seeds)), Hits()
    for seed in seeds:
        result = simulate(random_schedule(seed, slices))
        hits += result.hits
        progress.ran(result)
        if verbose:
            ends = ", ".join(getattr(e, "outcome", "failed") for e in result.ends)
            print(f"seed {seed}: {ends}: {result.schedule}", flush=True)
        if result.violation:
            progress.end()
            _explain(seed, slices, result)
            return 1
    progress.end()
    print(matrix(hits))
    return 0


def matrix(hits: Hits) -> str:
    """The hits of each kind of fault, a row, in each phase, a column; `-` where none can be."""
    phases, width = tuple(Phase), max(len(kind) for kind in Kind)
    lines = [" " * width + "".join(f"{phase:>{_column(phase)}}" for phase in phases)]
    for kind in Kind:
        row = (
            f"{hits[phase, kind] if (phase, kind) in CELLS else '-':>{_column(phase)}}"
            for phase in phases
        )
        lines.append(f"{kind:<{width}}" + "".join(row))
    counts = [hits[cell] for cell in CELLS]
    lines.append(f"{len(CELLS)} cells, {sum(counts)} faults, at least {min(counts)} in each cell")
    return "\n".join(lines)


def shrunk(schedule: Schedule, rule: str) -> Schedule:
    """The smallest schedule that violates the same rule."""

    def fails(smaller: Schedule) -> bool:
        violation = simulate(smaller).violation
        return violation is not None and violation.rule == rule

    return shrink(schedule, fails)


def _column(phase: Phase) -> int:
    return max(len(phase), 8) + 2


def _explain(seed: int, slices: int, result: Result) -> None:
    assert result.violation
    smallest = simulate(shrunk(result.schedule, result.violation.rule))
    print(f"seed {seed} of up to {slices} slices violates an invariant\n  {result.violation}")
    print(f"smallest schedule that does\n  {smallest.schedule}\n  {smallest.violation}")
    print(f"its event log\n{smallest.log}", end="", flush=True)


def _parse(argv: Sequence[str]) -> tuple[range, int, bool]:
    parser = argparse.ArgumentParser(
        prog="elastix simulate",
        description="Run the driver on ghosts in place of arrays, with a virtual clock, through "
        "random fault schedules; check what must hold whatever dies; show the smallest schedule "
        "in which it does not.",
        epilog="example: elastix simulate --seeds 0:100000 --slices 8",
        exit_on_error=False,
    )
    parser.add_argument("--seeds", metavar="A:B", default="0:1000", help="A to B - 1, or one seed")
    parser.add_argument("--slices", metavar="N", default="4", help="at most so many (default: 4)")
    parser.add_argument("--verbose", action="store_true", help="print every schedule")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(f"{unknown[0]}: there is no such argument")
    return _seeds(given.seeds), _slices(given.slices), given.verbose


def _seeds(text: str) -> range:
    first, colon, last = text.partition(":")
    if not (first.isdecimal() and (last.isdecimal() if colon else True)):
        raise ValueError(f"--seeds {text!r}: write A:B, such as 0:1000, or one seed")
    seeds = range(int(first), int(last) if colon else int(first) + 1)
    if not seeds:
        raise ValueError(f"--seeds {text!r}: there is no seed from {first} to {last}")
    return seeds


def _slices(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_SLICES:
        raise ValueError(f"--slices {text!r}: use 1 to {MOST_SLICES}")
    return int(text)


class _Progress:
    """Says on standard error how far it is, every second on a terminal and every 10 s elsewhere."""

    def __init__(self, total: int):
        self._total, self._runs, self._transitions = total, 0, 0
        self._start = self._said = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def ran(self, result: Result) -> None:
        self._runs += 1
        self._transitions += result.transitions
        if time.monotonic() - self._said >= (1.0 if self._terminal else 10.0):
            self._said = time.monotonic()
            self._say()

    def end(self) -> None:
        self._say()
        if self._terminal:
            print(file=sys.stderr)

    def _say(self) -> None:
        rate = self._runs / max(time.monotonic() - self._start, 1e-9)
        line = (
            f"{self._runs} of {self._total} runs, {rate:.0f} a second, "
            f"{self._transitions} transitions"
        )
        ends = "" if self._terminal else "\n"
        print(f"\r{line}" if self._terminal else line, end=ends, file=sys.stderr, flush=True)
