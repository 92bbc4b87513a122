"""The verbs and rules by example: each alone, at its edges, with all that it leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastix.machine import (
    Abandon,
    Committed,
    DataFailed,
    Diagnosing,
    Dispatched,
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Finishing,
    Flap,
    Growth,
    Leaving,
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
    SnapshotMissing,
    Snapshotted,
    Source,
    Stable,
    Started,
    Starting,
    StepStuck,
    Stopping,
    Tier,
    Training,
    Waiting,
    WakeAt,
    named_snapshots,
    trusted_step,
)
from elastix.machine.verbs import (
    advance,
    conclude,
    grown,
    involved,
    joinable,
    keep_live,
    regrow,
    restore,
    resume_or_wait,
    settle,
    stop,
    wait,
    wants_regrow,
    watch,
)
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
    training,
    waiting,
)

LIVE = replace(POLICY, lookback="live")
WOKE = Evaluated(at=100.0, epoch=EPOCH, step=45)
"""Any event: of most, a verb asks for the time alone."""


def live(step: int, holders=ALL) -> Source:
    return Source(Tier.LIVE, step, EPOCH, holders)


# --- restore and wait -----------------------------------------------------------------------------


def test_a_restore_begins_an_epoch_and_forgets_who_was_stable():
    book = ledger(stable=(Stable(3, 2, 80.0),), sources=(host(40), disk(20), SEED))
    after = replace(book, epoch=EPOCH + 1, stable=())
    expected = Restoring(after, slices(0, 1), host(40))
    assert restore(book, slices(0, 1)) == (
        expected,
        (Prepare(EPOCH + 1, slices(0, 1), host(40)),),
    )
    end = Failed("no snapshot or checkpoint is left to restore from")
    assert restore(ledger(sources=()), ALL) == (end, ())


def test_a_wait_begins_an_epoch_and_forgets_who_was_stable():
    book = ledger(up=slices(0, 1), stable=(Stable(3, 2, 80.0),))
    policy = replace(POLICY, min_slices=2, patience=7.0, max_slices=3)
    after = replace(book, epoch=EPOCH + 1, stable=())
    state, effects = wait(book, ALL, WOKE, policy)
    assert state == Waiting(after, ALL, want=3, until=107.0)
    assert effects == (Probe(EPOCH + 1, ALL),)
    state, _ = wait(book, ALL, WOKE, replace(policy, min_slices=3))
    assert state == Waiting(replace(after, below_since=100.0), ALL, want=3, until=100.0)


def test_a_run_that_drains_does_not_wait():
    state, _ = wait(ledger(draining=True, durable=False), ALL, WOKE, POLICY)
    assert state == Done("preempted", None, 0)


@pytest.mark.parametrize(
    ("up", "patience", "max_slices", "waits"),
    [
        (slices(0, 1), 0.0, None, False),
        (slices(0), 0.0, None, True),
        (slices(0, 1), 0.5, None, True),
        (slices(0, 1), 0.5, 2, False),
        (slices(0, 1, 2), 0.5, 2, False),
        (ALL, 9.0, None, False),
    ],
)
def test_who_waits_for_a_return(up, patience, max_slices, waits):
    policy = replace(POLICY, min_slices=2, patience=patience, max_slices=max_slices)
    state, _ = resume_or_wait(ledger(up=up), ALL, WOKE, policy)
    assert isinstance(state, Waiting if waits else Restoring)


# --- lose -----------------------------------------------------------------------------------------


def test_only_slices_that_worked_are_held_to_have_failed():
    before = restoring(host(40, slices(2, 3)), mesh=slices(0, 1))
    state, _ = on(before, SlicesLost, slices=slices(1, 3))
    assert state.ledger.flaps == (Flap(1, 1),) and state.ledger.losses == 1
    state, _ = on(before, SlicesLost, slices=slices(3))
    assert state.ledger.flaps == () and state.ledger.losses == 1, "its source is gone"


def test_a_loss_outside_changes_only_who_is_up():
    before = training(45, 46, mesh=slices(0, 1))
    state, effects = on(before, SlicesLost, slices=slices(3))
    rest = ALL - {3}
    book = ledger(up=rest, sources=(SEED, host(40, rest)))
    assert (state, effects) == (replace(before, ledger=book), ())


def test_a_loss_while_waiting_notes_the_first_moment_below():
    before = waiting(ledger=ledger(up=slices(2, 3)))
    state, effects = on(before, SlicesLost, replace(POLICY, min_slices=2), slices=slices(2))
    rest = ALL - {2}
    book = ledger(up=slices(3), sources=(SEED, host(40, rest)), below_since=100.0)
    assert (state, effects) == (replace(before, ledger=book), (WakeAt(EPOCH, 105.0),))


def test_the_last_of_too_many_losses_is_named():
    before = training(45, ledger=ledger(losses=1))
    policy = replace(POLICY, max_losses=1)
    state, _ = on(before, SlicesLost, policy, slices=slices(1), cause="it broke")
    assert state == Failed("2 losses in a row without a committed step; the last: it broke")
    state, _ = on(before, SlicesLost, policy, slices=slices(1))
    assert state == Failed("2 losses in a row without a committed step")
    state, _ = on(before, Probed, policy, down=slices(1))
    assert state == Failed("2 losses in a row without a committed step")


def test_who_keeps_the_live_state():
    book = ledger()
    for state in (training(45, 47), finishing(45)):
        assert keep_live(state, slices(1), book, POLICY) == book
        assert keep_live(state, ALL, book, LIVE) == book
        kept = keep_live(state, slices(1), book, LIVE)
        assert kept == ledger(sources=(*book.sources, live(45, ALL - {1})))
    assert keep_live(restoring(), slices(1), book, LIVE) == book


def test_whose_loss_ends_what_is_going_on():
    assert involved(training(mesh=slices(0, 1))) == slices(0, 1)
    assert involved(restoring(host(40, slices(1, 2)), mesh=slices(0, 1))) == slices(0, 1, 2)


# --- regrow and leave -----------------------------------------------------------------------------


def beside(*stable: Stable, **changes) -> Training:
    """Slices 0 and 1 train; all answer."""
    book = ledger(stable=stable, **changes)
    return training(45, mesh=slices(0, 1), ledger=book)


def test_who_may_join():
    policy = replace(POLICY, stable_probes=2)
    both = Stable(2, 2, 80.0), Stable(3, 1, 80.0)
    assert joinable(beside(*both), policy) == slices(2)
    assert joinable(beside(*both), replace(policy, stable_probes=1)) == slices(2, 3)
    assert joinable(beside(*both, flaps=(Flap(2, 2),)), policy) == slices()
    assert joinable(beside(*both, leaving=(Leaving(2, 900.0),)), policy) == slices()
    assert joinable(beside(*both, corrupt=slices(2)), policy) == slices()
    assert joinable(beside(Stable(0, 9, 80.0), Stable(2, 2, 80.0)), policy) == slices(2)


def test_there_must_be_room_for_who_joins():
    stable = Stable(2, 2, 80.0)
    assert wants_regrow(beside(stable), POLICY)
    assert wants_regrow(beside(stable), replace(POLICY, max_slices=3))
    assert not wants_regrow(beside(stable), replace(POLICY, max_slices=2))
    assert not wants_regrow(beside(Stable(2, 1, 80.0)), POLICY)
    assert not wants_regrow(beside(), POLICY)


def test_a_regrow_takes_the_stable_ones_and_nobody_else():
    before = beside(Stable(2, 2, 80.0), Stable(3, 1, 80.0))
    assert grown(before, POLICY) == slices(0, 1, 2)
    state, effects = regrow(before, slices(0, 1, 2))
    source = live(45, slices(0, 1))
    assert state == Restoring(
        ledger(epoch=EPOCH + 1, sources=(SEED, host(40), source)),
        slices(0, 1, 2),
        source,
    )
    assert effects == (Prepare(EPOCH + 1, slices(0, 1, 2), source),)


def leaving(committed: int, policy, **changes):
    book = ledger(up=ALL - {1}, leaving=(Leaving(1, 160.0),), **changes)
    return advance(training(committed, ledger=book), WOKE, policy)


def test_a_run_that_keeps_nothing_on_disk_leaves_without_a_save():
    policy = replace(POLICY, min_slices=4)
    state, effects = leaving(40, policy, durable=False)
    assert isinstance(state, Waiting) and effects == (Probe(EPOCH + 1, ALL),)
    assert state.mesh == ALL - {1} and state.ledger.saving is None
    state, effects = leaving(40, policy)
    assert effects == (Save(EPOCH, 40, 2), Probe(EPOCH + 1, ALL))


def test_before_the_first_step_there_is_nothing_to_save_on_leaving():
    policy = replace(POLICY, min_slices=4)
    state, effects = leaving(0, policy, sources=(SEED,))
    assert isinstance(state, Waiting) and effects == (Probe(EPOCH + 1, ALL),)


def test_as_many_as_are_needed_may_stay():
    state, _ = leaving(40, replace(POLICY, min_slices=3))
    assert isinstance(state, Restoring) and state.mesh == ALL - {1}
    assert state.source == live(40, ALL - {1})


# --- what comes next ------------------------------------------------------------------------------


EVALS = replace(POLICY, eval_every=5)


@pytest.mark.parametrize(
    ("state", "policy", "asked"),
    [
        (training(45), POLICY, RunStep(EPOCH, 46)),
        (training(45, 46), POLICY, RunStep(EPOCH, 47)),
        (training(45, 47), POLICY, None),
        (training(45, 46), replace(POLICY, inflight=1), None),
        (training(45, copying=45), POLICY, RunStep(EPOCH, 46)),
        (training(45, 46, copying=46), POLICY, RunStep(EPOCH, 47)),
        (training(45, copying=45, owed=45), POLICY, None),
        (training(45, 46, copying=45, owed=46), POLICY, None),
        (training(45), EVALS, Evaluate(EPOCH, 45)),
        (training(44, 45), EVALS, None),
        (training(45, ledger=ledger(evaluated=45)), EVALS, RunStep(EPOCH, 46)),
        (training(99, 100), POLICY, None),
        (training(100), EVALS, Evaluate(EPOCH, 100)),
        (training(45, 46, ledger=ledger(draining=True)), POLICY, None),
        (training(45, 46, ledger=ledger(leaving=(Leaving(1, 900.0),))), POLICY, None),
        (training(45, mesh=ALL - {1}, ledger=ledger(leaving=(Leaving(1, 9.0),))), POLICY, 46),
        (
            replace(
                beside(Stable(2, 2, 80.0)), dispatched=46, growth=Growth(slices(0, 1, 2), True)
            ),
            *(POLICY, None),
        ),
        (replace(beside(Stable(2, 2, 80.0)), growth=Growth(slices(0, 1, 2))), POLICY, 46),
    ],
)
def test_what_is_asked_for_next(state, policy, asked):
    asked = RunStep(EPOCH, asked) if isinstance(asked, int) else asked
    after, effects = advance(state, WOKE, policy)
    assert after == replace(state, asked=asked)
    assert effects == ((asked,) if asked else ())


@pytest.mark.parametrize(
    "state",
    [
        training(45, asked=RunStep(EPOCH, 46)),
        training(45, asked=Evaluate(EPOCH, 45)),
        training(45, copying=45),
        training(45, copying=45, owed=45),
        training(45, copying=45, asked=RunStep(EPOCH, 46)),
    ],
)
def test_nothing_is_asked_for_twice(state):
    for book in (ledger(), ledger(draining=True), ledger(leaving=(Leaving(1, 900.0),))):
        state = replace(state, ledger=book)
        assert advance(state, WOKE, EVALS) == (state, ())


@pytest.mark.parametrize(
    ("committed", "draining", "why"),
    [(100, False, "done"), (100, True, "done"), (45, True, "preempted")],
)
def test_why_a_run_ends(committed, draining, why):
    book = ledger(draining=draining, evaluated=100)
    state, effects = advance(training(committed, ledger=book), WOKE, EVALS)
    assert state == replace(finishing(committed, ledger=book), why=why)
    assert effects == (Snapshot(EPOCH, committed),)


def test_a_run_that_is_asked_to_stop_at_its_last_step_evaluates_when_it_goes_on():
    before = training(100, ledger=ledger(draining=True))
    state, _ = advance(before, WOKE, EVALS)
    assert isinstance(state, Finishing) and state.why == "preempted"


def test_only_what_is_outside_is_watched():
    assert watch(training()) == ()
    assert watch(training(mesh=slices(0, 2))) == (Probe(EPOCH, slices(1, 3)),)


# --- host snapshots, while steps run --------------------------------------------------------------


ENDING = {
    "an evaluation": (44, {}, EVALS),
    "the end": (99, {}, POLICY),
    "a stop": (45, {"draining": True}, POLICY),
    "leaving": (45, {"leaving": (Leaving(1, 160.0),), "up": ALL - {1}}, POLICY),
}
"""What waits for the snapshot under way: the last committed step, of what ledger, and policy."""


@pytest.mark.parametrize("why", ENDING)
def test_an_owed_snapshot_is_begun_and_what_ends_the_steps_waits_for_it(why):
    committed, changes, policy = ENDING[why]
    before = training(committed, committed + 1, owed=committed + 1, ledger=ledger(**changes))
    state, effects = advance(before, WOKE, policy)
    assert state == replace(before, owed=None, copying=committed + 1)
    assert effects == (Snapshot(EPOCH, committed + 1),), "and no step beside it"


@pytest.mark.parametrize(
    ("dispatched", "effects"),
    [
        (45, (Snapshot(EPOCH, 45), RunStep(EPOCH, 46))),
        (46, (Snapshot(EPOCH, 46), RunStep(EPOCH, 47))),
        (47, (Snapshot(EPOCH, 47),)),
    ],
)
def test_an_owed_snapshot_is_begun_before_the_step_that_is_next(dispatched, effects):
    before = training(45, dispatched, owed=dispatched)
    state, found = advance(before, WOKE, POLICY)
    asked = effects[1] if len(effects) > 1 else None
    assert found == effects, "as many steps are in flight as may be, and no more"
    assert state == replace(before, owed=None, copying=dispatched, asked=asked)


@pytest.mark.parametrize("why", ENDING)
def test_what_ends_the_steps_waits_for_the_snapshot_under_way(why):
    committed, changes, policy = ENDING[why]
    step = committed + 1
    before = training(committed, step, copying=step, ledger=ledger(**changes))
    state, effects = on(before, Committed, policy, step=step)
    read = training(step, copying=step, ledger=before.ledger)
    assert (state, effects) == (read, ()), "all is committed, and the copy is not there"
    state, effects = on(state, Snapshotted, policy, step=step, holders=ALL)
    live_there = live(step, slices(0, 2, 3))
    match why:
        case "an evaluation":
            assert effects == (Evaluate(EPOCH, 45),) and state.asked == Evaluate(EPOCH, 45)
        case "the end":
            assert isinstance(state, Finishing) and state.why == "done"
            assert effects == (Save(EPOCH, 100, 0),)
        case "a stop":
            assert isinstance(state, Finishing) and state.why == "preempted"
            assert effects == (Save(EPOCH, 46, 2),), "it is not copied again"
        case "leaving":
            assert isinstance(state, Restoring) and state.source == live_there
            assert effects == (Prepare(EPOCH + 1, slices(0, 2, 3), live_there),)


def test_a_regrow_waits_for_the_snapshot_under_way():
    ready = Growth(slices(0, 1, 2), True)
    before = replace(beside(Stable(2, 2, 80.0)), dispatched=46, copying=46, growth=ready)
    state, effects = on(before, Committed, step=46)
    assert isinstance(state, Training) and (state.copying, effects) == (46, ())
    held = slices(0, 1)
    state, effects = on(state, Snapshotted, step=46, holders=held)
    assert isinstance(state, Restoring) and host(46, held) in state.ledger.sources
    assert effects == (Prepare(EPOCH + 1, slices(0, 1, 2), live(46, held)),)


def test_a_second_snapshot_waits_for_the_first_and_no_step_runs_before_it_is_begun():
    each = replace(POLICY, snapshot_every=1, checkpoint_every=0)
    state, effects = on(training(45, asked=RunStep(EPOCH, 46)), Dispatched, each, step=46)
    assert effects == (Snapshot(EPOCH, 46), RunStep(EPOCH, 47))
    state, effects = on(state, Dispatched, each, step=47)
    assert state == training(45, 47, copying=46, owed=47) and effects == ()
    state, effects = on(state, Committed, each, step=46)
    assert (state.copying, state.owed) == (46, 47)
    assert effects == (), "there is room for a step, and it would overwrite step 47"
    state, effects = on(state, Snapshotted, each, step=46, holders=ALL)
    assert effects == (Snapshot(EPOCH, 47), RunStep(EPOCH, 48))
    assert (state.copying, state.owed) == (47, None)
    state, effects = on(state, Dispatched, each, step=48)
    state, effects = on(state, Committed, each, step=47)
    assert (state.copying, state.owed, effects) == (47, 48, ())
    assert [s.step for s in state.ledger.sources] == [0, 46], "the one that was let go is not named"


@pytest.mark.parametrize(
    ("state", "step", "why"),
    [
        (training(49, 51, copying=50), 50, "came before the step was committed"),
        (training(50, 52), 50, "is no snapshot of step None"),
        (training(50, 52, owed=52), 52, "is no snapshot of step None"),
        (training(51, 52, copying=50, owed=52), 51, "is no snapshot of step 50"),
    ],
)
def test_only_the_snapshot_under_way_is_published_and_once_its_step_is_committed(state, step, why):
    with pytest.raises(ProtocolError, match=why):
        on(state, Snapshotted, step=step, holders=ALL)


def test_no_step_is_committed_before_the_snapshot_of_the_one_before_it_is_published():
    with pytest.raises(ProtocolError, match="came before the snapshot of step 50"):
        on(training(50, 52, copying=50), Committed, step=51)


EACH = replace(POLICY, snapshot_every=1, inflight=2)


def test_a_snapshot_waits_until_an_older_one_that_others_hold_too_is_let_go():
    """Else a slice would hold two, with one under way."""
    kept = ledger(sources=(SEED, host(40, slices(0, 1, 2, 3, 4)), host(50)))
    state = training(51, 52, ledger=kept, asked=RunStep(EPOCH, 53))
    state, effects = on(state, Dispatched, EACH, step=53)
    assert (state.copying, state.owed, effects) == (None, 53, ())
    state, effects = on(state, Committed, EACH, step=52)
    assert effects == (Snapshot(EPOCH, 53), RunStep(EPOCH, 54)) and state.owed is None
    # Nothing is in flight whose commit could be waited for.
    drained = training(52, 52, ledger=kept, owed=52, copying=None)
    state, effects = on(drained, Evaluated, EACH, step=52)
    assert effects[0] == Snapshot(EPOCH, 52) and state.copying == 52


@pytest.mark.parametrize(
    ("older", "kept"),
    [
        (ALL, False),  # whoever holds it holds the newer one too
        (slices(0, 1), False),
        (slices(0, 1, 2, 3, 4), True),  # until a step tells that the newer one was outlived
    ],
)
def test_an_older_snapshot_that_others_hold_too_is_kept_until_a_step_is_committed(older, kept):
    book = ledger(sources=(SEED, host(40, older)))
    state = training(50, 52, copying=50, ledger=book)
    state, _ = on(state, Snapshotted, step=50, holders=ALL)
    held = (host(40, older),) if kept else ()
    assert state.ledger.sources == (SEED, *held, host(50))
    state, _ = on(state, Committed, step=51)
    assert state.ledger.sources == (SEED, host(50))


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        (SlicesLost, {"slices": slices(1)}),
        (SlicesLost, {"slices": slices(1), "corrupt": True}),
        (Probed, {"down": slices(1)}),
        (StepStuck, {"during": "step 50"}),
    ],
)
def test_what_ends_the_epoch_drops_the_snapshot_under_way(event, fields):
    state, effects = on(training(49, 51, copying=50), event, **fields)
    assert state.ledger.epoch == EPOCH + 1 and named_snapshots(state) == {40}
    assert not any(isinstance(e, Snapshot) for e in effects)
    assert on(state, Snapshotted, step=50, holders=ALL) == (state, ()), "of an older epoch"
    if isinstance(state, Restoring):
        state, effects = on(state, Prepared, step=40, epoch=EPOCH + 1)
        assert state.copying is state.owed is None and effects[0] == RunStep(EPOCH + 1, 41)


def test_what_goes_on_keeps_the_snapshot_under_way():
    before = training(49, 50, mesh=slices(0, 1), copying=50, asked=RunStep(EPOCH, 51))
    for event, fields in (
        (Committed, {"step": 50}),
        (Dispatched, {"step": 51}),
        (DataFailed, {"step": 51, "reason": "x"}),
        (SlicesLost, {"slices": slices(3)}),
        (Probed, {"up": slices(2, 3)}),
        (PreemptionNoticed, {}),
    ):
        state, effects = on(before, event, **fields)
        assert isinstance(state, Training) and state.copying == 50
        assert not any(isinstance(e, Snapshot) for e in effects), "it is not begun again"


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "changes", "saved"),
    [
        ((SEED, disk(20), host(40), host(30)), {}, 40),
        ((SEED, disk(20), host(30), host(40)), {}, 40),
        ((SEED, host(40)), {}, 40),
        ((SEED, disk(40), host(40)), {}, None),
        ((SEED, disk(50), host(40)), {}, None),
        ((SEED, disk(20), host(40)), {"durable": False}, None),
        ((SEED, disk(20)), {}, None),
        ((SEED, disk(20), host(40, slices(3))), {"up": slices(0)}, None),
        ((SEED, host(30), host(40, slices(3))), {"up": slices(0)}, 30),
        ((SEED, host(40)), {"up": slices(), "leaving": (Leaving(0, 900.0),)}, 40),
    ],
)
@pytest.mark.parametrize("reason", [None, "too few"])
def test_what_is_held_is_made_durable_before_a_run_ends(sources, changes, saved, reason):
    book = ledger(sources=sources, **changes)
    state, effects = settle(book, reason)
    if saved:
        assert isinstance(state, Stopping) and state.reason == reason
        assert effects == (Save(EPOCH, saved, state.ledger.saving.holder),)
        return
    last = max(s.step for s in sources if s.tier in (Tier.DISK, Tier.SEED))
    assert (state, effects) == (Failed(reason) if reason else Done("preempted", None, last), ())


def test_a_save_under_way_is_waited_for_in_a_new_epoch():
    book = ledger(saving=Saving(40, EPOCH, 0))
    assert stop(book, "x") == (Stopping(replace(book, epoch=EPOCH + 1), "x"), ())


def test_what_is_missing_for_the_end():
    def at(**changes):
        return finishing(100, ledger=ledger(**changes))

    both = (SEED, host(100))
    assert conclude(at()) == (at(), (Snapshot(EPOCH, 100),))
    busy = at(saving=Saving(40, EPOCH, 0))
    assert conclude(busy) == (busy, ())
    writing = at(sources=both, saving=Saving(100, EPOCH, 0))
    assert conclude(at(sources=both)) == (writing, (Save(EPOCH, 100, 0),))
    done = Done("done", at().train_state, 100)
    assert conclude(at(sources=(*both, disk(100)))) == (done, ())
    assert conclude(at(sources=both, durable=False)) == (done, ())


def test_a_loss_outside_does_not_ask_again_for_the_last_snapshot():
    before = replace(finishing(), mesh=slices(0, 1))
    assert on(before, SlicesLost, slices=slices(3))[1] == (), "it was asked for already"
    book = ledger(sources=(SEED, host(100)), saving=Saving(100, 2, 3))
    state, effects = on(replace(before, ledger=book), SlicesLost, slices=slices(3))
    assert effects == (Abandon(2, 100), Save(EPOCH, 100, 1)) and isinstance(state, Finishing)


def test_a_probe_that_finds_nobody_lost_changes_nothing_at_the_end():
    before = finishing(ledger=ledger(sources=(SEED, host(100))))
    assert on(before, Probed, up=slices(1), down=slices()) == (before, ())


@pytest.mark.parametrize("over", [Failed("x"), Done("done", None, 0), Starting()])
def test_nothing_follows_the_end_and_only_one_thing_the_beginning(over):
    for event in (Probed, Saved):
        fields = {"step": 40} if event is Saved else {}
        with pytest.raises(ProtocolError, match=f"no rule for {event.__name__} in"):
            on(over, event, **fields)


# --- rules ----------------------------------------------------------------------------------------


def test_what_was_evaluated_before_a_process_began_is_known_to_it():
    given = dict(epoch=0, num_steps=9, slices=ALL, up=ALL, sources=(SEED,), durable=True)
    state, _ = on(Starting(), Started, evaluated=5, **given)
    assert state.ledger.evaluated == 5


@pytest.mark.parametrize(
    ("source", "sources", "mesh", "owed"),
    [
        (host(40), (SEED, host(40)), ALL, None),
        (host(40), (SEED, host(40)), slices(0, 1), None),
        (host(40, slices(0, 1)), (SEED, host(40, slices(0, 1))), slices(0, 2), 40),
        (disk(40), (SEED, disk(40)), ALL, 40),
        (live(45), (SEED, host(40), live(45)), ALL, 45),
        (SEED, (SEED,), ALL, None),
    ],
)
def test_what_a_new_mesh_holds_is_copied_unless_its_slices_have_it(source, sources, mesh, owed):
    before = restoring(source, mesh=mesh, ledger=ledger(sources=sources))
    state, effects = on(before, Prepared, step=source.step)
    copy = (Snapshot(EPOCH, owed),) if owed else ()
    assert effects == (*copy, RunStep(EPOCH, source.step + 1), *watch(state))
    assert state.copying == owed and state.owed is None
    assert state.ledger.sources == tuple(s for s in sources if s.tier is not Tier.LIVE)
    assert state.mesh == mesh and state.committed == state.dispatched == source.step


def test_a_save_that_is_owed_begins_as_soon_as_a_mesh_is_ready():
    for owed, expected in ((True, (Save(EPOCH, 40, 0),)), (False, ())):
        before = restoring(mesh=slices(0, 1, 2), ledger=ledger(save_owed=owed))
        state, effects = on(before, Prepared, step=40)
        assert effects == (*expected, RunStep(EPOCH, 41), Probe(EPOCH, slices(3)))
        assert not state.ledger.save_owed and bool(state.ledger.saving) == owed
    before = restoring(disk(20), ledger=ledger(save_owed=True, sources=(SEED, disk(20))))
    state, effects = on(before, Prepared, step=20)
    assert effects == (Snapshot(EPOCH, 20), RunStep(EPOCH, 21)) and state.ledger.save_owed


def test_a_seed_that_is_missing_is_not_tried_again():
    before = restoring(SEED, ledger=ledger(sources=(SEED, disk(20))))
    state, _ = on(before, SnapshotMissing, source=SEED)
    assert state.source == disk(20) and state.ledger.sources == (disk(20),)
    state, _ = on(restoring(disk(20)), RestoreFailed, source=disk(20), reason="x")
    assert isinstance(state, Restoring)


def test_a_snapshot_of_a_step_replaces_the_one_of_another_mesh():
    old = host(50, slices(2, 3))
    book = ledger(sources=(SEED, disk(50), host(40), old, live(50)))
    before = snapshotting(50, mesh=slices(0, 1), ledger=book)
    state, _ = on(before, Snapshotted, step=50, holders=slices(0, 1))
    kept = (SEED, disk(50), host(40), live(50), host(50, slices(0, 1)))
    assert state == replace(before, ledger=replace(book, sources=kept), copying=None)


def test_slices_that_answer_are_counted_with_or_without_their_memory():
    before = training(45, 46, mesh=slices(0, 1))
    state, effects = on(before, Probed, up=slices(0, 2), emptied=slices(3))
    assert state.ledger.stable == (Stable(2, 1, 100.0), Stable(3, 1, 100.0))
    assert effects == (WakeAt(EPOCH, 105.0),)
    state, _ = on(before, Probed, up=slices(2), emptied=slices(1))
    assert isinstance(state, Restoring) and state.mesh == ALL - {1}


def test_a_row_of_probes_is_broken_by_one_that_finds_nobody():
    book = ledger(stable=(Stable(2, 1, 80.0), Stable(3, 1, 80.0)))
    before = training(45, 46, mesh=slices(0, 1), ledger=book)
    state, _ = on(before, Probed, up=slices(2), down=slices(3))
    assert isinstance(state, Training) and state.ledger.stable == (Stable(2, 2, 80.0),)


@pytest.mark.parametrize(
    ("up", "at", "min_slices", "until", "wakes"),
    [
        (slices(0, 1), 100.0, 2, 120.0, 105.0),
        (slices(0, 1), 117.0, 2, 120.0, 120.0),
        (slices(0, 1), 120.0, 2, 120.0, None),
        (slices(0, 1), 121.0, 2, 120.0, None),
        (slices(0, 1, 2, 3), 100.0, 2, 120.0, None),
        (slices(0), 130.0, 2, 120.0, 135.0),
        (slices(0), 148.0, 2, 120.0, 150.0),
    ],
)
def test_how_long_a_wait_goes_on(up, at, min_slices, until, wakes):
    """It is below since 100, and may be so for 50 seconds."""
    policy = replace(POLICY, min_slices=min_slices, deadline=50.0)
    book = ledger(up=slices(0), below_since=100.0)
    before = waiting(ledger=book, until=until)
    state, effects = on(before, Probed, policy, at=at, up=up, down=ALL - up)
    assert isinstance(state, Waiting if wakes else Restoring)
    assert isinstance(effects[0], WakeAt if wakes else Prepare) and len(effects) == 1
    assert not wakes or effects[0] == WakeAt(EPOCH, wakes)
    assert state.ledger.up == up


def test_a_wait_below_ends_at_its_deadline():
    policy = replace(POLICY, min_slices=2, deadline=50.0)
    book = ledger(up=slices(0), below_since=100.0, sources=(SEED, disk(40)))
    state, _ = on(waiting(ledger=book), Probed, policy, at=150.0, up=slices(0))
    assert state == Failed("1 of 4 slices were up after 50 s, and min_slices is 2")
    book = ledger(up=slices(0, 1), sources=(SEED, disk(40)))
    before = waiting(ledger=book, until=900.0)
    state, effects = on(before, Probed, policy, at=150.0, up=slices(0), down=slices(1))
    assert state.ledger.below_since == 150.0 and effects == (WakeAt(EPOCH, 155.0),)


@pytest.mark.parametrize("policy", [POLICY, LIVE])
@pytest.mark.parametrize("state", [training(45, 47), finishing(45), restoring()])
def test_who_is_stuck_is_asked_in_a_new_epoch(state, policy):
    book = ledger(stuck=1, stable=(Stable(3, 1, 80.0),))
    kept = policy is LIVE and not isinstance(state, Restoring)
    sources = (*book.sources, live(45)) if kept else book.sources
    after, effects = on(replace(state, ledger=book), StepStuck, policy, during="it")
    asked = replace(book, stuck=2, epoch=EPOCH + 1, stable=(), sources=sources)
    assert after == Diagnosing(asked, ALL, "it") and effects == (Probe(EPOCH + 1, ALL),)


def test_an_evaluation_that_nobody_waits_for_may_lack_its_data():
    before = training(45, asked=RunStep(EPOCH, 46))
    assert on(before, DataFailed, step=45, reason="x") == (before, ())
    with pytest.raises(ProtocolError):
        on(before, DataFailed, step=47, reason="x")


def test_data_that_failed_once_are_asked_for_again():
    for asked in (RunStep(EPOCH, 46), Evaluate(EPOCH, 45)):
        before = training(45, asked=asked)
        state, effects = on(before, DataFailed, EVALS, step=asked.step, reason="x")
        again = Evaluate(EPOCH, 45)  # which is due in either case
        assert effects == (again,)
        assert state == replace(before, asked=again, ledger=ledger(data_failures=1))


def test_a_step_that_was_asked_for_stays_so_when_another_commits():
    before = training(45, 46, asked=RunStep(EPOCH, 47))
    state, effects = on(before, Committed, step=46)
    assert state.asked == RunStep(EPOCH, 47) and effects == ()


def test_the_last_step_that_is_known_to_be_right():
    book = ledger(sources=(SEED, disk(20), host(40), live(45)))
    assert trusted_step(training(45, ledger=book)) == 40
    assert trusted_step(training(45, ledger=ledger(sources=(disk(20), SEED)))) == 20
    assert trusted_step(training(45, ledger=ledger(sources=(live(45),)))) == 0


# --- saves ----------------------------------------------------------------------------------------


def test_a_checkpoint_takes_its_place_among_the_others():
    policy = replace(POLICY, keep_checkpoints=2)
    book = ledger(saving=Saving(30, 1, 0), sources=(SEED, disk(40), disk(20), disk(30), host(40)))
    state, _ = on(training(45, 46, ledger=book), Saved, policy, step=30, epoch=1)
    assert state.ledger == ledger(sources=(SEED, host(40), disk(30), disk(40)))


@pytest.mark.parametrize("answer", [Saved, SaveFailed])
@pytest.mark.parametrize(("step", "epoch"), [(30, EPOCH), (40, 2)])
def test_only_the_answer_to_the_save_under_way_counts(answer, step, epoch):
    before = training(45, 46, ledger=ledger(saving=Saving(40, EPOCH, 0), save_owed=True))
    reason = {} if answer is Saved else {"reason": "x", "lost": slices(0)}
    assert on(before, answer, step=step, epoch=epoch, **reason) == (before, ())
    free = training(45, 46)
    assert on(free, answer, step=40, **reason) == (free, ())


@pytest.mark.parametrize(
    ("sources", "up", "saved"),
    [
        ((SEED, host(45), host(40)), ALL, 45),
        ((SEED, disk(50), host(40)), ALL, 40),
        ((SEED, disk(20)), ALL, None),
        ((SEED, host(45, slices(3))), slices(0), None),
    ],
)
@pytest.mark.parametrize("owed", [True, False])
def test_what_was_owed_is_saved_from_the_newest_snapshot(sources, up, saved, owed):
    book = ledger(saving=Saving(30, EPOCH, 0), save_owed=owed, sources=sources, up=up)
    before = training(45, 46, ledger=book)
    for answer in (Saved, SaveFailed):
        reason = {} if answer is Saved else {"reason": "x"}
        state, effects = on(before, answer, step=30, **reason)
        begun = [e.step for e in effects]
        assert begun == ([saved] if saved and owed else [])
        assert state.ledger.save_owed == (owed and not saved)


def test_the_last_save_alone_decides_how_a_run_ends():
    book = ledger(sources=(SEED, host(40), host(100)), saving=Saving(40, EPOCH, 0))
    state, effects = on(finishing(ledger=book), SaveFailed, step=40, reason="disk full")
    assert isinstance(state, Finishing) and effects == (Save(EPOCH, 100, 0),)


def test_a_failed_save_that_finds_its_slice_gone_is_a_loss():
    book = ledger(saving=Saving(40, EPOCH, 1))
    before = training(45, 46, ledger=book)
    state, effects = on(before, SaveFailed, step=40, reason="gone", lost=slices(1))
    assert isinstance(state, Restoring) and effects[0] == Abandon(EPOCH, 40)
    assert state.ledger.save_owed and state.ledger.up == ALL - {1}


def test_a_notice_counts_only_for_slices_that_exist():
    state, effects = on(training(45, 46), PreemptionNoticed, slices=slices(9), until=160.0)
    asked = RunStep(EPOCH, 47)
    assert (state, effects) == (training(45, 46, asked=asked), (asked,))
