"""The machine by example: one for each row of its table, and the verbs at their edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastix.machine import (
    TABLE,
    Abandon,
    Committed,
    Compile,
    Compiled,
    ControllerLost,
    DataFailed,
    Diagnosing,
    Dispatched,
    Done,
    Evaluate,
    Evaluated,
    Event,
    Failed,
    Finishing,
    Flap,
    Growth,
    Leaving,
    Ledger,
    Policy,
    PreemptionNoticed,
    Prepare,
    Prepared,
    Probe,
    Probed,
    ProgramFailed,
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
    State,
    StepStuck,
    Stopping,
    Tier,
    Training,
    TrainStateName,
    Tried,
    Try,
    Waiting,
    WakeAt,
    Woke,
    transition,
)

ALL = frozenset({0, 1, 2, 3})
SEED = Source(Tier.SEED, 0)
POLICY = Policy(snapshot_every=10, checkpoint_every=20, probe_every=5.0, warm="off")
EPOCH = 3


def slices(*ids: int) -> frozenset[int]:
    return frozenset(ids)


def host(step: int, holders: frozenset[int] = ALL) -> Source:
    return Source(Tier.HOST, step, EPOCH, holders)


def disk(step: int) -> Source:
    return Source(Tier.DISK, step)


def ledger(**changes) -> Ledger:
    base = Ledger(
        num_steps=100, slices=ALL, up=ALL, durable=True, sources=(SEED, host(40)), epoch=EPOCH
    )
    return replace(base, **changes)


def training(committed: int = 45, dispatched: int | None = None, **changes) -> Training:
    """Steps in flight up to `dispatched`; nothing asked unless said."""
    mesh = changes.pop("mesh", ALL)
    state = Training(
        ledger=changes.pop("ledger", None) or ledger(),
        mesh=mesh,
        committed=committed,
        dispatched=committed if dispatched is None else dispatched,
        train_state=TrainStateName(committed, EPOCH, mesh),
        iterator_state=committed,
    )
    return replace(state, **changes)


def snapshotting(step: int, **changes) -> Training:
    """The step is committed, and those after it run while its snapshot is made."""
    return training(step, step + 2, copying=step, **changes)


def restoring(source: Source = host(40), **changes) -> Restoring:
    return Restoring(changes.pop("ledger", None) or ledger(), changes.pop("mesh", ALL), source)


def waiting(**changes) -> Waiting:
    book = changes.pop("ledger", None) or ledger(up=slices(3), below_since=100.0)
    return replace(Waiting(book, ALL, want=4, until=100.0), **changes)


def finishing(step: int = 100, **changes) -> Finishing:
    book = changes.pop("ledger", None) or ledger()
    name = TrainStateName(step, EPOCH, ALL)
    return replace(Finishing(book, "done", ALL, name, step), **changes)


def growing(mesh=ALL, **changes) -> Training:
    """Slices 0 to 2 train, and the others answer; the executable for `mesh` is being made."""
    stable = tuple(Stable(s, 2, 90.0) for s in sorted(ALL - slices(0, 1, 2)))
    book = ledger(up=ALL, stable=stable)
    state = training(45, 47, mesh=slices(0, 1, 2), ledger=book, growth=Growth(mesh))
    return replace(state, **changes)


def on(state: State, event: type[Event], policy: Policy = POLICY, at: float = 100.0, **fields):
    fields.setdefault("epoch", EPOCH)
    return transition(state, event(at=at, **fields), policy)


# --- one example for each row -----------------------------------------------------------------


def starting_started():
    state, effects = on(
        Starting(), Started, epoch=0, num_steps=9, slices=ALL, up=ALL, sources=(SEED,), durable=True
    )
    assert state == Restoring(
        Ledger(num_steps=9, slices=ALL, up=ALL, durable=True, sources=(SEED,), epoch=1), ALL, SEED
    )
    assert effects == (Prepare(1, ALL, SEED),)


def training_dispatched():
    state, effects = on(training(45, asked=RunStep(EPOCH, 46)), Dispatched, step=46)
    assert (state.committed, state.dispatched, state.asked) == (45, 46, RunStep(EPOCH, 47))
    assert effects == (RunStep(EPOCH, 47),)


def training_committed():
    state, effects = on(training(45, 47), Committed, step=46)
    assert (state.committed, state.iterator_state, state.train_state.step) == (46, 46, 46)
    assert effects == (RunStep(EPOCH, 48),)


def training_snapshotted():
    state, effects = on(snapshotting(50), Snapshotted, step=50, holders=ALL)
    book = ledger(sources=(SEED, host(50)))
    assert (state, effects) == (training(50, 52, ledger=book), ()), "the steps go on"
    state, effects = on(state, Committed, step=51)
    assert state.ledger.sources == (SEED, host(50)) and effects == (RunStep(EPOCH, 53),)


def training_evaluated():
    before = training(50, asked=Evaluate(EPOCH, 50))
    state, effects = on(before, Evaluated, step=50)
    assert state.ledger.evaluated == 50 and effects == (RunStep(EPOCH, 51),)


def training_probed():
    book = ledger(up=slices(0, 1))
    state, effects = on(training(45, 46, mesh=slices(0, 1), ledger=book), Probed, down=slices(2, 3))
    assert state.ledger.up == slices(0, 1)
    assert effects == (WakeAt(EPOCH, 105.0),)


def training_compiled():
    state, effects = on(growing(dispatched=45), Compiled, mesh=ALL)
    source = Source(Tier.LIVE, 45, EPOCH, slices(0, 1, 2))
    assert (state.mesh, state.source) == (ALL, source)
    assert effects == (Prepare(EPOCH + 1, ALL, source),)


def training_woke():
    before = training(45, 46, mesh=slices(0, 1))
    assert on(before, Woke) == (before, (Probe(EPOCH, slices(2, 3)),))


def training_data_failed():
    before = training(45, asked=RunStep(EPOCH, 46))
    state, effects = on(before, DataFailed, step=46, reason="disk")
    assert effects == (RunStep(EPOCH, 46),)
    end, _ = on(state, DataFailed, step=46, reason="disk")
    assert end == Failed("the data stream failed twice at step 46: disk")


def training_slices_lost():
    state, effects = on(training(45, 47), SlicesLost, slices=slices(1))
    assert isinstance(state, Restoring) and state.mesh == slices(0, 2, 3)
    assert state.source == host(40, slices(0, 2, 3))
    assert effects == (Prepare(EPOCH + 1, slices(0, 2, 3), state.source),)


def training_saved():
    before = training(45, 46, ledger=ledger(saving=Saving(40, 2, 1)))
    state, effects = on(before, Saved, step=40, epoch=2)
    assert state.ledger.saving is None and disk(40) in state.ledger.sources and effects == ()


def training_save_failed():
    before = training(45, 46, ledger=ledger(saving=Saving(40, EPOCH, 1)))
    state, effects = on(before, SaveFailed, step=40, reason="disk full")
    assert state.ledger.saving is None and disk(40) not in state.ledger.sources and effects == ()


def training_program_failed():
    assert on(training(), ProgramFailed, reason="boom") == (Failed("boom"), ())


def training_controller_lost():
    state, _ = on(training(), ControllerLost, reason="proxy gone")
    assert state == Failed("the controller lost its devices (proxy gone)", resumable=True)
    assert state.outcome == "preempted" and Failed("boom").outcome == "failed"


def training_preemption_noticed():
    state, effects = on(training(45, 46), PreemptionNoticed)
    assert state.ledger.draining and effects == ()
    state, effects = on(state, Committed, step=46)
    assert isinstance(state, Finishing) and state.why == "preempted"
    assert effects == (Snapshot(EPOCH, 46),)


def waiting_probed():
    state, effects = on(waiting(), Probed, policy=replace(POLICY, min_slices=3), up=slices(3))
    assert isinstance(state, Waiting) and effects == (WakeAt(EPOCH, 105.0),)
    state, effects = on(
        waiting(), Probed, policy=replace(POLICY, min_slices=3), up=slices(0, 3), emptied=slices(1)
    )
    assert isinstance(state, Restoring) and state.mesh == slices(0, 1, 3)
    assert state.source == host(40, ALL - {1})


def waiting_woke():
    before = waiting()
    assert on(before, Woke) == (before, (Probe(EPOCH, ALL),))


def waiting_slices_lost():
    before = waiting(ledger=ledger(up=slices(2, 3)))
    state, effects = on(before, SlicesLost, policy=replace(POLICY, min_slices=2), slices=slices(2))
    assert state.ledger.up == slices(3) and state.ledger.below_since == 100.0
    assert effects == (WakeAt(EPOCH, 105.0),), "asks again"


def waiting_saved():
    state, _ = on(waiting(ledger=ledger(saving=Saving(40, 2, 1))), Saved, step=40, epoch=2)
    assert isinstance(state, Waiting) and disk(40) in state.ledger.sources


def waiting_save_failed():
    before = waiting(ledger=ledger(saving=Saving(40, 2, 1)))
    state, _ = on(before, SaveFailed, step=40, epoch=2, reason="x")
    assert isinstance(state, Waiting) and state.ledger.saving is None


def waiting_controller_lost():
    assert isinstance(on(waiting(), ControllerLost, reason="x")[0], Failed)


def waiting_preemption_noticed():
    book = ledger(sources=(SEED, disk(20), host(40)))
    state, effects = on(waiting(ledger=book), PreemptionNoticed)
    assert isinstance(state, Stopping) and effects == (Save(EPOCH + 1, 40, 0),), "40 is only held"
    book = ledger(sources=(SEED, disk(40), host(40)))
    assert on(waiting(ledger=book), PreemptionNoticed) == (Done("preempted", None, 40), ())


def restoring_prepared():
    state, effects = on(restoring(), Prepared, step=40)
    assert isinstance(state, Training)
    assert (state.committed, state.dispatched, state.iterator_state) == (40, 40, 40)
    assert state.train_state == TrainStateName(40, EPOCH, ALL)
    assert effects == (RunStep(EPOCH, 41),)


def restoring_snapshot_missing():
    before = restoring(ledger=ledger(sources=(SEED, disk(20), host(40))))
    state, effects = on(before, SnapshotMissing, source=host(40))
    assert state.source == disk(20) and effects == (Prepare(EPOCH + 1, ALL, disk(20)),)


def restoring_restore_failed():
    before = restoring(disk(20), ledger=ledger(sources=(SEED, disk(10), disk(20))))
    state, effects = on(before, RestoreFailed, source=disk(20), reason="flipped bit")
    assert state.source == disk(10) and disk(20) not in state.ledger.sources
    end, _ = on(restoring(SEED), RestoreFailed, source=SEED, reason="no memory")
    assert end == Failed("the initial state cannot be built: no memory")


def restoring_slices_lost():
    state, effects = on(restoring(mesh=slices(0, 2, 3)), SlicesLost, slices=slices(0))
    assert state.mesh == slices(1, 2, 3) and state.source.holders == slices(1, 2, 3)
    assert effects == (Prepare(EPOCH + 1, slices(1, 2, 3), state.source),)


def restoring_saved():
    before = restoring(ledger=ledger(saving=Saving(40, 2, 1)))
    state, _ = on(before, Saved, step=40, epoch=2)
    assert isinstance(state, Restoring) and disk(40) in state.ledger.sources


def restoring_save_failed():
    before = restoring(ledger=ledger(saving=Saving(40, 2, 1)))
    state, _ = on(before, SaveFailed, step=40, epoch=2, reason="x")
    assert isinstance(state, Restoring) and state.ledger.saving is None


def restoring_program_failed():
    assert on(restoring(), ProgramFailed, reason="boom") == (Failed("boom"), ())


def restoring_controller_lost():
    assert isinstance(on(restoring(), ControllerLost, reason="x")[0], Failed)


def restoring_preemption_noticed():
    state, effects = on(restoring(), PreemptionNoticed)
    assert isinstance(state, Restoring) and effects == ()
    state, effects = on(state, Prepared, step=40)
    assert isinstance(state, Finishing) and state.why == "preempted"


def diagnosing(stuck: int = 1, **changes) -> Diagnosing:
    return Diagnosing(changes.pop("ledger", None) or ledger(stuck=stuck), ALL, "step 46")


def training_step_stuck():
    state, effects = on(training(45, 47), StepStuck, during="step 46")
    assert state == Diagnosing(ledger(stuck=1, epoch=EPOCH + 1), ALL, "step 46")
    assert effects == (Probe(EPOCH + 1, ALL),)


def restoring_step_stuck():
    state, effects = on(restoring(), StepStuck, during="restoring")
    assert isinstance(state, Diagnosing) and effects == (Probe(EPOCH + 1, ALL),)


def finishing_compiled():
    assert on(finishing(), Compiled, mesh=ALL) == (finishing(), ())


def finishing_step_stuck():
    state, _ = on(finishing(), StepStuck, during="a snapshot")
    assert isinstance(state, Diagnosing) and state.during == "a snapshot"


def diagnosing_probed():
    state, _ = on(diagnosing(), Probed, up=slices(0, 1, 3), down=slices(2))
    assert isinstance(state, Restoring) and state.mesh == slices(0, 1, 3), "a culprit is lost"
    state, _ = on(diagnosing(), Probed, up=ALL)
    assert isinstance(state, Restoring) and state.mesh == ALL, "no culprit: once more"
    state, effects = on(diagnosing(stuck=2), Probed, up=ALL)
    assert isinstance(state, Diagnosing) and effects == (Try(EPOCH, ALL),)


def diagnosing_tried():
    state, _ = on(diagnosing(stuck=2), Tried, stuck=slices(3))
    assert isinstance(state, Restoring) and state.mesh == slices(0, 1, 2)
    state, _ = on(diagnosing(stuck=2), Tried)
    assert isinstance(state, Failed) and state.reason.startswith("stuck: step 46 did not finish")


def diagnosing_step_stuck():
    end, _ = on(diagnosing(2), StepStuck, during="compiling for slice 0")
    assert end.reason.startswith("stuck: step 46 did not finish, and neither did compiling for")


def diagnosing_slices_lost():
    state, _ = on(diagnosing(), SlicesLost, slices=slices(1))
    assert isinstance(state, Restoring) and state.mesh == slices(0, 2, 3)


def diagnosing_saved():
    state, _ = on(diagnosing(ledger=ledger(saving=Saving(40, 2, 1))), Saved, step=40, epoch=2)
    assert isinstance(state, Diagnosing) and disk(40) in state.ledger.sources


def diagnosing_save_failed():
    before = diagnosing(ledger=ledger(saving=Saving(40, 2, 1)))
    state, _ = on(before, SaveFailed, step=40, epoch=2, reason="x")
    assert isinstance(state, Diagnosing) and state.ledger.saving is None


def diagnosing_program_failed():
    assert on(diagnosing(), ProgramFailed, reason="boom") == (Failed("boom"), ())


def diagnosing_controller_lost():
    assert isinstance(on(diagnosing(), ControllerLost, reason="x")[0], Failed)


def diagnosing_preemption_noticed():
    state, effects = on(diagnosing(), PreemptionNoticed)
    assert isinstance(state, Diagnosing) and state.ledger.draining and effects == ()


def finishing_snapshotted():
    state, effects = on(finishing(), Snapshotted, step=100, holders=ALL)
    assert state.ledger.saving == Saving(100, EPOCH, 0)
    assert effects == (Save(EPOCH, 100, 0),)


def finishing_evaluated():
    state, effects = on(finishing(50), Evaluated, step=50)
    assert state.ledger.evaluated == 50 and effects == ()


def finishing_data_failed():
    assert on(finishing(50), DataFailed, step=50, reason="x") == (finishing(50), ())


def finishing_saved():
    book = ledger(sources=(SEED, host(100)), saving=Saving(100, EPOCH, 0))
    state, effects = on(finishing(ledger=book), Saved, step=100)
    assert state == Done("done", TrainStateName(100, EPOCH, ALL), 100) and effects == ()


def finishing_save_failed():
    book = ledger(sources=(SEED, host(100)), saving=Saving(100, EPOCH, 0))
    state, _ = on(finishing(ledger=book), SaveFailed, step=100, reason="disk full")
    assert state == Failed("the last checkpoint could not be written: disk full")


def finishing_slices_lost():
    state, _ = on(finishing(), SlicesLost, slices=slices(2))
    assert isinstance(state, Restoring) and state.source == host(40, ALL - {2})


def finishing_probed():
    state, effects = on(finishing(), Probed, emptied=slices(2))
    assert isinstance(state, Restoring)
    before = finishing()
    assert on(before, Probed, up=slices(2)) == (before, ())


def finishing_woke():
    before = finishing()
    assert on(before, Woke) == (before, ())


def finishing_program_failed():
    assert on(finishing(), ProgramFailed, reason="boom") == (Failed("boom"), ())


def finishing_controller_lost():
    assert isinstance(on(finishing(), ControllerLost, reason="x")[0], Failed)


def finishing_preemption_noticed():
    state, effects = on(finishing(), PreemptionNoticed)
    assert isinstance(state, Finishing) and effects == ()


def stopping(reason: str | None = None, **changes) -> Stopping:
    book = ledger(sources=(SEED, disk(20), host(40)), saving=Saving(40, EPOCH, 0), **changes)
    return Stopping(book, reason)


def stopping_saved():
    assert on(stopping(), Saved, step=40) == (Done("preempted", None, 40), ())
    assert on(stopping("too few"), Saved, step=40) == (Failed("too few"), ())


def stopping_save_failed():
    state, _ = on(stopping(), SaveFailed, step=40, reason="disk full")
    assert state == Failed("the last checkpoint could not be written: disk full")
    state, _ = on(stopping("too few"), SaveFailed, step=40, reason="disk full")
    assert state == Failed("too few")
    state, effects = on(stopping(), SaveFailed, step=40, reason="gone", lost=slices(0))
    assert effects == (Abandon(EPOCH, 40), Save(EPOCH + 1, 40, 2)), "from a slice that lives"
    state, _ = on(stopping(), SaveFailed, step=40, reason="gone", lost=ALL)
    assert state == Done("preempted", None, 20)


def stopping_preemption_noticed():
    state, effects = on(stopping(), PreemptionNoticed)
    assert isinstance(state, Stopping) and effects == ()


def _row_name(row: tuple[type, type]) -> str:
    camel = row[1].__name__
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in camel)
    return f"{row[0].__name__.lower()}{snake}"


@pytest.mark.parametrize("row", TABLE, ids=_row_name)
def test_each_row_of_the_table_has_an_example_that_holds(row):
    globals()[_row_name(row)]()


def test_each_example_has_its_row():
    states = {row[0].__name__.lower() for row in TABLE}
    examples = {name for name in globals() if name.partition("_")[0] in states and "_" in name}
    assert examples == {_row_name(row) for row in TABLE}


def test_a_row_that_is_missing_is_our_defect():
    with pytest.raises(ProtocolError, match="no rule for Prepared in Training"):
        on(training(), Prepared, step=3)


@pytest.mark.parametrize("step", [44, 45, 47])
def test_steps_commit_in_order(step):
    with pytest.raises(ProtocolError):
        on(training(45, 46), Committed, step=step)


def test_steps_dispatch_in_order():
    with pytest.raises(ProtocolError):
        on(training(45, asked=RunStep(EPOCH, 46)), Dispatched, step=47)


# --- old answers --------------------------------------------------------------------------------


def test_an_answer_of_an_older_epoch_is_dropped_before_the_table():
    before = training(45, 46)
    assert on(before, Committed, step=46, epoch=EPOCH - 1) == (before, ())
    assert on(before, Prepared, step=46, epoch=EPOCH - 1) == (before, ())


def test_a_finished_save_counts_in_whatever_epoch_it_began():
    before = training(45, 46, ledger=ledger(saving=Saving(40, 1, 2)))
    assert disk(40) in on(before, Saved, step=40, epoch=1)[0].ledger.sources


def test_the_answer_of_an_abandoned_save_says_nothing():
    before = training(45, 46, ledger=ledger(saving=Saving(40, EPOCH, 2)))
    assert on(before, Saved, step=40, epoch=EPOCH - 1) == (before, ())


# --- losing, waiting, resizing --------------------------------------------------------------------


def test_live_lookback_resumes_at_the_last_committed_step():
    policy = replace(POLICY, lookback="live")
    state, _ = on(training(45, 47), SlicesLost, policy=policy, slices=slices(0))
    assert state.source == Source(Tier.LIVE, 45, EPOCH, slices(1, 2, 3))


def test_when_every_slice_dies_the_newest_checkpoint_is_next():
    book = ledger(sources=(SEED, disk(20), host(40)))
    state, effects = on(training(45, 47, ledger=book), SlicesLost, slices=ALL)
    assert isinstance(state, Waiting) and state.ledger.sources == (SEED, disk(20))
    state, _ = on(state, Probed, epoch=EPOCH + 1, emptied=slices(2))
    assert state.mesh == slices(2) and state.source == disk(20)


def test_pause_and_resume_is_a_policy():
    policy = replace(POLICY, min_slices=4)
    state, effects = on(training(45), SlicesLost, policy=policy, slices=slices(1))
    assert isinstance(state, Waiting) and effects == (Probe(EPOCH + 1, ALL),)
    state, _ = on(state, Probed, policy, up=ALL - {1}, down=slices(1), epoch=EPOCH + 1)
    assert isinstance(state, Waiting)
    state, _ = on(state, Probed, policy, up=ALL - {1}, emptied=slices(1), epoch=EPOCH + 1)
    assert isinstance(state, Restoring) and state.mesh == ALL


def test_patience_waits_for_a_return_and_then_goes_on():
    policy = replace(POLICY, patience=7.0)
    state, _ = on(training(45), SlicesLost, policy, slices=slices(1))
    assert isinstance(state, Waiting) and state.until == 107.0
    state, effects = on(
        state, Probed, policy, at=100.0, up=ALL - {1}, down=slices(1), epoch=EPOCH + 1
    )
    assert effects == (WakeAt(EPOCH + 1, 105.0),)
    state, _ = on(state, Probed, policy, at=107.0, up=ALL - {1}, down=slices(1), epoch=EPOCH + 1)
    assert isinstance(state, Restoring) and state.mesh == ALL - {1}


def test_the_deadline_counts_from_the_first_moment_below():
    policy = replace(POLICY, min_slices=3, deadline=50.0)
    state, _ = on(training(45), SlicesLost, policy, slices=slices(0, 1))
    down = dict(up=slices(2, 3), down=slices(0, 1), epoch=EPOCH + 1)
    state, effects = on(state, Probed, policy, at=147.0, **down)
    assert effects == (WakeAt(EPOCH + 1, 150.0),)
    state, effects = on(state, Probed, policy, at=150.0, **down)
    assert isinstance(state, Stopping) and effects[0].step == 40, "what is held is saved first"
    end, _ = on(state, Saved, policy, step=40, epoch=EPOCH + 2)
    assert end == Failed("2 of 4 slices were up after 50 s, and min_slices is 3")


def test_losses_without_progress_are_bounded_and_a_commit_forgets_them():
    policy = replace(POLICY, max_losses=1)
    state, _ = on(restoring(ledger=ledger(losses=1)), SlicesLost, policy, slices=slices(0))
    assert state == Failed("2 losses in a row without a committed step")
    state, _ = on(training(45, 46, ledger=ledger(losses=1)), Committed, policy, step=46)
    assert state.ledger.losses == 0


def test_the_loss_of_a_slice_that_stands_by_disturbs_nobody():
    state, effects = on(training(45, 46, mesh=slices(0, 1)), SlicesLost, slices=slices(3))
    assert isinstance(state, Training) and state.ledger.up == slices(0, 1, 2) and effects == ()


def test_a_standby_takes_over_at_once_the_longest_stable_first():
    policy = replace(POLICY, max_slices=2)
    book = ledger(stable=(Stable(2, 2, 90.0), Stable(3, 2, 80.0)))
    state, _ = on(training(45, mesh=slices(0, 1), ledger=book), SlicesLost, policy, slices={0})
    assert state.mesh == slices(1, 3)


def test_a_step_that_is_stuck_again_after_a_commit_gets_its_retry_again():
    state, _ = on(training(45, 46, ledger=ledger(stuck=1)), Committed, step=46)
    assert state.ledger.stuck == 0


def test_a_stuck_step_looks_back_as_the_policy_says():
    policy = replace(POLICY, lookback="live")
    state, _ = on(training(45, 47), StepStuck, policy, during="step 46")
    state, _ = on(state, Probed, policy, up=ALL, epoch=EPOCH + 1)
    assert state.source == Source(Tier.LIVE, 45, EPOCH, ALL)


# --- regrow ---------------------------------------------------------------------------------------


def test_a_returned_slice_is_taken_back_after_stable_probes_and_no_step_is_lost():
    book = ledger(up=slices(0, 1, 2))
    state = training(45, 46, mesh=slices(0, 1, 2), ledger=book)
    state, effects = on(state, Probed, emptied=slices(3))
    assert effects == (WakeAt(EPOCH, 105.0),)
    state, effects = on(state, Probed, up=slices(3))
    assert isinstance(state, Training) and state.growth == Growth(ALL)
    assert effects == (WakeAt(EPOCH, 105.0), Compile(EPOCH, ALL), RunStep(EPOCH, 47)), "goes on"
    state, _ = on(state, Dispatched, step=47)
    state, effects = on(state, Compiled, mesh=ALL)
    assert isinstance(state, Training) and effects == (), "the steps in flight end first"
    state, effects = on(state, Committed, step=46)
    assert effects == ()
    state, effects = on(state, Committed, step=47)
    assert isinstance(state, Restoring) and state.mesh == ALL
    assert state.source == Source(Tier.LIVE, 47, EPOCH, slices(0, 1, 2))
    state, _ = on(state, Prepared, step=47, epoch=EPOCH + 1)
    assert state.committed == 47 and all(s.tier is not Tier.LIVE for s in state.ledger.sources)


def test_a_slice_that_flaps_starts_its_stable_probes_again():
    book = ledger(up=slices(0, 1, 2), stable=(Stable(3, 1, 90.0),))
    state = training(45, 46, mesh=slices(0, 1, 2), ledger=book)
    state, _ = on(state, Probed, down=slices(3))
    state, effects = on(state, Probed, emptied=slices(3))
    assert effects == (WakeAt(EPOCH, 105.0),) and state.ledger.stability(3) == Stable(3, 1, 100.0)


def test_a_loss_while_regrowing_falls_back_to_the_live_state_of_the_survivors():
    live = Source(Tier.LIVE, 46, EPOCH, slices(0, 1, 2))
    book = ledger(sources=(SEED, host(40), live))
    state, _ = on(restoring(live, ledger=book), SlicesLost, slices=slices(1))
    assert state.source == replace(live, holders=slices(0, 2)) and state.mesh == slices(0, 2, 3)


# --- slices that will be taken away ---------------------------------------------------------------


def test_a_slice_is_left_before_it_dies_and_no_step_is_lost():
    state, effects = on(training(45, 46), PreemptionNoticed, slices=slices(1), until=160.0)
    assert isinstance(state, Training) and effects == (), "the step in flight ends first"
    state, effects = on(state, Committed, step=46)
    assert isinstance(state, Restoring) and state.mesh == slices(0, 2, 3)
    assert state.source == Source(Tier.LIVE, 46, EPOCH, slices(0, 2, 3))


def test_a_slice_that_was_left_is_not_taken_back_before_its_time():
    book = ledger(up=slices(0, 2, 3), leaving=(Leaving(1, 160.0),))
    before = training(45, 46, mesh=slices(0, 2, 3), ledger=book)
    state = before
    for at in (110.0, 120.0, 130.0):
        state, effects = on(state, Probed, at=at, up=slices(1))
    assert isinstance(state, Training) and effects == (WakeAt(EPOCH, 135.0),)
    assert 1 not in state.ledger.up
    state, _ = on(state, Probed, at=161.0, up=slices(1))
    assert state.growth == Growth(ALL), "the notice was wrong"
    state, _ = on(before, Probed, at=110.0, emptied=slices(1))
    assert state.ledger.leaving == () and 1 in state.ledger.up, "it died, and came back"


def test_a_notice_that_is_over_leaves_the_slice_in_its_place():
    book = ledger(up=slices(0), leaving=(Leaving(1, 90.0),))
    state, _ = on(training(45, 46, mesh=slices(0, 1), ledger=book), Probed, down=slices(2, 3))
    assert state.ledger.up == slices(0, 1) and state.ledger.leaving == ()


@pytest.mark.parametrize(
    ("state", "event", "fields"),
    [
        (restoring(), Prepared, {"step": 30}),
        (restoring(), SnapshotMissing, {"source": host(30)}),
        (training(45, asked=RunStep(EPOCH, 46)), DataFailed, {"step": 44, "reason": "x"}),
        (snapshotting(50), Snapshotted, {"step": 44, "holders": ALL}),
        (snapshotting(50), Snapshotted, {"step": 50, "holders": slices(5)}),
        (training(45, 46), Committed, {"step": 46, "epoch": EPOCH + 1}),
    ],
)
def test_an_answer_to_what_was_not_asked_is_our_defect(state, event, fields):
    with pytest.raises(ProtocolError):
        on(state, event, **fields)


def test_leaving_below_min_slices_saves_and_waits_with_the_live_state():
    policy = replace(POLICY, min_slices=4)
    state, effects = on(training(45), PreemptionNoticed, policy, slices=slices(1), until=160.0)
    assert effects == (Snapshot(EPOCH, 45),), "its memory goes with it"
    state, effects = on(state, Snapshotted, policy, step=45, holders=ALL)
    assert effects == (Save(EPOCH, 45, 0), Probe(EPOCH + 1, ALL))
    assert isinstance(state, Waiting)
    held = training(45, ledger=ledger(sources=(SEED, host(45))))
    _, effects = on(held, PreemptionNoticed, policy, slices=slices(1), until=160.0)
    assert effects[0] == Save(EPOCH, 45, 0), "a snapshot that is there already is saved too"
    assert Source(Tier.LIVE, 45, EPOCH, slices(0, 2, 3)) in state.ledger.sources


def test_when_all_slices_leave_they_are_donors_to_those_that_stand_by():
    policy = replace(POLICY, max_slices=2)
    before = training(45, mesh=slices(0, 1), ledger=ledger(up=ALL))
    state, _ = on(before, PreemptionNoticed, policy, slices=slices(0, 1), until=160.0)
    assert state.mesh == slices(2, 3) and state.source.holders == slices(0, 1)


def test_a_slice_that_flaps_is_taken_back_more_slowly_until_checkpoints_forgive_it():
    state, _ = on(training(45), SlicesLost, slices=slices(1))
    assert state.ledger.flaps == (Flap(1, 1),)
    book = ledger(up=slices(0, 2, 3), flaps=(Flap(1, 2),), saving=Saving(40, EPOCH, 0))
    state = training(45, 46, mesh=slices(0, 2, 3), ledger=book)
    for _ in range(3):
        state, effects = on(state, Probed, emptied=slices(1))
        assert effects == (WakeAt(EPOCH, 105.0),), "two losses: four probes"
    state, effects = on(state, Probed, emptied=slices(1))
    assert Compile(EPOCH, ALL) in effects
    state, _ = on(state, Saved, step=40)
    assert state.ledger.flaps == (Flap(1, 1),)


# --- snapshots and saves --------------------------------------------------------------------------


def test_no_step_runs_before_the_snapshot_of_what_it_overwrites_was_begun():
    state, effects = on(training(49, asked=RunStep(EPOCH, 50)), Dispatched, step=50)
    assert effects == (Snapshot(EPOCH, 50), RunStep(EPOCH, 51)), "in this order, and at once"
    assert state == training(49, 50, copying=50, asked=RunStep(EPOCH, 51))
    state, effects = on(training(48, 49, asked=RunStep(EPOCH, 50)), Dispatched, step=50)
    assert effects == (Snapshot(EPOCH, 50),) and state == training(48, 50, copying=50)
    state, effects = on(state, Committed, step=49)
    assert effects == (RunStep(EPOCH, 51),) and state.copying == 50


def test_a_checkpoint_is_written_from_a_published_snapshot_by_turns():
    mesh = slices(1, 2, 3)
    state, effects = on(snapshotting(60, mesh=mesh), Snapshotted, step=60, holders=mesh)
    assert effects == (Save(EPOCH, 60, 1),) and state.ledger.saving == Saving(60, EPOCH, 1)


def test_the_death_of_the_slice_being_written_abandons_the_save_and_owes_another():
    book = ledger(saving=Saving(40, EPOCH, 1))
    state, effects = on(training(45, 46, ledger=book), SlicesLost, slices=slices(1))
    assert effects[0] == Abandon(EPOCH, 40)
    assert state.ledger.saving is None and state.ledger.save_owed
    state, effects = on(state, Prepared, step=40, epoch=EPOCH + 1)
    assert effects[0] == Save(EPOCH + 1, 40, 2), "the same step, from a slice that lives"


def test_the_death_of_another_slice_lets_the_save_go_on():
    book = ledger(saving=Saving(40, EPOCH, 1))
    state, effects = on(training(45, 46, ledger=book), SlicesLost, slices=slices(2))
    assert state.ledger.saving == Saving(40, EPOCH, 1)
    assert not any(isinstance(e, Abandon) for e in effects)


def test_a_save_that_is_due_during_another_is_made_up_for():
    book = ledger(saving=Saving(40, EPOCH, 1))
    state, effects = on(snapshotting(60, ledger=book), Snapshotted, step=60, holders=ALL)
    assert state.ledger.save_owed and effects == ()
    state, effects = on(state, Saved, step=40)
    assert effects == (Save(EPOCH, 60, 0),) and not state.ledger.save_owed


def test_the_oldest_checkpoints_are_let_go_after_a_newer_one_is_durable():
    sources = (SEED, disk(10), disk(20), disk(30))
    book = ledger(sources=sources, saving=Saving(40, EPOCH, 1))
    state, _ = on(training(45, ledger=book), Saved, step=40)
    assert [s.step for s in state.ledger.sources if s.tier is Tier.DISK] == [20, 30, 40]


def test_a_resumed_run_does_not_write_the_checkpoint_it_came_from_again():
    book = ledger(sources=(SEED, disk(40)))
    state, effects = on(restoring(disk(40), ledger=book), Prepared, step=40)
    assert effects == (Snapshot(EPOCH, 40), RunStep(EPOCH, 41))
    state, effects = on(state, Snapshotted, step=40, holders=ALL)
    assert effects == () and state.ledger.saving is None


def test_a_run_resumed_at_its_end_is_done():
    book = ledger(sources=(SEED, disk(100)))
    state, effects = on(restoring(disk(100), ledger=book), Prepared, step=100)
    assert effects == (Snapshot(EPOCH, 100),)
    state, effects = on(state, Snapshotted, step=100, holders=ALL)
    assert isinstance(state, Done) and effects == ()


def test_a_step_that_is_not_finite_ends_the_run_unless_the_policy_says_otherwise():
    state, _ = on(training(45, 46), Committed, step=46, finite=False)
    assert state == Failed("the loss or gradient of step 46 is not finite")
    state, _ = on(
        training(45, 46), Committed, replace(POLICY, on_nonfinite="continue"), step=46, finite=False
    )
    assert isinstance(state, Training)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("min_slices", 0, "policy.min_slices=0: use 1 or more"),
        ("max_slices", 0, "policy.max_slices=0 is below min_slices=1"),
        ("inflight", 0, "policy.inflight=0: use 1 or more"),
        ("snapshot_every", 0, "policy.snapshot_every=0"),
        ("probe_every", 0.0, "policy.probe_every=0.0"),
        ("probe_every", "1", "policy.probe_every='1': use 0 or more"),
        ("patience", -1.0, "policy.patience=-1.0"),
        ("deadline", float("nan"), "policy.deadline=nan"),
        ("lookback", "disk", "policy.lookback='disk': use one of live, host"),
        ("on_nonfinite", "?", "policy.on_nonfinite='?'"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.").replace("?", r"\?")):
        replace(POLICY, **{field: value})
