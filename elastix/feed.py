"""The batches of a stream for a driver: the next is read while a step runs, and none for ever."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
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
        """Forget what was read ahead: the next batch may be any."""
        ...


class StreamFeed:
    """The feed of a stream. The position is the number: nothing else is kept."""

    def __init__(self, stream: Stream, backend: Backend):
        self._stream, self._backend = stream, backend
        self._worker: Worker | None = None
        self._ahead: Future[Batch] | None = None

    def take(self, number: int, slices: Iterable[int], deadline: float) -> Batch:
        if self._worker is None:
            self._worker = Worker("elastix-data")
            batches = self._worker.submit(self._stream.batches, number)
            self._next = lambda: next(batches.result())
            self._ahead = self._worker.submit(self._next)
        assert self._ahead
        batch = wait_for(self._ahead, self._backend, slices, deadline, f"reading batch {number}")
        self._ahead = self._worker.submit(self._next)
        return batch

    def reset(self) -> None:
        if self._worker:
            self._worker.close(timeout=0.0)
        self._worker = self._ahead = None
