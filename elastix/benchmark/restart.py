"""The plain restart: the process is killed, and the same command goes on from its checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastix.benchmark.parts import (
    DEVICES_PER_SLICE,
    NUM_SLICES,
    NUM_STEPS,
    SNAPSHOT_EVERY,
    Task,
    run_folder,
)
from elastix.benchmark.recorder import say_to_stderr
from elastix.recipe import Recipe

_LOOK = 0.01
"""Seconds between two looks at the log of the run."""
_MORE_STEPS = 3
"""Steps that are trained after the checkpoint, and lost."""
_PATIENCE = 1800.0


def restarts(task: Task, recipe: Recipe) -> dict[str, Any]:
    """Seconds from the kill of a run, which has saved and trained on, to the first step that is
    committed after the same command was started again."""
    say, wanted = say_to_stderr(task.name), 1 if task.quick else max(5, task.few // 2)
    seconds = []
    with run_folder() as run_dir:
        killed = _live_until_saved(task, run_dir, 0)[1]
        for number in range(wanted):
            committed, next_kill = _live_until_saved(task, run_dir, _rows_in(run_dir))
            seconds.append(committed - killed)
            killed = next_kill
            say(f"restart {number + 1} of {wanted}: {seconds[-1]:.1f} s")
    return {"seconds": seconds, "checkpoint_every": SNAPSHOT_EVERY}


def _live_until_saved(task: Task, run_dir: Path, rows: int) -> tuple[float, float]:
    """Start the run, and kill it some steps after it has saved. Returns when it committed its
    first step, and when it was killed; `rows` of its log are of processes before it."""
    errors = run_dir.with_name("errors")
    with errors.open("wb") as file:
        process = subprocess.Popen(
            _command(task, run_dir), stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    first, left = 0.0, None
    try:
        for kind in _events(run_dir / "events.jsonl", rows, process, errors):
            if kind == "Committed":
                first = first or time.monotonic()
                left = left - 1 if left else left
            left = _MORE_STEPS if kind == "Saved" and left is None else left
            if left == 0:
                break
    finally:
        killed = time.monotonic()
        process.kill()
        process.wait()
    return first, killed


def _command(task: Task, run_dir: Path) -> list[str]:
    cache = "off" if task.option == "off" else task.cache
    return [
        *(sys.executable, "-m", "elastix", "run", task.recipe, "--run-dir", str(run_dir)),
        *("--slices", str(NUM_SLICES), "--devices-per-slice", str(DEVICES_PER_SLICE)),
        *("--steps", str(NUM_STEPS), "--compile-cache", cache),
        *("--policy.checkpoint-every", str(SNAPSHOT_EVERY)),
    ]


def _rows_in(run_dir: Path) -> int:
    with (run_dir / "events.jsonl").open("rb") as file:
        return sum(line.endswith(b"\n") for line in file)


def _events(path: Path, skip: int, process: subprocess.Popen[bytes], errors: Path) -> Iterator[str]:
    """The kinds of events that a process logs, as they come, without the first `skip` rows."""
    give_up = time.monotonic() + _PATIENCE
    while not path.exists():
        _rest(process, errors, give_up)
    with path.open("rb") as file:
        line = b""
        while True:
            line += file.readline()
            if not line.endswith(b"\n"):
                _rest(process, errors, give_up)
                continue
            if skip <= 0:
                yield json.loads(line)["event"]["type"]
            skip, line = skip - 1, b""


def _rest(process: subprocess.Popen[bytes], errors: Path, give_up: float) -> None:
    if process.poll() is not None or time.monotonic() > give_up:
        said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RuntimeError(f"the run ended, or hung: {said[-1] if said else 'it said nothing'}")
    time.sleep(_LOOK)
