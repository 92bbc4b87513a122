"""PURE: where the time of a run went, computed from its event log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

BUCKETS = (
    *("useful", "redone", "abandoned", "snapshots", "evaluating", "waiting", "diagnosing"),
    *("restoring", "compiling", "finishing", "starting", "stopped"),
)
"""What the seconds of a run went into. `useful`: steps committed for the first time; `redone`:
committed again; `abandoned`: never committed, and until their loss was known; `snapshots`: from
the commit of a step until its host copy was there, though the next step may have run meanwhile;
`starting`: of a process, before its first event; `stopped`: between two processes."""


@dataclass
class Spent:
    """Seconds by bucket; they add up to the time that the log covers."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    unknown_stops: int = 0
    """Processes whose clock began anew: the log cannot tell how long nothing ran before them."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of useful steps."""
        return self.seconds["useful"] / self.total if self.total else 0.0


def spent(rows: Iterable[dict[str, Any]]) -> Spent:
    """Where the time went, from the rows of `events.jsonl`, in order.

    Raises:
        ValueError: a row lacks what a row of an event log has.
    """
    fold = _Fold()
    for number, row in enumerate(rows):
        try:
            fold.add(row)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"row {number} (line {number + 1}) is not of an event log: give events.jsonl"
            ) from error
    return fold.close()


class _Fold:
    def __init__(self) -> None:
        self._spent = Spent()
        self._at, self._best = 0.0, 0
        self._pid: int | None = None
        self._state: dict[str, Any] = {"type": "Starting"}
        self._pending = 0.0
        """Of steps that are neither committed nor given up."""
        self._restoring = 0.0
        """Of the restore under way."""

    def add(self, row: dict[str, Any]) -> None:
        event, at = row["event"], row["at"]
        if event["type"] == "Started":
            self._begin(event["pid"], at)
        else:
            at = max(at, self._at)  # a save may have ended before what was noted before it
            self._charge(at - self._at, event["type"])
            self._settle(event, row["state"]["type"])
        self._at, self._state = at, row["state"]

    def close(self) -> Spent:
        self._give_up()
        return self._spent

    def _begin(self, pid: int, at: float) -> None:
        """Processes that share a clock, such as simulated ones, also share a process id."""
        self._give_up()
        if self._pid is not None and pid == self._pid and at >= self._at:
            self._add("stopped", at - self._at)
        else:
            self._spent.unknown_stops += self._pid is not None
            self._add("starting", at)
        self._pid, self._restoring = pid, 0.0

    def _charge(self, seconds: float, ended_by: str) -> None:
        """What passed in the state of the row before, until an event of this type."""
        match self._state["type"]:
            case "Training":
                self._train(seconds, ended_by)
            case "Restoring":
                self._restoring += seconds
                self._add("restoring", seconds)
            case name:
                self._add(_BUCKET_OF_STATE[name], seconds)

    def _train(self, seconds: float, ended_by: str) -> None:
        asked = self._state["asked"]
        if ended_by == "Snapshotted":
            self._add("snapshots", seconds)  # it is waited for as soon as its step is read
        elif asked and asked["type"] == "Evaluate":
            self._add("evaluating", seconds)
        else:
            self._pending += seconds

    def _settle(self, event: dict[str, Any], after: str) -> None:
        """What the event decides of the seconds before it."""
        fresh = event["epoch"] == self._state.get("ledger", {}).get("epoch")
        if event["type"] == "Committed" and fresh:
            self._add("useful" if event["step"] > self._best else "redone", self._pending)
            self._pending, self._best = 0.0, max(self._best, event["step"])
        if event["type"] == "Prepared" and fresh:
            compiled = min(event["compile_seconds"], self._restoring)
            self._add("compiling", compiled)
            self._add("restoring", -compiled)
        if after != "Training":
            self._give_up()
        if after != "Restoring" or self._state["type"] != "Restoring":
            self._restoring = 0.0

    def _give_up(self) -> None:
        self._add("abandoned", self._pending)
        self._pending = 0.0

    def _add(self, bucket: str, seconds: float) -> None:
        self._spent.seconds[bucket] += seconds


_BUCKET_OF_STATE = {
    "Starting": "starting",
    "Waiting": "waiting",
    "Diagnosing": "diagnosing",
    "Finishing": "finishing",
    "Stopping": "finishing",
    "Done": "stopped",
    "Failed": "stopped",
}
