"""elastix.report and elastix.display: the words and figures that a person reads."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from elastix import Lose, Return, SimulatedBackend, report, train
from elastix.display import PlainDisplay, TerminalDisplay
from elastix.machine import (
    DataFailed,
    Failed,
    Ledger,
    Policy,
    PreemptionNoticed,
    RestoreFailed,
    Restoring,
    SaveFailed,
    Source,
    Tier,
    Waiting,
)
from elastix.metrics import Row
from elastix.recoveries import Recovery
from elastix.run import RunInfo, Summary
from tests.recipes import tiny

INFO = RunInfo(
    recipe=replace(tiny.recipe(), num_steps=100),
    run_dir=Path("runs/tiny"),
    num_slices=4,
    devices_per_slice=2,
    num_params=165_000,
    state_bytes=3 * 2**20,
    checkpoints=(),
)
RECOVERY = Recovery(
    kind="loss",
    cause="DATA_LOSS: slice 1 is gone",
    step=48,
    lost=[1],
    resumed_at=40,
    steps_lost=8,
    steps_abandoned=2,
    source="host",
    slices=[0, 2, 3],
    compiles=1,
    seconds={"detect": 0.25, "wait": 0.0, "restore": 0.0125, "compile": 1.5, "first_step": 0.125},
)
LEDGER = Ledger(40, frozenset(range(4)), frozenset({0}), True, (), below_since=10.0)


def row(step: int, seconds: float = 0.5, slices: int = 4) -> Row:
    return Row(step, 2.5, slices, seconds, 800.0, 1e-3, 1.0)


# --- formatting ---------------------------------------------------------------------------------


def test_the_start_tells_what_runs_and_where_it_begins():
    block = report.start_block(INFO, "tiny")
    text = "\n".join([block.title, *block.lines()])
    for told in (
        "tiny: 100 steps on 4 slices x 2 devices",
        "165 k parameters, 3 MiB",
        "8 examples a step in R=4 logical replicas",
        "100% on 2, 67% on 3, 100% on 4",
        "ordered: the same bits",
        "1 to all slices",
        "runs/tiny; starts anew from step 0",
    ):
        assert told in text


@pytest.mark.parametrize(
    ("checkpoints", "told"),
    [
        ((), "starts anew from step 0"),
        ((20, 40), "resumes from its checkpoint of step 40"),
        ((100,), "complete already: its checkpoint of step 100 is the end"),
    ],
)
def test_the_resume_point(checkpoints, told):
    assert report.resume_point(replace(INFO, checkpoints=checkpoints)) == told


def test_a_step_line_counts_live_devices_alone():
    pace = report.Pace(INFO)
    pace.add(row(50, seconds=0.5, slices=2))
    line = report.step_line(row(50, slices=2), INFO, pace)
    # 800 tokens in half a second on 2 slices of 2 devices; 50 steps of half a second are left.
    expected = "step  50/100  loss 2.5000  400 tokens/s/device  slices 2/4  25.0 s left"
    assert line == expected


def test_the_pace_is_that_of_the_usual_step():
    pace = report.Pace(INFO)
    for step, seconds in enumerate((1.0, 1.0, 60.0, 1.0, 1.0), 1):
        pace.add(row(step, seconds))
    assert pace.tokens_per_device == 100.0
    assert pace.seconds_left(90) == 10.0


def test_waiting_tells_for_what_and_until_when():
    waiting = Waiting(LEDGER, frozenset({0, 1}), want=4, until=30.0)
    below = report.waiting_line(waiting, Policy(min_slices=2, deadline=60.0), at=20.0)
    assert below == "waiting: 1 of 4 slices are up, needs 2, gives up in 50.0 s"
    enough = report.waiting_line(waiting, Policy(patience=20.0), at=20.0)
    assert enough == "waiting: 1 of 4 slices are up, goes on with 4 or in 10.0 s"


def test_restoring_tells_from_where():
    restoring = Restoring(LEDGER, frozenset({0, 2}), Source(Tier.HOST, 30))
    assert report.restoring_line(restoring) == "restoring slices 0, 2 (host, step 30)"


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (PreemptionNoticed(at=0.0), "stopping"),
        (SaveFailed(at=0.0, step=20, reason="disk full"), "checkpoint of step 20 .* disk full"),
        (
            RestoreFailed(at=0.0, source=Source(Tier.DISK, 20), reason="bad crc"),
            "a checkpoint on disk, after step 20 cannot be used: bad crc",
        ),
        (DataFailed(at=0.0, step=7, reason="gone"), "step 7 .* again: gone"),
    ],
)
def test_troubles_beside_recoveries_are_told(event, told):
    assert re.search(told, report.event_line(event, Restoring(LEDGER, frozenset(), None)))


def test_the_reason_of_a_failure_is_told_once():
    failed = Failed("the data stream failed twice")
    assert report.event_line(DataFailed(at=0.0, step=7, reason="gone"), failed) is None


def test_the_block_of_a_loss():
    block = report.recovery_block(RECOVERY, 4)
    assert block.title == "recovery: slice 1 lost after step 48"
    assert dict(block.fields) == {
        "noticed": "DATA_LOSS: slice 1 is gone",
        "state from": "a snapshot in host memory, after step 40",
        "cost": "8 steps lost, 2 in flight abandoned, 1 program compiled",
        "goes on": "from step 40 on slices 0, 2, 3 (3 of 4)",
        "seconds": "detect 0.250, wait 0.000, restore 0.013, compile 1.500, first_step 0.125, "
        "total 1.887",
    }


def test_the_block_of_a_regrow_tells_what_came_back():
    regrow = replace(RECOVERY, kind="regrow", lost=[], found=[1, 3], source="live", steps_lost=0)
    block = report.recovery_block(regrow, 4)
    assert block.title == "recovery: slices 1, 3 came back after step 48"
    assert dict(block.fields)["state from"] == "the surviving slices' own memory, after step 40"
    both = dict(report.recovery_block(replace(RECOVERY, found=[3]), 4).fields)
    assert both["joined"] == "slice 3"


def test_the_end_tells_the_loss_beside_that_of_frequencies():
    end = Summary(
        outcome="done",
        reason=None,
        steps=100,
        state_sha256="5a17",
        finite=True,
        consumed={"examples": 800, "sha256": "c0de"},
        losses=[3.0, 2.0],
        evaluations=[{"step": 100, "loss": 2.25}],
        recoveries=[{"kind": "loss", "steps_lost": 8}, {"kind": "regrow", "steps_lost": 0}],
        compiles=3,
        compile_cache_hits=1,
        unfired_faults=["--lose 1@99"],
        seconds=75.4,
        resumed_at=0,
        pid=7,
        versions={},
    )
    block = report.summary_block(end, INFO, unigram_loss=3.25)
    assert block.title == "done: 100 of 100 steps in 1:15 min"
    assert dict(block.fields) == {
        "final loss": "2.0000, 1.2500 below the 3.2500 of knowing token frequencies alone",
        "evaluated": "2.2500, the last of 1",
        "state": "sha256 5a17",
        "consumed": "800 examples, sha256 c0de",
        "recoveries": "2 (1 loss, 1 regrow); 8 steps redone in all",
        "compiled": "3 programs, and 1 from the persistent cache",
        "process": "pid 7",
        "run dir": "runs/tiny",
        "not fired": "--lose 1@99",
    }
    assert "ABOVE" in report.loss_text(4.0, 3.25)
    assert report.loss_text(4.0, None) == "4.0000"


# --- whole runs ---------------------------------------------------------------------------------


class Both:
    """Shows a run on a terminal and in a pipe at once."""

    def __init__(self):
        self.terminal, self.pipe = io.StringIO(), io.StringIO()
        console = Console(file=self.terminal, force_terminal=True, width=100)
        self.displays = [
            TerminalDisplay("tiny", console),
            PlainDisplay("tiny", Console(file=self.pipe, soft_wrap=True, highlight=False)),
        ]

    def __getattr__(self, name):
        def tell_both(*arguments):
            for display in self.displays:
                getattr(display, name)(*arguments)

        return tell_both


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """(terminal, pipe, summary.json) of a run that waits, loses and regrows."""
    run_dir = tmp_path_factory.mktemp("shown") / "run"
    faults = [*(Lose(s, step=12) for s in (0, 1, 2)), Return(1, step=16), Return(2, step=16)]
    faults += [Lose(3, step=35)]
    whole = tiny.recipe()
    recipe = replace(whole, policy=replace(whole.policy, min_slices=2, probe_every=0.01))
    backend, both = SimulatedBackend(4, 2, faults), Both()
    with both.displays[0]:
        train(recipe, backend=backend, run_dir=run_dir, display=both)
    summary = json.loads((run_dir / "summary.json").read_text())
    return both.terminal.getvalue(), both.pipe.getvalue(), summary


def test_the_figures_of_a_block_are_those_of_the_summary(shown):
    _, pipe, summary = shown
    blocks = re.split(r"^--- recovery: ", pipe, flags=re.M)[1:]
    assert len(blocks) == len(summary["recoveries"]) >= 2
    for block, recovery in zip(blocks, summary["recoveries"], strict=True):
        seconds = dict(re.findall(r"(\w+) (\d+\.\d{3})", re.search("seconds.*", block)[0]))
        total = float(seconds.pop("total"))
        assert total == pytest.approx(sum(recovery["seconds"].values()), abs=1e-3)
        for phase, value in seconds.items():
            assert float(value) == pytest.approx(recovery["seconds"][phase], abs=1e-3)
        assert list(seconds) == ["detect", "wait", "restore", "compile", "first_step"]
        ids = {name: ", ".join(map(str, recovery[name])) for name in ("lost", "found", "slices")}
        happened = "lost" if recovery["lost"] else "came back"
        who = report.slices_text(recovery["lost"] or recovery["found"])
        assert f"{who} {happened} after step {recovery['step']}" in block
        assert re.search(rf"\b{recovery['steps_lost']} steps? lost, ", block)
        assert f" {recovery['steps_abandoned']} in flight abandoned" in block
        assert re.search(rf"\b{recovery['compiles']} programs? compiled", block)
        assert f"from step {recovery['resumed_at']} on slices {ids['slices']} (" in block
        assert recovery["cause"] in block


def test_a_pipe_gets_plain_lines_and_not_one_for_each_step(shown):
    _, pipe, summary = shown
    assert "\x1b" not in pipe
    steps = [int(n) for n in re.findall(r"^step +(\d+)/40 ", pipe, flags=re.M)]
    assert steps[-1] == summary["steps"] == 40
    assert steps == sorted(set(steps))
    assert 15 <= len(steps) <= 25
    assert "waiting: 1 of 4 slices are up, needs 2" in pipe
    assert f"state       sha256 {summary['state_sha256']}" in pipe


def test_a_terminal_gets_a_live_line_and_the_same_blocks(shown):
    terminal, _, summary = shown
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal)
    assert "\x1b[" in terminal
    assert "step 40/40" in text
    assert text.count("recovery: slice") == len(summary["recoveries"])
    assert summary["state_sha256"] in text
