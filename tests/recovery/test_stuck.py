"""A slice that answers probes and finishes no step: found, left out, and taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastix import Lose, Return, SimulatedBackend, train
from elastix.backends.simulated import VirtualClock
from elastix.faults import Hang
from tests.recipes.net import recipe

NET = recipe()


def run(*faults, recipe=NET, **options):
    backend = SimulatedBackend(4, 2, clock=VirtualClock(), **options)
    return train(recipe, backend=backend, faults=faults)


@pytest.fixture(scope="module")
def undisturbed():
    return run()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_slice_that_hangs_is_found_by_trial_and_left_out(undisturbed, victim):
    summary = run(Hang(victim, step=12))
    assert summary.outcome == "done", summary.reason
    assert summary.state_sha256 == undisturbed.state_sha256
    (recovery,) = summary.recoveries
    assert recovery["lost"] == [victim] and victim not in recovery["slices"]
    step = NET.policy.step_deadline
    assert summary.seconds == pytest.approx(3 * step, rel=0.01), "two tries and the trial"


def test_a_hang_that_ends_is_survived_by_all(undisturbed):
    """It is over before the deadline has passed twice: the retry finishes."""
    policy = replace(NET.policy, deadline=300.0)
    summary = run(Hang(1, step=12), Return(1, time=15.0), recipe=replace(NET, policy=policy))
    assert summary.outcome == "done" and summary.state_sha256 == undisturbed.state_sha256


def test_a_known_loss_interrupts_the_wait(undisturbed):
    summary = run(Hang(1, step=12), Lose(1, time=5.0))
    assert summary.outcome == "done" and summary.state_sha256 == undisturbed.state_sha256
    assert summary.seconds < NET.policy.step_deadline
    assert summary.recoveries[0]["lost"] == [1]


def test_a_slice_that_hung_is_taken_back_when_it_returns(undisturbed):
    summary = run(Hang(3, step=12), Return(3, step=20))
    assert summary.outcome == "done" and summary.state_sha256 == undisturbed.state_sha256
    assert summary.unfired_faults == []
