"""Every history of small worlds: nothing stalls, nothing is lost, and an end can be reached."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from elastix.machine import (
    Committed,
    Done,
    Failed,
    Finishing,
    Policy,
    PreemptionNoticed,
    Prepare,
    Prepared,
    Probed,
    Restoring,
    RunStep,
    Save,
    SlicesLost,
    Snapshotted,
    Source,
    Tier,
    Training,
    Waiting,
    WakeAt,
    Woke,
    transition,
)
from tests.test_machine import POLICY, on, training
from tests.world_search import Explored, explore, missing_rows
from tests.world_values import BIT_FLIPS, FAULTS, OUTSIDE_THE_CONTRACT, Setting

SMALL = Policy(snapshot_every=2, checkpoint_every=2, stable_probes=1, inflight=1, max_losses=2)
PAUSE = replace(SMALL, min_slices=2)
CLOCK = replace(SMALL, checkpoint_every=0, checkpoint_seconds=1.0)
"""Saves are due by time: a second passes, or does not, before anything that happens."""

AT_SLICES = frozenset({"lose", "hang", "blame", "notice"})

# The policy, slices, steps and faults; then the kinds of faults, if not all of them. Every fault
# may strike at every point. Wherever `hang` or an error is allowed, each operation may have it.
WORLDS = {
    "three faults": Setting(
        SMALL, 4, 2, 3, frozenset({"lose", "hang", "silent", "error", "disk full"})
    ),
    "every kind": Setting(SMALL, 2, 2, 2),
    "in flight": Setting(replace(SMALL, inflight=2), 2, 3, 2, AT_SLICES | {"data"}),
    "each step": Setting(
        replace(SMALL, inflight=2, snapshot_every=1), 2, 3, 2, AT_SLICES - {"notice"}
    ),
    "pause": Setting(PAUSE, 2, 2, 2),
    "asked to stop": Setting(PAUSE, 2, 2, 3, frozenset({"lose", "preempt", "controller"})),
    "live": Setting(replace(SMALL, lookback="live", inflight=2), 3, 3, 1),
    "standby": Setting(replace(SMALL, max_slices=2), 3, 2, 1),
    "patience": Setting(replace(SMALL, patience=1.0), 2, 2, 2, FAULTS - {"notice"}),
    "evaluations": Setting(
        replace(SMALL, eval_every=1), 2, 2, 2, AT_SLICES | {"data", "rot", "preempt"}
    ),
    "resumed": Setting(SMALL, 2, 3, 3, frozenset({"lose", "rot", "preempt"}), on_disk=(1, 2)),
    "nothing on disk": Setting(SMALL, 2, 2, 2, FAULTS - {"rot", "disk full"}, durable=False),
    "one checkpoint": Setting(
        replace(SMALL, checkpoint_every=1, snapshot_every=1, keep_checkpoints=1),
        *(2, 3, 2, frozenset({"lose", "preempt", "rot", "disk full"})),
    ),
    "by time": Setting(CLOCK, 2, 2, 2, frozenset({"lose", "disk full"})),
    "by time and steps": Setting(
        replace(CLOCK, snapshot_every=1, checkpoint_every=2),
        *(2, 3, 1, frozenset({"lose", "disk full", "preempt", "notice"})),
    ),
    # Which slice is wrong is known where most agree: of three or more.
    "wrong bits": Setting(
        replace(SMALL, eval_every=1),
        *(3, 2, 2, BIT_FLIPS | {"lose", "preempt", "hang", "rot"}),
    ),
    "wrong bits, live": Setting(
        replace(SMALL, eval_every=1, lookback="live"),
        *(3, 2, 2, BIT_FLIPS | {"lose", "notice"}),
    ),
    "wrong bits of four": Setting(SMALL, 4, 2, 2, BIT_FLIPS | {"lose", "notice"}),
    # No backend raises a loss from a probe, which says instead that a slice is down.
    "a probe that raises": Setting(
        replace(PAUSE, snapshot_every=1, checkpoint_every=0),
        *(2, 2, 2, OUTSIDE_THE_CONTRACT | {"lose", "blame", "preempt"}),
    ),
}


@cache
def explored(name: str) -> Explored:
    return explore(WORLDS[name])


@pytest.mark.parametrize("name", WORLDS)
def test_every_history_of_a_small_world_ends_well(name):
    seen = explored(name)
    assert "done" in seen.ends
    if "preempt" in WORLDS[name].kinds:
        assert "preempted" in seen.ends


def test_the_small_worlds_use_every_row_of_the_table():
    seen = {name: explored(name) for name in WORLDS}
    for name, one in seen.items():
        setting = WORLDS[name]
        print(f"{name}: {setting.num_slices} slices, {setting.faults} faults, {one}")
    transitions = sum(one.transitions for one in seen.values())
    seconds = sum(one.seconds for one in seen.values())
    print(f"all: {transitions} transitions in {seconds:.0f} s")
    assert missing_rows(*seen.values()) == set()
    assert transitions >= 1_000_000


LARGE = {
    "three faults": Setting(SMALL, 4, 2, 3, FAULTS - {"lose all"}),
    "four slices": Setting(SMALL, 4, 2, 2),
    "three slices": Setting(SMALL, 3, 2, 2),
    "five slices": Setting(SMALL, 5, 2, 2),
    "eight slices": Setting(
        SMALL, 8, 2, 3, frozenset({"lose", "hang", "silent", "error", "preempt"})
    ),
    "in flight": Setting(replace(SMALL, inflight=2), 3, 3, 2, FAULTS - {"lose all", "notice"}),
    "each step": Setting(replace(SMALL, inflight=2, snapshot_every=1), 2, 4, 2),
    "evaluations": Setting(replace(SMALL, eval_every=1), 2, 2, 2),
    "by time, noticed": Setting(CLOCK, 2, 2, 2, frozenset({"lose", "notice", "disk full"})),
    "by time": Setting(CLOCK, 2, 3, 2, frozenset({"lose", "notice", "preempt", "disk full"})),
    "by time, pause": Setting(
        replace(CLOCK, min_slices=2), 2, 3, 2, frozenset({"lose", "notice", "hang"})
    ),
    "wrong bits": Setting(replace(SMALL, eval_every=1), 3, 2, 2, BIT_FLIPS | FAULTS),
    "wrong bits, live": Setting(
        replace(SMALL, eval_every=1, lookback="live"), 3, 2, 3, BIT_FLIPS | {"lose", "notice"}
    ),
    "wrong bits, patience": Setting(
        replace(SMALL, patience=1.0), 4, 2, 2, BIT_FLIPS | {"lose", "notice", "silent"}
    ),
    "wrong bits, standby": Setting(
        replace(SMALL, max_slices=3), 4, 3, 2, BIT_FLIPS | {"lose", "notice"}
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", LARGE)
def test_every_history_of_a_larger_world_ends_well(name):
    seen = explore(LARGE[name])
    print(f"{name}: {seen}")
    assert "done" in seen.ends


# --- no slice is special ------------------------------------------------------------------------


def test_no_slice_is_special():
    """With every slice told apart, and with those alike taken for one, the same can happen; and
    whatever the slices are called, the machine answers the same, but for which of several equal
    slices it picks (`world_checks` compares)."""
    setting = Setting(SMALL, 3, 2, 2, frozenset({"lose", "notice", "silent"}))
    numbered = explore(replace(setting, reduced=False))
    reduced = explore(replace(setting, thorough=True))
    print(f"numbered: {numbered}\nreduced: {reduced}")
    assert (numbered.edges, numbered.ends) == (reduced.edges, reduced.ends)
    assert numbered.worlds > 3 * reduced.worlds


# --- what the searches have found -----------------------------------------------------------------


def test_the_last_save_begins_though_the_one_before_it_is_lost_with_a_slice_that_was_left():
    policy = replace(SMALL, snapshot_every=1, checkpoint_every=1)
    explore(Setting(policy, 2, 3, 2, frozenset({"lose", "notice"})))


def test_a_save_before_slices_are_left_counts_as_the_last_by_time():
    """Found by `by time` of the larger worlds: nothing runs then, and the next save was begun as
    soon as something did."""
    policy = replace(POLICY, min_slices=4, checkpoint_seconds=600.0)
    state, effects = on(
        training(40), PreemptionNoticed, policy, at=99.0, slices=frozenset({2}), until=500.0
    )
    assert isinstance(state, Waiting) and any(isinstance(effect, Save) for effect in effects)
    assert state.ledger.saved_at == 99.0


# --- defective machines ---------------------------------------------------------------------------


def forgetful(state, event, policy):
    """Forgets its host snapshots when it restores from one."""
    after, effects = transition(state, event, policy)
    if isinstance(after, Restoring) and after.source.tier is Tier.HOST:
        seed = Source(Tier.SEED, 0)
        after = replace(after, source=seed, ledger=replace(after.ledger, sources=(seed,)))
        effects = tuple(replace(e, source=seed) for e in effects if isinstance(e, Prepare))
    return after, effects


def timid(state, event, policy):
    """Restores from the seed, though it has better."""
    after, effects = transition(state, event, policy)
    if isinstance(after, Restoring) and any(isinstance(e, Prepare) for e in effects):
        seed = Source(Tier.SEED, 0)
        after = replace(after, source=seed)
        effects = tuple(replace(e, source=seed) for e in effects if isinstance(e, Prepare))
    return after, effects


def lazy(state, event, policy):
    """Goes back to sleep when it wakes, without asking to be woken."""
    after, effects = transition(state, event, policy)
    return after, () if isinstance(event, Woke) else effects


def patient(state, event, policy):
    """Waits for ever."""
    if isinstance(state, Waiting) and isinstance(event, Probed):
        return state, (WakeAt(state.ledger.epoch, event.at),)
    return transition(state, event, policy)


def hasty(state, event, policy):
    """Reports the last step as done before it is on disk."""
    after, effects = transition(state, event, policy)
    if isinstance(after, Finishing):
        return Done(after.why, after.train_state, after.iterator_state), ()
    return after, effects


def skipping(state, event, policy):
    """Takes what was restored for one step more than it is."""
    after, effects = transition(state, event, policy)
    if isinstance(event, Prepared) and isinstance(after, Training) and after.asked:
        step = after.committed + 1
        name = replace(after.train_state, step=step)
        asked = replace(after.asked, step=step + 1)
        after = replace(after, committed=step, dispatched=step, iterator_state=step)
        after = replace(after, train_state=name, asked=asked)
        effects = (asked,)
    return after, effects


def parted(state, event, policy):
    """Moves the data on, and not the model."""
    after, effects = transition(state, event, policy)
    if isinstance(event, Committed) and isinstance(after, Training):
        after = replace(after, iterator_state=after.iterator_state + 1)
    return after, effects


def deaf(state, event, policy):
    """Goes on with a step on a mesh of which a slice is lost."""
    if isinstance(state, Training) and isinstance(event, SlicesLost):
        return replace(state, asked=None), (RunStep(state.ledger.epoch, state.dispatched + 1),)
    return transition(state, event, policy)


def meagre(state, event, policy):
    """Trains on one slice, whatever the policy says."""
    return transition(state, event, replace(policy, min_slices=1))


def generous(state, event, policy):
    """Forgets how often it has begun again."""
    after, effects = transition(state, event, policy)
    if isinstance(after, Restoring):
        after = replace(after, ledger=replace(after.ledger, losses=0))
    return after, effects


def snobbish(state, event, policy):
    """Does not run without slice 0."""
    if isinstance(event, SlicesLost) and 0 in event.slices:
        return Failed("slice 0 is gone"), ()
    return transition(state, event, policy)


def silent(state, event, policy):
    """Fails, and does not say why."""
    after, effects = transition(state, event, policy)
    return (Failed("") if isinstance(after, Failed) else after), effects


def forgiving(state, event, policy):
    """Takes a slice back whose bits were wrong, as soon as it answers."""
    after, effects = transition(state, event, policy)
    if isinstance(event, Probed) and isinstance(after, Training | Restoring):
        back = after.ledger.corrupt & event.up
        after = replace(after, ledger=replace(after.ledger, up=after.ledger.up | back))
    return after, effects


def trusting(state, event, policy):
    """Takes a slice with wrong bits for one that was lost."""
    if isinstance(event, SlicesLost) and event.corrupt:
        event = replace(event, corrupt=False)
    return transition(state, event, policy)


def boastful(state, event, policy):
    """Counts as evaluated what wrong bits gave."""
    after, effects = transition(state, event, policy)
    if isinstance(event, SlicesLost) and event.corrupt and isinstance(after, Restoring):
        ledger = replace(after.ledger, evaluated=state.ledger.evaluated)
        after = replace(after, ledger=ledger)
    return after, effects


BITS = replace(SMALL, eval_every=1, lookback="live")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (forgiving, "a corrupt slice is used again"),
        (trusting, "wrong bits are kept"),
        (boastful, "what was taken back counts as evaluated"),
    ],
)
def test_the_search_finds_a_machine_that_trusts_wrong_bits(rules, message):
    kinds = BIT_FLIPS | {"lose", "silent"}
    with pytest.raises(AssertionError, match=f"{message}.*\\nbegin"):
        explore(Setting(BITS, 3, 2, 2, kinds, rules=rules))


def hurried(state, event, policy):
    """Forgets when it began its last save."""
    after, effects = transition(state, event, policy)
    if any(isinstance(effect, Save) for effect in effects) and isinstance(after, Training):
        after = replace(after, ledger=replace(after.ledger, saved_at=state.ledger.saved_at))
    return after, effects


def ahead(state, event, policy):
    """Notes a save for a second later than it began."""
    after, effects = transition(state, event, policy)
    if any(isinstance(effect, Save) for effect in effects) and isinstance(after, Training):
        after = replace(after, ledger=replace(after.ledger, saved_at=event.at + 1))
    return after, effects


def restless(state, event, policy):
    """Saves at every snapshot, whatever the time."""
    return transition(state, event, replace(policy, checkpoint_every=1))


def slow(state, event, policy):
    """Saves when ten times as long has passed."""
    return transition(state, event, replace(policy, checkpoint_seconds=10.0))


def doubling(state, event, policy):
    """Begins a save though another is under way."""
    if isinstance(event, Snapshotted) and isinstance(state, Training) and state.ledger.saving:
        state = replace(state, ledger=replace(state.ledger, saving=None, save_owed=True))
    return transition(state, event, policy)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (hurried, "when it was begun is wrong"),
        (ahead, "when it was begun is wrong"),
        (restless, "a save before its time"),
        (slow, "a save is due, and"),
        (doubling, "two saves at once"),
    ],
)
def test_the_search_finds_a_machine_with_a_bad_clock(rules, message):
    policy = replace(CLOCK, snapshot_every=1)
    with pytest.raises(AssertionError, match=f"{message}.*\\nbegin"):
        explore(Setting(policy, 2, 3, 1, frozenset({"lose"}), rules=rules))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (forgetful, "a good snapshot was dropped"),
        (timid, "could be restored"),
        (lazy, "stalled"),
        (patient, "no end can be reached"),
        (hasty, "and not on disk"),
        (skipping, "runs on a train state that was freed"),
        (parted, "one step"),
        (deaf, "known to be gone"),
        (meagre, "fewer than min_slices"),
        (generous, "budgets fall"),
        (snobbish, "a slice is special"),
        (silent, "says not why"),
    ],
)
def test_the_search_finds_a_defective_machine(rules, message):
    policy = PAUSE if rules in (lazy, patient, meagre) else SMALL
    setting = Setting(policy, 2, 3, 1, FAULTS - {"notice"}, rules=rules, thorough=True)
    with pytest.raises(AssertionError, match=f"{message}.*\\nbegin"):
        explore(setting)
