"""Evaluations: each is recorded once, whatever dies and wherever the run resumes."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from elastix import Lose, Return, SimulatedBackend, train
from elastix.backends.simulated import VirtualClock
from elastix.evaluation import EvalLog, EvalRow, read_evaluations
from elastix.faults import Hang
from elastix.machine import (
    Committed,
    DataFailed,
    Dispatched,
    Evaluate,
    Evaluated,
    Failed,
    Finishing,
    PreemptionNoticed,
    Prepared,
    Restoring,
    RunStep,
    SlicesLost,
    Snapshot,
    Snapshotted,
)
from tests.recipes import net, tiny
from tests.test_machine import ALL, EPOCH, POLICY, host, ledger, on, restoring, slices, training

# --- the machine ------------------------------------------------------------------------------

EVALUATING = replace(POLICY, eval_every=5)


def evaluating(step: int = 45, **changes):
    return training(step, asked=Evaluate(EPOCH, step), **changes)


def test_an_evaluation_comes_after_the_snapshot_and_before_the_next_step():
    state, effects = on(training(49, 49, asked=RunStep(EPOCH, 50)), Dispatched, EVALUATING, step=50)
    assert effects == (Snapshot(EPOCH, 50),), "and no step beside it"
    state, effects = on(state, Committed, EVALUATING, step=50)
    assert effects == (), "the step is read, and its snapshot is not published yet"
    state, effects = on(state, Snapshotted, EVALUATING, step=50, holders=ALL)
    assert effects == (Evaluate(EPOCH, 50),)
    state, effects = on(state, Evaluated, EVALUATING, step=50)
    assert effects == (RunStep(EPOCH, 51),) and state.ledger.evaluated == 50


def test_an_evaluation_on_record_is_not_due_again_after_a_restore():
    before = restoring(host(45), ledger=ledger(sources=(host(45),), evaluated=45))
    _, effects = on(before, Prepared, EVALUATING, step=45)
    assert effects == (RunStep(EPOCH, 46),)
    missing = replace(before, ledger=replace(before.ledger, evaluated=40))
    _, effects = on(missing, Prepared, EVALUATING, step=45)
    assert effects == (Evaluate(EPOCH, 45),), "the process died before it was recorded"


def test_a_loss_in_an_evaluation_is_a_loss():
    state, _ = on(evaluating(), SlicesLost, EVALUATING, slices=slices(1))
    assert isinstance(state, Restoring) and state.ledger.losses == 1


def test_a_notice_ends_the_evaluation_and_the_slice_is_left_at_once():
    state, _ = on(evaluating(), PreemptionNoticed, EVALUATING, slices=slices(1), until=200.0)
    assert isinstance(state, Restoring) and state.mesh == slices(0, 2, 3)
    assert state.source.step == 45 and state.ledger.evaluated == 0, "it is due again"


def test_a_run_that_is_asked_to_stop_does_not_wait_for_an_evaluation():
    state, _ = on(evaluating(), PreemptionNoticed, EVALUATING)
    assert isinstance(state, Finishing) and state.why == "preempted"


def test_the_last_step_is_evaluated_before_the_run_is_done():
    book = ledger(sources=(host(100),))
    before = training(99, 100, ledger=book)
    state, effects = on(before, Committed, EVALUATING, step=100)
    assert effects == (Evaluate(EPOCH, 100),)
    asked_to_stop, _ = on(state, PreemptionNoticed, EVALUATING)
    assert asked_to_stop.why == "preempted", "the same command evaluates it"
    state, _ = on(state, Evaluated, EVALUATING, step=100)
    assert isinstance(state, Finishing) and state.why == "done"


def test_data_for_an_evaluation_may_fail_once():
    state, effects = on(evaluating(), DataFailed, EVALUATING, step=45, reason="x")
    assert effects == (Evaluate(EPOCH, 45),)
    end, _ = on(state, DataFailed, EVALUATING, step=45, reason="x")
    assert end == Failed("the evaluation data failed twice after step 45: x")


def test_data_for_an_evaluation_that_nobody_waits_for_may_fail():
    state = training(45, asked=RunStep(EPOCH, 46))
    assert on(state, DataFailed, EVALUATING, step=45, reason="x") == (state, ())


# --- runs on arrays -----------------------------------------------------------------------------

NET = replace(
    net.recipe(),
    eval_data=net.WavesConfig(size=72),
    policy=replace(net.recipe().policy, eval_every=10),
)
DUE = [10, 20, 30, 40]


def run(*faults, recipe=NET, **options):
    backend = SimulatedBackend(4, 2, clock=VirtualClock())
    return train(recipe, backend=backend, faults=faults, **options)


def results(summary):
    """What must not depend on what died: all but how long it took, and where."""
    timing = ("seconds", "slices")
    return [{k: v for k, v in row.items() if k not in timing} for row in summary.evaluations]


@pytest.fixture(scope="module")
def undisturbed():
    return run()


def test_a_run_evaluates_every_whole_batch_of_its_data(undisturbed):
    assert [row["step"] for row in undisturbed.evaluations] == DUE
    assert {row["examples"] for row in undisturbed.evaluations} == {72}
    losses = [row["loss"] for row in undisturbed.evaluations]
    assert losses == sorted(losses, reverse=True), "it learns"
    assert all(row["metrics"]["absolute"] > 0 for row in undisturbed.evaluations)


def test_evaluating_changes_nothing_that_is_trained(undisturbed):
    plain = run(recipe=replace(NET, policy=replace(NET.policy, eval_every=0)))
    assert plain.state_sha256 == undisturbed.state_sha256 and plain.evaluations == []


@pytest.mark.parametrize("lookback", ["live", "host"])
def test_evaluations_have_the_same_bits_whatever_dies(undisturbed, lookback):
    recipe = replace(NET, policy=replace(NET.policy, lookback=lookback))
    faults = (Lose(1, step=10), Lose(0, step=13), Return(1, step=18), Hang(2, step=21))
    summary = run(*faults, recipe=recipe)
    assert summary.outcome == "done" and summary.unfired_faults == []
    assert results(summary) == results(undisturbed)


class Stopping:
    """Asks the run to stop at the first evaluation after step 10."""

    def __init__(self):
        self.event = threading.Event()

    def __call__(self, row):
        if row["step"] == 20:
            self.event.set()


def test_a_run_in_parts_records_each_evaluation_once(undisturbed, tmp_path):
    stop = Stopping()
    recipe = replace(NET, hooks=(stop,))
    first = run(recipe=recipe, run_dir=tmp_path / "run", stop=stop.event)
    assert first.outcome == "preempted" and [r["step"] for r in first.evaluations] == [10]
    second = run(recipe=recipe, run_dir=tmp_path / "run")
    assert second.outcome == "done"
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == DUE
    assert results(second) == results(undisturbed)
    assert second.state_sha256 == undisturbed.state_sha256


def test_a_longer_run_goes_on_evaluating(tmp_path):
    short = replace(tiny.recipe(), num_steps=12, eval_data=tiny.Points(16))
    short = replace(short, policy=replace(short.policy, eval_every=8))
    steps = [row["step"] for row in run(recipe=short, run_dir=tmp_path / "run").evaluations]
    assert steps == [8, 12]
    longer = run(recipe=replace(short, num_steps=16), run_dir=tmp_path / "run")
    assert [row["step"] for row in longer.evaluations] == [8, 12, 16]


def test_an_evaluation_may_have_a_loss_of_its_own():
    def unlike(model, batch, keys):
        total, weight, _ = net.loss(model, batch, keys)
        return 2 * total, weight, {}

    once = run(recipe=NET).evaluations[0]["loss"]
    twice = run(recipe=replace(NET, eval_loss=unlike)).evaluations[0]
    assert twice["loss"] == pytest.approx(2 * once) and twice["metrics"] == {}


# --- bad input ------------------------------------------------------------------------------------


def test_an_interval_without_data_is_refused():
    with pytest.raises(ValueError, match=r"eval_every=10 but eval_data=None: say what"):
        replace(NET, eval_data=None)


@pytest.mark.parametrize(("batches", "message"), [(0, "1 or more"), (4, "give more")])
def test_more_batches_than_there_are_are_refused(batches, message):
    with pytest.raises(ValueError, match=rf"eval_batches={batches}.*{message}"):
        run(recipe=replace(NET, eval_batches=batches))


def test_a_file_that_is_no_record_of_evaluations_is_refused(tmp_path):
    run(recipe=NET, run_dir=tmp_path / "run")
    path = tmp_path / "run" / "evaluations.jsonl"
    path.write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match="no record of evaluations"):
        run(recipe=NET, run_dir=tmp_path / "run")


def test_a_row_of_a_step_on_record_is_dropped(tmp_path):
    row = EvalRow(step=5, loss=1.0, tokens=1.0, examples=1, slices=1, seconds=0.0)
    log = EvalLog(tmp_path / "evaluations.jsonl")
    assert log.record(row) and not log.record(replace(row, loss=2.0))
    log.close()
    assert [r["loss"] for r in read_evaluations(tmp_path / "evaluations.jsonl")] == [1.0]
