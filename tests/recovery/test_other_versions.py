"""A run that goes on under another Python and JAX: the same values; bits are no promise.

It takes two interpreters. The other one is named by ELASTIX_OTHER_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastix import SimulatedBackend, train
from elastix.checkpoints import CheckpointReader
from elastix.run import versions
from elastix.train_state import StateSpec
from tests.recipes import tiny

ROOT = Path(__file__).resolve().parents[2]
HALF, ALL = 20, 40


def recipe(num_steps):
    return replace(tiny.recipe(), num_steps=num_steps)


def loaded_sha256(run_dir, step):
    """`state_sha256` of what a checkpoint gives back."""
    made_by = recipe(ALL)
    spec = StateSpec(made_by.model.build, made_by.optimizer.build(), made_by.seed)
    return spec.sha256(CheckpointReader(Path(run_dir) / "checkpoints").load(step)[0])


def part(run_dir, num_steps):
    """Trains up to `num_steps`, here, and returns what can be compared."""
    summary = train(recipe(num_steps), backend=SimulatedBackend(2, 1), run_dir=run_dir)
    assert summary.outcome == "done", summary.reason
    return {
        "losses": summary.losses,
        "resumed_at": summary.resumed_at,
        "state": summary.state_sha256,
        "loaded": loaded_sha256(run_dir, num_steps),
        "versions": versions(),
    }


THERE = """
import json, sys
from elastix.backends.simulated import simulate_devices
simulate_devices(2)
from tests.recovery import test_other_versions as here
run_dir, steps = sys.argv[1], int(sys.argv[2])
does = here.part if sys.argv[3] == "train" else here.loaded_sha256
print(json.dumps(does(run_dir, steps)))
"""


def there(run_dir, num_steps, what="train"):
    """The same, by the other Python."""
    command = [os.environ["ELASTIX_OTHER_PYTHON"], "-c", THERE, str(run_dir), str(num_steps), what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def loaded_here(run_dir, num_steps, what):
    return loaded_sha256(run_dir, num_steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return part(tmp_path_factory.mktemp("whole"), ALL)


@pytest.mark.skipif(
    "ELASTIX_OTHER_PYTHON" not in os.environ,
    reason="set ELASTIX_OTHER_PYTHON to the python of another environment with elastix's packages",
)
@pytest.mark.parametrize("begins", ["here", "there"])
def test_a_run_goes_on_under_other_versions(begins, whole, tmp_path):
    first, second = (part, there) if begins == "here" else (there, part)
    begun = first(tmp_path, HALF)
    load = there if begins == "here" else loaded_here
    assert load(tmp_path, HALF, "load") == begun["loaded"] == begun["state"], "the same values"
    ended = second(tmp_path, ALL)
    print(f"{begins}: {begun['versions']}, then {ended['versions']}; {ended['losses'][-1]!r}")
    assert begun["versions"] != ended["versions"], f"{sys.executable} is no other Python"
    assert ended["resumed_at"] == HALF and ended["losses"][:HALF] == begun["losses"]
    assert len(ended["losses"]) == ALL
    # A step differs by roundings of float32, some 1e-7, which forty of them do not enlarge to 1e-3.
    assert ended["losses"] == pytest.approx(whole["losses"], rel=1e-3)
    told = json.loads((tmp_path / "recipe.json").read_text())
    assert told["exact_from"] == HALF + 1, "from here on, the bits are those of these versions"
    assert told["numerics"]["versions"] == ended["versions"]
