"""The ledger by example: each function of it alone, at its edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastix.machine import Flap, Leaving, Probed, Save, Saving, Source, Stable, Tier
from elastix.machine.ledger import (
    below,
    checkpoint_due,
    choose_mesh,
    distrust,
    evaluation_due,
    forgive,
    health,
    mark_flaps,
    most_slices,
    on_disk,
    probes_needed,
    progressed,
    save,
    save_at,
    save_overdue,
    snapshot_due,
    steadier,
)
from tests.test_machine import ALL, EPOCH, POLICY, SEED, disk, host, ledger, slices

LIVE = Source(Tier.LIVE, 45, EPOCH, ALL)
NEVER = replace(POLICY, checkpoint_every=0, snapshot_every=1000)

# --- losses ---------------------------------------------------------------------------------------


def test_each_loss_is_held_against_its_slice_and_a_checkpoint_takes_one_off():
    book = mark_flaps(ledger(flaps=(Flap(3, 2),)), slices(1, 3))
    assert book.flaps == (Flap(1, 1), Flap(3, 3))
    assert forgive(book).flaps == (Flap(3, 2),)
    assert forgive(ledger(flaps=(Flap(2, 1), Flap(3, 1)))).flaps == ()


def test_a_slice_that_was_never_lost_needs_as_many_probes_as_the_policy_says():
    assert probes_needed(ledger(), 1, replace(POLICY, stable_probes=3)) == 3


def test_the_first_moment_below_is_noted_once():
    policy = replace(POLICY, min_slices=2)
    enough, few = ledger(up=slices(0, 1)), ledger(up=slices(0))
    assert below(enough, 7.0, policy) == enough
    assert below(few, 7.0, policy) == replace(few, below_since=7.0)
    for book in (enough, few):
        since = replace(book, below_since=3.0)
        assert below(since, 7.0, policy) == since


def test_wrong_bits_leave_no_live_source():
    sources = (SEED, disk(20), host(40))
    book = ledger(sources=(*sources, LIVE), evaluated=45, corrupt=slices(0))
    after = replace(book, sources=sources, evaluated=40, corrupt=slices(0, 1))
    assert distrust(book, slices(1)) == after
    assert distrust(after, slices(1)) == after
    assert distrust(ledger(sources=(LIVE,), evaluated=45), ALL).evaluated == 0
    assert distrust(replace(book, evaluated=20), slices(1)).evaluated == 20


# --- which slices ---------------------------------------------------------------------------------


def test_as_many_slices_are_wanted_as_may_be_used():
    assert most_slices(ledger(), POLICY) == 4
    assert most_slices(ledger(corrupt=slices(1, 9)), POLICY) == 3
    assert most_slices(ledger(), replace(POLICY, max_slices=3)) == 3
    assert most_slices(ledger(), replace(POLICY, max_slices=9)) == 4
    assert most_slices(ledger(corrupt=slices(1, 2)), replace(POLICY, max_slices=3)) == 2


def test_of_equals_the_lowest_is_chosen_however_the_set_is_ordered():
    policy = replace(POLICY, max_slices=1)
    for ids in ((1, 8), (8, 1), (7, 16), (33, 2)):
        assert choose_mesh(ledger(up=slices(*ids)), slices(), policy) == slices(min(ids))
    both = ledger(up=slices(1, 8), stable=(Stable(8, 1, 3.0), Stable(1, 1, 3.0)))
    assert choose_mesh(both, slices(), policy) == slices(1)
    assert choose_mesh(both, slices(8), policy) == slices(8)
    assert choose_mesh(ledger(), slices(1), POLICY) == ALL


def test_a_probe_tells_who_is_up():
    book = ledger(up=slices(0, 1), sources=(SEED, host(40)), corrupt=slices(4))
    book = replace(book, leaving=(Leaving(2, 100.0), Leaving(3, 100.1)))
    event = Probed(at=100.0, up=slices(3, 4), emptied=slices(5), down=slices(1))
    after, effects = health(book, event)
    assert effects == () and after == replace(
        book,
        up=slices(0, 2, 5),
        leaving=(Leaving(3, 100.1),),
        sources=(SEED, host(40, slices(0, 2, 3))),
    )
    again = Probed(at=100.0, emptied=slices(3))
    assert health(book, again)[0].up == slices(0, 1, 2, 3), "it was left, and came back"


def test_probes_in_a_row_are_counted_from_the_first():
    book = ledger(stable=(Stable(2, 1, 90.0),))
    policy = replace(POLICY, stable_probes=3)
    assert steadier(book, 2, 100.0, policy) == Stable(2, 2, 90.0)
    assert steadier(book, 3, 100.0, policy) == Stable(3, 1, 100.0)
    assert steadier(ledger(stable=(Stable(2, 3, 90.0),)), 2, 99.0, policy).probes == 3


# --- what is due ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "changes", "policy", "due"),
    [
        (99, {}, NEVER, False),
        (100, {}, NEVER, True),
        (100, {"durable": False}, NEVER, True),
        (99, {"save_owed": True}, NEVER, True),
        (99, {"save_owed": True, "saving": Saving(40, 1, 0)}, NEVER, False),
        (10, {}, replace(NEVER, snapshot_every=10), True),
        (11, {}, replace(NEVER, snapshot_every=10), False),
        (11, {}, replace(NEVER, snapshot_every=1), True),
        (20, {}, replace(NEVER, checkpoint_every=20), True),
        (10, {}, replace(NEVER, checkpoint_every=20), False),
        (20, {"durable": False}, replace(NEVER, checkpoint_every=20), False),
        (0, {}, POLICY, False),
    ],
)
def test_when_a_snapshot_is_due(step, changes, policy, due):
    assert snapshot_due(step, 0.0, ledger(**changes), policy) is due


@pytest.mark.parametrize(
    ("step", "changes", "policy", "due"),
    [
        (99, {}, NEVER, False),
        (100, {}, NEVER, True),
        (100, {"durable": False}, NEVER, False),
        (99, {"durable": False, "save_owed": True}, NEVER, False),
        (99, {"save_owed": True}, NEVER, True),
        (99, {"save_owed": True, "saving": Saving(40, 1, 0)}, NEVER, True),
        (10, {}, POLICY, False),
        (20, {}, POLICY, True),
        (1, {}, replace(NEVER, checkpoint_every=1), True),
        (0, {}, POLICY, False),
    ],
)
def test_when_a_checkpoint_is_due(step, changes, policy, due):
    assert checkpoint_due(step, 0.0, ledger(**changes), policy) is due


@pytest.mark.parametrize(
    ("seconds", "at", "saving", "overdue"),
    [
        (30.0, 39.9, None, False),
        (30.0, 40.0, None, True),
        (30.0, 99.0, Saving(40, 1, 0), False),
        (0.5, 10.4, None, False),
        (0.5, 10.5, None, True),
        (0.0, 99.0, None, False),
    ],
)
def test_when_a_save_is_overdue(seconds, at, saving, overdue):
    policy = replace(NEVER, checkpoint_seconds=seconds)
    book = ledger(saved_at=10.0, saving=saving)
    assert save_overdue(at, book, policy) is overdue
    assert checkpoint_due(7, at, book, policy) is overdue
    assert snapshot_due(7, at, book, policy) is overdue


@pytest.mark.parametrize(
    ("step", "every", "done", "due"),
    [
        (10, 10, 0, True),
        (11, 10, 0, False),
        (10, 10, 10, False),
        (10, 10, 9, True),
        (10, 10, 20, False),
        (100, 30, 90, True),
        (100, 30, 100, False),
        (100, 0, 0, False),
        (1, 1, 0, True),
        (0, 1, 0, False),
    ],
)
def test_when_an_evaluation_is_due(step, every, done, due):
    policy = replace(POLICY, eval_every=every)
    assert evaluation_due(step, ledger(evaluated=done), policy) is due


# --- saves ----------------------------------------------------------------------------------------


def test_only_a_checkpoint_of_the_step_counts_as_one():
    book = ledger(sources=(SEED, disk(20), host(40)))
    assert on_disk(book, 20) and not on_disk(book, 40) and not on_disk(book, 0)


def test_the_holder_that_stays_is_written_from_and_else_one_that_leaves():
    book = ledger(up=slices(0, 1), sources=(SEED,), leaving=(Leaving(2, 9.0), Leaving(3, 9.0)))
    for step, holder in ((40, 0), (41, 1)):
        after, effects = save(book, host(step))
        assert effects == (Save(EPOCH, step, holder),)
        assert after == replace(book, saving=Saving(step, EPOCH, holder))
        gone = replace(book, up=slices(), save_owed=True)
        after, effects = save(gone, host(step))
        assert effects == (Save(EPOCH, step, holder + 2),) and not after.save_owed


def test_a_save_behind_another_is_owed():
    book = ledger(saving=Saving(20, 1, 3))
    assert save(book, host(40)) == (replace(book, save_owed=True), ())


def test_the_moment_of_a_save_is_noted_if_it_is_begun_and_seconds_count():
    book, by_time = ledger(saved_at=3.0), replace(POLICY, checkpoint_seconds=0.5)
    assert save_at(book, host(40), 9.0, by_time)[0].saved_at == 9.0
    assert save_at(book, host(40), 9.0, POLICY)[0].saved_at == 3.0
    busy = replace(book, saving=Saving(20, 1, 3))
    assert save_at(busy, host(40), 9.0, by_time) == (replace(busy, save_owed=True), ())


# --- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "held", [{"losses": 1}, {"stuck": 1}, {"data_failures": 1}, {"below_since": 0.0}]
)
def test_progress_forgives(held):
    assert progressed(ledger(**held)) == ledger()


def test_progress_lets_older_snapshots_go():
    book = ledger(sources=(SEED, disk(20), host(30), host(40)))
    assert progressed(book) == ledger(sources=(SEED, disk(20), host(40)))
    book = ledger()
    assert progressed(book) is book, "as nearly always: nothing is made anew"
