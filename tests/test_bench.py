"""The benchmarks run and say what they measured. How fast anything is, no test asserts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench/transition.py"), *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_cost_of_a_transition_is_told_by_state_and_event():
    ran = bench("--seeds", "0:8", "--steps", "40")
    assert ran.returncode == 0, ran.stderr
    head, quiet, faulty = ran.stdout.split("\n\n")
    assert re.search(r"^yardstick: \d+\.\d+ us", head, re.M)
    for block, told in ((quiet, "a quiet run of 40 steps"), (faulty, "8 faulty runs")):
        title, columns, *rows = block.strip().splitlines()
        assert title.startswith(told)
        assert columns.split()[2:] == ["count", "share", "median", "p95", "units"]
        counts = [int(row[34:43]) for row in rows]
        assert counts[-1] == sum(counts[:-1]) == int(re.search(r": (\d+) tr", title).group(1))
        assert sum(float(row[43:52].rstrip("%")) for row in rows[:-1]) == pytest.approx(100, abs=1)
        assert all(float(row[52:61]) <= float(row[61:70]) + 0.01 for row in rows[-1:])
    assert re.search(r"^Training, Committed +40 ", quiet, re.M)
    assert "SlicesLost" in faulty and "SlicesLost" not in quiet


@pytest.mark.parametrize("words", [["--seeds", "5"], ["--seeds", "2:2"], ["--steps", "0"]])
def test_bad_input_is_refused_with_the_remedy(words):
    ran = bench(*words)
    assert ran.returncode == 2
    assert ran.stdout == "" and re.search(r"write A:B|use 1 step", ran.stderr.splitlines()[-1])
