"""Twice thirty steps are sixty: in each column of each row, in the evaluations and in the state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest

from elastix import Lose, SimulatedBackend, train
from elastix.backends.simulated import VirtualClock
from elastix.data import Stream, stream
from elastix.data.files import NO_IDENTITY
from tests.children import reading_the_cache
from tests.recipes import net, tiny

STEPS = 60
LOSS = Lose(1, step=44)


@dataclass(frozen=True)
class Points:
    """Points and what belongs to them, of which so many batches are read ahead."""

    prefetch: int = field(default=2, metadata=NO_IDENTITY)

    def build(self, global_batch: int, seed: int) -> Stream:
        waves = [net.Waves(50)[index] for index in range(50)]
        points = [{"x": wave["x"][:4], "y": wave["y"][0]} for wave in waves]
        what = {"kind": "points", "size": 50}
        return stream(
            points, global_batch=global_batch, seed=seed, prefetch=self.prefetch, fingerprint=what
        )


def killed_at_45(row):
    if row["step"] == 45:
        os.kill(os.getpid(), signal.SIGKILL)


def recipe(prefetch=2, **changes):
    policy = replace(tiny.recipe().policy, eval_every=7)
    data = {"data": Points(prefetch), "eval_data": Points(prefetch), "policy": policy}
    return replace(tiny.recipe(), num_steps=STEPS, **data, **changes)


def run(of, run_dir, *faults):
    backend = SimulatedBackend(2, 1, clock=VirtualClock())
    summary = train(of, backend=backend, faults=faults, run_dir=run_dir)
    assert (summary.outcome, summary.unfired_faults) == ("done", []), summary.reason
    return summary


def told(run_dir, summary):
    """All that a run leaves, but how long it took: its rows, its evaluations, its last state."""
    rows = {}
    for name in ("metrics", "evaluations"):
        lines = (run_dir / f"{name}.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
        assert all(row.pop("seconds") >= 0 for row in rows[name])
    return rows, summary.losses, summary.consumed, summary.state_sha256


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What sixty steps in one process leave, undisturbed and with a loss in the second half."""
    path = tmp_path_factory.mktemp("whole")
    undisturbed = told(path / "a", run(recipe(), path / "a"))
    steps = [row["step"] for row in undisturbed[0]["evaluations"]]
    assert steps == [7, 14, 21, 28, 35, 42, 49, 56, 60]
    return undisturbed, told(path / "b", run(recipe(), path / "b", LOSS))


def evaluated_at_the_end_of_the_half(rows):
    """The end of a run is evaluated: that of the first half is what a split run has more."""
    return [row for row in rows if row["step"] != STEPS // 2]


@pytest.mark.parametrize(
    "prefetch", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2)), 3, 4]
)
def test_a_split_run_leaves_what_an_unsplit_one_does(prefetch, whole, tmp_path):
    """With a loss in the second half if `prefetch` is odd: then fewer slices do the steps."""
    run(replace(recipe(prefetch), num_steps=STEPS // 2), tmp_path)
    faults = [LOSS] if prefetch % 2 else []
    summary = run(recipe(4 - prefetch), tmp_path, *faults)
    assert summary.resumed_at == STEPS // 2
    rows, *rest = told(tmp_path, summary)
    expected, *others = whole[prefetch % 2]
    assert rows["metrics"] == expected["metrics"]
    assert evaluated_at_the_end_of_the_half(rows["evaluations"]) == expected["evaluations"]
    assert rest == others


KILLED = """
import sys
from tests.recovery.test_split_runs import killed_at_45, recipe
import jax
from elastix import SimulatedBackend, train
jax.config.update("jax_num_cpu_devices", 2)
train(recipe(hooks=(killed_at_45,)), backend=SimulatedBackend(2, 1), run_dir=sys.argv[1])
"""


def test_killed_in_the_second_half_as_well(whole, tmp_path):
    run(replace(recipe(), num_steps=STEPS // 2), tmp_path)
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    child = subprocess.run(
        command, env=reading_the_cache(), capture_output=True, text=True, timeout=300
    )
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, ""), child.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 45
    summary = run(recipe(), tmp_path)
    assert summary.resumed_at in (30, 40), "a checkpoint that was being written may be lost"
    rows, *rest = told(tmp_path, summary)
    expected, *others = whole[0]
    assert rows["metrics"] == expected["metrics"] and rest == others
    assert evaluated_at_the_end_of_the_half(rows["evaluations"]) == expected["evaluations"]
