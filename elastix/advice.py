"""Advice for a job, as one value and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elastix.durations import long_duration
from elastix.goodput import Spent
from elastix.goodput_model import (
    COSTS,
    STRATEGIES,
    Costs,
    Job,
    best_intervals,
    break_even,
    daly,
    whole_steps,
    young,
)
from elastix.measured_costs import ASSUMED, KnownCosts
from elastix.wording import duration, plural


@dataclass(frozen=True)
class Interval:
    """How often to save: `name` is a field of the policy, `seconds` of work between two saves."""

    name: str
    current_steps: int
    young_seconds: float
    young_steps: int
    daly_seconds: float
    daly_steps: int


@dataclass(frozen=True)
class SliceCount:
    """A number of slices: the share of computed work that is not padding, and the steps a second
    as a share of those on all slices."""

    slices: int
    useful: float
    speed: float


@dataclass(frozen=True)
class Advice:
    """What to set, and what to expect of it. Times in seconds, goodput from 0 to 1."""

    recipe: str
    job: Job
    job_mtbf: float
    costs: Costs
    origins: dict[str, str]
    intervals: tuple[Interval, ...]
    restart_checkpoint_every: int
    """Steps between checkpoints that are best for a job that restarts at every loss."""
    slice_counts: tuple[SliceCount, ...]
    break_even: float
    patience: float
    too_late: float
    """The share of repairs that take longer than `policy.deadline`: each ends a run that waits
    with fewer than `min_slices`."""
    goodput: dict[str, float]
    """By strategy, with the recipe's intervals."""
    best_goodput: dict[str, float]
    """By strategy, with the best intervals."""
    assumed: tuple[str, ...]


def advise(
    recipe: str,
    known: KnownCosts,
    job: Job,
    job_mtbf: float,
    deadline: float,
    assumed: tuple[str, ...] = (),
) -> Advice:
    """The advice for a job.

    Args:
        job_mtbf: mean seconds between losses of the whole job, which checkpoints are for.
        deadline: of the policy, in seconds.
        assumed: what nobody measured or gave besides costs.
    """
    costs, best = known.costs, best_intervals(known.costs, job, job_mtbf)
    at_each_loss = best_intervals(costs, job, 1 / job.failure_rate)
    restart_every = at_each_loss.checkpoint_every
    of_restart = replace(best, checkpoint_every=restart_every)
    return Advice(
        recipe=recipe,
        job=job,
        job_mtbf=job_mtbf,
        costs=costs,
        origins=known.origins,
        intervals=_intervals(costs, job, best, job_mtbf),
        restart_checkpoint_every=restart_every,
        slice_counts=tuple(_count(job, s) for s in range(job.min_slices, job.num_slices + 1)),
        break_even=break_even(costs, job),
        patience=patience(costs, job),
        too_late=math.exp(-deadline / job.repair),
        goodput={name: f(costs, job) for name, f in STRATEGIES.items()},
        best_goodput={
            name: f(costs, of_restart if name == "restart" else best)
            for name, f in STRATEGIES.items()
        },
        assumed=(*(f"{name} {getattr(costs, name):g} s" for name in known.assumed), *assumed),
    )


def patience(costs: Costs, job: Job) -> float:
    """Seconds to wait after a loss: the break-even if a slice is back within it on average, else
    none. Whoever waits as long as a resize would have cost loses at most twice the least."""
    even = break_even(costs, job)
    return even if job.repair <= even < math.inf else 0.0


def _intervals(costs: Costs, job: Job, best: Job, job_mtbf: float) -> tuple[Interval, ...]:
    snapshot, checkpoint = costs.snapshot, costs.snapshot + costs.stall
    loss, every = 1 / job.failure_rate, (best.snapshot_every, best.checkpoint_every)
    return (
        _interval("snapshot_every", job.snapshot_every, snapshot, loss, costs.step, every[0]),
        _interval(
            "checkpoint_every", job.checkpoint_every, checkpoint, job_mtbf, costs.step, every[1]
        ),
    )


def _interval(
    name: str, current: int, cost: float, mtbf: float, step: float, best: int
) -> Interval:
    first, higher = young(cost, mtbf), daly(cost, mtbf)
    return Interval(name, current, first, whole_steps(first, step), higher, best)


def _count(job: Job, slices: int) -> SliceCount:
    computed = slices * -(-job.num_replicas // slices)
    return SliceCount(slices, job.num_replicas / computed, job.speed(slices))


# --- as text ----------------------------------------------------------------------------------


def as_text(advice: Advice, where: Spent | None = None) -> str:
    """The advice for a person; `where` is where the time of a measured run went."""
    blocks = [
        _head(advice),
        _costs(advice),
        _saves(advice),
        _shares(advice),
        _waiting(advice),
        _goodput(advice),
        _assumptions(advice),
    ]
    return "\n\n".join(blocks + ([_spent(where)] if where else []))


def _head(advice: Advice) -> str:
    job = advice.job
    return (
        f"{advice.recipe} on {job.num_slices} slices, R={job.num_replicas} logical replicas\n"
        f"a slice fails every {long_duration(job.mtbf)}, one of them every "
        f"{long_duration(1 / job.failure_rate)}; it is back after {long_duration(job.repair)}; "
        f"the whole job is lost every {long_duration(advice.job_mtbf)} (all: on average)"
    )


def _costs(advice: Advice) -> str:
    values = ((name, getattr(advice.costs, name), advice.origins[name]) for name in COSTS)
    rows = (f"  {name:<10}{value:>12.4g}   {origin}" for name, value, origin in values)
    return "\n".join(["costs, in seconds", *rows])


def _saves(advice: Advice) -> str:
    step = advice.costs.step
    head = f"  {'policy.':<18}{'the recipe':>12}{'Young':>20}{'Daly':>20}"
    rows = [
        f"  {i.name:<18}{_steps(i.current_steps):>12}"
        f"{f'{i.young_steps} ({long_duration(i.young_steps * step)})':>20}"
        f"{f'{i.daly_steps} ({long_duration(i.daly_steps * step)})':>20}"
        for i in advice.intervals
    ]
    restart = (
        f"  a job that restarts at each loss: checkpoint_every {advice.restart_checkpoint_every}"
    )
    return "\n".join(["best intervals, in steps", head, *rows, restart])


def _steps(steps: int) -> str:
    return str(steps) if steps else "at the end"


def _shares(advice: Advice) -> str:
    rows = [f"  {c.slices:>6}{c.useful:>10.0%}{c.speed:>10.0%}" for c in _some(advice)]
    head = f"  {'slices':>6}{'useful':>10}{'speed':>10}"
    return "\n".join(["share of useful work (not padding), and steps a second", head, *rows])


def _some(advice: Advice) -> tuple[SliceCount, ...]:
    """The slice counts that fit on a page: the most slices matter most."""
    return advice.slice_counts[-16:]


def _waiting(advice: Advice) -> str:
    return "\n".join(
        [
            "waiting or resizing",
            *_break_even(advice),
            f"  {advice.too_late:.0%} of repairs take longer than policy.deadline, and would end a "
            "run that waits with fewer than min_slices",
        ]
    )


def _break_even(advice: Advice) -> list[str]:
    even, repair = advice.break_even, advice.job.repair
    if math.isinf(even):
        fewer = plural(advice.job.num_slices - 1, "slice")
        return [f"  {fewer} cannot train (policy.min_slices): every loss is waited for"]
    better = "waiting" if advice.patience else "resizing"
    return [
        f"  break-even: waiting loses less if a slice is back within {long_duration(even)}",
        f"  it is back after {long_duration(repair)}: {better} is better, "
        f"policy.patience={advice.patience:.3g}",
    ]


_NAMES = {
    "wait": "wait for the slice (patience without end)",
    "resize": "resize at once (patience 0)",
    "restart": "restart the job from its checkpoint",
}


def _goodput(advice: Advice) -> str:
    head = f"  {'':<44}{'the recipe':>12}{'best':>9}"
    rows = (
        f"  {text:<44}{advice.goodput[name]:>12.2%}{advice.best_goodput[name]:>9.2%}"
        for name, text in _NAMES.items()
    )
    return "\n".join(["expected goodput, with the intervals of", head, *rows])


def _assumptions(advice: Advice) -> str:
    values = "; ".join(advice.assumed) or "no cost"
    return (
        f"{ASSUMED}, not measured: {values}; failures and repairs of each slice independent and "
        "exponential; no wait is cut short by policy.deadline"
    )


def _spent(where: Spent) -> str:
    rows = (
        f"  {name:<12}{seconds:>12.3f}{seconds / where.total:>9.1%}"
        for name, seconds in where.seconds.items()
        if seconds
    )
    gaps = where.unknown_stops
    unknown = [f"  {gaps} stops between processes are not in the log"] if gaps else []
    title = f"where the {duration(where.total)} of the run went, in seconds"
    return "\n".join([title, *rows, *unknown])
