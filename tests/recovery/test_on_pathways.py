"""Runs on slices that are processes of their own, behind the real client of a Pathways proxy.

Slices are killed and stopped as the event log shows what the controller is at. Whatever is lost,
the bits are those of the undisturbed run on the same backend, which is made last: it has as many
steps as the other got through. Each slice has one device: with more, the death of one process can
take another with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastix.checkpoints import CheckpointReader

pytest.importorskip("grpc")
pytest.importorskip("pathwaysutils")

from elastix.testing.local_pathways import LocalPathways
from tests.local_pathways.kept import COMPILE_CACHE

DEEP = "tests/recipes/deep.py"
SLICES = 3
ALL = list(range(SLICES))
PATIENCE = 120.0
"""Seconds within which anything must have happened, on a slow machine too."""

Row = dict[str, Any]


class Controller:
    """`elastix run` in a process of its own, and what its event log has told so far."""

    def __init__(self, cluster: LocalPathways, run_dir: Path, *options: str, recipe: str = DEEP):
        self.run_dir, self.rows = run_dir, list[Row]()
        self._taken = self._read = 0
        command = [sys.executable, "-m", "elastix", "run", recipe, "--backend", "pathways"]
        self._said = run_dir.with_name(f"{run_dir.name}.said")
        with self._said.open("a") as said:
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(run_dir), *options],
                env={**os.environ, **cluster.environment, "TF_CPP_MIN_LOG_LEVEL": "2"},
                stdout=said,
                stderr=said,
            )

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def look(self) -> None:
        """Take in the rows that were written since."""
        path = self.run_dir / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as log:
            log.seek(self._read)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        self.rows += map(json.loads, whole.splitlines())

    def until(self, seen: Callable[[Row], bool]) -> Row:
        """The next row, after the one that this gave before, of which `seen` is true."""
        give_up = time.monotonic() + PATIENCE
        while True:
            while self._taken < len(self.rows):
                row = self.rows[self._taken]
                self._taken += 1
                if seen(row):
                    return row
            self.pause(0.01)
            self.look()
            if self.process.poll() is not None and self._taken == len(self.rows):
                pytest.fail(f"the run ended:\n{self._said.read_text()}")
            assert time.monotonic() < give_up, self.rows[-3:]

    def pause(self, seconds: float) -> None:
        """Let time pass, unless the process ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)

    def in_flight(self) -> bool:
        """Whether a step was dispatched that has not been committed."""
        self.look()
        state = self.rows[-1]["state"] if self.rows else {}
        return state.get("dispatched", 0) > state.get("committed", 0)

    def drain(self) -> Row:
        """The summary of the run, which is asked to end at once."""
        self.process.terminate()
        return self.finish(status=75)

    def finish(self, status: int = 0) -> Row:
        """The summary of the run, once it has ended with `status`."""
        assert self.process.wait(timeout=PATIENCE) == status, self._said.read_text()
        self.look()
        return json.loads((self.run_dir / "summary.json").read_text())


def is_a(kind: str, **fields: Any) -> Callable[[Row], bool]:
    """Rows of events of this kind, with these fields."""
    wanted = {"type": kind, **fields}.items()
    return lambda row: wanted <= {k: row["event"].get(k) for k, _ in wanted}.items()


def committed(step: int) -> Callable[[Row], bool]:
    return lambda row: row["event"]["type"] == "Committed" and row["event"]["step"] >= step


def asks_for(kind: str, **fields: Any) -> Callable[[Row], bool]:
    """Rows whose effects have one of this kind, with these fields."""

    def found(row: Row) -> bool:
        return any(
            effect["type"] == kind and all(effect[k] == v for k, v in fields.items())
            for effect in row["effects"]
        )

    return found


def start(heartbeat: float) -> LocalPathways:
    return LocalPathways(SLICES, heartbeat=heartbeat, compile_cache=COMPILE_CACHE)


def assert_undisturbed(summary: Row, run_dir: Path, cluster: LocalPathways) -> None:
    """The losses, the data and the checkpoint on disk are those of a run that nothing disturbs."""
    steps, other = summary["steps"], run_dir.with_name("undisturbed")
    options = ("--steps", str(steps), "--policy.checkpoint-every", "0")
    with Controller(cluster, other, *options, "--policy.snapshot-every", "10000") as controller:
        undisturbed = controller.finish()
    assert undisturbed["outcome"] == "done" and undisturbed["recoveries"] == []
    assert undisturbed["finite"] and undisturbed["steps"] == steps
    for told in ("losses", "consumed", "state_sha256"):
        assert summary[told] == undisturbed[told]
    ours, theirs = (load(directory, steps) for directory in (run_dir, other))
    assert ours[1]["progress"] == theirs[1]["progress"]
    assert ours[0].keys() == theirs[0].keys()
    for path, array in theirs[0].items():
        np.testing.assert_array_equal(ours[0][path].view(np.uint8), array.view(np.uint8), path)


def load(run_dir: Path, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    leaves, metadata = CheckpointReader(run_dir / "checkpoints").load(step)
    return {path: np.atleast_1d(leaf) for path, leaf in leaves.items()}, metadata


def whole(row: Row) -> bool:
    return row["event"]["type"] == "Prepared" and row["state"]["mesh"] == ALL


def recover(cluster: LocalPathways, controller: Controller, killed: list[int]) -> None:
    """Bring these slices back once their loss is known, until all train."""
    controller.until(is_a("SlicesLost"))
    for slice_id in killed:
        cluster.give_back(slice_id)
    controller.until(whole)
    controller.until(is_a("Committed"))


# --- phases -----------------------------------------------------------------------------------


def kill_at_every_phase(cluster: LocalPathways, controller: Controller) -> None:
    controller.until(committed(4))
    cluster.kill(1)
    controller.until(is_a("SlicesLost"))
    controller.until(is_a("Committed"))  # by those that are left
    cluster.give_back(1)
    controller.until(asks_for("Prepare", mesh=ALL))
    cluster.kill(0)  # while the mesh grows
    recover(cluster, controller, [0])
    save = controller.until(asks_for("Save"))
    first = next(effect["holder"] for effect in save["effects"] if effect["type"] == "Save")
    cluster.kill(first)  # while its copy is written
    controller.until(asks_for("Prepare"))
    second = next(slice_id for slice_id in ALL if slice_id != first)
    cluster.kill(second)  # while the loss is recovered from: too few are left
    recover(cluster, controller, [first, second])
    for slice_id in ALL:
        cluster.kill(slice_id)
    recover(cluster, controller, ALL)


def stop_for_long(cluster: LocalPathways, controller: Controller) -> None:
    cluster.stop(1)
    controller.until(is_a("StepStuck"))
    assert controller.until(is_a("Probed"))["event"]["down"] == [1]
    assert controller.until(is_a("Prepared"))["state"]["mesh"] == [0, 2]
    cluster.resume(1)
    controller.until(whole)


# --- any moment -------------------------------------------------------------------------------


def kill_at_random(
    cluster: LocalPathways, controller: Controller, kills: int, rng: random.Random
) -> int:
    """In each round some slices are killed, or all, at moments uniform in time; then all come back.
    For how many a step was in flight."""
    in_flight: list[bool] = []
    while len(in_flight) < kills:
        victims = rng.sample(ALL, rng.randint(1, SLICES))
        for slice_id in victims:
            controller.pause(rng.uniform(0.0, 0.5))
            in_flight.append(controller.in_flight())
            cluster.kill(slice_id)
        recover(cluster, controller, victims)
    return sum(in_flight)


def stop_in_a_step(cluster: LocalPathways, controller: Controller, slice_id: int) -> None:
    """Stop a slice that a step in flight waits for: not one that has just been copied from."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        cluster.stop(slice_id)
        controller.pause(0.05)
        in_flight, seen = controller.in_flight(), len(controller.rows)
        controller.pause(0.15)
        if controller.in_flight() and in_flight and len(controller.rows) == seen:
            return
        cluster.resume(slice_id)
        controller.pause(0.07)
    pytest.fail(f"no step waited for slice {slice_id}: {controller.rows[-3:]}")


def kill_in_a_collective(
    cluster: LocalPathways, controller: Controller, kills: int, rng: random.Random
) -> None:
    """In each round a slice dies while it waits for another in the middle of a step."""
    for _ in range(kills):
        awaited, victim = rng.sample(ALL, 2)
        stop_in_a_step(cluster, controller, awaited)
        cluster.kill(victim)
        cluster.resume(awaited)
        recover(cluster, controller, [victim])


def test_what_dies_at_any_moment_leaves_no_trace(tmp_path):
    run_dir, rng = tmp_path / "run", random.Random(10)
    options = ("--steps", "100000", "--data.pace", "0.2", "--policy.min-slices", "2")
    stuck_soon = ("--policy.deadline", "150")
    seldom = ("--policy.snapshot-every", "8", "--policy.checkpoint-every", "16")
    with (
        start(heartbeat=600.0) as cluster,
        Controller(cluster, run_dir, *options, *stuck_soon) as controller,
    ):
        kill_at_every_phase(cluster, controller)
        stop_for_long(cluster, controller)
        saved = controller.until(is_a("Saved"))["event"]["step"]
        os.kill(cluster.server_pid, signal.SIGKILL)
        summary = controller.finish(status=75)
    assert "the controller lost its devices (UNAVAILABLE: " in summary["reason"]
    assert {"loss", "regrow"} <= {recovery["kind"] for recovery in summary["recoveries"]}
    with start(heartbeat=60.0) as cluster:
        with Controller(cluster, run_dir, *options, *seldom, recipe=f"{DEEP}:live") as controller:
            controller.until(is_a("Committed"))
            kill_in_a_collective(cluster, controller, 5, rng)
            kill_at_random(cluster, controller, 20, rng)
            summary = controller.drain()
        assert summary["resumed_at"] >= saved
        restored = {(recovery["kind"], recovery["source"]) for recovery in summary["recoveries"]}
        assert ("loss", "live") in restored  # of arrays that a slice which died held a part of
        assert_undisturbed(summary, run_dir, cluster)


@pytest.mark.soak
@pytest.mark.parametrize("min_slices", ["1", "2"])
def test_a_hundred_kills_leave_no_trace(tmp_path, min_slices):
    options = ("--steps", "100000", "--data.pace", "0.2", "--policy.min-slices", min_slices)
    run_dir = tmp_path / "run"
    with start(heartbeat=0.5) as cluster:
        with Controller(cluster, run_dir, *options, recipe=f"{DEEP}:live") as controller:
            controller.until(is_a("Committed"))
            in_flight = kill_at_random(cluster, controller, 100, random.Random(int(min_slices)))
            summary = controller.drain()
        print(f"100 kills, {in_flight} with a step in flight; {summary['steps']} steps")
        assert_undisturbed(summary, run_dir, cluster)
