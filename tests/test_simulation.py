"""The simulator: thousands of fault schedules through the real driver, and that it can fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from elastix import driver as driver_module
from elastix.backends import Health
from elastix.driver import Driver
from elastix.machine import Done, Failed, Finishing, Policy, Prepare, Source, Tier
from elastix.testing import (
    CELLS,
    Fault,
    Kind,
    Parts,
    Phase,
    Schedule,
    Violation,
    random_schedule,
    shrink,
    simulate,
)
from elastix.testing.coverage import LineCoverage
from elastix.testing.ghost_backend import GhostBackend
from elastix.testing.ghost_saver import GhostSaver
from elastix.testing.ghosts import GhostArrays, GhostFeed
from elastix.testing.simulate_command import main, matrix

SEEDS = {4: range(2400), 8: range(100_000, 101_600)}


@pytest.fixture(scope="module")
def results():
    return [simulate(random_schedule(s, n)) for n, seeds in SEEDS.items() for s in seeds]


def test_thousands_of_schedules_violate_nothing(results):
    failed = [r for r in results if r.violation]
    shown = "\n".join(f"{r.violation}: {r.schedule}" for r in failed[:5])
    assert not failed, f"{len(failed)} of {len(results)}\n{shown}"


def test_every_kind_of_fault_strikes_in_every_phase(results):
    hits = sum((r.hits for r in results), Counter())
    print(matrix(hits))
    assert set(hits) == set(CELLS)
    assert min(hits.values()) >= 20, matrix(hits)


def test_runs_end_in_every_way(results):
    ends = Counter(getattr(r.ends[-1], "outcome", "failed") for r in results if not r.violation)
    assert set(ends) == {"done", "preempted", "failed"}
    assert ends["done"] > 0.9 * len(results)


def test_the_simulator_runs_nearly_every_line_of_the_driver():
    """What is left: a step on one slice alone that raises, and a protocol error."""
    coverage = LineCoverage(driver_module)
    with coverage.within():
        for seed in range(300):
            simulate(random_schedule(seed, 4))
    lines, missed = coverage.lines, coverage.missed
    print(f"driver.py: {1 - len(missed) / len(lines):.1%} of {len(lines)} lines; not {missed}")
    assert len(missed) <= 0.06 * len(lines), missed


def test_a_save_that_ran_out_of_time_is_not_owed_for_what_befell_its_slice_meanwhile():
    """The disk hangs, and before that is noticed the slice dies: nothing is to be made up for."""
    hangs = Fault(Phase.SAVE, Kind.STALL, returns=300.0)
    dies = Fault(Phase.SAVE, Kind.HANG, slices=(1,), returns=50.0)
    policy = Policy(deadline=2.0, eval_every=1)
    result = simulate(Schedule(2, 1, policy, faults=(hangs, dies)))
    assert result.violation is None
    first, last = result.ends
    assert first == Failed("the last checkpoint could not be written: it was not written in 30 s")
    assert isinstance(last, Done) and last.outcome == "done"


def test_what_an_abandoned_save_left_is_removed_before_another_save_of_the_step():
    """It hangs, is abandoned and runs out of time: by then another slice saved the step."""
    lost = Fault(Phase.SYNC, Kind.LOSS, visit=3, slices=(0,))
    hangs = Fault(Phase.REGROW, Kind.HANG, slices=(1,), returns=300.0)
    slow = Fault(Phase.SAVE, Kind.STALL, returns=50.0)
    policy = Policy(deadline=2.0, checkpoint_every=1, stable_probes=1)
    result = simulate(Schedule(2, 3, policy, faults=(lost, hangs, slow)))
    assert result.violation is None and result.ends[-1].outcome == "done"


def test_nothing_older_goes_for_a_save_that_is_abandoned_while_it_is_written():
    """Of one checkpoint that is kept, none was left."""
    faults = (
        Fault(Phase.SYNC, Kind.LOSS, slices=(0,)),
        Fault(Phase.DATA, Kind.ROT),
        Fault(Phase.EVALUATION, Kind.UNAVAILABLE),
        Fault(Phase.DATA, Kind.NOTICE, slices=(1,), warning=15.0),
        Fault(Phase.DISPATCH, Kind.LOSSES, slices=(1, 2), returns=20.0),
        Fault(Phase.SYNC, Kind.LOSS, slices=(2,)),
        Fault(Phase.EVALUATION, Kind.PREEMPTION, visit=2),
        Fault(Phase.EVALUATION, Kind.UNSEEN, visit=4, slices=(0,)),
    )
    policy = Policy(checkpoint_every=1, keep_checkpoints=1, eval_every=1)
    schedule = Schedule(3, 9, policy, faults=faults, save_seconds=6.0, on_disk=(3, 8))
    assert simulate(schedule).violation is None


def test_a_save_that_replaces_an_abandoned_one_of_its_step_is_waited_for():
    faults = (
        Fault(Phase.REGROW, Kind.DATA_LOSS),
        Fault(Phase.SAVE, Kind.NOTICE, slices=(1,), warning=4.0),
        Fault(Phase.SYNC, Kind.LOSS, slices=(0,)),
    )
    policy = Policy(eval_every=5, probe_every=0.5)
    assert simulate(Schedule(3, 1, policy, faults=faults, save_seconds=6.0)).violation is None


def test_slices_that_die_between_their_copy_and_its_publication_hold_nothing():
    few = Fault(Phase.SAVE, Kind.LOSSES, slices=(1, 5, 7))
    rest = Fault(Phase.SNAPSHOT, Kind.LOSSES, visit=25, slices=(0, 2, 3, 4, 6))
    result = simulate(Schedule(8, 1, faults=(few, rest)))
    assert result.violation is None and result.ends[-1].outcome == "done"


def test_a_disk_that_stalls_at_the_end_may_keep_the_final_state_to_itself():
    """It is durable, and nobody else answers: the summary cannot tell its hash."""
    slow = Fault(Phase.RESTORE, Kind.STALL, returns=300.0)
    silent = Fault(Phase.SAVE, Kind.SILENT, visit=3, slices=(0,))
    result = simulate(Schedule(1, 1, Policy(deadline=600.0), faults=(slow, silent)))
    assert result.violation is None


def test_a_run_may_jump_ahead_to_a_checkpoint_that_was_written_meanwhile():
    """An older one was restored while it was being written: nothing is lost by the jump."""
    faults = (
        Fault(Phase.COMPILE, Kind.NOTICE, visit=9, slices=(2,)),
        Fault(Phase.PROBE, Kind.LOSS, slices=(0,)),
        Fault(Phase.LAST_STEP, Kind.LOSS, slices=(1,)),
        Fault(Phase.DATA, Kind.HANG, visit=4, slices=(0,)),
    )
    policy = Policy(checkpoint_every=1, stable_probes=1)
    schedule = Schedule(3, 12, policy, faults=faults, save_seconds=6.0, on_disk=(8,))
    assert simulate(schedule).violation is None


@pytest.mark.parametrize("seed", range(25))
def test_the_same_seed_gives_the_same_event_log(seed):
    schedule = random_schedule(seed, 4)
    assert schedule == random_schedule(seed, 4)
    first = simulate(schedule).log
    assert first and first == simulate(schedule).log


def test_a_schedule_prints_as_the_python_that_makes_it():
    names = {c.__name__: c for c in (Schedule, Fault, Phase, Kind, type(Schedule(1, 1).policy))}
    for seed in range(50):
        schedule = random_schedule(seed, 4)
        assert eval(str(schedule), names) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Fault(Phase.SYNC, Kind.DISK_FULL), "disk full does not occur in sync"),
        (lambda: Fault(Phase.SYNC, Kind.LOSS, visit=0, slices=(0,)), "visit=0"),
        (lambda: Fault(Phase.SYNC, Kind.LOSS), "name the slices"),
        (lambda: Schedule(2, 3, on_disk=(4,)), "on_disk"),
        (lambda: Schedule(2, 3, on_disk=(1,), durable=False), "keeps nothing on disk"),
        (
            lambda: Schedule(2, 3, faults=(Fault(Phase.SYNC, Kind.LOSS, slices=(2,)),)),
            "there are 2 slices",
        ),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change()


# --- the simulator can fail: each of these defects is planted, found and shrunk -----------------


class DroppedHolder(GhostArrays):
    """Restores from whatever memory has the step, and does not ask whether its slice lives."""

    def _host_copy(self, step, holders):
        return super()._host_copy(step, frozenset(self._backend.devices))

    def _require(self, slices, during):
        pass


class LateLoss(GhostBackend):
    """Reads results from slices that died."""

    def _raise_if_dead(self, slices):
        pass


class SkippedBatch(GhostFeed):
    """A stream that is built anew begins one batch too late."""

    late = 0

    def take(self, number, slices, deadline):
        return super().take(number + self.late, slices, deadline)

    def reset(self):
        self.late = int(self._first is not None)


class UncheckedSave(GhostSaver):
    """Writes what it read, without asking whether the slice lived."""

    def _write(self, effect, copy, metadata):
        self._world.point()
        if copy:
            self._store.write(effect.step, copy.whole(), metadata)


class BlamesNobody(GhostSaver):
    """Says that a save failed, and not that its slice is gone."""

    def _lost(self, error, holder):
        return frozenset()


class DeafDriver(Driver):
    """Takes every loss for one of slice 0, and goes on with the others."""

    def _ask(self, slices):
        return {s: Health.UP if s else Health.DOWN for s in slices}


class DeadMember(Driver):
    """Prepares a mesh with a slice that was lost."""

    def _start(self, effect):
        if isinstance(effect, Prepare):
            effect = replace(effect, mesh=frozenset(self._backend.devices))
        super()._start(effect)


class EagerFree(GhostArrays):
    """Frees host snapshots that are still named."""

    def release(self, state):
        super().release(state)
        for slice_id in self._backend.devices:
            self._backend.host_memory(slice_id).clear()


class Leak(GhostArrays):
    """Frees nothing."""

    def release(self, state):
        pass


class HastyDriver(Driver):
    """Reports the end before the last step is durable."""

    def run(self, state, first):
        def end(before, event, after, effects):
            if isinstance(after, Finishing):
                raise Ended(after)

        self._observers = (*self._observers, end)
        try:
            return super().run(state, first)
        except Ended as ended:
            (at,) = ended.args
            return Done(at.why, at.train_state, at.iterator_state)


class Ended(Exception):
    pass


class RegrowFromHost(Driver):
    """Goes back to a snapshot, where the committed state could be moved as it is."""

    def _start(self, effect):
        if isinstance(effect, Prepare) and effect.source.tier is Tier.LIVE:
            effect = replace(effect, source=Source(Tier.SEED, 0))
        super()._start(effect)


class LossyStore(GhostSaver):
    """Says saved, and has kept nothing of every third step."""

    def _answered(self, job):
        super()._answered(job)
        for step in [s for s in self._world.disk if s % 3 == 0]:
            del self._world.disk[step]


class TwiceStream(GhostFeed):
    """Gives the first batch again after it was read to the fourth."""

    def take(self, number, slices, deadline):
        batch = super().take(number, slices, deadline)
        return batch if number != 4 else {"example_id": np.array([0, 1], np.int64)}


class ForgetfulLog(Driver):
    """Evaluates again what was evaluated, and records it twice."""

    def _evaluate(self, evaluation):
        super()._evaluate(evaluation)
        if self._evaluation is None and self._evaluations.log.rows:
            self._evaluations.log.rows.append(dict(self._evaluations.log.rows[-1]))


class UnequalEvaluation(GhostArrays):
    """What an evaluation gives depends on the number of slices."""

    def evaluate(self, epoch, step, mesh, batch):
        sums = super().evaluate(epoch, step, mesh, batch)
        return {**sums, "total": sums["total"] + 0.5 * (len(mesh) == 1)}


class LazyWatch(Driver):
    """Never wakes up."""

    def _next(self):
        self._pending.begin_epoch()
        return super()._next()


DEFECTS = [
    (
        Parts(arrays=DroppedHolder),
        "a restored state is right|a committed state is right|nothing dead is done",
    ),
    (Parts(backend=LateLoss), "committed on live slices|an evaluation is right"),
    (Parts(feed=SkippedBatch), "exactly once, in order|a failure fits"),
    (
        Parts(saver=UncheckedSave),
        "saved is saved|the newest|the end is on disk|nothing dead is done",
    ),
    (Parts(saver=BlamesNobody), "an abandoned save is owed"),
    (Parts(driver=DeafDriver), "runs on live slices|the run ends|a failure fits"),
    (Parts(driver=DeadMember), "runs on live|nothing escapes|a failure fits|a restored"),
    (
        Parts(arrays=EagerFree),
        "a named snapshot is kept|a snapshot is right|nothing dead is done|a failure fits",
    ),
    (Parts(arrays=Leak), "memory is bounded"),
    (Parts(driver=HastyDriver), "the end is on disk|nothing dead is done"),
    (Parts(driver=RegrowFromHost), "one meaning|nothing escapes|model and data|live redoes"),
    (Parts(saver=LossyStore), "saved is saved|the end is on disk"),
    (Parts(feed=TwiceStream), "exactly once, in order|a failure fits"),
    (Parts(driver=ForgetfulLog), "each evaluation is recorded once|one meaning"),
    (Parts(arrays=UnequalEvaluation), "an evaluation is right"),
    (Parts(driver=LazyWatch), "nothing escapes|a slice is taken back|the run ends"),
]


@pytest.mark.parametrize(("parts", "rules"), DEFECTS, ids=lambda p: "" if isinstance(p, str) else p)
def test_a_planted_defect_is_found_and_shrunk(parts, rules):
    def violation(schedule) -> Violation | None:
        return simulate(schedule, parts).violation

    schedules = (random_schedule(seed, 4) for seed in range(400))
    schedule = next((s for s in schedules if violation(s)), None)
    assert schedule, "400 seeds did not find the defect"
    rule = violation(schedule).rule
    smallest = shrink(schedule, lambda s: (v := violation(s)) is not None and v.rule == rule)
    print(rule, smallest)
    assert any(rule.startswith(name) for name in rules.split("|")), rule
    assert violation(smallest).rule == rule
    assert len(smallest.faults) <= 2 and smallest.num_slices <= 4


# --- longer ---------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("slices", [2, 4, 8])
def test_many_more_schedules_violate_nothing(slices):
    """Minutes, and other seeds than those of every day."""
    assert main(["--seeds", "1000000:1020000", "--slices", str(slices)]) == 0
