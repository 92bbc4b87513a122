"""Every history of small worlds: nothing stalls, nothing is lost, and an end can be reached."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastix.machine import (
    Done,
    Finishing,
    Policy,
    Prepare,
    Restoring,
    Source,
    Tier,
    Woke,
    transition,
)
from tests.machine_world import begin, explore

SMALL = Policy(snapshot_every=2, checkpoint_every=2, stable_probes=1, inflight=2)
WORLDS = {
    "resize": (SMALL, 3, 2),
    "pause": (replace(SMALL, min_slices=2), 2, 2),
    "live": (replace(SMALL, lookback="live"), 3, 1),
    "standby": (replace(SMALL, max_slices=2), 3, 1),
    "patience": (replace(SMALL, patience=1.0, inflight=1), 2, 2),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_history_of_a_small_world_ends_well(name):
    policy, num_slices, faults = WORLDS[name]
    seen = explore(begin(policy, num_slices, num_steps=3, faults=faults))
    print(f"{name}: {seen.worlds} worlds, {seen.transitions} transitions")
    assert seen.ends >= {"done", "preempted"}
    assert seen.transitions > 2000


def forgetful(state, event, policy):
    """Forgets its host snapshots when it restores from one."""
    after, effects = transition(state, event, policy)
    if isinstance(after, Restoring) and after.source.tier is Tier.HOST:
        seed = Source(Tier.SEED, 0)
        after = replace(after, source=seed, ledger=replace(after.ledger, sources=(seed,)))
        effects = tuple(replace(e, source=seed) for e in effects if isinstance(e, Prepare))
    return after, effects


def lazy(state, event, policy):
    """Goes back to sleep when it wakes, without asking to be woken."""
    after, effects = transition(state, event, policy)
    return after, () if isinstance(event, Woke) else effects


def hasty(state, event, policy):
    """Reports the last step as done before it is on disk."""
    after, effects = transition(state, event, policy)
    if isinstance(after, Finishing):
        return Done(after.why, after.train_state, after.iterator_state), ()
    return after, effects


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (forgetful, "a good snapshot was dropped"),
        (lazy, "stalled"),
        (hasty, "done, and not on disk"),
    ],
)
def test_the_search_finds_a_defective_machine(rules, message):
    policy = replace(SMALL, min_slices=2) if rules is lazy else SMALL
    world = replace(begin(policy, 2, num_steps=3, faults=1), rules=rules)
    with pytest.raises(AssertionError, match=message):
        explore(world)
