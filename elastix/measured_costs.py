"""What steps and recoveries cost, from a file or from a run directory; and where each is from.

A file of costs is a JSON object of seconds by name, those of `goodput_model.Costs`, or has such an
object under "costs", as what `bench/scale.py` writes. In place of `move` it may give `state_bytes`
and `bytes_per_second`. What it leaves out is assumed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from elastix.goodput_model import COSTS, Costs, move_seconds
from elastix.jsonl import RowReader
from elastix.wording import plural

ASSUMED = "assumed"
_BYTES = ("state_bytes", "bytes_per_second")


@dataclass(frozen=True)
class KnownCosts:
    """Costs, and for each name where it is from: `assumed`, or what says it."""

    costs: Costs = field(default_factory=Costs)
    origins: dict[str, str] = field(default_factory=lambda: dict.fromkeys(COSTS, ASSUMED))

    @property
    def assumed(self) -> list[str]:
        """The names of costs that nobody measured or gave."""
        return [name for name in COSTS if self.origins[name] == ASSUMED]

    def given(self, found: dict[str, float], origin: str) -> KnownCosts:
        """With these costs in place of those known before.

        Raises:
            ValueError: a cost is out of range.
        """
        costs = {name: getattr(self.costs, name) for name in COSTS} | found
        return KnownCosts(Costs(**costs), self.origins | dict.fromkeys(found, origin))


def read_costs(path: Path) -> dict[str, float]:
    """The costs that a file gives.

    Raises:
        ValueError: it cannot be read, or is no object of costs; one line with the remedy.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--costs {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--costs {path} is not JSON: write seconds by name") from error
    if isinstance(value, dict) and isinstance(value.get("costs"), dict):
        value = value["costs"]
    if not isinstance(value, dict) or not value:
        raise ValueError(f'--costs {path}: write an object such as {{"step": 1.5, "move": 2}}')
    for name, seconds in value.items():
        _check(path, name, seconds)
    return _with_move(path, value)


def _check(path: Path, name: str, seconds: Any) -> None:
    if name not in (*COSTS, *_BYTES):
        raise ValueError(f"--costs {path}: {name!r} is no cost; use {', '.join((*COSTS, *_BYTES))}")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise ValueError(f"--costs {path}: {name}={seconds!r}: use a number")


def _with_move(path: Path, value: dict[str, float]) -> dict[str, float]:
    """`move` from bytes and bandwidth, where those are given in its place."""
    costs = {name: float(seconds) for name, seconds in value.items() if name in COSTS}
    given = [name for name in _BYTES if name in value]
    if not given:
        return costs
    if len(given) == 1 or "move" in costs or not value["bytes_per_second"] > 0:
        raise ValueError(
            f"--costs {path}: give move alone, or in its place both state_bytes and a "
            "bytes_per_second above 0"
        )
    return costs | {"move": move_seconds(value["state_bytes"], value["bytes_per_second"])}


# --- of a run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredRun:
    """What a run directory tells: costs, from how many measurements each, and on how many slices
    the steps were timed."""

    costs: dict[str, float]
    counts: dict[str, int]
    num_slices: int

    def origin(self, name: str) -> str:
        """Where a cost is from, in words."""
        return f"measured ({plural(self.counts[name], 'time')})"


def measure_run(directory: Path) -> MeasuredRun:
    """The medians of what a run's steps, recoveries and saves took. Its files are only read.

    Raises:
        ValueError: it is no run directory, or no step was timed in it.
    """
    rows = _rows(directory / "metrics.jsonl")
    events = _rows(directory / "events.jsonl")
    if not rows or not events:
        raise ValueError(f"--run-dir {directory} holds no metrics.jsonl and events.jsonl of a run")
    try:
        slices = max(row["slices"] for row in rows)
        steps = [row["seconds"] for row in rows[1:] if row["slices"] == slices]
        if not steps:
            raise ValueError(f"--run-dir {directory}: no step was timed there; train for longer")
        found = {"step": steps}
        found |= _of_recoveries(_rows(directory / "recoveries.jsonl"), median(steps))
        found |= costs_of_events(events)
    except (KeyError, TypeError) as error:
        raise ValueError(f"--run-dir {directory} holds other rows than a run's: {error}") from error
    costs = {name: median(times) for name, times in found.items() if times}
    return MeasuredRun(costs, {name: len(found[name]) for name in costs}, slices)


def _rows(path: Path) -> list[Any]:
    try:
        return list(RowReader(path)) if path.is_file() else []
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error


def _of_recoveries(rows: Iterable[Any], step: float) -> dict[str, list[float]]:
    """`move` includes what the first step took longer than others."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        seconds = row["seconds"]
        if row["kind"] == "loss":
            found["notice"].append(seconds["detect"])
            found["compile"].append(seconds["compile"])
        if row["source"] in ("live", "host"):
            slow_start = max(0.0, seconds["first_step"] - step)
            found["move"].append(seconds["restore"] + slow_start)
    return found


_ANSWERED = {"Snapshotted": ("Snapshot", "snapshot"), "Saved": ("Save", "write")}
"""Events that end something, the effect that began it, and which cost it is."""


def costs_of_events(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """How long each snapshot, save and restore from disk took, from the rows of `events.jsonl`. A
    snapshot that was begun beside its step is timed from the commit of the step."""
    found: dict[str, list[float]] = defaultdict(list)
    asked: dict[tuple[str, int, int], float] = {}
    state: dict[str, Any] = {"type": "Starting"}
    for row in rows:
        event, at = row["event"], row["at"]
        if event["type"] == "Started":
            asked.clear()
        effect, cost = _ANSWERED.get(event["type"], ("", ""))
        begun = asked.pop((effect, event["epoch"], event.get("step", -1)), None)
        if begun is not None:
            found[cost].append(at - begun)
        if event["type"] == "Committed":
            copied = "Snapshot", event["epoch"], event["step"]
            asked |= {copied: at} if copied in asked else {}
        from_disk = state["type"] == "Restoring" and state["source"]["tier"] == "disk"
        if event["type"] == "Prepared" and from_disk:
            found["disk"].append(event["restore_seconds"])
        asked |= {(e["type"], e["epoch"], e["step"]): at for e in row["effects"] if "step" in e}
        state = row["state"]
    return found
