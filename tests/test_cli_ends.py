"""How the command ends when the world around it does not behave: always, and with its status."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.children import ROOT, reading_the_cache

HANGING = """
import time
from dataclasses import dataclass, replace
import numpy as np
from elastix import Policy
from elastix.data import stream
from tests.recipes import tiny

class Points:
    read = 0
    def __len__(self):
        return 64
    def __getitem__(self, index):
        Points.read += 1
        if Points.read > {after}:
            time.sleep(10_000)
        return {{"x": np.ones(4, np.float32), "y": np.float32(index)}}

@dataclass(frozen=True)
class Data:
    def build(self, global_batch, seed):
        return stream(Points(), global_batch=global_batch, seed=seed, fingerprint={{}})

def recipe():
    return replace(tiny.recipe(), data=Data(), policy=Policy(deadline=1.0, warm="off"))
"""


def start(*arguments, **options):
    command = [sys.executable, "-m", "elastix", *map(str, arguments), "--compile-cache", "off"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = reading_the_cache(JAX_PLATFORMS="cpu")
    return subprocess.Popen(command, cwd=ROOT, env=env, **pipes, **options)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_a_signal_while_libraries_are_imported_is_heard(number, status, seconds, tmp_path):
    child = start("run", "tests/recipes/tiny.py", "--run-dir", tmp_path / "run")
    time.sleep(seconds)
    child.send_signal(number)
    _, error = child.communicate(timeout=60)
    assert child.returncode == status and error.count("\n") == 1, error


def test_a_run_whose_data_hang_ends_though_a_thread_still_waits_for_them(tmp_path):
    recipe = tmp_path / "hanging.py"
    recipe.write_text(HANGING.format(after=120))
    child = start("run", recipe, "--run-dir", tmp_path / "run")
    _, error = child.communicate(timeout=90)
    assert child.returncode == 1
    assert "the data stream failed twice" in error and "did not finish in time" in error


def test_more_slices_than_a_recipe_can_use_are_refused_before_they_are_made(tmp_path):
    many = ("--slices", "100000000", "--run-dir", tmp_path / "run")
    child = start("run", "tests/recipes/tiny.py", *many)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 2 and "cannot keep 100000000 slices busy" in error
    assert not (tmp_path / "run").exists()
