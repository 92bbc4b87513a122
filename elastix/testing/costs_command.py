"""`elastix simulate --costs`: the goodput of each strategy against how often slices fail."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastix.durations import long_duration, parse_duration
from elastix.goodput_model import COSTS, STRATEGIES, Costs, Job, best_intervals, break_even
from elastix.measured_costs import KnownCosts, read_costs
from elastix.testing.costs import History, run_history
from elastix.testing.jumps import Strategy
from elastix.wording import plural

MOST_SLICES = 1000
MOST_FAILURES = 100_000
REPLICAS_OF_A_SLICE = 4
"""Logical replicas for each slice, unless it is said how many there are."""

STRATEGY_NAMES: tuple[Strategy, ...] = ("wait", "resize", "restart")


@dataclass(frozen=True)
class CostsWanted:
    """What `--costs` is asked for; `mtbfs` of one slice and `repair` are in seconds."""

    known: KnownCosts
    slices: tuple[int, ...]
    replicas: int | None
    mtbfs: tuple[float, ...]
    repair: float
    failures: int
    seeds: range

    @staticmethod
    def parse(
        costs: str,
        slices: str,
        replicas: str | None,
        mtbf: str,
        repair: str,
        failures: str,
        seeds: range,
    ) -> CostsWanted:
        """What was written after each option.

        Raises:
            ValueError: bad input, in one line with the remedy.
        """
        numbers = tuple(_number("--slices", text, MOST_SLICES) for text in slices.split(","))
        least = None if replicas is None else _number("--replicas", replicas, 10**6)
        if least is not None and least < max(numbers):
            raise ValueError(f"--replicas {least}: {max(numbers)} slices need {max(numbers)}")
        return CostsWanted(
            KnownCosts().given(read_costs(Path(costs)), costs),
            numbers,
            least,
            tuple(parse_duration(text, "--mtbf") for text in mtbf.split(",")),
            parse_duration(repair, "--repair"),
            _number("--failures", failures, MOST_FAILURES),
            seeds,
        )

    def job(self, slices: int, mtbf: float) -> Job:
        """The job of a row, with the intervals of Daly for its losses."""
        replicas = self.replicas or REPLICAS_OF_A_SLICE * slices
        job = Job(slices, replicas, mtbf, self.repair)
        return best_intervals(self.known.costs, job, 1 / job.failure_rate)


@dataclass(frozen=True)
class GoodputRow:
    """One failure rate: the goodput of each strategy, simulated and by the closed form."""

    job: Job
    simulated: dict[Strategy, float]
    model: dict[Strategy, float]


def goodput_table(wanted: CostsWanted) -> int:
    """Print a table for each number of slices, a row as soon as it is known; returns 0."""
    print(_costs_text(wanted.known))
    for slices in wanted.slices:
        print("\n" + _head(wanted, slices), flush=True)
        for row in goodput_rows(wanted, slices):
            print(_row_text(row), flush=True)
    return 0


def goodput_rows(wanted: CostsWanted, slices: int) -> Iterator[GoodputRow]:
    """One row for each failure rate."""
    costs = wanted.known.costs
    for mtbf in wanted.mtbfs:
        job, simulated = wanted.job(slices, mtbf), {}
        for strategy in STRATEGY_NAMES:
            if sys.stderr.isatty():
                told = f"{slices} slices, one fails every {long_duration(mtbf)}: {strategy}"
                print(f"\r{told:<79}\r", end="", file=sys.stderr, flush=True)
            histories = [
                run_history(costs, job, strategy, random.Random(seed), wanted.failures)
                for seed in wanted.seeds
            ]
            simulated[strategy] = together(costs, histories)
        model = {name: STRATEGIES[name](costs, job) for name in STRATEGY_NAMES}
        yield GoodputRow(job, simulated, model)


def together(costs: Costs, histories: list[History]) -> float:
    """The goodput of several histories, one after another."""
    return costs.step * sum(h.steps for h in histories) / sum(h.seconds for h in histories)


def _costs_text(known: KnownCosts) -> str:
    given = [n for n in COSTS if n not in known.assumed]
    lines = [f"costs in seconds, given: {_values(known.costs, given)}"]
    if known.assumed:
        lines.append(f"assumed, not measured: {_values(known.costs, known.assumed)}")
    return "\n".join(lines)


def _values(costs: Costs, names: list[str]) -> str:
    return ", ".join(f"{name} {getattr(costs, name):g}" for name in names)


def _head(wanted: CostsWanted, slices: int) -> str:
    job, costs = wanted.job(slices, wanted.mtbfs[0]), wanted.known.costs
    even, histories = break_even(costs, job), plural(len(wanted.seeds), "history", "histories")
    waits = f"break-even of waiting and resizing: back after {long_duration(even)}"
    return (
        f"{slices} slices, {job.num_replicas} logical replicas, a slice is back after "
        f"{long_duration(wanted.repair)}; "
        f"{waits if slices > 1 else 'one slice can only be waited for'}\n"
        f"goodput, simulated by the pure machine ({histories} of {wanted.failures} failures), "
        "and by the closed form\n"
        f"{'a slice fails':>14}{'the job':>10}{'snapshot':>10}{'checkpoint':>12}"
        f"{'wait':>9}{'model':>8}{'resize':>9}{'model':>8}{'restart':>9}{'model':>8}\n"
        f"{'every':>14}{'every':>10}{'steps':>10}{'steps':>12}"
    )


def _row_text(row: GoodputRow) -> str:
    job = row.job
    cells = "".join(f"{row.simulated[n]:>9.1%}{row.model[n]:>8.1%}" for n in STRATEGY_NAMES)
    return (
        f"{long_duration(job.mtbf):>14}{long_duration(1 / job.failure_rate):>10}"
        f"{job.snapshot_every:>10}{job.checkpoint_every:>12}{cells}"
    )


def _number(option: str, text: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ValueError(f"{option} {text!r}: use 1 to {most}")
    return int(text)
