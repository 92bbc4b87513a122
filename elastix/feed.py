"""The batches of a stream for a driver, none of which is waited for for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from elastix.backends import Backend
from elastix.background import Worker, wait_for
from elastix.data import Stream

Batch = dict[str, np.ndarray]


class Feed(Protocol):
    """Batches by number, counted from 0."""

    def take(self, number: int, slices: Iterable[int], deadline: float) -> Batch:
        """Batch `number`, for a step on `slices`. What the stream raises comes out.

        Raises:
            StuckError: there is none within `deadline` seconds.
        """
        ...

    def reset(self) -> None:
        """The next batch may be any."""
        ...


class StreamFeed:
    """The feed of a stream. The position is the number: nothing else is kept."""

    def __init__(self, stream: Stream, backend: Backend):
        self._stream, self._backend = stream, backend
        self._worker: Worker | None = None
        self._next: Callable[[], Batch]

    def take(self, number: int, slices: Iterable[int], deadline: float) -> Batch:
        if self._worker is None:
            self._worker = Worker("elastix-data")
            batches = self._worker.submit(self._stream.batches, number)
            self._next = lambda: next(batches.result())
        job = self._worker.submit(self._next)
        return wait_for(job, self._backend, slices, deadline, f"reading batch {number}")

    def reset(self) -> None:
        if self._worker:
            self._worker.close(timeout=0.0)
        self._worker = None

    def close(self) -> None:
        """No more is read; a read that hangs is left to itself."""
        self.reset()
