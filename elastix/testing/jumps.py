"""Undisturbed training as one jump: what a stretch of steps costs, and the state at its end."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Literal

from elastix.goodput_model import Costs, Job
from elastix.machine import Policy, RunStep, Source, Tier, Training, TrainStateName
from elastix.machine.ledger import forgive, progressed

Strategy = Literal["wait", "resize", "restart"]

ENDLESS = 10**12
"""Steps of a job that nobody sees end, and the seconds of a deadline that nobody misses."""


def policy_of(job: Job, strategy: Strategy) -> Policy:
    """The policy of a strategy: waiting is a `min_slices` of all."""
    return Policy(
        min_slices=job.min_slices if strategy == "resize" else job.num_slices,
        deadline=float(ENDLESS),
        lookback=job.lookback,
        inflight=1,
        warm="off",
        snapshot_every=job.snapshot_every,
        checkpoint_every=job.checkpoint_every,
        max_losses=ENDLESS,
        probe_every=job.probe_every,
        stable_probes=job.stable_probes,
    )


def elapsed(costs: Costs, job: Job, slices: int, done: int, more: int) -> float:
    """Seconds of `more` steps after step `done`, with the snapshots and checkpoints then due."""
    k, c = job.snapshot_every, job.checkpoint_every

    def due(every: int) -> int:
        return (done + more) // every - done // every if every else 0

    snapshots = due(k) + due(c) - (due(lcm(k, c)) if c else 0)
    steps = more * costs.step / job.speed(slices)
    return steps + snapshots * costs.snapshot + due(c) * costs.stall


def jump(state: Training, job: Job, step: int) -> Training:
    """The state after undisturbed training up to `step`: what its events would have led to.

    The snapshots of the way are published, and each checkpoint that became due lets one loss less
    count against each slice, as one that was written does.
    """
    ledger = progressed(state.ledger)
    taken = max(newest(step, job.snapshot_every), newest(step, job.checkpoint_every))
    if taken > state.committed:
        host = Source(Tier.HOST, taken, ledger.epoch, state.mesh)
        others = (s for s in ledger.sources if s.tier is not Tier.HOST)
        ledger = replace(ledger, sources=(*others, host))
    for _ in range(_checkpoints_that_matter(state, job, step)):
        ledger = forgive(ledger)
    name = TrainStateName(step, state.train_state.epoch, state.train_state.holders)
    asked = RunStep(ledger.epoch, step + 1)
    return Training(ledger, state.mesh, step, step, name, step, None, asked, state.growth)


def newest(step: int, every: int) -> int:
    """The newest step up to `step` after which something is due that comes every `every` steps."""
    return step - step % every if every else 0


def _checkpoints_that_matter(state: Training, job: Job, step: int) -> int:
    """Checkpoints on the way to `step`, as many as there are losses that they could forgive."""
    every = job.checkpoint_every
    most = max((flap.losses for flap in state.ledger.flaps), default=0)
    return min(most, step // every - state.committed // every) if every else 0
