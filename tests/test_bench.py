"""The benchmarks run and say what they measured. How fast anything is, no test asserts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import floor, scale
from elastix.measured_costs import read_costs

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


@pytest.mark.soak
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


# --- bench/scale.py -------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_recovery_is_timed_by_size_and_slices(tmp_path):
    out = tmp_path / "scale.json"
    ran = bench("--quick", "--out", str(out), name="scale")
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^ +1 MB +2 +[\d.]+ +[\d.]+ +[\d.]+ +\d +[\d.]+$", ran.stdout, re.M)
    report = json.loads(out.read_text())
    (point,) = report["points"]
    assert point["megabytes"] == 1 and point["slices"] == 2 and point["recoveries"] >= 2
    assert min(point["loss"], point["regrow"], point["cold_compile"], point["costs"]["step"]) > 0
    assert "not measured on TPUs" in report["about"]
    assert read_costs(out) == report["costs"] and report["costs"]["compile"] == 0.0
    picture = ElementTree.parse(tmp_path / "scale.svg").getroot()
    assert len([part for part in picture if part.tag.endswith("polyline")]) == 3
    with pytest.raises(SystemExit, match="2"):
        scale.main(["--quick", "--out", str(out)])  # it would overwrite that
    assert json.loads(out.read_text()) == report


def made(megabytes: float, slices: int) -> scale.Point:
    """A point of a machine that takes 0.1 s, 2 s for each GB moved and 0.01 s for each slice."""
    loss, regrow = (0.1 + 2 * megabytes / 1024 * n + 0.01 * slices for n in (slices - 1, slices))
    return scale.Point(megabytes, slices, loss, regrow, 4, 3.0, {"step": 0.5})


def test_a_fit_finds_what_the_points_were_made_of():
    points = [made(size, slices) for size in (1, 10, 100, 500) for slices in (2, 4, 8)]
    for found in scale.fits(points):
        assert list(found.terms.values()) == pytest.approx([0.1, 2.0, 0.01])
        assert found.r_squared == pytest.approx(1) and found.worst < 1e-9
        assert "it says nothing" not in scale.fit_text(found)
    off = scale.Point(**{**vars(points[0]), "loss": points[0].loss + 1})
    assert scale.fits([off, *points[1:]])[0].worst > 0.3


def test_terms_that_the_points_cannot_tell_apart_are_left_out():
    (loss, _) = scale.fits([made(size, 2) for size in (1, 10, 100)])
    assert list(loss.terms) == ["s", "s per GB on all slices"]
    (loss, _) = scale.fits([made(1, 2)])
    assert list(loss.terms) == ["s"] and "it says nothing" in scale.fit_text(loss)


def test_the_floor_is_the_sum_of_its_parts_and_says_what_is_assumed(capsys, tmp_path):
    found = floor.floor()
    # 12 bytes x 70e9 over 64 chips of 16 GB/s, or of 50 Gbit/s; 6 x 70e9 x 2^24 FLOP at half peak.
    assert found.from_host == pytest.approx(840e9 / (64 * 16e9))
    assert found.to_new_slice == pytest.approx(840e9 / (64 * 6.25e9)) == pytest.approx(2.1)
    assert found.step == pytest.approx(6 * 70e9 * 2**24 / (64 * 64 * 459e12 * 0.5))
    assert found.slower_step == pytest.approx(found.step * 5 / 4), "five replicas of 256, not four"
    assert found.loss == pytest.approx(10 + found.from_host + found.slower_step)
    points = [vars(made(size, 2)) for size in (1, 10, 100)]
    report = {"about": "made up", "machine": "none", "python": "3", "skipped": ["x"]}
    (tmp_path / "scale.json").write_text(json.dumps({**report, "points": points}))
    assert scale.main(["--from", str(tmp_path / "scale.json")]) == 0
    out = capsys.readouterr().out
    assert "made up: none, Python 3\nleft out: x" in out
    assert "nothing of it was measured on TPUs" in out
    for assumption in floor.ASSUMPTIONS:
        assert re.search(rf"^  {assumption.name} .*{re.escape(assumption.source)}$", out, re.M)


def test_the_picture_falls_with_failures_and_stays_inside():
    lines = floor.curves(floor.floor().costs, floor.floor().job)
    for line in lines.values():
        shares = [share for _, share in sorted(line)]
        assert shares == sorted(shares, reverse=True) and 0 <= shares[-1] < shares[0] <= 1
    drawn = ElementTree.fromstring(floor.svg("a < b", lines))
    for part in drawn:
        if part.tag.endswith("polyline"):
            for pair in part.get("points").split():
                x, y = map(float, pair.split(","))
                assert floor.LEFT <= x <= floor.WIDTH - floor.RIGHT
                assert floor.TOP <= y <= floor.HEIGHT - floor.BOTTOM


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--megabytes", "1,x"], "write numbers with commas"),
        (["--megabytes", "0"], "use 0.01 to 100000 megabytes"),
        (["--slices", "1"], "use 2 to 64 slices"),
        (["--slices", "2.5"], "use 2 to 64 slices"),
        (["--repeats", "0"], "use 1 or more"),
        (["--from", "absent.json"], "is no report of this program"),
    ],
)
def test_bad_input_of_scale_is_refused_with_the_remedy(words, remedy, capsys):
    with pytest.raises(SystemExit) as left:
        scale.main(words)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and remedy in err.splitlines()[-1]
