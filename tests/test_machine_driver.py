"""The driver by example, on ghosts: what it does with each effect and what it says happened."""

from __future__ import annotations

from math import inf

import jax
import pytest

from elastix.classification import SliceLostError
from elastix.compile_cache import count_compiles
from elastix.driver import Driver
from elastix.machine import (
    Abandon,
    Committed,
    DataFailed,
    Dispatched,
    Done,
    Effect,
    Evaluated,
    Failed,
    Policy,
    PreemptionNoticed,
    Prepare,
    Prepared,
    Probed,
    ProtocolError,
    RestoreFailed,
    SlicesLost,
    SnapshotMissing,
    Snapshotted,
    StepStuck,
    Tier,
    Tried,
    WakeAt,
    Woke,
    is_stale,
)
from elastix.metrics import MetricsLog
from elastix.testing import Fault, Kind, Parts, Phase, Schedule, random_schedule, simulate
from elastix.testing.ghost_backend import GhostBackend
from elastix.testing.ghost_saver import GhostSaver
from elastix.testing.ghosts import GhostArrays, GhostFeed, progress_after
from elastix.testing.world import World
from tests.test_machine import disk, ledger, slices, waiting


class Watched(Driver):
    """Keeps the events of its process, and the effects that it did."""

    last: Watched

    def run(self, state, first):
        Watched.last, self.events, self.done, self.stale = self, [], [], []
        self._observers = (*self._observers, self._watch)
        return super().run(state, first)

    def _watch(self, before, event, after, effects):
        self.events.append(event)
        if is_stale(before, event):
            self.stale.append(event)
        if not isinstance(after, Done | Failed):
            self.done.append(effects)


def watched(schedule: Schedule, **parts) -> Watched:
    """The driver of a simulated run of one process."""
    simulate(schedule, Parts(driver=Watched, **parts))
    return Watched.last


def idle_driver(durable: bool) -> Driver:
    """A driver that was asked for nothing yet."""
    world = World(Schedule(4, 100))
    backend = GhostBackend(world)
    saver = GhostSaver(world, backend) if durable else None
    arrays = GhostArrays(world, backend, saver)
    feed, policy = GhostFeed(world), world.schedule.policy
    return Driver(arrays, feed, backend, policy, MetricsLog(None), saver)


# --- waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
def test_a_machine_that_nobody_answers_is_our_defect(durable):
    """It would wait for ever."""
    notice = PreemptionNoticed(at=0.0, epoch=3, slices=slices(2), until=60.0)
    with pytest.raises(ProtocolError, match="no answer is outstanding"):
        idle_driver(durable).run(waiting(ledger=ledger(below_since=0.0)), notice)


class Restless(GhostBackend):
    """Keeps how long it was idle at a time."""

    def __init__(self, world):
        super().__init__(world)
        Restless.pauses = self.pauses = []

    def idle(self, seconds):
        self.pauses.append(seconds)
        super().idle(seconds)


@pytest.mark.parametrize("durable", [False, True])
def test_what_comes_by_itself_is_heard_soon_however_long_the_wait(durable):
    """The next probe is due in an hour, and a save takes another."""
    loss = Fault(Phase.SNAPSHOT, Kind.LOSS, slices=(1,), returns=3.0, after=4)
    policy = Policy(min_slices=2, probe_every=3600.0, deadline=8000.0, checkpoint_every=2)
    schedule = Schedule(2, 8, policy, faults=(loss,), save_seconds=3600.0, durable=durable)
    driver = watched(schedule, backend=Restless)
    assert isinstance(driver.events[-1], Snapshotted) or durable
    assert any(isinstance(e, WakeAt) for effects in driver.done for e in effects)
    assert min(Restless.pauses) >= 0.0 and 0.0 < max(Restless.pauses) <= 0.5


def test_the_saver_hears_of_every_abandoned_save_and_nobody_of_an_older_wake_up():
    heard, asked, woken = [], [], []

    class Listening(GhostSaver):
        def abandon(self, effect):
            heard.append(effect)
            super().abandon(effect)

    class Asking(Watched):
        def run(self, state, first):
            end = super().run(state, first)
            asked.extend(e for effects in self.done for e in effects if isinstance(e, Abandon))
            woken.extend(e for e in self.stale if isinstance(e, Woke))
            return end

    for seed in range(120):
        simulate(random_schedule(seed, 4), Parts(driver=Asking, saver=Listening))
    assert heard == asked != [] and woken == []


def test_the_driver_wakes_on_the_second_it_was_asked_to():
    loss = Fault(Phase.SYNC, Kind.LOSS, slices=(1,), returns=3.0)
    policy = Policy(min_slices=2, probe_every=0.2)
    driver = watched(Schedule(2, 4, policy, faults=(loss,), durable=False))
    late, asked = [], None
    for event, effects in zip(driver.events, driver.done, strict=False):
        if isinstance(event, Woke):
            late.append(event.at - asked.at)
        asked = next((e for e in effects if isinstance(e, WakeAt)), asked)
    assert len(late) > 5 and late == pytest.approx([0.0] * len(late))


@pytest.mark.parametrize(("visit", "deadline"), [(12, "step_deadline"), (1, "prepare_deadline")])
def test_only_the_first_step_on_a_mesh_may_take_long(visit, deadline):
    policy = Policy(deadline=600.0)
    hang = Fault(Phase.SYNC, Kind.HANG, visit=visit, slices=(1,), returns=1000.0)
    events = watched(Schedule(3, 12, policy, faults=(hang,), durable=False)).events
    number = next(n for n, event in enumerate(events) if isinstance(event, StepStuck))
    assert events[number].during.startswith("step")
    waited = events[number].at - events[number - 1].at
    assert waited == pytest.approx(getattr(policy, deadline))
    assert [e.stuck for e in events if isinstance(e, Tried)] == [slices(1)]
    assert isinstance(events[-1], Snapshotted), "it goes on without the culprit, to the end"


def test_what_was_consumed_up_to_steps_that_are_over_is_forgotten():
    driver = watched(Schedule(2, 30))
    assert driver.progress(30).examples > 0
    assert driver.progress(3) is None


# --- failures -------------------------------------------------------------------------------------


class LostWhileRead(GhostFeed):
    """A slice is found to be gone while the first batch is waited for."""

    error: Exception

    def take(self, number, slices, deadline):
        error, self.error = self.error, None
        if error:
            raise error
        return super().take(number, slices, deadline)


@pytest.mark.parametrize(
    "error",
    [
        SliceLostError(frozenset({1}), "its host is gone"),
        jax.errors.JaxRuntimeError("DATA_LOSS: slice 1 is gone"),
    ],
)
def test_a_slice_that_is_lost_while_data_are_read_is_not_the_fault_of_the_data(error):
    class Feed(LostWhileRead):
        pass

    Feed.error = error
    events = watched(Schedule(2, 3, durable=False), feed=Feed).events
    lost = [e for e in events if isinstance(e, SlicesLost)]
    assert [1 in e.slices for e in lost] == [True]
    assert not any(isinstance(e, DataFailed) for e in events)


@pytest.mark.parametrize("error", [OSError("no such bucket"), SystemExit("no such bucket")])
def test_data_that_fail_are_told_with_the_reason_and_the_trace(error):
    class Feed(LostWhileRead):
        pass

    Feed.error = error
    events = watched(Schedule(2, 3, durable=False), feed=Feed).events
    (failed,) = (e for e in events if isinstance(e, DataFailed))
    assert (failed.step, failed.reason) == (1, "no such bucket")
    assert isinstance(events[-1], Snapshotted), "asked again, they come, and the run ends well"
    assert type(error).__name__ in failed.trace and "in take" in failed.trace


class Exiting(GhostArrays):
    """The user's code ends the process."""

    def step(self, epoch, step, mesh, batch):
        raise SystemExit("no more")


def test_a_program_that_would_exit_has_failed():
    ends = simulate(Schedule(2, 5, durable=False), Parts(arrays=Exiting)).ends
    assert ends == (Failed("SystemExit: no more"),)


class Wavering(GhostArrays):
    """The loss of a step depends on the slices."""

    def step(self, epoch, step, mesh, batch):
        results = super().step(epoch, step, mesh, batch)
        return {**results, "loss": results["loss"] + len(mesh)}


def test_a_step_that_gives_another_loss_when_it_is_done_again_ends_the_run():
    lost = Fault(Phase.SYNC, Kind.LOSS, slices=(1,), returns=None, after=2)
    (end,) = simulate(Schedule(2, 5, faults=(lost,), durable=False), Parts(arrays=Wavering)).ends
    assert isinstance(end, Failed) and end.reason.startswith("step 1 was done again and gave loss")


class Diverging(GhostArrays):
    """The loss of the third step is not finite."""

    def step(self, epoch, step, mesh, batch):
        return {**super().step(epoch, step, mesh, batch), "finite": step != 3}


def test_a_step_that_is_not_finite_is_told():
    events = watched(Schedule(2, 5, durable=False), arrays=Diverging).events
    told = [(e.step, e.finite) for e in events if isinstance(e, Committed)]
    assert told == [(1, True), (2, True), (3, False)]
    ends = simulate(Schedule(2, 5, durable=False), Parts(arrays=Diverging)).ends
    assert ends == (Failed("the loss or gradient of step 3 is not finite"),)


def test_a_notice_is_heard_at_once():
    notice = Fault(Phase.SYNC, Kind.NOTICE, slices=(1,), warning=60.0, after=2)
    events = watched(Schedule(2, 6, Policy(snapshot_every=2), (notice,), durable=False)).events
    (heard,) = (e for e in events if isinstance(e, PreemptionNoticed))
    assert heard.slices == slices(1) and heard.until <= heard.at + 60.0
    assert [e.step for e in events if isinstance(e, Prepared)] == [0, 4], "no step was lost"


def test_data_that_fail_in_an_evaluation_are_asked_for_again():
    fault = Fault(Phase.EVALUATION, Kind.DATA, visit=2)
    driver = watched(Schedule(2, 4, Policy(eval_every=2), (fault,), durable=False))
    told = [(type(e), e.step) for e in driver.events if isinstance(e, DataFailed | Evaluated)]
    assert told == [(DataFailed, 2), (Evaluated, 2), (Evaluated, 4)]


class Counting(GhostArrays):
    """Keeps of which steps a batch was evaluated."""

    def __init__(self, *parts):
        super().__init__(*parts)
        Counting.evaluated = self.evaluated = []

    def evaluate(self, epoch, step, mesh, batch):
        self.evaluated.append((step, int(batch["example_id"][0])))
        return super().evaluate(epoch, step, mesh, batch)


def test_a_run_that_is_asked_to_stop_evaluates_no_further():
    """Not even while its last checkpoint is written."""
    stop = Fault(Phase.EVALUATION, Kind.PREEMPTION, visit=2)
    schedule = Schedule(2, 4, Policy(eval_every=2), (stop,), save_seconds=30.0)
    first = simulate(schedule).processes[0]
    assert not any(isinstance(event, Evaluated) for event, _, _ in first)
    assert first[-1][1].outcome == "preempted"


def test_an_evaluation_without_its_data_is_given_up_by_a_run_that_is_asked_to_stop():
    stop, fails = (Fault(Phase.EVALUATION, kind) for kind in (Kind.PREEMPTION, Kind.DATA))
    policy = Policy(eval_every=2, snapshot_every=2)
    first = simulate(Schedule(2, 4, policy, (stop, fails), save_seconds=30.0)).processes[0]
    assert [e.step for e, _, _ in first if isinstance(e, DataFailed)] == [2]
    assert not any(isinstance(event, Evaluated) for event, _, _ in first)


def test_an_evaluation_is_read_before_it_counts():
    lost = Fault(Phase.EVALUATION, Kind.LOSS, visit=2, slices=(1,), returns=None)
    before, event = what_followed(Schedule(2, 4, Policy(eval_every=2), (lost,), durable=False))
    assert event.cause.endswith("(reading a result)") and not isinstance(before, Evaluated)
    assert event.at < before.at + 1.0, "at the first batch: to read it takes a second"


def test_each_batch_of_an_evaluation_is_evaluated_once_and_that_is_on_record():
    schedule = Schedule(2, 6, Policy(eval_every=2), save_seconds=30.0)  # waited for at the end
    driver = watched(schedule, arrays=Counting)
    assert [row["step"] for row in driver._evaluations.log.rows] == [2, 4, 6]
    assert Counting.evaluated == [(n, first) for n in (2, 4, 6) for first in (0, 2)]


def test_what_was_in_flight_is_given_up_when_a_save_finds_its_slice_gone():
    lost = Fault(Phase.SAVE, Kind.LOSS, slices=(1,), returns=None)
    policy = Policy(checkpoint_every=1, inflight=2)
    result = simulate(Schedule(2, 6, policy, (lost,)), Parts(driver=Watched))
    assert result.violation is None and isinstance(result.ends[-1], Done)


AT_DISPATCH = dict(slices=(1,), returns=None, surfaces="dispatch")
"""A loss that is known as soon as something is to be dispatched."""


def what_followed(schedule: Schedule):
    """The event before the loss, and the loss."""
    events = watched(schedule).events
    number = next(n for n, event in enumerate(events) if isinstance(event, SlicesLost))
    return events[number - 1], events[number]


def test_nothing_is_evaluated_on_a_slice_that_is_known_to_be_gone():
    fault = Fault(Phase.EVALUATION, Kind.LOSS, **AT_DISPATCH)
    before, lost = what_followed(Schedule(2, 4, Policy(eval_every=2), (fault,), durable=False))
    assert lost.slices == slices(1) and lost.cause.endswith("(dispatch)")
    assert not isinstance(before, Evaluated)


def test_no_step_is_dispatched_to_a_slice_that_is_known_to_be_gone():
    fault = Fault(Phase.DATA, Kind.LOSS, visit=2, **AT_DISPATCH)
    before, lost = what_followed(Schedule(2, 4, Policy(inflight=1), (fault,), durable=False))
    assert lost.slices == slices(1) and lost.cause.endswith("(dispatch)")
    assert before == Committed(at=before.at, epoch=1, step=1)


def test_nothing_is_copied_from_a_slice_that_is_known_to_be_gone():
    after_the_step = 5  # points in a step: at its check, before and after its call, when told
    fault = Fault(Phase.DISPATCH, Kind.LOSS, visit=after_the_step, **AT_DISPATCH)
    policy = Policy(inflight=1, snapshot_every=1)
    before, lost = what_followed(Schedule(2, 4, policy, (fault,), durable=False))
    assert lost.slices == slices(1) and lost.cause.endswith("(dispatch)")
    assert before == Dispatched(at=before.at, epoch=1, step=1), "it is copied as it is dispatched"


# --- host snapshots, while steps run --------------------------------------------------------------


class Noting(GhostArrays):
    """Keeps what was done to steps, in order, by itself and by the backend beside it."""

    notes: list[tuple[str, int]] = []  # noqa: RUF012

    def step(self, epoch, step, mesh, batch):
        self.notes.append(("run", step))
        return super().step(epoch, step, mesh, batch)

    def begin_snapshot(self, epoch, step, mesh):
        self.notes.append(("begin", step))
        super().begin_snapshot(epoch, step, mesh)

    def finish_snapshot(self):
        step = super().finish_snapshot()
        self.notes.append(("finish", step))
        return step

    def give_up_snapshot(self):
        self.notes.append(("give up", self.snapshot_begun))
        super().give_up_snapshot()


class NotingBackend(GhostBackend):
    def read(self, results, slices, deadline):
        Noting.notes.append(("read", int(results["example_id"][0]) // 2 + 1))
        return super().read(results, slices, deadline)

    def committed(self, step):
        Noting.notes.append(("commit", step))
        super().committed(step)


def noted(schedule: Schedule) -> list[tuple[str, int]]:
    """What was done to which step in the last process of a run that ended well."""
    Noting.notes = []
    result = simulate(schedule, Parts(arrays=Noting, backend=NotingBackend))
    assert result.violation is None and isinstance(result.ends[-1], Done)
    return [(what, step) for what, step in Noting.notes if (what, step) != ("give up", inf)]


def test_a_snapshot_is_finished_when_its_step_was_read_and_before_another_is_begun():
    each = Policy(snapshot_every=2, inflight=2)
    read = {n: [("read", n), ("commit", n)] for n in range(1, 6)}
    assert noted(Schedule(2, 5, each, durable=False)) == [
        *(("run", 1), ("run", 2), ("begin", 2)),
        *(*read[1], ("run", 3)),
        *(*read[2], ("finish", 2), ("run", 4), ("begin", 4)),
        *(*read[3], ("run", 5)),
        *(*read[4], ("finish", 4), ("begin", 5)),
        *(*read[5], ("finish", 5)),
    ]
    assert noted(Schedule(2, 3, Policy(snapshot_every=2, inflight=1), durable=False)) == [
        *(("run", 1), *read[1]),
        *(("run", 2), ("begin", 2), *read[2], ("finish", 2)),
        *(("run", 3), ("begin", 3), *read[3], ("finish", 3)),
    ]


@pytest.mark.parametrize(
    ("phase", "visit", "after", "step"),
    [
        (Phase.SNAPSHOT, 1, 0, 2),
        (Phase.SNAPSHOT, 2, 0, 2),
        (Phase.SNAPSHOT, 4, 0, 2),
        (Phase.SYNC, 1, 0, 2),
        (Phase.SYNC, 1, 3, 4),
        (Phase.DISPATCH, 2, 3, 4),
        (Phase.DATA, 1, 3, 4),
    ],
    ids=["begun", "finished", "all-copied", "read", "next-read", "next-run", "next-fed"],
)
@pytest.mark.parametrize("surfaces", ["dispatch", "read"])
def test_nobody_finishes_a_snapshot_after_a_failure(phase, visit, after, step, surfaces):
    lost = dict(slices=(1,), returns=None, surfaces=surfaces)
    fault = Fault(phase, Kind.LOSS, visit=visit, after=after, **lost)
    notes = noted(Schedule(2, 7, Policy(snapshot_every=2, inflight=2), (fault,), durable=False))
    assert ("give up", step) in notes, "it was under way"
    ours = [note for note in notes if note[0] in ("begin", "finish", "give up")]
    ends = list(zip(ours[::2], ours[1::2], strict=True))
    assert all(a[0] == "begin" and b[0] != "begin" and a[1] == b[1] for a, b in ends)
    given_up = ours.index(("give up", step))
    assert ("finish", step) in ours[given_up:], "it is copied again, of the mesh that is left"


def test_a_step_that_was_asked_for_with_a_snapshot_that_failed_is_given_up_too():
    fault = Fault(Phase.SNAPSHOT, Kind.LOSS, slices=(1,), returns=None, surfaces="dispatch")
    driver = watched(Schedule(2, 4, Policy(snapshot_every=2), (fault,), durable=False))
    lost = [event for event in driver.events if isinstance(event, SlicesLost)]
    assert [e.slices for e in lost if e not in driver.stale] == [slices(1)]
    assert all(event.epoch == lost[0].epoch for event in driver.stale)
    assert isinstance(driver.events[-1], Snapshotted), "and the run goes on to its end"


class Following(GhostBackend):
    """Keeps what it was told of steps."""

    def __init__(self, world):
        super().__init__(world)
        Following.told = self.told = []

    def dispatched(self, step, slices):
        self.told.append(("dispatched", step, frozenset(slices)))
        super().dispatched(step, slices)

    def committed(self, step):
        self.told.append(("committed", step))
        super().committed(step)


def test_the_backend_is_told_of_each_step():
    watched(Schedule(2, 2, Policy(inflight=1), durable=False), backend=Following)
    each = [[("dispatched", n, slices(0, 1)), ("committed", n)] for n in (1, 2)]
    assert Following.told == each[0] + each[1]


class Resetting(LostWhileRead):
    """Keeps when it was to begin anew, and for which batches it was asked."""

    def reset(self):
        self.asked.append("reset")

    def take(self, number, slices, deadline):
        self.asked.append(number)
        return super().take(number, slices, deadline)


def test_the_stream_begins_anew_with_each_mesh_and_after_a_failure():
    class Feed(Resetting):
        error, asked = OSError("no such bucket"), []

    lost = Fault(Phase.SYNC, Kind.LOSS, slices=(1,), returns=None, after=1)
    policy = Policy(snapshot_every=1, inflight=1)
    watched(Schedule(2, 3, policy, (lost,), durable=False), feed=Feed)
    assert Feed.asked == ["reset", 0, "reset", 0, 1, "reset", 1, 2]


def test_an_effect_that_is_not_known_is_our_defect():
    class Strange(Effect):
        pass

    with pytest.raises(ProtocolError, match="no handler for Strange"):
        idle_driver(durable=False)._start(Strange(epoch=0))


# --- what is asked of slices and sources ----------------------------------------------------------


def test_each_slice_that_is_probed_is_told_of():
    lost = Fault(Phase.SYNC, Kind.LOSS, slices=(1,), returns=3.0, after=1)
    policy = Policy(min_slices=2, probe_every=2.0)
    events = watched(Schedule(2, 3, policy, (lost,), durable=False)).events
    told = [(e.up, e.emptied, e.down) for e in events if isinstance(e, Probed)]
    gone, back = (slices(0), slices(), slices(1)), (slices(0), slices(1), slices())
    assert told == [gone, gone, back]


def test_a_checkpoint_that_cannot_be_read_is_told_with_the_reason():
    rots = Fault(Phase.RESTORE, Kind.ROT)
    events = watched(Schedule(2, 6, faults=(rots,), on_disk=(2, 4))).events
    (failed,) = (e for e in events if isinstance(e, RestoreFailed))
    assert failed.source == disk(4) and failed.reason.startswith("the checkpoint of step 4 is dam")
    assert [e.step for e in events if isinstance(e, Prepared)] == [2]


def test_a_snapshot_that_is_gone_is_missing():
    """Its slice died while the step was compiled, and was back before anybody asked."""
    lost = Fault(Phase.SYNC, Kind.LOSS, slices=(1,), returns=None, after=3)
    emptied = Fault(Phase.COMPILE, Kind.UNSEEN, slices=(0,), after=3)
    policy = Policy(snapshot_every=2)
    events = watched(Schedule(2, 6, policy, (lost, emptied), durable=False)).events
    (missing,) = (e for e in events if isinstance(e, SnapshotMissing))
    assert (missing.source.tier, missing.source.holders) == (Tier.HOST, slices(0))
    assert [e.step for e in events if isinstance(e, Prepared)] == [0, 0]


# --- a mesh is made -------------------------------------------------------------------------------


class Admitting(GhostBackend):
    """Keeps which slices were admitted."""

    def __init__(self, world):
        super().__init__(world)
        Admitting.admitted = self.admitted = []

    def admit(self, slices):
        self.admitted.append(frozenset(slices))
        super().admit(slices)


def test_only_slices_that_hold_nothing_are_admitted():
    loss = Fault(Phase.SYNC, Kind.LOSS, slices=(1,), returns=3.0, after=4)
    policy = Policy(snapshot_every=2, probe_every=1.0)
    driver = watched(Schedule(3, 40, policy, (loss,), durable=False), backend=Admitting)
    asked = [e for effects in driver.done for e in effects if isinstance(e, Prepare)]
    assert [e.mesh for e in asked] == [slices(0, 1, 2), slices(0, 2), slices(0, 1, 2)]
    new = [slices(0, 1, 2), slices(), slices(1)]
    assert Admitting.admitted[::2] == new, "before the step is compiled"
    assert Admitting.admitted[1::2] == new, "and after"


class Compiling(GhostArrays):
    """Compiles two programs for each mesh that is new."""

    def compile(self, mesh):
        if self._compiles_of.begin(mesh).ready_at > self._backend.now():
            for _ in range(2):
                event = "/jax/core/compile/backend_compile_duration"
                jax.monitoring.record_event_duration_secs(event, 1.0)
        return super().compile(mesh)


def test_what_it_took_to_make_a_mesh_is_told():
    loss = Fault(Phase.SYNC, Kind.LOSS, slices=(1,), returns=3.0, after=4)
    policy = Policy(snapshot_every=2, probe_every=1.0)
    count_compiles()
    events = watched(Schedule(3, 40, policy, (loss,), durable=False), arrays=Compiling).events
    told = [e for e in events if isinstance(e, Prepared)]
    assert [e.compiles for e in told] == [2, 2, 0]
    assert [e.compile_seconds for e in told] == pytest.approx([2.0, 2.0, 0.0])
    assert [e.restore_seconds for e in told] == pytest.approx([0.85] * 3)


# --- saves ----------------------------------------------------------------------------------------


def test_what_goes_into_a_checkpoint_besides_the_state():
    given = []

    class Listening(GhostSaver):
        def save(self, effect, copy, extra):
            given.append((effect.step, copy.step, extra))
            super().save(effect, copy, extra)

    watched(Schedule(3, 4, Policy(checkpoint_every=2)), saver=Listening)
    of = {step: {"progress": progress_after(step).to_json(), "mesh": [0, 1, 2]} for step in (2, 4)}
    assert given == [(2, 2, of[2]), (4, 4, of[4])]


# --- the end --------------------------------------------------------------------------------------


def test_a_run_that_ended_without_a_mesh_has_no_final_state():
    driver = watched(Schedule(2, 4))
    assert driver.final_state(None) is None
