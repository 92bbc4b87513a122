"""`metrics.jsonl`: one row for each step number, in order, never twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elastix.jsonl import RowFile, read_rows


@dataclass(frozen=True)
class Row:
    """One committed step. `seconds` is the time since the commit before, `tokens` the weighted
    targets, `learning_rate` the one used in this update."""

    step: int
    loss: float
    slices: int
    seconds: float
    tokens: float
    learning_rate: float | None
    grad_norm: float
    metrics: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(step: int, results: dict[str, Any], slices: int, seconds: float) -> Row:
        """The row of the results that came back from a step."""
        rate = results.get("learning_rate")
        return Row(
            step=step,
            loss=float(results["loss"]),
            slices=slices,
            seconds=seconds,
            tokens=float(results["weight"]),
            learning_rate=None if rate is None else float(rate),
            grad_norm=float(results["grad_norm"]),
            metrics={k: np.asarray(v).tolist() for k, v in results["metrics"].items()},
        )


def read_losses(path: Path) -> list[float]:
    """The loss of each step that an earlier process recorded.

    Raises:
        ValueError: the file is not such a record.
    """
    rows = read_rows(path)
    try:
        losses = [float(row["loss"]) for row in rows]
        counted = [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    except (TypeError, KeyError, ValueError):
        counted = False
    if not counted:
        raise ValueError(f"{path} is no record of steps from 1 on: choose another --run-dir")
    return losses


Listener = Callable[[Row], None]


class MetricsLog:
    """Rows by step, on disk too unless `path` is None.

    A step that is done again writes nothing, but must give the same loss, bit for bit.

    Args:
        exact_from: the first step that must repeat its loss when it is done again.
    """

    def __init__(
        self, path: Path | None, exact_from: int = 1, listeners: tuple[Listener, ...] = ()
    ):
        self.losses: list[float] = []
        self._exact_from, self._listeners = exact_from, listeners
        self._file = None
        if path is not None:
            self.losses = read_losses(path)
            self._file = RowFile(path)

    def commit(self, row: Row) -> str | None:
        """Record a committed step; returns what is wrong with it, in one line, or None."""
        if row.step <= len(self.losses):
            return self._compare(row, self.losses[row.step - 1])
        self.losses.append(row.loss)
        if self._file:
            self._file.append(asdict(row))
        for listen in self._listeners:
            listen(row)
        return None

    def retract(self, after: int) -> None:
        """What was recorded of steps after `after` is not true: they count as not done yet."""
        del self.losses[after:]
        if self._file:
            self._file.retract(after)

    def flush(self) -> None:
        """Write what could not be written before, if there is room now."""
        if self._file:
            self._file.flush()

    def problem(self) -> str | None:
        """Why rows are missing on disk, as on a full one; None if none is."""
        return self._file.problem() if self._file else None

    def _compare(self, row: Row, first: float) -> str | None:
        same = np.float32(first).tobytes() == np.float32(row.loss).tobytes()
        if same or row.step < self._exact_from:
            return None
        return (
            f"step {row.step} was done again and gave loss {row.loss!r}, not {first!r}: "
            "what a step computes must not depend on the slices it runs on"
        )

    def close(self) -> None:
        if self._file:
            self._file.close()
