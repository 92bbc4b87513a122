"""Evaluations: what is evaluated, batch by batch, and `evaluations.jsonl`, a row for each once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elastix.feed import Feed
from elastix.jsonl import RowFile, read_rows


@dataclass(frozen=True)
class EvalRow:
    """The state after `step`, evaluated on `examples` examples. `loss` and `metrics` are weighted
    means over all of them, `tokens` is the sum of the weights, `seconds` what it took."""

    step: int
    loss: float
    tokens: float
    examples: int
    slices: int
    seconds: float
    metrics: dict[str, Any] = field(default_factory=dict)


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The rows of earlier processes.

    Raises:
        ValueError: the file is not such a record.
    """
    rows = read_rows(path)
    try:
        steps = [int(row["step"]) for row in rows]
    except (TypeError, KeyError, ValueError):
        steps = [1, 0]
    if steps != sorted(set(steps)):
        raise ValueError(f"{path} is no record of evaluations: choose another --run-dir")
    return rows


class EvalLog:
    """Rows by step, on disk too unless `path` is None: each once, whatever is done again."""

    def __init__(self, path: Path | None, listeners: tuple[Callable[[EvalRow], None], ...] = ()):
        self.rows = read_evaluations(path) if path else []
        self._listeners = listeners
        self._file = RowFile(path) if path else None

    @property
    def last(self) -> int:
        """The last step on record; 0 if there is none."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def loss(self, step: int) -> float | None:
        """The loss of the state after `step`; None if it is not on record."""
        return next((row.get("loss") for row in self.rows if row["step"] == step), None)

    def record(self, row: EvalRow) -> bool:
        """Whether the row is new; one of a step on record is dropped."""
        if row.step <= self.last:
            return False
        if self._file:
            self._file.append(asdict(row))
        self.rows.append(asdict(row))
        for listen in self._listeners:
            listen(row)
        return True

    def retract(self, after: int) -> None:
        """What was recorded of states after step `after` is not true."""
        self.rows = [row for row in self.rows if row["step"] <= after]
        if self._file:
            self._file.retract(after)

    def flush(self) -> None:
        """Write what could not be written before, if there is room now."""
        if self._file:
            self._file.flush()

    def problem(self) -> str | None:
        """Why rows are missing on disk, as on a full one; None if none is."""
        return self._file.problem() if self._file else None

    def close(self) -> None:
        if self._file:
            self._file.close()


@dataclass(frozen=True)
class Evaluations:
    """What a run evaluates on, and where it is recorded: batches 0 to `num_batches` - 1 of
    `feed`."""

    feed: Feed
    num_batches: int
    log: EvalLog

    def close(self) -> None:
        """No more is read, and the record is whole."""
        self.feed.reset()
        self.log.close()

    def begin(self, step: int, now: float) -> Evaluation:
        """A new evaluation, from the first batch on."""
        self.feed.reset()
        return Evaluation(step, self.num_batches, now)


class Evaluation:
    """One evaluation under way: `done` batches were added."""

    def __init__(self, step: int, num_batches: int, began: float):
        self.step, self._num_batches, self._began = step, num_batches, began
        self.done = 0
        self._examples = 0
        self._sums: list[dict[str, Any]] = []

    def add(self, sums: dict[str, Any], examples: int) -> bool:
        """Add the sums of the next batch; returns whether it was the last."""
        self._sums.append(sums)
        self._examples += examples
        self.done += 1
        return self.done == self._num_batches

    def row(self, slices: int, now: float) -> EvalRow:
        """The row of all batches."""
        weight = math.fsum(float(s["weight"]) for s in self._sums)
        share = 1.0 / weight if weight else math.nan
        return EvalRow(
            step=self.step,
            loss=math.fsum(float(s["total"]) for s in self._sums) * share,
            tokens=weight,
            examples=self._examples,
            slices=slices,
            seconds=now - self._began,
            metrics={
                name: (np.sum([s["metrics"][name] for s in self._sums], axis=0) * share).tolist()
                for name in self._sums[0]["metrics"]
            },
        )
