"""`elastix advise`: what it prints, where its costs are from, and bad input."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from elastix import cli
from elastix.durations import long_duration, parse_duration
from elastix.event_log import decode
from elastix.goodput_model import COSTS, Costs, Job, goodput_resize, goodput_wait
from elastix.machine import Event, Policy, Starting, transition
from elastix.measured_costs import costs_of_events, measure_run, read_costs
from elastix.metrics import Row
from elastix.recoveries import Recoveries
from elastix.testing import Fault, Kind, Phase, Schedule, simulate

TINY = "tests/recipes/tiny.py"


def advise(*argv: str) -> int:
    return cli.main(["advise", *argv])


def advice(capsys, *argv: str) -> dict:
    assert advise(*argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """The files of a run on three ghost slices, of which one is lost and comes back; its steps
    take 1 s, snapshots 0.2 s, restores 0.8 s, compiles 2 s and saves 3 s."""
    policy = Policy(snapshot_every=5, checkpoint_every=10, inflight=1, probe_every=1.0, warm="off")
    loss = Fault(Phase.SYNC, Kind.LOSS, visit=1, slices=(1,), returns=4.0, after=7)
    result = simulate(Schedule(3, 40, policy, (loss,), save_seconds=3.0))
    path = tmp_path_factory.mktemp("run")
    (path / "events.jsonl").write_text(result.log)
    rows = [Row(n, 0.5, 2 if 7 < n < 12 else 3, 1.0, 8.0, None, 1.0) for n in range(1, 41)]
    write_rows(path / "metrics.jsonl", [asdict(row) for row in rows])
    recoveries, state = Recoveries(), Starting()
    for event, after, _ in result.processes[0]:
        recoveries.update(state, event, after)
        state = after
    assert [r.kind for r in recoveries.done] == ["loss", "regrow"]
    write_rows(path / "recoveries.jsonl", [asdict(r) for r in recoveries.done])
    return path


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- what it prints -------------------------------------------------------------------------------


def test_it_prints_intervals_shares_break_even_goodput_and_what_was_assumed(capsys):
    assert advise(TINY, "--mtbf", "3h") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "tiny on 4 slices, R=4 logical replicas" in out
    assert "a slice fails every 3 h, one of them every 45 min; it is back after 10 min" in out
    # sqrt(2 x 0.2 x 2700) = 32.9 and sqrt(2 x 0.2 x 10800) = 65.7 steps of a second.
    assert re.search(r"snapshot_every +5 +33 \(33 s\) +33 \(33 s\)", out)
    assert re.search(r"checkpoint_every +10 +66 \(1.1 min\) +66", out)
    assert re.search(r"^ +3 +67% +50%$", out, re.M) and re.search(r"^ +4 +100% +100%$", out, re.M)
    assert "resizing is better, policy.patience=0" in out
    assert re.search(r"^  resize at once \(patience 0\) +\d\d\.\d\d% +\d\d\.\d\d%$", out, re.M)
    assumed = next(line for line in out.splitlines() if line.startswith("assumed, not measured"))
    assert all(f"{name} " in assumed for name in COSTS)
    assert "mtbf of the whole job" in assumed and "repair, 10m" in assumed


def test_json_has_the_numbers_of_the_model(capsys):
    words = ("--mtbf", "2d", "--slices", "2", "--repair", "30m", "--step-seconds", "0.5")
    found = advice(capsys, TINY, *words, "--job-mtbf", "10d")
    job = Job(2, 4, 2 * 86400.0, 1800.0, 1, "host", 5, 10, 0.01)
    assert found["job"] == asdict(job) and found["job_mtbf"] == 864_000.0
    costs = Costs(step=0.5)
    assert found["costs"] == asdict(costs)
    assert found["origins"]["step"] == "--step-seconds" and found["origins"]["move"] == "assumed"
    assert found["goodput"]["wait"] == goodput_wait(costs, job)
    assert found["goodput"]["resize"] == goodput_resize(costs, job)
    assert all(found["best_goodput"][name] >= share for name, share in found["goodput"].items())
    assert not [text for text in found["assumed"] if re.match("mtbf|repair|number|step", text)]


def test_fields_of_the_recipe_count(capsys):
    found = advice(capsys, TINY, "--mtbf", "1d", "--policy.snapshot-every", "7", "--slices=4")
    assert found["job"]["snapshot_every"] == 7
    found = advice(capsys, TINY, "--mtbf", "1d", "--policy.min-slices", "4")
    assert found["break_even"] is None and found["patience"] == 0.0
    assert [c["slices"] for c in found["slice_counts"]] == [4]
    assert advise(TINY, "--mtbf", "1d", "--policy.min-slices", "4") == 0
    assert "3 slices cannot train" in capsys.readouterr().out
    every = ("--policy.checkpoint-every", "0", "--policy.checkpoint-seconds", "90")
    found = advice(capsys, TINY, "--mtbf", "1d", *every, "--step-seconds", "3")
    assert found["job"]["checkpoint_every"] == 30


def test_a_slice_that_returns_soon_is_worth_waiting_for(capsys, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text('{"notice": 30, "move": 60, "compile": 600, "snapshot": 5}')
    found = advice(capsys, TINY, "--mtbf", "1d", "--repair", "5m", "--costs", str(costs))
    assert 600 < found["break_even"] == found["patience"]
    assert advise(TINY, "--mtbf", "1d", "--repair", "1h", "--costs", str(costs)) == 0
    out = capsys.readouterr().out
    assert "it is back after 1 h: resizing is better, policy.patience=0" in out
    # exp(-1800 s / 1 h) of the repairs outlast the recipe's deadline.
    assert "61% of repairs take longer than policy.deadline" in out


# --- what was measured ----------------------------------------------------------------------------


def test_costs_are_measured_in_a_run_directory(run_dir):
    found = measure_run(run_dir)
    assert found.num_slices == 3
    costs = found.costs
    assert costs["step"] == 1.0 and found.counts["step"] == 35
    assert costs["snapshot"] == pytest.approx(0.2, abs=0.06)
    assert costs["write"] == pytest.approx(3.0, abs=1.1), "noticed between two steps"
    assert costs["compile"] == pytest.approx(2.0, abs=0.06)
    assert 0.8 <= costs["move"] < 3.5 and 0 < costs["notice"] < 1.2
    assert costs.keys() == {"step", "snapshot", "write", "compile", "move", "notice"}


def test_a_restore_from_disk_is_measured(tmp_path):
    schedule = Schedule(2, 6, Policy(), on_disk=(4,))
    rows = [json.loads(line) for line in simulate(schedule).log.splitlines()]
    rows[1]["event"]["restore_seconds"] = 0.75
    assert rows[0]["state"]["source"]["tier"] == "disk"
    assert costs_of_events(rows)["disk"] == [0.75]


def test_a_run_directory_gives_costs_slices_and_where_its_time_went(run_dir, capsys):
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    assert advise(TINY, "--mtbf", "3h", "--run-dir", str(run_dir)) == 0
    out = capsys.readouterr().out
    assert "tiny on 3 slices" in out and "number of slices" not in out
    assert re.search(r"^  step +1 +measured \(35 times\)$", out, re.M)
    assert re.search(r"^  restart +300 +assumed$", out, re.M)
    title = re.search(r"^where the .* of the run went, in seconds$", out, re.M)
    shares = re.findall(r"^  \w+ +[\d.]+ +([\d.]+)%$", out[title.start() :], re.M)
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.5)
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before


def test_a_step_on_other_slices_is_scaled_by_their_replicas(run_dir, capsys):
    found = advice(capsys, TINY, "--mtbf", "3h", "--run-dir", str(run_dir), "--slices", "4")
    assert found["costs"]["step"] == 0.5
    assert found["origins"]["step"] == "measured (35 times) on 3 slices, scaled by 1 / 2"
    found = advice(
        capsys, TINY, "--mtbf", "3h", "--run-dir", str(run_dir), "--step-seconds", "0.25"
    )
    assert found["costs"]["step"] == 0.25 and found["costs"]["snapshot"] < 0.3
    assert found["spent"]["seconds"]["useful"] == pytest.approx(40, abs=1)


def test_events_of_the_run_are_those_of_the_machine(run_dir):
    """The fixture is no invention: its log replays."""
    state, policy = Starting(), None
    for line in (run_dir / "events.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["event"]["type"] == "Started":
            policy = decode(row["event"].pop("policy"))
            del row["event"]["pid"]
        state, _ = transition(state, decode(row["event"], Event), policy)
    assert type(state).__name__ == "Done"


def test_bytes_and_bandwidth_stand_for_a_move(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"costs": {"state_bytes": 8e9, "bytes_per_second": 2e9, "step": 3}}')
    assert read_costs(path) == {"move": 4.0, "step": 3.0}


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        ([TINY], "--mtbf (elastix advise --help)"),
        (["--mtbf", "3h"], "RECIPE (elastix advise --help)"),
        ([TINY, "--mtbf", "3"], "--mtbf '3': write a time above 0 such as 90s, 10m, 3h or 2d"),
        ([TINY, "--mtbf", "0s"], "write a time above 0"),
        ([TINY, "--mtbf", "-3h"], "elastix advise --help"),
        ([TINY, "--mtbf", "3h", "--repair", "soon"], "--repair 'soon': write a time"),
        ([TINY, "--mtbf", "3h", "--job-mtbf", "1e3s"], "--job-mtbf '1e3s': write a time"),
        ([TINY, "--mtbf", "3h", "--slices", "0"], "--slices '0': use 1 to 10000"),
        ([TINY, "--mtbf", "3h", "--slices", "9"], "num_replicas=4 cannot keep 9 slices busy"),
        ([TINY, "--mtbf", "3h", "--step-seconds", "0"], "--step-seconds '0': use the seconds"),
        ([TINY, "--mtbf", "3h", "--step-seconds", "nan"], "--step-seconds 'nan': use"),
        ([TINY, "--mtbf", "3h", "--costs", "absent.json"], "absent.json cannot be read"),
        ([TINY, "--mtbf", "3h", "--run-dir", "absent"], "holds no metrics.jsonl"),
        ([TINY, "--mtbf", "3h", "--no-such-field", "3"], "--no-such-field is no option"),
        (["absent.py", "--mtbf", "3h"], "absent.py does not exist"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy_and_status_2(argv, remedy, capsys):
    assert advise(*argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("elastix: ")
    assert remedy in err


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("{", "is not JSON"),
        ("[1]", "write an object such as"),
        ("{}", "write an object such as"),
        ('{"steps": 1}', "'steps' is no cost; use step, notice"),
        ('{"step": "1"}', "step='1': use a number"),
        ('{"step": true}', "step=True: use a number"),
        ('{"state_bytes": 8}', "give move alone, or in its place both"),
        ('{"state_bytes": 8, "bytes_per_second": 0}', "above 0"),
        ('{"state_bytes": 8, "bytes_per_second": 1, "move": 1}', "give move alone"),
        ('{"move": -1}', "costs.move=-1.0: use 0 or more"),
        ('{"move": NaN}', "costs.move=nan: use 0 or more"),
    ],
)
def test_a_bad_file_of_costs_is_refused_with_the_remedy(text, remedy, tmp_path, capsys):
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert advise(TINY, "--mtbf", "3h", "--costs", str(path)) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and remedy in err


def test_a_run_that_timed_no_step_or_is_none_is_refused(run_dir, tmp_path):
    events = (run_dir / "events.jsonl").read_text()
    (tmp_path / "events.jsonl").write_text(events)
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "slices": 3, "seconds": 2.0}])
    with pytest.raises(ValueError, match="no step was timed there; train for longer"):
        measure_run(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    with pytest.raises(ValueError, match="holds other rows than a run's: 'slices'"):
        measure_run(tmp_path)


# --- times ----------------------------------------------------------------------------------------


def test_times_are_written_with_their_unit():
    written = {"90s": 90, "10m": 600, "1.5h": 5400, "2d": 172_800, "0.5s": 0.5}
    assert {text: parse_duration(text, "--t") for text in written} == written
    for text in ("", "3", "h", "3 h", "3H", "-3h", "1e3s", "inf", "1h30m", "9" * 400 + "d"):
        with pytest.raises(ValueError, match=r"^--t .*: write a time above 0"):
            parse_duration(text, "--t")


def test_times_are_told_to_three_digits():
    told = {1.4333: "1.43 s", 60: "1 min", 3599: "60 min", 5400: "1.5 h", 172_800: "2 days"}
    assert {seconds: long_duration(seconds) for seconds in told} == told
