"""Properties of recovery: what holds for any schedule, any policy and any fault script.

The examples are the same in every run (tests/conftest.py); `elastix simulate` and the soak test at
the end draw others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from elastix.faults import Hang, Lose, Return, validate
from elastix.testing import CELLS, Fault, Kind, Phase, assert_recovers, simulate, strategies
from tests.recipes import net

LONG = strategies.schedules(max_slices=8, min_faults=15, max_faults=40)
NET = replace(net.recipe(), num_steps=12)
REPRODUCIBLE = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def violation(schedule):
    """What a simulated run violates, or None."""
    return simulate(schedule).violation


@settings(REPRODUCIBLE, max_examples=200)
@given(strategies.schedules(max_slices=6))
def test_no_schedule_violates_an_invariant(schedule):
    assert violation(schedule) is None


@settings(REPRODUCIBLE, max_examples=80)
@given(LONG)
def test_no_long_history_violates_an_invariant(schedule):
    assert violation(schedule) is None


@pytest.mark.soak
@settings(
    max_examples=5000,
    derandomize=False,
    suppress_health_check=REPRODUCIBLE.suppress_health_check,
)
@given(strategies.schedules(max_slices=6) | LONG)
def test_no_other_schedule_violates_an_invariant(schedule):
    assert violation(schedule) is None


@settings(REPRODUCIBLE, max_examples=6)
@given(policy=strategies.policies(2), faults=strategies.faults(2, 12, min_slices=2))
def test_no_fault_script_and_no_policy_changes_what_is_learned(policy, faults):
    recipe = replace(NET, policy=policy)
    assert_recovers(recipe, faults, num_slices=2, devices_per_slice=1)


@settings(REPRODUCIBLE, max_examples=200)
@given(st.data())
def test_fault_scripts_are_valid_and_leave_enough_slices(data):
    num_slices, num_steps = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 30))
    min_slices = data.draw(st.integers(1, num_slices))
    script = data.draw(strategies.faults(num_slices, num_steps, min_slices=min_slices))
    validate(script, range(num_slices), num_steps)
    last = {fault.slice: fault for fault in script}
    assert script and num_slices - sum(not isinstance(f, Return) for f in last.values()) >= (
        min_slices
    )
    assert [f.step for f in script] == sorted(f.step for f in script)


def smallest(strategy, condition=lambda _: True):
    return find(strategy, condition, settings=settings(REPRODUCIBLE, database=None))


def test_strategies_shrink_to_what_a_person_would_write():
    assert smallest(strategies.faults(4, 20)) == (Lose(0, step=1),)
    hung = smallest(strategies.faults(4, 20), lambda script: Hang in map(type, script))
    assert hung == (Hang(0, step=1),)
    assert smallest(strategies.schedules()).faults == ()
    least = smallest(strategies.schedules(), lambda s: s.faults and s.num_slices > 1)
    assert least.faults == (Fault(Phase.DISPATCH, Kind.LOSS, slices=(0,)),)
    assert (least.num_slices, least.num_steps, least.policy.lookback) == (2, 1, "host")


def test_nearly_every_fault_in_every_phase_is_drawn_and_histories_are_long():
    cells, lengths, policies = set(), set(), set()

    @settings(REPRODUCIBLE, max_examples=150)
    @given(LONG)
    def draw(schedule):
        cells.update((fault.phase, fault.kind) for fault in schedule.faults)
        lengths.add(len(schedule.faults))
        policies.add(schedule.policy)

    draw()
    assert cells <= set(CELLS) and len(cells) > 0.9 * len(CELLS)
    assert max(lengths) > 30 and len(policies) > 20
    assert {p.lookback for p in policies} == {"live", "host"}
    assert {p.inflight for p in policies} == {1, 2, strategies.INFLIGHT}
