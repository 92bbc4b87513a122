"""The steps in flight, and what was consumed up to each one that may still be gone back to."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastix.progress import Progress


@dataclass(frozen=True)
class InFlight:
    """A dispatched step whose results have not been read, for which there are `deadline`
    seconds."""

    step: int
    results: Any
    dispatched_at: float
    deadline: float


class Steps:
    """Steps in flight are committed in order, or abandoned; `committed` is the last committed."""

    def __init__(self) -> None:
        self.in_flight: deque[InFlight] = deque()
        self.committed = 0
        self.progress: dict[int, Progress] = {0: Progress()}
        """By step, of those that are in memory or on their way."""
        self._last_commit: float | None = None

    def dispatched(self, step: int, results: Any, at: float, deadline: float) -> None:
        self.in_flight.append(InFlight(step, results, at, deadline))

    def commit(self, ids: np.ndarray, at: float) -> float:
        """The oldest step in flight counts, and consumed examples `ids`; returns the seconds since
        the commit before."""
        step = self.in_flight.popleft()
        self.progress[step.step] = self.progress[step.step - 1].consume(ids)
        self.committed = step.step
        since = step.dispatched_at if self._last_commit is None else self._last_commit
        self._last_commit = at
        return at - since

    def restored(self, step: int, progress: Progress) -> None:
        """The run goes on after `step`."""
        self.progress[step] = progress
        self.committed = step

    def forget(self, needed: Container[int]) -> None:
        """Of the steps before the last committed one, only the `needed` may be gone back to."""
        for step in [s for s in self.progress if s < self.committed and s not in needed]:
            del self.progress[step]
