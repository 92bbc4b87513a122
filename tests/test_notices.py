"""Preemption: a slice is left before it dies, and a signal is never held up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from elastix import SimulatedBackend, train
from elastix.cli import main
from elastix.notices import Inbox, post
from elastix.supervision import InterruptedRun, supervise
from tests.recipes.net import recipe

NET = recipe()


@pytest.fixture(scope="module")
def undisturbed():
    return train(NET, backend=SimulatedBackend(4, 2))


def notifying(run_dir, at_step, *arguments):
    """The recipe with a hook that runs `elastix notify` after a step, as another process would."""

    def notify(row):
        if row["step"] == at_step:
            assert main(["notify", str(run_dir), *arguments]) == 0

    return replace(NET, hooks=(notify,))


def test_a_slice_is_left_before_its_time_and_no_step_is_lost(undisturbed, tmp_path):
    told = notifying(tmp_path / "run", 11, "--slices", "1", "--in", "1000")
    summary = train(told, backend=SimulatedBackend(4, 2), run_dir=tmp_path / "run")
    assert summary.outcome == "done" and summary.state_sha256 == undisturbed.state_sha256
    (leave,) = summary.recoveries
    assert (leave["kind"], leave["slices"], leave["source"]) == ("leave", [0, 2, 3], "live")
    assert leave["lost"] == [1]
    assert leave["steps_lost"] == leave["steps_abandoned"] == 0


def test_a_notice_for_the_whole_job_saves_and_the_same_command_resumes(undisturbed, tmp_path):
    told = notifying(tmp_path / "run", 13)
    first = train(told, backend=SimulatedBackend(4, 2), run_dir=tmp_path / "run")
    assert first.outcome == "preempted" and first.exit_status == 75
    assert 13 <= first.steps < NET.num_steps
    second = train(NET, backend=SimulatedBackend(4, 2), run_dir=tmp_path / "run")
    assert second.resumed_at == first.steps and second.state_sha256 == undisturbed.state_sha256


def test_an_inbox_gives_each_notice_once_and_the_oldest_first(tmp_path):
    run_dir = tmp_path / "run"
    train(replace(NET, num_steps=1), backend=SimulatedBackend(4, 2), run_dir=run_dir)
    now = [0.0]
    inbox = Inbox(run_dir, clock=lambda: now[0])
    assert inbox.take() is None
    with held_lock(run_dir):
        post(run_dir, frozenset({2}), 60.0)
        post(run_dir, frozenset(), 5.0)
    assert inbox.take() is None, "it looks a few times a second only"
    now[0] = 10.0
    first, second = inbox.take(), inbox.take()
    assert first.slices == {2} and 50.0 < first.seconds <= 60.0
    assert second.slices == frozenset() and inbox.take() is None


@pytest.mark.parametrize(("jump", "left"), [(0.0, 60.0), (3600.0, 0.0), (-3600.0, 60.0)])
def test_a_notice_is_never_later_than_it_said_whatever_the_wall_clock_was_set_to(
    tmp_path, jump, left
):
    """Too early costs the slice some time; too late, and it is gone before it is left."""
    run_dir = tmp_path / "run"
    train(replace(NET, num_steps=1), backend=SimulatedBackend(4, 2), run_dir=run_dir)
    inbox = Inbox(run_dir, wall=lambda: time.time() + jump)
    with held_lock(run_dir):
        post(run_dir, frozenset({2}), 60.0)
    notice = inbox.take()
    assert notice.slices == {2} and left - 10.0 <= notice.seconds <= left


def test_a_notice_for_a_process_that_is_gone_is_not_obeyed_by_the_next(tmp_path):
    run_dir = tmp_path / "run"
    train(replace(NET, num_steps=1), backend=SimulatedBackend(4, 2), run_dir=run_dir)
    with held_lock(run_dir):
        post(run_dir, frozenset(), 5.0)
    assert Inbox(run_dir).take() is None
    assert train(NET, backend=SimulatedBackend(4, 2), run_dir=run_dir).outcome == "done"


def test_a_notice_that_leaves_too_few_saves_before_it_waits(undisturbed, tmp_path):
    told = notifying(tmp_path / "run", 13, "--slices", "0,1,2,3", "--in", "1.5")
    policy = replace(NET.policy, checkpoint_every=0)
    told = replace(told, policy=policy, num_steps=1200)
    summary = train(told, backend=SimulatedBackend(4, 2), run_dir=tmp_path / "run")
    assert summary.outcome == "done"
    (leave,) = summary.recoveries
    assert leave["kind"] == "leave" and leave["steps_lost"] == 0
    steps = [p.name for p in (tmp_path / "run/checkpoints").iterdir() if p.name.isdigit()]
    assert str(leave["step"]) in steps, "what it held when it began to wait is on disk"


def held_lock(run_dir):
    import fcntl

    lock = (run_dir / "lock").open("r+")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--slices", "7"], "slice 7 does not exist"),
        (["--slices", "x"], "name slices such as 1 or 0,2"),
        (["--slices", ","], "name slices such as 1 or 0,2"),
        (["--slices", ""], "name slices such as 1 or 0,2"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--in", "-3"], "--in -3.0"),
        (["--in", "soon"], "invalid float"),
    ],
)
def test_a_notice_that_cannot_be_is_one_line_and_status_2(tmp_path, capsys, arguments, told):
    run_dir = tmp_path / "run"
    train(replace(NET, num_steps=1), backend=SimulatedBackend(4, 2), run_dir=run_dir)
    with held_lock(run_dir):
        assert main(["notify", str(run_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not (run_dir / "notices").exists()


def test_nobody_to_notify(tmp_path, capsys):
    assert main(["notify", str(tmp_path / "none")]) == 2
    assert "is no run directory" in capsys.readouterr().err
    run_dir = tmp_path / "run"
    train(replace(NET, num_steps=1), backend=SimulatedBackend(4, 2), run_dir=run_dir)
    assert main(["notify", str(run_dir)]) == 2
    assert "no process runs in" in capsys.readouterr().err
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "done"


# --- signals that come while the run is somewhere else --------------------------------------


def test_a_signal_is_heard_while_the_run_is_blocked_and_the_grace_time_ends_it():
    never = threading.Event()

    def blocked(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        never.wait(20)

    with pytest.raises(InterruptedRun) as given_up:
        supervise(blocked, grace=0.2)
    assert given_up.value.status == 75
    never.set()


def test_the_second_interrupt_does_not_wait_for_the_grace_time():
    never = threading.Event()

    def blocked(stop):
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait(20)
        os.kill(os.getpid(), signal.SIGINT)
        never.wait(20)

    with pytest.raises(InterruptedRun) as given_up:
        supervise(blocked, grace=1000.0)
    assert given_up.value.status == 130
    never.set()


def test_a_run_that_ends_in_time_ends_by_itself_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)

    def drains(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(20)
        return "saved"

    assert supervise(drains, grace=1000.0) == "saved"
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_the_run_raises_is_raised():
    def fails(stop):
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        supervise(fails, grace=1.0)
