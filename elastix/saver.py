"""Checkpoints in the background: one thread does all reading, writing and removing on disk."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from elastix.backends import Backend, Health, slices_of
from elastix.checkpoints import CheckpointError, CheckpointStore, UnreadableHereError
from elastix.classification import SliceLostError, first_line
from elastix.machine import Abandon, Event, Save, Saved, SaveFailed, Slices
from elastix.snapshots import HostCopy
from elastix.train_state import all_finite

Shapes = dict[str, tuple[int, ...]]


class Saver:
    """Writes host copies as checkpoints and answers with `Saved` or `SaveFailed`.

    Args:
        shapes: the shape of each leaf.
        metadata: what goes into each checkpoint beside the progress of the run.
    """

    def __init__(
        self,
        store: CheckpointStore,
        backend: Backend,
        shapes: Shapes,
        metadata: dict[str, Any],
    ):
        self._store, self._backend = store, backend
        self._shapes, self._metadata = shapes, metadata
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastix-checkpoints")
        self._answers: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._abandoned: set[tuple[int, int]] = set()
        self.pending = 0
        """Saves that have not been answered yet."""

    def save(self, effect: Save, copy: HostCopy | None, extra: dict[str, Any]) -> None:
        """Begin to write the host copy of one slice."""
        self.pending += 1
        self._thread.submit(self._answer, effect, copy, {**self._metadata, **extra})

    def abandon(self, effect: Abandon) -> None:
        """Give up a save. What it wrote is removed behind it, even if it looks committed."""
        self._abandoned.add((effect.epoch, effect.step))
        self._thread.submit(self._remove, effect)

    def load(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """Read a checkpoint, verified.

        Raises:
            CheckpointError: it is bad, and was set aside.
            UnreadableHereError: it may be good, but this process cannot read it.
        """
        return self._thread.submit(self._load, step).result()

    def answer(self, timeout: float = 0.0) -> Event | None:
        """The next answer, or None if there is none within `timeout` seconds."""
        try:
            event = self._answers.get(timeout=timeout) if timeout else self._answers.get_nowait()
        except queue.Empty:
            return None
        self.pending -= 1
        return event

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown(wait=True)

    def _load(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        try:
            return self._store.load(step)
        except UnreadableHereError:
            raise
        except CheckpointError as error:
            self._store.set_aside(step, str(error))
            raise

    def _answer(self, effect: Save, copy: HostCopy | None, metadata: dict[str, Any]) -> None:
        try:
            self._write(effect, copy, metadata)
        except Exception as error:
            self._answers.put(
                SaveFailed(
                    at=self._backend.now(),
                    epoch=effect.epoch,
                    step=effect.step,
                    reason=first_line(error),
                    lost=self._lost(error, effect.holder),
                )
            )
        else:
            at = self._backend.now()
            self._answers.put(Saved(at=at, epoch=effect.epoch, step=effect.step))

    def _lost(self, error: Exception, holder: int) -> Slices:
        """The slice that a failed save was written from, if it is gone."""
        if isinstance(error, SliceLostError):
            return error.slices
        try:
            return slices_of(self._backend.probe([holder]), Health.DOWN, Health.EMPTIED)
        except Exception:
            return frozenset()

    def _write(self, effect: Save, copy: HostCopy | None, metadata: dict[str, Any]) -> None:
        """A checkpoint counts only if its slice was alive after the copy was read."""
        if (effect.epoch, effect.step) in self._abandoned:
            raise CheckpointError(f"the save of step {effect.step} was abandoned")
        if copy is None:
            raise CheckpointError(f"slice {effect.holder} has no snapshot of step {effect.step}")
        whole = copy.whole(self._shapes)
        if self._backend.probe([effect.holder])[effect.holder] is not Health.UP:
            gone = frozenset({effect.holder})
            raise SliceLostError(gone, f"slice {effect.holder} died while its copy was read")
        if not all_finite(whole):
            raise CheckpointError(f"the state of step {effect.step} is not finite")
        self._store.save(effect.step, whole, metadata)

    def _remove(self, effect: Abandon) -> None:
        self._store.remove(effect.step)
        self._abandoned.discard((effect.epoch, effect.step))
