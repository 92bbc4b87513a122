"""`elastix simulate`: run many fault schedules, and show the smallest one that fails."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastix import driver
from elastix.goodput_model import COSTS
from elastix.machine import TABLE
from elastix.testing.costs_command import MOST_SLICES as MOST_COSTED
from elastix.testing.costs_command import CostsWanted, goodput_table
from elastix.testing.coverage import LineCoverage, Row, rows_hit, rows_missed
from elastix.testing.schedules import CELLS, Kind, Phase, Schedule, random_schedule
from elastix.testing.shrinking import shrink
from elastix.testing.simulation import Result, simulate
from elastix.testing.storms import storm
from elastix.usage import UsageParser

MOST_SLICES = 64
MOST_FAULTS = 10_000
TRACED = 200
"""Runs in which the lines of the driver are counted: those are several times slower."""
INTERRUPTED = 130

Hits = Counter[tuple[Phase, Kind]]


def main(argv: Sequence[str]) -> int:
    """Run the seeds: 0 if every invariant held, 1 at the first that did not, 130 if interrupted.

    Raises:
        ValueError: bad input, in one line with the remedy.
    """
    wanted = _parse(argv)
    if isinstance(wanted, CostsWanted):
        return _goodput(wanted)
    tally, progress, status = Tally(), _Progress(len(wanted.seeds)), 0
    try:
        for seed in wanted.seeds:
            result = tally.run(wanted.schedule(seed))
            progress.ran(result)
            if wanted.verbose:
                ends = ", ".join(e.outcome for e in result.ends)
                print(f"seed {seed}: {ends}: {result.schedule}", flush=True)
            if result.violation:
                progress.end()
                _explain(seed, wanted, result)
                return 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    progress.end()
    print(tally.report(), flush=True)
    if status:
        print("elastix: interrupted: that is what was run so far", file=sys.stderr)
    return status


def _goodput(wanted: CostsWanted) -> int:
    try:
        return goodput_table(wanted)
    except KeyboardInterrupt:
        print("elastix: interrupted: that is what was run so far", file=sys.stderr)
        return INTERRUPTED


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for; with `faults`, storms of so many."""

    seeds: range
    slices: int
    faults: int | None
    verbose: bool

    def schedule(self, seed: int) -> Schedule:
        """The schedule of one seed."""
        if self.faults is None:
            return random_schedule(seed, self.slices)
        return storm(seed, self.faults, self.slices)


class Tally:
    """What the runs came by: cells of the matrix, rows of the table, lines of the driver."""

    def __init__(self) -> None:
        self.hits, self.rows, self.runs = Hits(), set[Row](), 0
        self._lines = LineCoverage(driver)

    def run(self, schedule: Schedule) -> Result:
        """Simulate it; a run that is interrupted does not count."""
        with self._lines.within() if self.runs < TRACED else contextlib.nullcontext():
            result = simulate(schedule)
        self.runs += 1
        self.hits += result.hits
        self.rows |= rows_hit(result)
        return result

    def report(self) -> str:
        """The matrix, and what was used of the machine and of the driver."""
        return "\n".join([matrix(self.hits), self._table(), self._driver()])

    def _table(self) -> str:
        missed = rows_missed(self.rows)
        told = f"; not {'; '.join(missed)}" if missed else ""
        return f"machine: {len(TABLE) - len(missed)} of {len(TABLE)} rows of its table{told}"

    def _driver(self) -> str:
        lines, missed = len(self._lines.lines), self._lines.missed
        told = f"; not {', '.join(map(str, missed))}" if missed else ""
        traced = min(self.runs, TRACED)
        return (
            f"driver: {lines - len(missed)} of {lines} lines of driver.py, in the first {traced} "
            f"runs (to trace a run is slow){told}"
        )


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


def _explain(seed: int, wanted: Wanted, result: Result) -> None:
    assert result.violation
    smallest = simulate(shrunk(result.schedule, result.violation.rule))
    print(f"seed {seed} of up to {wanted.slices} slices violates an invariant")
    print(f"  {result.violation}")
    print(f"smallest schedule that does\n  {smallest.schedule}\n  {smallest.violation}")
    print(f"its event log\n{smallest.log}", end="", flush=True)


def _parse(argv: Sequence[str]) -> Wanted | CostsWanted:
    parser = UsageParser(
        prog="elastix simulate",
        description="Run the driver on ghosts in place of arrays, with a virtual clock, through "
        "random fault schedules; check what must hold whatever dies; show the smallest schedule "
        "in which it does not.",
        epilog="examples: elastix simulate --seeds 0:100000 --slices 8; elastix simulate --storm "
        "500 --seeds 0:10. Ctrl-C ends it with what was run so far. "
        "Exit status: 0 all held, 1 one did not, 2 bad input, 130 interrupted.",
    )
    parser.add_argument("--seeds", metavar="A:B", help="A to B - 1, or one seed (default: 0:1000)")
    parser.add_argument("--slices", metavar="N", help="at most so many (default: 4)")
    parser.add_argument(
        "--storm", metavar="N", help="runs with N faults, one every few steps, on all slices"
    )
    parser.add_argument("--verbose", action="store_true", help="print every schedule")
    _add_costs(parser)
    given = parser.parse_args(argv)
    costs = {name: value for name in _WITH_COSTS if (value := vars(given)[name]) is not None}
    if given.costs is not None:
        _refuse(("storm", "verbose"), given, "does not go with --costs: leave it out")
        seeds = _seeds(given.seeds or "0")
        slices = given.slices or "4,64,1000"
        return CostsWanted.parse(given.costs, slices, seeds=seeds, **_WITH_COSTS | costs)
    _refuse(tuple(_WITH_COSTS), given, "goes with --costs FILE: add it")
    seeds = _seeds(given.seeds or "0:1000")
    return Wanted(seeds, _slices(given.slices or "4"), _faults(given.storm), given.verbose)


_WITH_COSTS = {
    "replicas": None,
    "mtbf": "10h,100h,1000h,10000h",
    "repair": "10m",
    "failures": "300",
}
"""Options that only `--costs` has, and their defaults."""


def _add_costs(parser: argparse.ArgumentParser) -> None:
    """With `--costs`, what slices that fail at random leave of the time."""
    group = parser.add_argument_group(
        "goodput, with --costs",
        "In place of fault schedules: long histories in which slices fail and return at random, "
        "decided by the pure machine on a virtual clock that charges what things cost; waiting "
        "for lost slices, resizing, and restarting the job. Undisturbed training is one jump. "
        "--slices is then a number, or several with commas, of up to "
        f"{MOST_COSTED} (default: 4,64,1000), and --seeds how many histories (default: 0).",
    )
    add = group.add_argument
    add(
        "--costs",
        metavar="FILE",
        help=f"JSON: seconds of {', '.join(COSTS)}, or state_bytes and bytes_per_second in place "
        "of move; or a file of bench/scale.py. What it lacks is assumed, and said to be",
    )
    add("--mtbf", metavar="T,T", help="a slice fails every 90s, 10m, 3h or 2d on average")
    add("--repair", metavar="T", help="and is back after so long on average (default: 10m)")
    add("--replicas", metavar="R", help="logical replicas (default: 4 a slice)")
    add("--failures", metavar="N", help="failures in one history (default: 300)")


def _refuse(names: Sequence[str], given: argparse.Namespace, why: str) -> None:
    for name in names:
        if vars(given)[name]:
            raise ValueError(f"--{name} {why}")


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


def _faults(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and 1 <= int(text) <= MOST_FAULTS):
        raise ValueError(f"--storm {text!r}: use 1 to {MOST_FAULTS} faults")
    return None if text is None else int(text)


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
