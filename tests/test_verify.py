"""elastix.verify: equal bits make it 0, and each planted defect makes it 1."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from elastix.cli import main
from elastix.verify import compare_summaries

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "tests/recipes"
FAULTS = ["--lose", "1@12", "--lose", "0@20", "--return", "1@25", "--return", "0@25"]
ONE_LOSS = ["--lose", "1@12", "--return", "1@25"]


@pytest.fixture
def cache() -> str:
    """Compiled programs, which the children of these tests share: none of them is killed."""
    return jax.config.jax_compilation_cache_dir


@pytest.fixture
def verify(cache, tmp_path, monkeypatch, capsys):
    """Runs `elastix verify` on a test's recipe; returns (status, out, err)."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(recipe: str, *arguments: str) -> tuple[int, str, str]:
        where = ["--run-dir", str(tmp_path / "both"), "--compile-cache", str(cache)]
        status = main(["verify", str(RECIPES / recipe), *where, *arguments])
        return status, *capsys.readouterr()

    return run


def test_a_run_that_lost_and_regained_slices_is_equal(cache, tmp_path):
    command = ["verify", RECIPES / "tiny.py", "--compile-cache", cache, *FAULTS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "elastix", *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "equal after 3 recoveries: state_sha256 " in result.stdout
    assert "equal: 320 examples consumed" in result.stdout
    assert "[with faults] step 40/40" in result.stdout
    assert "[undisturbed] step 40/40" in result.stdout
    assert list(tmp_path.iterdir()) == []  # what is equal is not kept


def assert_found(tmp_path, status: int, out: str, err: str, told: list[str]) -> None:
    assert status == 1
    line = err.splitlines()[-1]
    assert line.startswith("elastix: ")
    assert [text for text in told if text not in line] == []
    assert f"kept: {tmp_path / 'both'}" in out
    assert (tmp_path / "both/with-faults/recipe.json").exists()


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("planted_skip.py", ["the loss of step 11 is", "consumed is", "state_sha256 is"]),
        ("planted_repeat.py", ["the loss of step 11 is", "consumed is", "state_sha256 is"]),
        ("planted_device_key.py", ["the loss of step 11 is", "state_sha256 is"]),
    ],
)
def test_a_planted_defect_is_found(verify, tmp_path, recipe, told):
    assert_found(tmp_path, *verify(recipe, *ONE_LOSS, "--slices", "2"), told)


def test_memory_of_dead_slices_is_found(cache, tmp_path):
    # In a process of its own: this planted defect would stay in this one.
    where = ["--run-dir", tmp_path / "both", "--compile-cache", cache]
    result = subprocess.run(
        [sys.executable, "-m", "elastix", "verify", RECIPES / "planted_dead_memory.py", *where]
        + ONE_LOSS,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    told = ["with faults ended with status 1", "step 11 is not finite"]
    assert_found(tmp_path, result.returncode, result.stdout, result.stderr, told)


def test_a_fault_that_did_not_fire_is_found(verify):
    status, _, err = verify("tiny.py", "--lose", "1@9000s", "--steps", "8")
    assert (status, err) == (1, "elastix: did not fire: --lose 1@9000s\n")


def test_a_run_that_trains_nothing_is_found(verify):
    status, _, err = verify("tiny.py:idle", "--lose", "1@3", "--steps", "4")
    assert status == 1
    assert err == "elastix: the final model is that of the seed: training changed nothing\n"


def test_bad_input_that_only_the_runs_can_see_is_passed_on(verify, tmp_path):
    status, _, err = verify("tiny.py", "--lose", "1@3", "--data.size", "0")
    assert (status, err) == (2, "elastix: data.size=0: use 1 point or more\n")
    assert not (tmp_path / "both").exists()


def test_the_first_step_whose_loss_differs_is_named():
    row = {"step": 3, "loss": 2.0, "slices": 4, "seconds": 0.5}
    one = {"losses": [3.0, 2.0, 1.0], "steps": 3, "consumed": {"examples": 3}, "state_sha256": "a"}
    one["evaluations"] = [row]
    assert compare_summaries(one, {**one, "evaluations": [{**row, "slices": 2}]}) == []
    other = {**one, "losses": [3.0, 2.5, 1.5], "consumed": {"examples": 4}}
    other["evaluations"] = [{**row, "loss": 2.5}]
    assert compare_summaries(one, other) == [
        "the loss of step 2 is 2.0 with faults and 2.5 without",
        "evaluations are [{'step': 3, 'loss': 2.0}] with faults "
        "and [{'step': 3, 'loss': 2.5}] without",
        "consumed is {'examples': 3} with faults and {'examples': 4} without",
    ]
