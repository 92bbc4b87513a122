"""Goodput: the closed forms against the pure machine, their limits, and where a run's time went."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.goodput import BUCKETS, spent
from elastix.goodput_model import (
    STRATEGIES,
    Costs,
    Job,
    best_intervals,
    break_even,
    daly,
    goodput_resize,
    goodput_restart,
    goodput_wait,
    lost_work,
    move_seconds,
    young,
)
from elastix.machine import (
    Committed,
    Dispatched,
    Policy,
    Prepared,
    RunStep,
    SlicesLost,
    Snapshotted,
    Source,
    Started,
    Starting,
    Tier,
    Training,
    transition,
)
from elastix.testing import Fault, Kind, Phase, Schedule, random_schedule, simulate
from elastix.testing.costs import run_history
from elastix.testing.ghost_backend import PROBE_SECONDS
from elastix.testing.ghosts import SNAPSHOT_SECONDS
from elastix.testing.jumps import elapsed, jump, policy_of
from tests.test_layout import ROOT, imports

FREE = Costs(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["goodput", "goodput_model", "durations"])
def test_they_import_the_standard_library_alone(name):
    found = imports(f"elastix.{name}", ROOT / f"elastix/{name}.py")
    assert found and not [i for i in found if i.module.split(".")[0] in ("elastix", "jax", "numpy")]


# --- how often to save ----------------------------------------------------------------------------


def test_young_is_the_square_root_of_twice_cost_and_mtbf():
    assert young(5, 1000) == 100 and young(2, 3600) == 120


@pytest.mark.parametrize("mtbf", [30.0, 300.0, 3000.0, 30_000.0])
def test_the_interval_of_daly_is_the_best_that_the_exact_model_has(mtbf):
    """One slice that restarts, as in the paper, tried at 600 intervals."""
    costs, job = replace(FREE, step=0.01, snapshot=5.0), Job(1, 1, mtbf, 0.0, snapshot_every=10**12)

    def goodput(seconds: float) -> float:
        return goodput_restart(costs, replace(job, checkpoint_every=round(seconds / costs.step)))

    best = max(goodput(10 ** (n / 100)) for n in range(600))
    assert goodput(daly(5.0, mtbf)) > 0.9999 * best
    assert goodput(daly(5.0, mtbf)) >= goodput(young(5.0, mtbf))
    assert goodput(2 * daly(5.0, mtbf)) < 0.999 * best


def test_a_save_that_costs_more_than_failures_leave_is_made_once_an_mtbf():
    assert daly(200.0, 100.0) == daly(1e9, 100.0) == 100.0


def test_half_an_interval_is_lost_if_failures_are_rare_and_all_since_the_start_if_not():
    assert lost_work(10.0, 1e-6) == pytest.approx(5.0, rel=1e-4)
    assert lost_work(1e9, 0.1) == pytest.approx(10.0)


def test_a_state_moves_in_bytes_over_bandwidth():
    assert move_seconds(840e9, 400e9, startup=0.5) == pytest.approx(2.6)


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 4, 1000])
@pytest.mark.parametrize("name", STRATEGIES)
def test_without_failures_saves_are_all_that_is_lost(name, slices):
    costs, job = Costs(snapshot=0.5, stall=2.0), Job(slices, 4 * slices, 1e15, 600.0)
    # In 100 steps: ten snapshots of half a second, and one stall of two.
    assert STRATEGIES[name](costs, job) == pytest.approx(100 / (100 + 5 + 2), abs=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_if_nothing_costs_anything_steps_since_the_last_save_are_all_that_is_lost(name):
    job = Job(4, 12, 4e5, 0.0, snapshot_every=10, checkpoint_every=10, probe_every=1e-9)
    lost = lost_work(10.0, job.failure_rate) * job.failure_rate
    assert STRATEGIES[name](FREE, job) == pytest.approx(1 - lost, abs=1e-9)


def test_with_one_slice_there_is_nothing_to_resize_and_no_other_memory():
    job = Job(1, 3, 36_000.0, 600.0)
    assert goodput_resize(Costs(), job) == goodput_wait(Costs(), job)
    assert goodput_wait(Costs(disk=60.0), job) > goodput_wait(Costs(disk=6000.0), job)
    assert goodput_wait(Costs(), replace(job, checkpoint_every=0)) == 0.0


def test_where_no_fewer_slices_can_train_resizing_is_waiting():
    job = Job(4, 12, 1e6, 600.0, min_slices=4)
    assert goodput_resize(Costs(), job) == pytest.approx(goodput_wait(Costs(), job), abs=1e-4)
    assert break_even(Costs(), job) == math.inf


def test_a_job_that_always_lacks_a_slice_does_nothing_but_overflow_nothing():
    job = Job(1000, 4000, 1e3, 1e5)
    assert goodput_wait(Costs(), job) == goodput_restart(Costs(), job) == 0.0
    assert 0 <= goodput_resize(Costs(), job) < 0.01


def test_the_last_step_is_never_lost_with_lookback_live():
    host = Job(4, 12, 3600.0, 600.0, snapshot_every=50)
    live = replace(host, lookback="live")
    for goodput in (goodput_wait, goodput_resize):
        assert goodput(Costs(), live) > goodput(Costs(), host) + 0.01


def test_a_checkpoint_is_a_snapshot_too():
    seldom = Job(4, 12, 3600.0, 600.0, snapshot_every=80, checkpoint_every=40)
    often = replace(seldom, snapshot_every=40)
    assert goodput_resize(FREE, seldom) == pytest.approx(goodput_resize(FREE, often))
    assert goodput_wait(FREE, replace(seldom, checkpoint_every=0)) < goodput_wait(FREE, often)


def test_a_step_is_as_slow_as_its_busiest_slice():
    job = Job(8, 24, 1e6, 600.0, min_slices=3)
    assert [job.speed(s) for s in (8, 7, 6, 4, 3, 2)] == [1, 3 / 4, 3 / 4, 1 / 2, 3 / 8, 0]
    assert Job(8, 12, 1e6, 600.0).speed(7) == 1.0


jobs = st.builds(
    Job,
    st.integers(1, 40),
    st.integers(40, 100),
    st.floats(1e3, 1e7),
    st.floats(0, 1e4),
    snapshot_every=st.integers(1, 100),
    checkpoint_every=st.integers(0, 1000),
    lookback=st.sampled_from(["live", "host"]),
)


@settings(max_examples=40)
@given(jobs)
def test_goodput_is_a_share_and_a_restart_is_never_better_than_a_wait(job):
    costs = Costs()
    found = {name: goodput(costs, job) for name, goodput in STRATEGIES.items()}
    assert all(0 <= share <= 1 for share in found.values())
    # A restart goes back further and costs more, but for steps between snapshots that no loss asks.
    if job.snapshot_every <= job.checkpoint_every or job.checkpoint_every == 0:
        assert found["restart"] <= found["wait"] + 1e-9
    rarer = replace(job, mtbf=2 * job.mtbf)
    assert all(f(costs, rarer) >= found[name] - 1e-9 for name, f in STRATEGIES.items())


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Costs(step=0.0), "costs.step=0: use the seconds of a step"),
        (lambda: Costs(move=-1.0), "costs.move=-1.0: use 0 or more"),
        (lambda: Costs(write=math.inf), "costs.write=inf: use 0 or more, and a finite number"),
        (lambda: Job(0, 1, 1.0, 1.0), "job.num_slices=0: use 1 or more"),
        (lambda: Job(4, 3, 1.0, 1.0), "job.num_replicas=3: use 4 or more"),
        (lambda: Job(4, 4, 0.0, 1.0), "job.mtbf=0.0: use seconds above 0"),
        (lambda: Job(4, 4, 1.0, math.nan), "job.repair=nan: use 0 or more"),
        (lambda: Job(4, 4, 1.0, 1.0, min_slices=5), "job.min_slices=5: use at most 4"),
    ],
)
def test_bad_costs_and_jobs_are_refused_with_the_remedy(make, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)) as refused:
        make()
    assert "\n" not in str(refused.value)


# --- against the pure machine ---------------------------------------------------------------------

SEEDS, FAILURES = range(5), 60


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("costs", "job"),
    [
        (Costs(write=1500.0), Job(4, 12, 36_000.0, 600.0)),
        (Costs(step=3.0, move=8.0, compile=20.0), Job(8, 24, 72_000.0, 900.0, lookback="live")),
        (Costs(disk=20.0), Job(1, 1, 20_000.0, 300.0, checkpoint_every=200)),
        (Costs(snapshot=20.0, compile=30.0), Job(4, 12, 36_000.0, 600.0, snapshot_every=200)),
        (
            Costs(),
            Job(64, 256, 360_000.0, 600.0, min_slices=60, snapshot_every=200, checkpoint_every=200),
        ),
    ],
    ids=["four", "eight-live", "one", "slow-snapshots", "sixty-four"],
)
def test_the_closed_form_is_what_the_machine_does_on_average(name, costs, job):
    """Within four standard errors of the mean of the seeds, which are fixed (with five of them,
    chance exceeds that once in sixty draws), and 0.3 points for what the closed forms neglect."""
    histories = [run_history(costs, job, name, random.Random(s), FAILURES) for s in SEEDS]
    found = [h.goodput for h in histories]
    error = stdev(found) / math.sqrt(len(found))
    assert error < 0.02, "the histories are too short to say anything"
    assert STRATEGIES[name](costs, job) == pytest.approx(mean(found), abs=4 * error + 0.003)
    assert all(h.failures >= FAILURES and h.interruptions <= h.failures for h in histories)


class FixedRepair(random.Random):
    """Draws as ever, but each repair takes as long as the last."""

    repair = 1.0

    def expovariate(self, lambd: float = 1.0) -> float:
        return self.repair if lambd == 1 / self.repair else super().expovariate(lambd)


@pytest.mark.parametrize(
    ("costs", "job"),
    [
        (Costs(notice=10.0, move=20.0, compile=60.0), Job(4, 12, 8e4, 1.0)),
        (Costs(compile=30.0), Job(16, 64, 3.2e5, 1.0)),
        (Costs(notice=10.0, move=20.0), Job(4, 12, 8e4, 1.0, probe_every=30.0, stable_probes=8)),
    ],
)
def test_at_the_break_even_waiting_loses_as_much_as_resizing(costs, job):
    def lost(strategy: str, repair: float) -> float:
        """Seconds that one failure costs, as the machine decides."""
        rng = FixedRepair(1)
        rng.repair = repair
        ran = run_history(costs, replace(job, repair=repair), strategy, rng, 80)
        undisturbed = costs.step / (costs.step + costs.snapshot / job.snapshot_every)
        return ran.seconds * (1 - ran.goodput / undisturbed) / ran.interruptions

    even = break_even(costs, job)
    assert lost("wait", even) == pytest.approx(lost("resize", even), rel=0.15)
    assert lost("wait", even / 2) < 0.9 * lost("resize", even / 2)
    assert lost("wait", even * 2) > 1.1 * lost("resize", even * 2)


def test_the_same_draws_give_the_same_history():
    job = Job(3, 6, 5000.0, 100.0)
    first, again, other = (
        run_history(Costs(), job, "resize", random.Random(seed), 40) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.steps > 100 and first.transitions < first.steps


def trained(job: Job) -> Training:
    """A job that has lost slice 1, and goes on from the seed."""
    policy, every = policy_of(job, "resize"), frozenset(range(job.num_slices))
    up = Started(
        at=0,
        num_steps=10**12,
        slices=every,
        up=every,
        sources=(Source(Tier.SEED, 0),),
        durable=False,
    )
    state, _ = transition(Starting(), up, policy)
    state, _ = transition(state, Prepared(at=1, epoch=1, step=0), policy)
    state, _ = transition(state, SlicesLost(at=2, epoch=1, slices=frozenset({1})), policy)
    state, _ = transition(state, Prepared(at=3, epoch=2, step=0), policy)
    return state


def stepped(state: Training, job: Job) -> Training:
    """One step further, event by event."""
    policy, step, epoch = policy_of(job, "resize"), state.committed + 1, state.ledger.epoch
    state, _ = transition(state, Dispatched(at=4, epoch=epoch, step=step), policy)
    state, _ = transition(state, Committed(at=4, epoch=epoch, step=step), policy)
    if state.copying is not None:
        published = Snapshotted(at=4, epoch=epoch, step=step, holders=state.mesh)
        state, _ = transition(state, published, policy)
    assert state.asked == RunStep(epoch, step + 1)
    return state


def test_a_jump_ends_where_its_steps_would_have_led():
    job = Job(3, 6, 1e6, 1.0, snapshot_every=4, checkpoint_every=0)
    start = state = trained(job)
    for step in range(1, 30):
        state = stepped(state, job)
        if step % 4:  # the snapshot of before is let go when a step is committed after the next
            assert jump(start, job, step) == state
    middle = jump(start, job, 13)
    assert jump(middle, job, 29) == state


def test_a_jump_over_checkpoints_forgives_a_loss_for_each():
    job = Job(3, 6, 1e6, 1.0, snapshot_every=4, checkpoint_every=8)
    start = trained(job)
    assert [f.slice_id for f in start.ledger.flaps] == [1]
    assert jump(start, job, 7).ledger.flaps == start.ledger.flaps
    assert jump(start, job, 9).ledger.flaps == ()


def test_steps_cost_their_snapshots_and_stalls_on_the_way():
    costs = Costs(step=2.0, snapshot=0.5, stall=10.0)
    job = Job(4, 12, 1e6, 1.0, snapshot_every=4, checkpoint_every=6)
    assert elapsed(costs, job, 4, 0, 3) == 6.0
    assert elapsed(costs, job, 4, 3, 3) == 6.0 + 2 * 0.5 + 10.0  # steps 4 and 6
    assert elapsed(costs, job, 4, 11, 1) == 2.0 + 0.5 + 10.0  # step 12 is saved once
    assert elapsed(costs, job, 2, 0, 3) == 12.0


def test_best_intervals_are_of_the_failures_they_are_for():
    costs = Costs(step=1.0, snapshot=0.5, stall=1.5, write=30.0)
    job = Job(4, 12, 4e4, 600.0)
    best = best_intervals(costs, job, job_mtbf=1e6)
    assert best.snapshot_every == round(daly(0.5, 1e4)) == 100
    assert best.checkpoint_every == round(daly(2.0, 1e6)) == 1999
    assert best_intervals(costs, job, job_mtbf=1.0).checkpoint_every == 30, "it takes that long"
    live = best_intervals(costs, replace(job, lookback="live"), job_mtbf=1e6)
    assert live.snapshot_every == live.checkpoint_every == 1999
    assert goodput_resize(costs, best) > goodput_resize(costs, job)


# --- where the time went --------------------------------------------------------------------------


def rows_of(schedule: Schedule) -> list[dict]:
    return [json.loads(line) for line in simulate(schedule).log.splitlines()]


def test_time_goes_to_what_the_run_did():
    policy = Policy(snapshot_every=5, checkpoint_every=0, inflight=1, probe_every=1000.0)
    loss = Fault(Phase.SYNC, Kind.LOSS, visit=1, slices=(1,), returns=None, after=7)
    found = spent(rows_of(Schedule(3, 12, policy, (loss,), durable=False)))
    seconds = found.seconds
    # A ghost's step takes 1 s, its compile 2 s, its restore 0.8 s and its snapshot 0.2 s.
    assert seconds["useful"] == pytest.approx(12.0, abs=0.11), "and what probes take"
    assert seconds["redone"] == pytest.approx(2.0, abs=0.06), (
        "steps 6 and 7, since the snapshot of step 5"
    )
    assert seconds["compiling"] + seconds["restoring"] == pytest.approx(5.6, abs=0.11)
    assert seconds["snapshots"] + seconds["finishing"] == pytest.approx(0.75), "each asks once"
    assert seconds["waiting"] == seconds["stopped"] == seconds["starting"] == 0.0
    assert found.goodput == seconds["useful"] / found.total


@pytest.mark.parametrize("inflight", [1, 2, 3])
def test_a_snapshot_takes_only_the_time_that_it_is_waited_for(inflight):
    """And not that of the steps which run between its beginning and its end."""
    policy = Policy(snapshot_every=4, checkpoint_every=0, inflight=inflight)
    seconds = spent(rows_of(Schedule(2, 14, policy, durable=False))).seconds
    assert seconds["useful"] == pytest.approx(14.0)
    taken = 4 * (SNAPSHOT_SECONDS + PROBE_SECONDS)  # of steps 4, 8, 12 and 14; each asks once
    assert seconds["snapshots"] == pytest.approx(taken)


def test_a_wait_and_a_stop_between_processes_are_told_apart():
    loss = Fault(Phase.SYNC, Kind.LOSS, visit=1, slices=(1,), returns=20.0, after=3)
    rows = rows_of(Schedule(2, 9, Policy(min_slices=2, snapshot_every=2), (loss,)))
    assert 18.0 < spent(rows).seconds["waiting"] < 23.0

    stop = Fault(Phase.SYNC, Kind.PREEMPTION, visit=1, after=3)
    rows = rows_of(Schedule(2, 9, Policy(snapshot_every=2), (stop,)))
    begins = [n for n, row in enumerate(rows) if row["event"]["type"] == "Started"]
    assert len(begins) == 2
    for row in rows[begins[1] :]:
        row["at"] += 50.0
    found = spent(rows)
    assert found.seconds["stopped"] == pytest.approx(50.0, abs=0.1) and found.unknown_stops == 0
    for row in rows[begins[1] :]:
        row["at"] -= rows[begins[1] - 1]["at"]  # another process has another clock
    rows[begins[1]]["event"]["pid"] = 4711
    found = spent(rows)
    assert found.seconds["stopped"] == 0.0 and found.unknown_stops == 1
    assert found.seconds["starting"] > 49.0


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_the_buckets_add_up_to_the_time_of_any_run(first):
    for seed in range(first, first + 20):
        rows = rows_of(replace(random_schedule(seed, 4), on_disk=()))
        found = spent(rows)
        assert found.total == pytest.approx(rows[-1]["at"], abs=1e-6)
        assert set(found.seconds) == set(BUCKETS) and min(found.seconds.values()) > -1e-9
        steps = {r["event"]["step"] for r in rows if r["event"]["type"] == "Committed"}
        assert found.seconds["useful"] >= 0.99 * len(steps), "each takes a second, or more"


def test_what_is_no_event_log_is_refused():
    with pytest.raises(ValueError, match=r"row 0 \(line 1\) is not of an event log"):
        spent([{"step": 1, "loss": 0.5}])
    assert spent([]).total == 0.0 == spent([]).goodput
