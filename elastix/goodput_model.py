"""PURE: what share of its time a job will train, from what steps, losses and recoveries cost.

Goodput is progress over time: the steps that count, each at its time on all slices, over the
seconds that passed. So a run on fewer slices, a step that is done again and a wait all lower it.

The three strategies: *wait* (pause and resume: nothing runs until every slice is back), *resize*
(go on with those left, take back those that return) and *restart* (the job ends at each loss and
begins anew from its newest checkpoint, once every slice is there). In all, slices fail by
themselves, each after an exponential time of mean `mtbf`, and are back after one of mean `repair`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

# --- what is known of a job -------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """What things cost, in seconds. The defaults are round guesses, measured nowhere.

    Args:
        step: one step on all slices.
        notice: from a loss until it is known.
        move: the state onto the slices of a new mesh, from slices that hold it; `move_seconds`
            has it from bytes.
        compile: the step for a mesh of fewer slices; 0 where that is done before it is needed.
        snapshot: what a host snapshot takes from training: the step after it ends so much later.
        stall: training stands still for a checkpoint, besides its snapshot.
        write: from the snapshot until the checkpoint is durable, while training goes on.
        disk: the state from a checkpoint onto the slices.
        restart: from the moment that all slices are there until a new process asks for its state;
            its compiles are part of it.

    Raises:
        ValueError: a cost is negative or not finite, or a step costs nothing.
    """

    step: float = 1.0
    notice: float = 1.0
    move: float = 1.0
    compile: float = 0.0
    snapshot: float = 0.2
    stall: float = 0.0
    write: float = 30.0
    disk: float = 60.0
    restart: float = 300.0

    def __post_init__(self) -> None:
        for name in COSTS:
            _at_least("costs", name, getattr(self, name), 0.0)
        if not self.step:
            raise ValueError("costs.step=0: use the seconds of a step, above 0")


COSTS = tuple(f.name for f in fields(Costs))
"""The names of the costs."""


@dataclass(frozen=True)
class Job:
    """The slices of a job, how they fail, and what its policy does about it.

    Args:
        num_replicas: logical replicas that the slices share.
        mtbf: mean seconds between two failures of one slice.
        repair: mean seconds from a failure until the slice answers again.
        checkpoint_every: steps; 0: none.

    Raises:
        ValueError: a number is out of range; the message names the value and the remedy.
    """

    num_slices: int
    num_replicas: int
    mtbf: float
    repair: float
    min_slices: int = 1
    lookback: Literal["live", "host"] = "host"
    snapshot_every: int = 10
    checkpoint_every: int = 100
    probe_every: float = 5.0
    stable_probes: int = 2

    def __post_init__(self) -> None:
        for name in ("num_slices", "min_slices", "snapshot_every", "stable_probes"):
            _at_least("job", name, getattr(self, name), 1)
        for name in ("checkpoint_every", "repair"):
            _at_least("job", name, getattr(self, name), 0)
        for name in ("mtbf", "probe_every"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"job.{name}={getattr(self, name)}: use seconds above 0")
        if self.min_slices > self.num_slices:
            raise ValueError(f"job.min_slices={self.min_slices}: use at most {self.num_slices}")
        if self.num_replicas < self.num_slices:
            raise ValueError(f"job.num_replicas={self.num_replicas}: use {self.num_slices} or more")

    @property
    def failure_rate(self) -> float:
        """Failures a second, on all slices."""
        return self.num_slices / self.mtbf

    def speed(self, slices: int) -> float:
        """Steps a second on so many slices, as a share of those on all: 0 below `min_slices`.

        A step takes as long as its busiest slice, which has ceil(R / slices) logical replicas.
        """
        if slices < self.min_slices:
            return 0.0
        return -(-self.num_replicas // self.num_slices) / -(-self.num_replicas // slices)


def _at_least(owner: str, name: str, value: float, low: float) -> None:
    if not low <= value < math.inf:
        raise ValueError(f"{owner}.{name}={value}: use {low:g} or more, and a finite number")


def move_seconds(state_bytes: float, bytes_per_second: float, startup: float = 0.0) -> float:
    """Seconds for a state to reach slices that each receive all of it at this bandwidth."""
    return startup + state_bytes / bytes_per_second


# --- how often to save ------------------------------------------------------------------------


def young(cost: float, mtbf: float) -> float:
    """Seconds of work between two saves that each cost `cost` seconds.

    sqrt(2 C M): J. W. Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17(9), 1974.
    """
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """The same to a higher order, which matters where `cost` is not small beside `mtbf`.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006, equation 37.
    """
    if cost >= 2 * mtbf:
        return mtbf
    part = cost / (2 * mtbf)
    return young(cost, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - cost


def lost_work(interval: float, failure_rate: float) -> float:
    """Seconds since the last save when a failure comes, on average; about half the interval.

    The mean of X mod T for an exponential X: 1 / rate - T / (exp(rate T) - 1). Daly 2006.
    """
    return 1 / failure_rate - interval / _expm1(failure_rate * interval)


# --- goodput ----------------------------------------------------------------------------------


def goodput_wait(costs: Costs, job: Job) -> float:
    """Of pause and resume. With one slice there is no other memory: it goes back to disk."""
    delay = job.probe_every / 2
    if job.num_slices == 1:
        return _all_or_nothing(costs, job, job.checkpoint_every, delay + costs.disk, costs.write)
    return _all_or_nothing(costs, job, _lookback(job), delay + costs.move, 0.0)


def goodput_restart(costs: Costs, job: Job) -> float:
    """Of a job that ends at every loss. Only what was durable by then is kept."""
    delay = costs.restart + costs.disk
    return _all_or_nothing(costs, job, job.checkpoint_every, delay, costs.write)


def _all_or_nothing(costs: Costs, job: Job, every: int, delay: float, lag: float) -> float:
    """Steps run while all slices are up, `delay` seconds after that began; `lag` seconds after
    every `every` steps they are kept.

    Between two moments at which all slices became up pass, on average, A^-S / rate seconds, where
    A = mtbf / (mtbf + repair) (alternating renewal: all are up a share A^S of the time). In the
    first 1 / rate of them the intervals kept are exp(-rate (delay + lag)) / (exp(rate T) - 1), as
    in Daly 2006. Neglected: that every slice which holds a snapshot fails in one wait.
    """
    if not every:
        return 0.0
    rate = job.failure_rate
    down = _expm1(job.num_slices * math.log1p(job.repair / job.mtbf)) / rate
    intervals = math.exp(-rate * (delay + lag)) / _expm1(rate * every * _pace(costs, job, 1.0))
    cycle = 1 / rate + down + _not_hidden(costs.notice, down)
    return intervals * every * costs.step / cycle


def _not_hidden(notice: float, down: float) -> float:
    """How much later than after `down` seconds, an exponential mean, nothing more is missing, if
    the loss must also have been noticed: E[max(notice, X)] - E[X]."""
    if not 0 < down < math.inf:
        return notice if not down else 0.0
    return notice + down * math.expm1(-notice / down)


def goodput_resize(costs: Costs, job: Job) -> float:
    """Of a job that goes on with the slices left, and takes back those that return.

    The number of slices up is binomial; each stay in one number begins with what the change cost
    and, if a loss ends it, gives back what came after the last snapshot. Exact for exponential
    times where a change is over before the next begins; neglected as in waiting.
    """
    if job.num_slices == 1:
        return goodput_wait(costs, job)
    away = job.repair + _regrow_lag(job)
    shares = _binomial(job.num_slices, job.mtbf / (job.mtbf + away))
    return sum(p * _resized(costs, job, s, away) for s, p in shares if job.speed(s) and p > 1e-12)


def _resized(costs: Costs, job: Job, slices: int, away: float) -> float:
    """Progress a second while so many slices are up, each of the others for `away` on average."""
    fail, back = slices / job.mtbf, (job.num_slices - slices) / away
    rate = fail + back
    compile = costs.compile if slices < job.num_slices else 0.0
    after_loss = math.exp(-rate * (costs.notice + costs.move + compile))
    after_return = math.exp(-rate * (costs.move + costs.snapshot + compile))
    # As many stays begin with a loss as end with a return: detailed balance.
    begun = back * after_loss + fail * after_return
    pace, every = _pace(costs, job, job.speed(slices)), _lookback(job)
    kept = every / _expm1(rate * every * pace)
    kept += back / rate * lost_work(every * pace, rate) / pace  # a return loses nothing
    return begun * kept * costs.step


def _pace(costs: Costs, job: Job, speed: float) -> float:
    """Seconds of a step, its share of snapshots and checkpoints included."""
    k, c = job.snapshot_every, job.checkpoint_every
    saves = 1 / k + (1 / c - 1 / math.lcm(k, c) if c else 0.0)
    return costs.step / speed + costs.snapshot * saves + (costs.stall / c if c else 0.0)


def _goes_back(job: Job) -> bool:
    return job.lookback == "host"


def _lookback(job: Job) -> int:
    """Steps from one snapshot to the next; a checkpoint has one of its own."""
    if not _goes_back(job):
        return 1
    return min(job.snapshot_every, job.checkpoint_every or job.snapshot_every)


def _regrow_lag(job: Job) -> float:
    """From a slice's return until enough probes in a row found it."""
    return job.probe_every * (job.stable_probes - 0.5)


def _binomial(number: int, chance: float) -> Iterator[tuple[int, float]]:
    yes, no = math.log(chance), math.log1p(-chance)
    for k in range(number + 1):
        ways = math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1)
        yield k, math.exp(ways + k * yes + (number - k) * no)


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf


def break_even(costs: Costs, job: Job) -> float:
    """The seconds up to which waiting for a slice that is back after so long loses less than
    resizing does; infinite if fewer slices cannot train.

    Waiting loses the repair, the probe that finds its end, and the move. Resizing loses notice,
    move and compile, the slower steps until the return is found, and a move and a snapshot then.
    """
    speed = job.speed(job.num_slices - 1)
    if not speed:
        return math.inf
    slower = _regrow_lag(job) * (1 - speed) + costs.snapshot - job.probe_every / 2
    return max(0.0, costs.notice + costs.move + costs.compile + slower / speed)


STRATEGIES = {"wait": goodput_wait, "resize": goodput_resize, "restart": goodput_restart}
"""The goodput of each strategy, a function of costs and job."""


def best_intervals(costs: Costs, job: Job, job_mtbf: float) -> Job:
    """The job with the intervals of Daly 2006, in whole steps: snapshots for the loss of a slice,
    checkpoints for that of the whole job, which comes every `job_mtbf` seconds, and no oftener than
    one can be written. With lookback `live` no loss needs a snapshot, and only checkpoints do."""
    checkpoint = max(daly(costs.snapshot + costs.stall, job_mtbf), costs.write)
    snapshot = daly(costs.snapshot, 1 / job.failure_rate) if _goes_back(job) else checkpoint
    return replace(
        job,
        snapshot_every=whole_steps(snapshot, costs.step),
        checkpoint_every=whole_steps(checkpoint, costs.step),
    )


def whole_steps(seconds: float, step: float) -> int:
    """The nearest number of steps, at least one."""
    return max(1, round(seconds / step))
