"""`elastix simulate`: the matrix, what was covered, storms, Ctrl-C and bad input."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from types import ModuleType

import pytest

from elastix import cli
from elastix.machine import TABLE
from elastix.testing import Kind, Parts, random_schedule, simulate
from elastix.testing.coverage import LineCoverage, histories, rows_hit, rows_missed
from elastix.testing.simulate_command import TRACED, Tally
from elastix.testing.storms import storm


def simulated(*argv: str) -> int:
    return cli.main(["simulate", *argv])


def test_it_prints_the_matrix_and_what_was_covered(capsys):
    assert simulated("--seeds", "0:60", "--slices", "4") == 0
    out, err = capsys.readouterr()
    *matrix, cells, table, driver = out.splitlines()
    assert len(matrix) == len(Kind) + 1 and re.match(r"141 cells, \d+ faults", cells)
    hit, of = map(int, re.match(r"machine: (\d+) of (\d+) rows of its table", table).groups())
    named = table.partition("; not ")[2].split("; ")
    assert of == len(TABLE) == hit + len(list(filter(None, named))) and 20 < hit < of
    lines, of = map(int, re.match(r"driver: (\d+) of (\d+) lines", driver).groups())
    named = driver.partition("; not ")[2].split(", ")
    assert of == lines + len(list(filter(None, named))) and 0.8 * of < lines <= of
    assert "in the first 60 runs" in driver
    assert "60 of 60 runs" in err


def test_verbose_shows_the_schedules(capsys):
    assert simulated("--seeds", "7", "--slices", "3", "--verbose") == 0
    assert str(random_schedule(7, 3)) in capsys.readouterr().out


def test_storms_have_so_many_faults(capsys):
    assert simulated("--storm", "12", "--seeds", "3:5", "--slices", "5", "--verbose") == 0
    out = capsys.readouterr().out
    for seed in (3, 4):
        assert f"seed {seed}: done: {storm(seed, 12, 5)}" in out
    assert "2 of 2 runs" not in out and "in the first 2 runs" in out


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--seeds", "5:2"], "there is no seed from 5 to 2"),
        (["--seeds", "x"], "write A:B"),
        (["--seeds", "3:3"], "there is no seed"),
        (["--seeds"], "elastix simulate --help"),
        (["--slices", "0"], "use 1 to 64"),
        (["--slices", "many"], "use 1 to 64"),
        (["--storm", "0"], "use 1 to 10000 faults"),
        (["--storm", "-3"], "use 1 to 10000 faults"),
        (["--storm", "1.5"], "use 1 to 10000 faults"),
        (["--storm", "99999"], "use 1 to 10000 faults"),
        (["--seed", "1:2", "x"], "elastix simulate --help"),
        (["x"], "elastix simulate --help"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy_and_status_2(argv, remedy, capsys):
    assert simulated(*argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("elastix: ")
    assert remedy in err


# --- goodput, with --costs ------------------------------------------------------------------------


def test_costs_print_the_goodput_of_each_strategy_against_failures(capsys, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text('{"step": 2, "state_bytes": 6e9, "bytes_per_second": 2e9, "disk": 40}')
    words = ("--slices", "4,1000", "--mtbf", "20h,40d", "--failures", "60", "--repair", "5m")
    assert simulated("--costs", str(costs), *words, "--seeds", "0:2") == 0
    out, err = capsys.readouterr()
    head, four, thousand = out.strip().split("\n\n")
    assert "given: step 2, move 3, disk 40" in head
    assert "assumed, not measured: notice 1, compile 0, snapshot 0.2" in head
    for slices, block in ((4, four), (1000, thousand)):
        title, histories, _, _, *rows = block.splitlines()
        assert title.startswith(f"{slices} slices, {4 * slices} logical replicas")
        assert "2 histories of 60 failures" in histories
        shares = [[float(s) for s in re.findall(r"([\d.]+)%", row)] for row in rows]
        for wait, wait_model, resize, resize_model, restart, restart_model in shares:
            assert restart <= wait + 1 and wait <= resize
            assert abs(wait - wait_model) < 8 and abs(restart - restart_model) < 8
            assert abs(resize - resize_model) < 4
        often, seldom = shares
        assert all(a < b for a, b in zip(often, seldom, strict=True))
    assert simulated("--costs", str(costs), *words, "--seeds", "0:2") == 0
    assert capsys.readouterr().out == out and err == ""


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--costs", "absent.json"], "--costs absent.json cannot be read"),
        (["--mtbf", "3h"], "--mtbf goes with --costs FILE: add it"),
        (["--failures", "3"], "--failures goes with --costs FILE: add it"),
        (["--costs", "FILE", "--mtbf", "3"], "--mtbf '3': write a time above 0"),
        (["--costs", "FILE", "--repair", "0s"], "--repair '0s': write a time above 0"),
        (["--costs", "FILE", "--slices", "4,1001"], "--slices '1001': use 1 to 1000"),
        (["--costs", "FILE", "--slices", "4", "--replicas", "3"], "--replicas 3: 4 slices need 4"),
        (["--costs", "FILE", "--failures", "0"], "--failures '0': use 1 to 100000"),
        (["--costs", "FILE", "--storm", "3"], "--storm does not go with --costs"),
        (["--costs", "FILE", "--verbose"], "--verbose does not go with --costs"),
        (["--costs", "FILE", "--seeds", "3:2"], "there is no seed from 3 to 2"),
    ],
)
def test_bad_costs_are_one_line_with_the_remedy_and_status_2(argv, remedy, capsys, tmp_path):
    (tmp_path / "costs.json").write_text('{"step": 1}')
    given = [str(tmp_path / "costs.json") if word == "FILE" else word for word in argv]
    assert simulated(*given) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("elastix: ")
    assert remedy in err


# --- interrupted, and not imported ----------------------------------------------------------------


def test_ctrl_c_prints_the_matrix_so_far():
    command = [
        sys.executable,
        "-u",
        "-m",
        "elastix",
        "simulate",
        "--seeds",
        "0:9999999",
        "--verbose",
    ]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=os.getcwd()) as running:
        for line in running.stdout:
            if line.startswith("seed 5:"):
                running.send_signal(signal.SIGINT)
                break
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert re.search(r"^141 cells, \d+ faults", out, re.M) and "rows of its table" in out
    assert "Traceback" not in err and "interrupted" in err.splitlines()[-1]


def test_only_those_who_ask_for_the_simulator_import_it():
    code = (
        "import sys, elastix.cli; print([m for m in sys.modules if 'simul' in m or 'ghost' in m])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['elastix.backends.simulated']"


# --- what coverage counts -------------------------------------------------------------------------


def test_the_rows_of_a_run_are_those_of_its_history():
    result = simulate(random_schedule(0, 4), Parts())
    found = list(histories(result))
    assert sum(map(len, found)) == result.transitions
    for history in found:
        for before, after in pairwise(history):
            assert after.before == before.after
    assert rows_hit(result) <= set(TABLE)
    assert len(rows_missed(rows_hit(result))) == len(TABLE) - len(rows_hit(result))
    assert rows_missed(TABLE) == [] and len(rows_missed(())) == len(TABLE)


def test_lines_are_those_that_were_run_within(tmp_path):
    path = tmp_path / "made.py"
    path.write_text("def one(x):\n    if x:\n        return 1\n    return 2\n\n\nX = one(1)\n")
    module = ModuleType("made")
    module.__file__ = str(path)
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    coverage, before = LineCoverage(module), sys.gettrace()
    assert coverage.missed == [2, 3, 4]
    with coverage.within():
        module.one(1)
    module.one(0)
    assert coverage.missed == [4] and sys.gettrace() is before
    with coverage.within():
        module.one(0)
    assert coverage.missed == []


def test_only_the_first_runs_are_traced():
    tally = Tally()
    tally.runs = TRACED
    tally.run(random_schedule(1, 2))
    assert "driver: 0 of" in tally.report() and tally.rows
