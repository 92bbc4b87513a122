"""Whole runs on arrays: whatever is lost, the bits, the losses and the data are the same."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from elastix import Lose, Policy, Return, SimulatedBackend, train
from elastix.checkpoints import CheckpointReader, CheckpointStore
from elastix.machine import Saved, Waiting
from elastix.summary import NoDisplay
from tests.recipes.net import WavesConfig, loss, recipe

NET = recipe()


def run(recipe=NET, *faults, **options):
    slices = options.pop("slices", 4)
    return train(recipe, backend=SimulatedBackend(slices, 2), faults=faults, **options)


@pytest.fixture(scope="module")
def undisturbed():
    return run()


def assert_same(summary, undisturbed):
    assert summary.outcome == "done", summary.reason
    assert summary.unfired_faults == []
    assert summary.losses == undisturbed.losses
    assert summary.consumed == undisturbed.consumed
    assert summary.state_sha256 == undisturbed.state_sha256


def test_an_undisturbed_run_learns_and_counts_what_it_consumed(undisturbed):
    assert undisturbed.outcome == "done" and undisturbed.exit_status == 0
    assert undisturbed.steps == len(undisturbed.losses) == 40
    assert undisturbed.consumed["examples"] == 40 * NET.global_batch
    assert undisturbed.losses[-1] < undisturbed.losses[0]
    assert undisturbed.recoveries == [] and undisturbed.finite


def test_slices_lost_and_returned_leave_no_trace_in_the_weights(undisturbed):
    summary = run(NET, Lose(1, step=12), Lose(0, step=18), Return(1, step=25), Return(0, step=25))
    assert_same(summary, undisturbed)
    first, second, regrow = summary.recoveries
    assert (first["kind"], first["lost"], first["source"]) == ("loss", [1], "host")
    assert first["steps_lost"] <= NET.policy.snapshot_every
    assert first["resumed_at"] == 10 and first["slices"] == [0, 2, 3]
    assert (second["lost"], second["slices"]) == ([0], [2, 3])
    assert second["steps_lost"] <= NET.policy.snapshot_every
    assert (regrow["kind"], regrow["found"], regrow["source"]) == ("regrow", [0, 1], "live")
    assert regrow["steps_lost"] == 0 and regrow["steps_abandoned"] == 0
    assert regrow["compiles"] == 0, "the mesh of four was compiled at the start"
    for recovery in summary.recoveries:
        assert recovery["seconds"]["first_step"] > 0 and recovery["seconds"]["restore"] > 0
        assert recovery["steps_lost"] == recovery["step"] - recovery["resumed_at"]
        assert recovery["steps_abandoned"] <= NET.policy.inflight


@pytest.mark.parametrize("inflight", [1, 3])
@pytest.mark.parametrize("surfaces", ["read", "dispatch"])
def test_live_lookback_redoes_nothing(undisturbed, inflight, surfaces):
    policy = replace(NET.policy, lookback="live", inflight=inflight)
    fault = Lose(0, step=13, surfaces=surfaces)
    summary = run(replace(NET, policy=policy), fault)
    assert_same(summary, undisturbed)
    (recovery,) = summary.recoveries
    assert (recovery["source"], recovery["steps_lost"]) == ("live", 0)
    assert recovery["steps_abandoned"] <= inflight


def test_pause_and_resume_waits_for_all_slices(undisturbed):
    policy = replace(NET.policy, min_slices=4)
    summary = run(replace(NET, policy=policy), Lose(2, step=7), Return(2, step=11))
    assert_same(summary, undisturbed)
    (recovery,) = summary.recoveries
    assert recovery["slices"] == [0, 1, 2, 3] and recovery["seconds"]["wait"] > 0


def test_a_return_that_never_comes_fails_with_the_reason():
    policy = replace(NET.policy, min_slices=4, deadline=0.2)
    summary = run(replace(NET, policy=policy), Lose(2, step=7))
    assert summary.outcome == "failed" and summary.exit_status == 1
    assert summary.reason == "3 of 4 slices were up after 0.2 s, and min_slices is 4"


def test_all_slices_at_once_go_back_to_the_checkpoint(undisturbed, tmp_path):
    run(replace(NET, num_steps=10), run_dir=tmp_path / "run")
    faults = [Lose(s, step=17) for s in range(4)] + [Return(s, step=19) for s in range(4)]
    summary = run(NET, *faults, run_dir=tmp_path / "run")
    assert_same(summary, undisturbed)
    assert (summary.recoveries[0]["source"], summary.recoveries[0]["resumed_at"]) == ("disk", 10)


def test_without_a_run_directory_the_seed_is_the_last_source(undisturbed):
    faults = [Lose(s, step=17) for s in range(4)] + [Return(s, step=19) for s in range(4)]
    summary = run(NET, *faults)
    assert_same(summary, undisturbed)
    assert (summary.recoveries[0]["source"], summary.recoveries[0]["resumed_at"]) == ("seed", 0)


def test_a_loss_in_the_last_step_is_not_reported_as_done(undisturbed):
    summary = run(NET, Lose(3, step=40))
    assert_same(summary, undisturbed)
    assert summary.recoveries[0]["lost"] == [3]


def test_a_loss_in_the_first_step(undisturbed):
    assert_same(run(NET, Lose(0, step=1), Return(0, step=4)), undisturbed)


def test_more_slices_than_the_policy_wants_stand_by(undisturbed):
    policy = replace(NET.policy, max_slices=3)
    summary = run(replace(NET, policy=policy), Lose(1, step=15))
    assert_same(summary, undisturbed)
    assert summary.recoveries[0]["slices"] == [0, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_give_the_same_bits(undisturbed, seed):
    rng = random.Random(seed)
    faults, step = [], 2
    for _ in range(4):
        victim, step = rng.randrange(4), step + rng.randrange(1, 5)
        surfaces = rng.choice(["read", "dispatch"])
        faults.append(Lose(victim, step=step, surfaces=surfaces))
        step += rng.randrange(0, 4)
        faults.append(Return(victim, step=step))
        step += 1
    lookback = rng.choice(["live", "host"])
    policy = replace(NET.policy, lookback=lookback, inflight=rng.randrange(1, 4))
    assert_same(run(replace(NET, policy=policy), *faults), undisturbed)


def test_a_split_run_equals_an_unsplit_one_on_other_slices(undisturbed, tmp_path):
    half = run(replace(NET, num_steps=17), run_dir=tmp_path / "run", slices=3)
    assert half.steps == 17
    whole = run(NET, run_dir=tmp_path / "run")
    assert whole.resumed_at == 17
    assert_same(whole, undisturbed)
    rows = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, 41))
    rates = [r["learning_rate"] for r in rows]
    assert rates[:5] == pytest.approx([0.0, 0.002, 0.004, 0.006, 0.008])


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_older_one_used(undisturbed, tmp_path):
    run(replace(NET, num_steps=30), run_dir=tmp_path / "run")
    for file in (tmp_path / "run/checkpoints/30").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    summary = run(NET, run_dir=tmp_path / "run")
    assert_same(summary, undisturbed)
    assert 10 <= summary.resumed_at < 30
    assert [
        a.step for a in CheckpointStore(tmp_path / "run/checkpoints", keep=3).set_aside_list()
    ] == [30]


def worse_and_worse(model, batch, keys):
    """An evaluation that grows while the model learns."""
    total, weight, metrics = loss(model, batch, keys)
    return -total, weight, metrics


class Saves(NoDisplay):
    """Keeps the steps that became durable."""

    def __init__(self):
        self.steps = set()

    def event(self, before, event, after):
        if isinstance(event, Saved):
            self.steps.add(event.step)


def test_the_best_and_the_newest_are_kept_apart_and_known_after_a_resume(undisturbed, tmp_path):
    path, saves = tmp_path / "run", Saves()
    policy = replace(NET.policy, checkpoint_every=5, eval_every=5, keep_checkpoints=1, keep_best=2)
    recipe = replace(NET, policy=policy, eval_data=WavesConfig(size=24), eval_loss=worse_and_worse)

    def kept():
        return CheckpointReader(path / "checkpoints").steps()

    def expected(summary):
        known = {r["step"]: r["loss"] for r in summary.evaluations if r["step"] in saves.steps}
        best = sorted(known, key=lambda step: known[step])[:2]
        return tuple(sorted({*best, summary.steps}))

    half = run(replace(recipe, num_steps=20), run_dir=path, display=saves)
    assert kept() == expected(half)
    whole = run(recipe, Lose(1, step=33), run_dir=path, display=saves)
    assert_same(whole, undisturbed)
    assert whole.resumed_at == 20, "the newest, though it is the worst"
    assert kept() == expected(whole)
    assert min(kept()) <= 20, "the best of the first process are kept"


def test_the_files_of_a_run(tmp_path):
    path = tmp_path / "run"
    summary = run(NET, Lose(1, step=12), Return(1, step=20), run_dir=path)
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert [e["seq"] for e in events] == list(range(len(events)))
    assert events[0]["event"]["type"] == "Started" and events[0]["event"]["pid"] == summary.pid
    assert events[-1]["state"]["type"] == "Done"
    assert all({"v", "seq", "at", "epoch", "event", "state", "effects"} == set(e) for e in events)
    stored = json.loads((path / "summary.json").read_text())
    assert stored["state_sha256"] == summary.state_sha256
    assert stored["recoveries"] == json.loads(json.dumps(summary.recoveries))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in rows] == summary.losses
    assert {r["slices"] for r in rows} == {3, 4}
    assert all(r["seconds"] > 0 and r["tokens"] > 0 for r in rows)
    assert json.loads((path / "recipe.json").read_text())["identity"]["num_replicas"] == 12


def test_a_run_may_go_on_with_another_layout_inside_a_slice(tmp_path):
    """No promise of bits then: a step that was done with the old layout may differ when redone."""
    path = tmp_path / "run"
    run(replace(NET, num_steps=12), run_dir=path)
    shutil.rmtree(path / "checkpoints/12")
    summary = train(NET, backend=SimulatedBackend(4, 1), run_dir=path)
    assert summary.outcome == "done", summary.reason
    assert json.loads((path / "recipe.json").read_text())["exact_from"] == 13


def test_a_summary_tells_the_recoveries_of_every_process_of_the_run(tmp_path):
    run(replace(NET, num_steps=12), Lose(1, step=7), run_dir=tmp_path / "run")
    summary = run(NET, Lose(0, step=20), run_dir=tmp_path / "run")
    assert [r["lost"] for r in summary.recoveries] == [[1], [0]]
    assert run(NET, run_dir=tmp_path / "run").recoveries == summary.recoveries


def test_what_is_no_checkpoint_keeps_no_run_from_its_good_ones(undisturbed, tmp_path):
    """It has a number above all that was done, and above all that is to be done."""
    run(replace(NET, num_steps=20), run_dir=tmp_path / "run")
    for step in (30, 99):
        (tmp_path / f"run/checkpoints/{step}").mkdir()
        (tmp_path / f"run/checkpoints/{step}/half").write_bytes(b"copied")
    summary = run(NET, run_dir=tmp_path / "run")
    assert_same(summary, undisturbed)
    assert summary.resumed_at == 20
    aside = CheckpointStore(tmp_path / "run/checkpoints", keep=3).set_aside_list()
    assert [a.step for a in aside] == [30, 99]


def test_a_path_at_which_no_checkpoint_can_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not UTF-8: choose another"):
        run(run_dir=tmp_path / "a\udcff")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["events", "recoveries", "evaluations", "metrics"])
def test_a_log_that_cannot_be_written_is_refused_before_anything_is_changed(name, tmp_path):
    run(replace(NET, num_steps=2), run_dir=tmp_path / "run")
    log, recipe_file = tmp_path / f"run/{name}.jsonl", tmp_path / "run/recipe.json"
    log.unlink(missing_ok=True)
    log.mkdir()
    before = recipe_file.read_text()
    with pytest.raises(ValueError, match=rf"cannot be written: .*{name}"):
        run(NET, run_dir=tmp_path / "run")
    assert recipe_file.read_text() == before


def test_metrics_that_end_before_the_checkpoint_are_refused(tmp_path):
    run(replace(NET, num_steps=12), run_dir=tmp_path / "run")
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run/metrics.jsonl").write_text("".join(rows[:5]))
    before = (tmp_path / "run/recipe.json").read_text()
    with pytest.raises(ValueError, match=r"up to step 5, and there is a checkpoint of step 12"):
        run(NET, run_dir=tmp_path / "run")
    assert (tmp_path / "run/recipe.json").read_text() == before


def test_a_run_that_is_told_to_stop_while_it_waits_saves_what_a_slice_still_holds(tmp_path):
    stop = threading.Event()
    policy = replace(NET.policy, min_slices=4, checkpoint_every=0)

    class Watcher(NoDisplay):
        def event(self, before, event, after):
            if isinstance(after, Waiting):
                stop.set()

    first = run(
        replace(NET, policy=policy),
        Lose(1, step=13),
        run_dir=tmp_path / "run",
        display=Watcher(),
        stop=stop,
    )
    assert (first.outcome, first.steps) == ("preempted", 10)
    assert len(first.losses) == 10 and first.consumed["examples"] == 10 * NET.global_batch
    assert run(NET, run_dir=tmp_path / "run").resumed_at == 10


def test_a_loss_right_after_a_restore_from_disk(undisturbed, tmp_path):
    run(replace(NET, num_steps=20), run_dir=tmp_path / "run")
    summary = run(NET, Lose(2, step=21), run_dir=tmp_path / "run")
    assert_same(summary, undisturbed)


def test_faults_of_a_run_that_was_refused_do_not_stay_in_the_backend(undisturbed, tmp_path):
    backend = SimulatedBackend(4, 2)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file"):
        train(NET, backend=backend, faults=[Lose(1, step=9)], run_dir=tmp_path / "file")
    assert_same(train(NET, backend=backend, faults=[Lose(1, step=9)]), undisturbed)


@pytest.mark.parametrize("error", [BrokenPipeError(), SystemExit(1)])
def test_a_display_that_fails_never_stops_training(undisturbed, error):
    class Closed(NoDisplay):
        def step(self, row):
            raise error

    assert_same(run(display=Closed()), undisturbed)


# --- what ends a run ------------------------------------------------------------------------------


def failing_loss(model, batch, keys):
    raise TypeError("INTERNAL: no such thing as a slice")


def test_an_error_of_the_users_program_is_never_taken_for_a_loss():
    summary = run(replace(NET, loss=failing_loss))
    assert summary.outcome == "failed"
    assert summary.reason == "TypeError: INTERNAL: no such thing as a slice"
    assert "failing_loss" in summary.trace


def exiting_loss(model, batch, keys):
    raise SystemExit(0)


def test_a_program_that_exits_has_failed_whatever_status_it_names():
    summary = run(replace(NET, loss=exiting_loss))
    assert (summary.outcome, summary.reason) == ("failed", "SystemExit: 0")


def nan_loss(model, batch, keys):
    from tests.recipes.net import loss

    total, weight, metrics = loss(model, batch, keys)
    return total * np.float32("nan"), weight, metrics


def test_a_loss_that_is_not_finite_ends_the_run_with_that_reason():
    summary = run(replace(NET, loss=nan_loss))
    assert summary.reason == "the loss or gradient of step 1 is not finite"


class Flaky:
    """Data that raises at its n-th read, once or always."""

    def __init__(self, stream, broken):
        self._stream, self._broken = stream, broken

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def batches(self, position):
        for number, batch in enumerate(self._stream.batches(position), position):
            if number in self._broken:
                if self._broken[number] == "once":
                    del self._broken[number]
                raise OSError("the disk went away")
            yield batch


class FlakyConfig:
    def __init__(self, config, broken):
        self._config, self._broken = config, broken

    def build(self, global_batch, seed):
        return Flaky(self._config.build(global_batch, seed), dict(self._broken))


def test_a_data_source_that_fails_once_is_read_again_at_the_same_position(undisturbed):
    summary = run(replace(NET, data=FlakyConfig(NET.data, {9: "once"})))
    assert_same(summary, undisturbed)


def test_a_data_source_that_stays_broken_ends_the_run():
    summary = run(replace(NET, data=FlakyConfig(NET.data, {9: "always"})))
    assert summary.reason == "the data stream failed twice at step 10: the disk went away"
    assert "OSError: the disk went away" in summary.trace and "in batches" in summary.trace


def test_what_is_compiled_ahead_changes_nothing_but_the_wait(undisturbed):
    """Executables are made by another thread while steps run; each loss and return uses one."""
    policy = replace(NET.policy, warm="all")
    faults = (Lose(1, step=12), Lose(0, step=18), Return(1, step=22), Return(0, step=30))
    assert_same(run(replace(NET, policy=policy), *faults), undisturbed)


def test_a_run_leaves_no_thread_behind():
    before = set(threading.enumerate())
    run(replace(NET, num_steps=7))
    give_up = time.monotonic() + 30.0
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("elastix", "grain")):
            thread.join(max(0.0, give_up - time.monotonic()))
            assert not thread.is_alive(), thread.name


def test_a_hook_that_fails_never_stops_training(undisturbed, capsys):
    seen = []

    def hook(row):
        seen.append(row["step"])
        if row["step"] == 3:
            raise RuntimeError("tracker down")

    assert_same(run(replace(NET, hooks=(hook,))), undisturbed)
    assert seen == [1, 2, 3]
    assert "tracker down" in capsys.readouterr().err


# --- bad input: before anything is changed --------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": Policy(min_slices=5)}, r"policy.min_slices=5 but there are 4 slices"),
        ({"num_replicas": 3}, r"num_replicas=3 cannot keep 4 slices busy"),
        ({"num_replicas": 5}, r"global_batch=24 cannot be split into num_replicas=5"),
        ({"num_steps": 0}, r"num_steps=0"),
        ({"reduction": "quick"}, r"reduction='quick'"),
        ({"seed": -1}, r"seed=-1"),
    ],
)
def test_bad_input_is_refused_before_anything_is_changed(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(replace(NET, **changes), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_directory_of_another_recipe_is_refused_with_what_differs(tmp_path):
    path = tmp_path / "run"
    run(replace(NET, num_steps=3), run_dir=path)
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    with pytest.raises(ValueError, match=r"another recipe \(seed was 0, is 7\)"):
        run(replace(NET, num_steps=3, seed=7), run_dir=path)
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before


def test_a_run_that_is_further_than_asked_for_is_refused(tmp_path):
    run(replace(NET, num_steps=20), run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"num_steps=10 .* step 20"):
        run(replace(NET, num_steps=10), run_dir=tmp_path / "run")


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"holds thesis.tex but no recipe.json"):
        run(NET, run_dir=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


class DyingAtTheEnd(SimulatedBackend):
    """Loses every slice when the last snapshot was taken, before anybody reads it."""

    def committed(self, step):
        super().committed(step)
        self.last = step == 40

    def probe(self, slices, deadline):
        found = super().probe(slices, deadline)
        if getattr(self, "last", False):
            for slice_id in self.devices:
                self.lose(slice_id)
        return found


def test_a_run_whose_final_state_nobody_can_read_is_not_done():
    summary = train(NET, backend=DyingAtTheEnd(4, 2))
    assert summary.outcome == "failed" and summary.state_sha256 is None
    assert "the state after step 40 was lost before it was read" in summary.reason
