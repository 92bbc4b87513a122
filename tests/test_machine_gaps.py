"""The machine by example, once more: what mutants of its rules showed to be untested."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from elastix.machine import (
    Abandon,
    Committed,
    Compile,
    DataFailed,
    Dispatched,
    Done,
    Evaluate,
    Failed,
    Finishing,
    Flap,
    Growth,
    Leaving,
    Policy,
    PreemptionNoticed,
    Prepare,
    Prepared,
    Probe,
    Probed,
    ProtocolError,
    RestoreFailed,
    Restoring,
    RunStep,
    Save,
    Saved,
    SaveFailed,
    Saving,
    SlicesLost,
    Snapshot,
    Snapshotted,
    Source,
    Stable,
    Started,
    Starting,
    Stopping,
    Tier,
    Training,
    Waiting,
    WakeAt,
    named_snapshots,
    names_train_state,
)
from elastix.machine.ledger import (
    choose_mesh,
    forget,
    host_source,
    newest_snapshot,
    probes_needed,
    save,
)
from elastix.testing import Schedule, simulate
from tests.test_machine import (
    ALL,
    EPOCH,
    POLICY,
    SEED,
    disk,
    finishing,
    host,
    ledger,
    on,
    restoring,
    slices,
    snapshotting,
    stopping,
    training,
    waiting,
)

# --- a probe finds that the slice being written from is gone --------------------------------------


def writing(holder: int, **changes):
    return ledger(saving=Saving(40, EPOCH, holder), **changes)


def test_a_save_is_abandoned_when_the_wait_ends():
    book = writing(1, up=slices(1, 3), below_since=100.0)
    policy = replace(POLICY, min_slices=3)
    state, effects = on(waiting(ledger=book), Probed, policy, up=slices(0, 3), emptied=slices(1))
    assert isinstance(state, Restoring) and state.ledger.save_owed
    assert effects == (Abandon(EPOCH, 40), Prepare(EPOCH + 1, slices(0, 1, 3), state.source))


def test_a_save_is_abandoned_when_the_wait_goes_on():
    book = writing(1, up=slices(1, 3), below_since=100.0)
    policy = replace(POLICY, min_slices=3)
    state, effects = on(waiting(ledger=book), Probed, policy, up=slices(3), down=slices(1))
    assert isinstance(state, Waiting) and state.ledger.saving is None
    assert effects == (Abandon(EPOCH, 40), WakeAt(EPOCH, 105.0))


def test_a_save_is_abandoned_and_begun_again_when_the_wait_has_failed():
    book = writing(1, up=slices(1, 3), below_since=100.0)
    policy = replace(POLICY, min_slices=3, deadline=50.0)
    state, effects = on(waiting(ledger=book), Probed, policy, at=150.0, down=slices(1))
    assert isinstance(state, Stopping)
    assert effects == (Abandon(EPOCH, 40), Save(EPOCH + 1, 40, 3))


def test_a_save_is_abandoned_when_its_slice_stands_by():
    book = writing(3, up=slices(0, 1, 2, 3))
    before = training(45, 46, mesh=slices(0, 1), ledger=book)
    state, effects = on(before, Probed, up=slices(2), down=slices(3))
    assert isinstance(state, Training) and effects == (Abandon(EPOCH, 40), WakeAt(EPOCH, 105.0))


def test_a_save_is_abandoned_at_the_moment_of_a_regrow():
    book = writing(3, up=ALL, stable=(Stable(2, 1, 90.0),))
    before = training(46, mesh=slices(0, 1), ledger=book)
    state, effects = on(before, Probed, up=slices(2), down=slices(3))
    assert isinstance(state, Training) and state.growth == Growth(slices(0, 1, 2))
    assert effects[0] == Abandon(EPOCH, 40) and Compile(EPOCH, slices(0, 1, 2)) in effects


def test_a_save_is_abandoned_by_a_loss_that_changes_nothing_else():
    book = writing(3)
    state, effects = on(training(45, 46, mesh=slices(0, 1), ledger=book), SlicesLost, slices={3})
    assert isinstance(state, Training) and effects == (Abandon(EPOCH, 40),)
    state, effects = on(waiting(ledger=book), SlicesLost, slices=slices(3))
    assert isinstance(state, Waiting) and effects[0] == Abandon(EPOCH, 40)


def test_a_save_is_abandoned_by_one_loss_too_many():
    policy = replace(POLICY, max_losses=1)
    before = training(45, ledger=writing(1, losses=1))
    state, effects = on(before, SlicesLost, policy, slices=slices(1))
    assert isinstance(state, Failed) and effects == (Abandon(EPOCH, 40),)


# --- budgets at their edges -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "probes"), [(0, 3), (1, 3), (2, 6), (3, 12), (7, 192), (8, 192), (30, 192)]
)
def test_the_probes_that_are_asked_for_double_up_to_a_limit(losses, probes):
    policy = replace(POLICY, stable_probes=3)
    flaps = (Flap(0, 50), Flap(1, losses)) if losses else (Flap(0, 50),)
    assert probes_needed(ledger(flaps=flaps), 1, policy) == probes


def test_as_many_losses_as_are_allowed_are_survived():
    policy = replace(POLICY, max_losses=2)
    state, _ = on(training(ledger=ledger(losses=1)), SlicesLost, policy, slices=slices(1))
    assert isinstance(state, Restoring) and state.ledger.losses == 2


def test_a_checkpoint_forgives_the_last_loss():
    book = ledger(flaps=(Flap(1, 1), Flap(2, 3)), saving=Saving(40, EPOCH, 0))
    state, _ = on(training(45, 46, ledger=book), Saved, step=40)
    assert state.ledger.flaps == (Flap(2, 2),)


def test_probes_are_counted_no_further_than_they_are_asked_for():
    book = ledger(up=slices(0, 1, 2), stable=(Stable(3, 2, 80.0),))
    before = training(45, 46, mesh=slices(0, 1, 2), ledger=book)
    state, _ = on(before, Probed, up=slices(3))
    assert state.ledger.stability(3) == Stable(3, 2, 80.0)


# --- which slices, which source -------------------------------------------------------------------


def test_members_stay_and_the_lowest_of_equals_joins():
    policy = replace(POLICY, max_slices=3)
    assert choose_mesh(ledger(), slices(2, 3), policy) == slices(0, 2, 3)
    stable = (Stable(0, 1, 50.0), Stable(1, 1, 40.0))
    assert choose_mesh(ledger(stable=stable), slices(2, 3), policy) == slices(1, 2, 3)
    assert choose_mesh(ledger(stable=stable[1:]), slices(2, 3), policy) == slices(1, 2, 3)


def test_of_equally_recent_sources_the_one_that_moves_least_is_taken():
    live = Source(Tier.LIVE, 40, EPOCH, ALL)
    sources = (disk(40), host(40), live, SEED)
    for best in (live, host(40), disk(40), SEED):
        book = ledger(sources=sources)
        state, _ = on(restoring(disk(50), ledger=book), RestoreFailed, source=disk(50), reason="x")
        assert state.source == best
        sources = tuple(s for s in sources if s != best)


def test_the_newest_snapshot_stays_and_other_tiers_with_it():
    sources = (SEED, disk(20), host(30), host(40, slices(1)), host(40, slices(2)))
    assert newest_snapshot(sources) == (SEED, disk(20), *sources[3:])
    assert newest_snapshot((SEED, disk(20))) == (SEED, disk(20))


def test_what_died_is_forgotten_and_the_rest_is_not():
    book = ledger(
        sources=(SEED, disk(20), host(30, slices(1)), host(40)),
        stable=(Stable(1, 1, 0.0), Stable(2, 1, 0.0)),
        leaving=(Leaving(1, 9.0), Leaving(3, 9.0)),
    )
    after, effects = forget(book, slices(1))
    assert effects == () and after == replace(
        book,
        up=ALL - {1},
        sources=(SEED, disk(20), host(40, ALL - {1})),
        stable=(Stable(2, 1, 0.0),),
        leaving=(Leaving(3, 9.0),),
    )


def test_only_a_snapshot_that_an_answering_slice_holds_is_one():
    book = ledger(up=slices(0), leaving=(Leaving(1, 900.0),), sources=(SEED, host(40, slices(2))))
    assert host_source(book, 40) is None
    for holder in (0, 1):
        held = replace(book, sources=(SEED, host(40, slices(2, holder))))
        assert host_source(held, 40) == held.sources[1]
    assert host_source(held, 30) is None


def test_where_no_snapshot_is_to_be_let_go_nothing_is_made_anew():
    sources = (SEED, disk(20), host(40))
    assert newest_snapshot(sources) is sources
    assert newest_snapshot(sources[:2]) == sources[:2]


# --- slices whose bits differ ---------------------------------------------------------------------


def test_after_wrong_bits_no_live_state_is_a_source():
    policy = replace(POLICY, lookback="live")
    live = Source(Tier.LIVE, 45, 2, ALL)
    book = ledger(sources=(SEED, disk(20), host(40), live), evaluated=45)
    before = training(45, 47, ledger=book)
    state, effects = on(before, SlicesLost, policy, slices=slices(1), corrupt=True, cause="bits")
    rest = slices(0, 2, 3)
    assert isinstance(state, Restoring) and state.mesh == rest
    assert state.ledger == replace(
        book,
        up=rest,
        epoch=EPOCH + 1,
        sources=(SEED, disk(20), host(40, rest)),
        corrupt=slices(1),
        evaluated=40,
        losses=1,
        flaps=(Flap(1, 1),),
    )
    assert effects == (Prepare(EPOCH + 1, rest, host(40, rest)),)


def test_what_was_evaluated_before_the_newest_snapshot_stays_so():
    before = training(45, 47, ledger=ledger(evaluated=30, corrupt=slices(3)))
    state, _ = on(before, SlicesLost, slices=slices(1), corrupt=True)
    assert state.ledger.evaluated == 30 and state.ledger.corrupt == slices(1, 3)


def test_a_slice_with_wrong_bits_is_not_waited_for_and_not_taken_back():
    policy = replace(POLICY, patience=0.5)
    state, _ = on(training(45), SlicesLost, policy, slices=slices(1), corrupt=True)
    assert isinstance(state, Restoring), "all others are up"
    book = ledger(up=slices(0, 2), corrupt=slices(1))
    state, _ = on(training(45, mesh=slices(0, 2), ledger=book), Probed, up=slices(1, 3))
    assert state.ledger.up == slices(0, 2, 3)
    for _ in range(2):
        state, _ = on(state, Probed, up=slices(1, 3))
    assert state.growth == Growth(slices(0, 2, 3))


def test_a_slice_that_died_is_not_one_whose_bits_differ():
    policy = replace(POLICY, lookback="live")
    state, _ = on(training(45, 46), SlicesLost, policy, slices=slices(1))
    assert state.ledger.corrupt == slices() and state.source.tier is Tier.LIVE


# --- waits ----------------------------------------------------------------------------------------


def test_patience_of_less_than_a_second_is_patience():
    policy = replace(POLICY, patience=0.5)
    state, effects = on(training(45), SlicesLost, policy, slices=slices(1))
    assert isinstance(state, Waiting) and (state.want, state.until) == (4, 100.5)
    assert effects == (Probe(EPOCH + 1, ALL),)


# --- evaluations and notices ----------------------------------------------------------------------


def evaluating(step: int = 50, **changes) -> Training:
    return training(step, asked=Evaluate(EPOCH, step), **changes)


def test_a_notice_for_a_slice_that_evaluates_ends_the_evaluation_and_one_for_another_does_not():
    policy = replace(POLICY, eval_every=50)
    notice = dict(slices=slices(1), until=160.0)
    state, effects = on(evaluating(), PreemptionNoticed, policy, **notice)
    assert isinstance(state, Restoring) and state.source.tier is Tier.LIVE
    assert state.mesh == slices(0, 2, 3) and len(effects) == 1
    before = evaluating(mesh=slices(0, 2, 3))
    state, effects = on(before, PreemptionNoticed, policy, **notice)
    assert state.asked == Evaluate(EPOCH, 50) and effects == (), "it is not begun a second time"


# --- our defects ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "event", "fields"),
    [
        (training(45, asked=RunStep(EPOCH, 46)), Dispatched, {"step": 45}),
        (training(45), Dispatched, {"step": 46}),
        (finishing(), Snapshotted, {"step": 90, "holders": ALL}),
        (finishing(), Snapshotted, {"step": 100, "holders": slices(0)}),
        (restoring(SEED), RestoreFailed, {"source": disk(20), "reason": "x"}),
        (restoring(), Prepared, {"step": 50}),
        (waiting(), Probed, {"epoch": EPOCH + 1}),
        (stopping(), Saved, {"step": 40, "epoch": EPOCH + 1}),
    ],
)
def test_an_answer_that_does_not_fit_is_our_defect(state, event, fields):
    with pytest.raises(ProtocolError):
        on(state, event, **fields)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (RunStep(EPOCH, 46), "the data stream failed twice at step 46: x"),
        (Evaluate(EPOCH, 45), "the evaluation data failed twice after step 45: x"),
    ],
)
def test_it_is_said_which_data_failed_twice(asked, told):
    before = training(45, asked=asked, ledger=ledger(data_failures=1))
    state, effects = on(before, DataFailed, step=asked.step, reason="x")
    assert (state, effects) == (Failed(told), ())
    before = replace(before, ledger=replace(before.ledger, draining=True))
    state, _ = on(before, DataFailed, step=asked.step, reason="x")
    assert isinstance(state, Finishing), "a run that ends anyway saves what it has"


# --- the end --------------------------------------------------------------------------------------


def test_a_run_that_keeps_nothing_on_disk_ends_with_its_snapshot():
    book = ledger(durable=False, sources=(SEED,))
    state, effects = on(finishing(ledger=book), Snapshotted, step=100, holders=ALL)
    assert isinstance(state, Done) and state.outcome == "done" and effects == ()


def test_a_notice_while_the_last_save_is_written_changes_nothing():
    book = ledger(sources=(SEED, host(100)), saving=Saving(100, EPOCH, 0))
    state, effects = on(finishing(ledger=book), PreemptionNoticed, slices=slices(2), until=160.0)
    assert isinstance(state, Finishing) and effects == ()
    assert state.ledger.up == ALL - {2} and state.ledger.leaving == (Leaving(2, 160.0),)


def test_another_notice_for_the_same_slice_replaces_the_first():
    book = ledger(up=slices(0, 1), leaving=(Leaving(2, 120.0), Leaving(3, 120.0)))
    before = waiting(ledger=book)
    state, _ = on(before, PreemptionNoticed, slices=slices(2, 9), until=160.0)
    assert state.ledger.leaving == (Leaving(3, 120.0), Leaving(2, 160.0))
    assert state.ledger.up == slices(0, 1), "slices that do not exist are not noticed"


def test_waiting_without_patience_probes_all():
    policy = replace(POLICY, min_slices=4)
    state, effects = on(training(45), SlicesLost, policy, slices=slices(1))
    assert state.want == 4 and state.until == 100.0 and state.ledger.below_since == 100.0
    assert effects == (Probe(EPOCH + 1, ALL),)


def test_below_min_slices_there_is_no_patience():
    policy = replace(POLICY, min_slices=3, patience=7.0)
    state, _ = on(training(45), SlicesLost, policy, slices=slices(0, 1))
    assert isinstance(state, Waiting)
    probe = dict(up=slices(2, 3), emptied=slices(1), down=slices(0), epoch=EPOCH + 1)
    state, _ = on(state, Probed, policy, at=101.0, **probe)
    assert isinstance(state, Restoring) and state.mesh == slices(1, 2, 3)


def test_a_save_that_no_slice_can_write_is_owed():
    book = ledger(up=slices(0), sources=(SEED,))
    assert save(book, host(40, slices(1, 2))) == (replace(book, save_owed=True), ())


def test_the_seed_is_not_copied_to_the_hosts_it_can_be_built_again():
    state, effects = on(restoring(SEED, ledger=ledger(sources=(SEED,))), Prepared, step=0)
    assert state.owed is state.copying is None and effects == (RunStep(EPOCH, 1),)


def test_a_save_that_is_there_already_is_owed_no_more():
    on_disk = ledger(save_owed=True, sources=(SEED, disk(40), host(40)))
    assert save(on_disk, host(40)) == (replace(on_disk, save_owed=False), ())
    written = writing(1, save_owed=True)
    assert save(written, host(40)) == (replace(written, save_owed=False), ())
    assert save(replace(written, save_owed=False), host(50)) == (written, ())


def test_what_leaves_before_the_first_step_is_copied_and_not_saved():
    """Step 0 is the seed: a checkpoint of it would save nothing."""
    book = ledger(sources=(SEED,), leaving=(Leaving(1, 900.0),), up=ALL - {1})
    state, _ = on(restoring(SEED, ledger=book), Prepared, step=0)
    assert isinstance(state, Restoring) and state.source.tier is Tier.LIVE
    moved = dict(epoch=EPOCH + 1)
    state, effects = on(state, Prepared, step=0, **moved)
    assert effects[:2] == (Snapshot(EPOCH + 1, 0), RunStep(EPOCH + 1, 1))
    state, effects = on(state, Snapshotted, step=0, holders=state.mesh, **moved)
    assert effects == () and state.copying is None and state.ledger.saving is None


# --- checkpoints by time --------------------------------------------------------------------------

BY_TIME = replace(POLICY, checkpoint_every=0, checkpoint_seconds=30.0)


def timed(saved_at: float = 100.0, **changes):
    return ledger(sources=(SEED, host(40)), saved_at=saved_at, **changes)


def taken(step: int):
    """The snapshot of `step` is being made."""
    return snapshotting(step, ledger=timed())


def dispatched(book, at: float, policy: Policy = BY_TIME):
    before = training(45, asked=RunStep(EPOCH, 46), ledger=book)
    return on(before, Dispatched, policy, at=at, step=46)


def test_a_process_counts_the_seconds_from_its_start():
    given = dict(epoch=0, num_steps=9, slices=ALL, up=ALL, sources=(SEED,), durable=True)
    state, _ = on(Starting(), Started, BY_TIME, at=70.0, **given)
    assert state.ledger.saved_at == 70.0
    state, _ = on(Starting(), Started, at=70.0, **given)
    assert state.ledger.saved_at == 0.0, "nobody asks, and states that do the same are the same"


def test_a_step_dispatched_after_so_many_seconds_is_saved():
    state, effects = dispatched(timed(), at=129.9)
    assert state.copying is None and effects == (RunStep(EPOCH, 47),)
    state, effects = dispatched(timed(), at=130.0)
    assert effects == (Snapshot(EPOCH, 46), RunStep(EPOCH, 47))
    state, effects = on(state, Committed, BY_TIME, at=131.0, step=46)
    assert state.copying == 46 and effects == ()
    state, effects = on(state, Snapshotted, BY_TIME, at=132.0, step=46, holders=ALL)
    assert effects == (Save(EPOCH, 46, 2),)
    assert state.ledger.saved_at == 132.0 and state.ledger.saving.step == 46


@pytest.mark.parametrize(("book", "policy"), [(timed(), BY_TIME), (ledger(save_owed=True), POLICY)])
def test_one_snapshot_is_enough_for_a_save_that_has_to_be_made(book, policy):
    state, _ = dispatched(book, at=130.0, policy=policy)
    assert state.copying == 46
    state, _ = on(state, Dispatched, policy, at=131.0, step=47)
    assert (state.copying, state.owed) == (46, None), "it is made from the one under way"
    state, _ = on(state, Committed, policy, at=132.0, step=46)
    state, effects = on(state, Snapshotted, policy, at=132.0, step=46, holders=ALL)
    assert Save(EPOCH, 46, 2) in effects and not state.ledger.save_owed


@pytest.mark.parametrize("changes", [{"durable": False}, {"saving": Saving(40, EPOCH, 0)}])
def test_time_asks_for_nothing_where_nothing_can_be_begun(changes):
    state, effects = dispatched(timed(**changes), at=1000.0)
    assert state.owed is state.copying is None and effects == (RunStep(EPOCH, 47),)


def test_a_snapshot_taken_for_another_reason_is_saved_when_the_time_has_come():
    _, effects = on(taken(50), Snapshotted, BY_TIME, at=140.0, step=50, holders=ALL)
    assert effects == (Save(EPOCH, 50, 2),)
    state, effects = on(taken(50), Snapshotted, BY_TIME, at=120.0, step=50, holders=ALL)
    assert effects == () and state.ledger.saved_at == 100.0


def test_steps_and_seconds_go_together_and_a_save_of_either_counts():
    both = replace(BY_TIME, checkpoint_every=50)
    state, effects = on(taken(50), Snapshotted, both, at=101.0, step=50, holders=ALL)
    assert Save(EPOCH, 50, 2) in effects and state.ledger.saved_at == 101.0


def test_a_save_on_leaving_counts_from_when_it_was_begun():
    policy = replace(BY_TIME, min_slices=4)
    before = training(40, ledger=timed())
    notice = dict(slices=slices(1), until=160.0)
    state, effects = on(before, PreemptionNoticed, policy, at=120.0, **notice)
    assert isinstance(state, Waiting) and effects[0] == Save(EPOCH, 40, 2)
    assert state.ledger.saved_at == 120.0
    state, effects = on(before, PreemptionNoticed, replace(POLICY, min_slices=4), **notice)
    assert state.ledger.saved_at == 100.0, "where no seconds are counted, none are noted"


def saved_at(at: float, event=Saved, **fields):
    book = timed(saving=Saving(40, EPOCH, 0))
    book = replace(book, sources=(*book.sources, host(45)))
    return on(training(45, 46, ledger=book), event, BY_TIME, at=at, step=40, **fields)


def test_continuous_saves_follow_each_other_from_the_newest_snapshot():
    state, effects = saved_at(129.0)
    assert effects == () and state.ledger.saving is None
    state, effects = saved_at(130.0)
    assert effects == (Save(EPOCH, 45, 1),)
    assert (state.ledger.saving.step, state.ledger.saved_at) == (45, 130.0)
    book = replace(state.ledger, saved_at=100.0, sources=(SEED, host(45)))
    state, effects = on(training(45, 46, ledger=book), Saved, BY_TIME, at=150.0, step=45)
    assert effects == (), "the newest is on disk: the next step is due"
    assert dispatched(state.ledger, at=150.0)[0].copying == 46


def test_a_failed_save_is_not_tried_again_before_the_next_step():
    state, effects = saved_at(150.0, SaveFailed, reason="disk full")
    assert effects == () and state.ledger.saving is None
    state, _ = dispatched(state.ledger, at=150.0)
    assert 46 in (state.copying, state.owed)


def test_what_is_owed_since_a_save_is_under_way_asks_for_no_snapshot():
    """It begins from the newest snapshot when the other has ended: not each step needs one."""
    book = timed(saving=Saving(40, EPOCH, 0), save_owed=True)
    state, effects = dispatched(book, at=101.0, policy=POLICY)
    assert state.owed is state.copying is None and effects == (RunStep(EPOCH, 47),)
    state, _ = dispatched(replace(book, saving=None), at=101.0, policy=POLICY)
    assert state.copying == 46


def saves(checkpoint_seconds: float, snapshot_every: int = 100) -> list[float]:
    """When saves of 2.5 s ended, in a run of 21 steps of a second by the simulator's clock."""
    policy = Policy(
        checkpoint_every=0, snapshot_every=snapshot_every, checkpoint_seconds=checkpoint_seconds
    )
    result = simulate(Schedule(2, 21, policy, save_seconds=2.5))
    assert result.violation is None
    events = [event for rows in result.processes for event, _, _ in rows]
    return [event.at for event in events if isinstance(event, Saved)]


def test_a_run_by_time_saves_as_often_as_it_says():
    assert len(saves(1000.0)) == 1, "the last step always"
    # A step is dispatched two before it is read, which is when it can be saved.
    ended = saves(6.0)
    assert len(ended) == 3 and all(6.0 <= b - a <= 6.0 + 3.5 for a, b in pairwise(ended[:-1]))
    ended = saves(1e-6, snapshot_every=1)
    pause = 1.3  # until the next snapshot, if the newest is on disk
    assert all(b - a < 2.5 + pause for a, b in pairwise(ended[1:])), "continuous"


# --- what must be kept ----------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["snapshot_every", "inflight", "min_slices", "max_slices"])
@pytest.mark.parametrize("value", [2.5, True, "2"])
def test_what_is_counted_is_a_whole_number(field, value):
    with pytest.raises(ValueError, match=rf"policy.{field}={value!r}: use a whole number"):
        Policy(**{field: value})


def test_host_copies_are_kept_to_restore_from_and_while_they_are_written():
    book = ledger(sources=(SEED, disk(20), host(40), Source(Tier.LIVE, 45, EPOCH, ALL)))
    assert named_snapshots(training(45, ledger=book)) == {40}
    assert named_snapshots(waiting(ledger=replace(book, saving=Saving(30, 1, 0)))) == {30, 40}


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (training(45, 47), {(EPOCH, 45), (EPOCH, 46)}),
        (finishing(45), {(EPOCH, 45), (EPOCH, 46)}),
        (restoring(), {(EPOCH, 44), (EPOCH, 45), (EPOCH, 46)}),
        (waiting(), set()),
        (waiting(ledger=ledger(sources=(SEED, Source(Tier.LIVE, 45, 2, ALL)))), {(2, 45)}),
        (waiting(ledger=ledger(sources=(SEED, Source(Tier.HOST, 45, 2, ALL)))), set()),
    ],
)
def test_train_states_are_kept_while_they_may_be_needed(state, kept):
    names = {(epoch, step) for epoch in (2, EPOCH) for step in (44, 45, 46)}
    assert {n for n in names if names_train_state(state, *n)} == kept


def test_a_run_that_ends_waits_for_the_save_under_way():
    book = ledger(sources=(SEED, disk(20)), saving=Saving(40, EPOCH, 0))
    state, effects = on(waiting(ledger=book), PreemptionNoticed)
    assert state == Stopping(replace(book, draining=True, epoch=EPOCH + 1)) and effects == ()


def test_a_save_that_was_owed_begins_from_slices_that_will_be_taken_away():
    book = ledger(
        up=slices(), saving=Saving(40, EPOCH, 0), save_owed=True, sources=(SEED, host(45))
    )
    book = replace(book, leaving=tuple(Leaving(s, 900.0) for s in sorted(ALL)))
    state, effects = on(waiting(ledger=book), Saved, step=40)
    assert effects == (Save(EPOCH, 45, 1),) and state.ledger.saving.step == 45


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoint_every", -1),
        ("checkpoint_seconds", -1.0),
        ("keep_checkpoints", 0),
        ("keep_best", -1),
        ("eval_every", -1),
        ("max_losses", 0),
        ("stable_probes", 0),
        ("grace", -1.0),
        ("deadline", -1.0),
        ("probe_every", -1.0),
    ],
)
def test_each_bound_of_a_policy_is_kept(field, value):
    with pytest.raises(ValueError, match=f"policy.{field}={value}: use"):
        replace(POLICY, **{field: value})
    lowest = {"keep_checkpoints": 1, "max_losses": 1, "stable_probes": 1, "probe_every": 0.1}
    assert replace(POLICY, **{field: lowest.get(field, 0)})


def test_the_best_cannot_be_kept_of_a_run_that_is_not_evaluated():
    with pytest.raises(ValueError, match=r"policy.keep_best=2 but eval_every=0: set eval_every"):
        replace(POLICY, keep_best=2)
    assert replace(POLICY, keep_best=2, eval_every=5)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("step", 200.0), ("prepare", 2000.0), ("probe", 100 / 3), ("save", 1000.0)],
)
def test_each_deadline_is_a_share_of_the_one_budget(name, seconds):
    assert getattr(Policy(deadline=6000.0), f"{name}_deadline") == pytest.approx(seconds)


def test_every_deadline_is_told_by_what_it_is_for():
    told = {"wait": 6000.0, "compile": 2000.0, "save": 1000.0, "step": 200.0, "probe": 100 / 3}
    assert Policy(deadline=6000.0).deadlines == pytest.approx(told)


def test_a_deadline_is_never_so_short_that_healthy_slices_miss_it():
    shares = Policy(deadline=0.0)
    found = [shares.step_deadline, shares.prepare_deadline, shares.probe_deadline]
    assert [*found, shares.save_deadline] == [5.0, 60.0, 1.0, 30.0]


def test_a_deadline_is_never_so_long_that_the_system_cannot_wait_for_it():
    assert 0 < Policy(deadline=1e300).probe_deadline < threading.TIMEOUT_MAX


def test_a_committed_step_forgives_the_data_their_failure():
    book = ledger(data_failures=1)
    state, _ = on(training(45, 46, ledger=book), Committed, step=46)
    assert state.ledger.data_failures == 0
