"""The benchmarks run and say what they measured. How fast anything is, no test asserts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def bench(*words: str, name: str = "transition") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / f"bench/{name}.py"), *words]
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


def test_the_cost_of_the_same_bits_is_told_by_slices():
    small = ["--replicas", "3", "--examples", "2", "--seq-len", "8", "--repeats", "2"]
    ran = bench("--models", "least", "--slices", "3", *small, name="reduction")
    assert ran.returncode == 0, ran.stderr
    head, table = ran.stdout.split("\n\n")
    assert "R=3, replicas of 2 x 8 tokens" in head
    title, _, columns, row = table.strip().splitlines()
    params = int(re.search(r"least: ([\d,]+) parameters", title).group(1).replace(",", ""))
    assert columns.split()[:4] == ["slices", "fast", "ordered", "ratio"]
    three = [float(x) for x in row.split()]
    assert three[0] == 3 and min(three[1:8]) > 0
    ideal = 2 * 2 / 3 * 4 * params / 1e6
    assert three[8] == pytest.approx(ideal, abs=0.01)
    assert three[9] == pytest.approx(ideal, abs=0.01), "what XLA's all-reduce sends"
    assert three[10] == pytest.approx(ideal * 1.25, abs=0.01), "five bytes for every four"
