"""Losses, returns and leaves of slices: how long they take, and what is done again for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from elastix.backends.simulated import SimulatedBackend
from elastix.benchmark.history import Moment, changes, count, cpu_of_steps, of_kind, steady_steps
from elastix.benchmark.parts import (
    DEVICES_PER_SLICE,
    NEVER,
    NUM_SLICES,
    NotPossible,
    Task,
    measured_recipe,
    policy,
    run_folder,
)
from elastix.benchmark.recorder import Plan, Recorder, say_to_stderr
from elastix.recipe import Recipe
from elastix.run import train


def losses(task: Task, recipe: Recipe) -> dict[str, Any]:
    """Lose each slice in turn and take it back, then leave each after a notice."""
    lookback, _, inflight = task.part.partition("-")
    plan = Plan(task.losses, leaves=min(task.losses, NUM_SLICES))
    # A checkpoint after four losses: else slices that are lost again and again would have to
    # answer more and more probes before they are taken back.
    chosen = policy(
        recipe,
        lookback=lookback,
        inflight=int(inflight),
        checkpoint_every=NUM_SLICES * plan.period,
    )
    recorder = disturb(task, measured_recipe(recipe, chosen), plan)
    found, measured = changes(recorder.measured), recorder.measured
    return {
        "lookback": lookback,
        "inflight": chosen.inflight,
        "snapshot_every": chosen.snapshot_every,
        "period": plan.period,
        "steady": steady_steps(measured),
        "losses": of_kind(found, "loss"),
        "regrows": of_kind(found, "regrow"),
        "leaves": of_kind(found, "leave"),
        "committed": count(measured, "committed"),
        "dispatched": count(measured, "dispatched"),
        "while_losing": while_losing(measured, plan.period),
        "params": recorder.info.num_params,
        "state_bytes": recorder.info.state_bytes,
    }


def while_losing(moments: Sequence[Moment], period: int) -> dict[str, int]:
    """Steps from each loss until `period` more than before it are committed, and how many were
    dispatched for them."""
    committed = dispatched = losses = 0
    for n, moment in enumerate(moments):
        if moment.kind != "lost":
            continue
        first = next(m.step for m in reversed(moments[:n]) if m.kind == "committed")
        within = list(takewhile(lambda m: not _is_over(m, first + period), moments[n:]))  # noqa: B023
        committed += len({m.step for m in within if m.kind == "committed" and m.step > first})
        done = [m for m in within if m.step <= first + period]
        dispatched += count(done, "dispatched") + _in_flight(moments[:n])
        losses += 1
    return {"committed": committed, "dispatched": dispatched, "losses": losses}


def _is_over(moment: Moment, last: int) -> bool:
    return moment.kind == "committed" and moment.step > last


def _in_flight(moments: Sequence[Moment]) -> int:
    """Steps dispatched and not committed at the end of `moments`."""
    last = next(m.step for m in reversed(moments) if m.kind == "committed")
    return next(m.step for m in reversed(moments) if m.kind == "dispatched") - last


def disturb(
    task: Task, recipe: Recipe, plan: Plan, backend: SimulatedBackend | None = None
) -> Recorder:
    """Train on four simulated slices, and take them away by the plan."""
    backend = backend or SimulatedBackend(NUM_SLICES, DEVICES_PER_SLICE)
    with run_folder() as run_dir:
        recorder = Recorder(backend, plan, say_to_stderr(task.name), run_dir)
        summary = train(
            recipe, backend=backend, run_dir=run_dir, display=recorder, stop=recorder.stop
        )
    if recorder.error:
        raise recorder.error
    if summary.outcome != "preempted":
        raise RuntimeError(f"the run {summary.outcome}: {summary.reason}")
    return recorder


def tokens(task: Task, recipe: Recipe) -> dict[str, Any]:
    """CPU seconds of a step with all slices and with one gone, in turns."""
    replicas = int(task.option)
    try:
        recipe = replace(recipe, num_replicas=replicas)
    except ValueError as error:
        raise NotPossible(str(error)) from error
    chosen = policy(recipe, lookback="live", snapshot_every=NEVER, probe_every=0.5)
    away, period = (6, 20) if task.quick else (16, 40)
    plan = Plan(task.few, period=period, away=away)
    recorder = disturb(task, measured_recipe(recipe, chosen), plan)
    shares = recipe.useful_shares(NUM_SLICES)
    return {
        "cpu": cpu_of_steps(recorder.measured),
        "tokens": recorder.tokens,
        "useful": {n: shares[n] for n in (NUM_SLICES - 1, NUM_SLICES)},
    }
