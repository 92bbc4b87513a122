"""Checkpoints in the background: one thread does all reading, writing and removing on disk."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import numpy as np

from elastix.backends import Backend, Health, slices_of
from elastix.background import Worker, wait_for
from elastix.checkpoints import CheckpointError, CheckpointStore, UnreadableHereError
from elastix.classification import SliceLostError, first_line
from elastix.leaf_hash import difference
from elastix.machine import Abandon, Policy, Save, Saved, SaveFailed, Slices
from elastix.snapshots import HostSnapshot
from elastix.train_state import all_finite

Shapes = dict[str, tuple[int, ...]]
SaveAnswer = Saved | SaveFailed


Place = Callable[[str, np.ndarray], Any]
"""Takes the path and the values of a leaf."""

Misfit = Callable[[list[dict[str, Any]]], str | None]
"""Takes the rows of a checkpoint's leaves: path, dtype, shape."""


def keep(path: str, leaf: np.ndarray) -> np.ndarray:
    """Nothing is placed: the leaf stays in host memory."""
    return leaf


class Saver:
    """Writes host copies as checkpoints and answers with `Saved` or `SaveFailed`.

    Args:
        shapes: the shape of each leaf.
        metadata: what goes into each checkpoint beside the progress of the run.
        misfit: how the leaves of a checkpoint differ from those of the run, from the rows of its
            metadata; None if they do not.
    """

    def __init__(
        self,
        store: CheckpointStore,
        backend: Backend,
        shapes: Shapes,
        metadata: dict[str, Any],
        policy: Policy,
        misfit: Misfit = lambda rows: None,
    ):
        self._store, self._backend, self._misfit = store, backend, misfit
        self._shapes, self._metadata, self._policy = shapes, metadata, policy
        self._thread = Worker("elastix-checkpoints")
        self._answers: queue.SimpleQueue[tuple[int, SaveAnswer]] = queue.SimpleQueue()
        self._abandoned: set[tuple[int, int]] = set()
        self._due: dict[tuple[int, int], tuple[int, float]] = {}
        """The number of each save that was not answered yet, and until when it must be, by (epoch,
        step). One that was abandoned may have been followed by another of the same step."""
        self._begun = 0
        self._hangs = False

    @property
    def pending(self) -> int:
        """Saves that have not been answered yet."""
        return len(self._due)

    def save(self, effect: Save, copy: HostSnapshot | None, extra: dict[str, Any]) -> None:
        """Begin to write the host copy of one slice."""
        self._abandoned.discard((effect.epoch, effect.step))
        self._begun += 1
        due = self._backend.now() + self._policy.save_deadline
        self._due[effect.epoch, effect.step] = self._begun, due
        self._submit(self._begun, effect, copy, {**self._metadata, **extra})

    def _submit(
        self, number: int, effect: Save, copy: HostSnapshot | None, metadata: dict[str, Any]
    ) -> None:
        self._thread.submit(self._answer, number, effect, copy, metadata)

    def abandon(self, effect: Abandon) -> None:
        """Give up a save. What it wrote is removed behind it, even if it looks committed: once, for
        what is there later is of another save."""
        given_up = effect.epoch, effect.step
        if given_up not in self._abandoned:
            self._abandoned.add(given_up)
            self._thread.submit(self._store.remove, effect.step)

    def load(self, step: int, place: Place = keep) -> tuple[dict[str, Any], dict[str, object]]:
        """Read a checkpoint, verified.

        Args:
            place: is given each leaf as soon as it is read, and returns what is wanted of it; the
                whole state need not be in host memory then.

        Raises:
            CheckpointError: it is bad, and was set aside.
            UnreadableHereError: it may be good, but this process cannot read it.
            StuckError: it was not read by the deadline of a restore.
        """
        job = self._thread.submit(self._load, step, place)
        deadline = self._policy.prepare_deadline
        return wait_for(job, self._backend, (), deadline, f"reading the checkpoint of step {step}")

    def answer(self, timeout: float = 0.0) -> SaveAnswer | None:
        """The next answer, or None if there is none within `timeout` seconds.

        A save that hangs is given up at its deadline: it failed, and if it is written after all,
        that is removed.
        """
        answer = self._take(timeout) or self._overdue()
        if answer is None:
            return None
        number, event = answer
        key = event.epoch, event.step
        if self._due.get(key, (None,))[0] != number:
            return None  # nobody waits for it any more
        del self._due[key]
        if isinstance(event, Saved):  # only now: until it was heard, it could be given up
            self._thread.submit(self._store.retire, event.step)
        return event

    def _take(self, timeout: float) -> tuple[int, SaveAnswer] | None:
        try:
            return self._answers.get(timeout=timeout) if timeout else self._answers.get_nowait()
        except queue.Empty:
            return None

    def _overdue(self) -> tuple[int, SaveAnswer] | None:
        now = self._backend.now()
        for (epoch, step), (number, due) in self._due.items():
            if now >= due:
                self._hangs = True
                self.abandon(Abandon(epoch, step))
                reason = f"it was not written in {self._policy.save_deadline:g} s"
                return number, SaveFailed(at=now, epoch=epoch, step=step, reason=reason)
        return None

    def close(self) -> None:
        """Wait for what is being written, unless that hangs."""
        self._thread.close(timeout=0.0 if self._hangs else None)

    def _load(self, step: int, place: Place) -> tuple[dict[str, Any], dict[str, object]]:
        try:
            leaves, metadata = self._store.stream(step)
            self._refuse_misfit(step, metadata)
            hashes: Any = metadata.get("leaf_hashes", {})
            placed = {}
            for path, leaf in leaves:
                if difference({path: leaf}, hashes):
                    raise CheckpointError(f"step {step}: {path} is not what the device held")
                placed[path] = place(path, leaf)
                del leaf  # before the next is read
            return placed, metadata
        except UnreadableHereError:
            raise
        except CheckpointError as error:
            self._store.set_aside(step, str(error))
            raise

    def _refuse_misfit(self, step: int, metadata: dict[str, Any]) -> None:
        """A good checkpoint is none of this run's if its leaves are others."""
        own = metadata["checkpoint"]
        if differences := self._misfit(own["leaves"]):
            what = f"its train state is not that of the recipe: {differences}"
            raise CheckpointError(f"step {step}: {what}")

    def _answer(
        self, number: int, effect: Save, copy: HostSnapshot | None, metadata: dict[str, Any]
    ) -> None:
        self._answers.put((number, self._saved(effect, copy, metadata)))

    def _saved(
        self, effect: Save, copy: HostSnapshot | None, metadata: dict[str, Any]
    ) -> SaveAnswer:
        """Write the copy, and say what came of it."""
        told: dict[str, Any] = {"epoch": effect.epoch, "step": effect.step}
        try:
            self._write(effect, copy, metadata)
        except Exception as error:
            lost, reason = self._lost(error, effect.holder), first_line(error)
            return SaveFailed(at=self._backend.now(), **told, reason=reason, lost=lost)
        return Saved(at=self._backend.now(), **told)

    def _lost(self, error: Exception, holder: int) -> Slices:
        """The slice that a failed save was written from, if it is gone."""
        if isinstance(error, SliceLostError):
            return error.slices
        try:
            return slices_of(self._probe(holder), Health.DOWN, Health.EMPTIED)
        except Exception:
            return frozenset()

    def _probe(self, slice_id: int) -> dict[int, Health]:
        return self._backend.probe([slice_id], self._policy.probe_deadline)

    def _write(self, effect: Save, copy: HostSnapshot | None, metadata: dict[str, Any]) -> None:
        """A checkpoint counts only if its slice was alive after the copy was read."""
        if (effect.epoch, effect.step) in self._abandoned:
            raise CheckpointError(f"the save of step {effect.step} was abandoned")
        if copy is None:
            raise CheckpointError(f"slice {effect.holder} has no snapshot of step {effect.step}")
        whole = copy.whole(self._shapes)
        if self._probe(effect.holder)[effect.holder] is not Health.UP:
            gone = frozenset({effect.holder})
            raise SliceLostError(gone, f"slice {effect.holder} died while its copy was read")
        if not all_finite(whole):
            raise CheckpointError(f"the state of step {effect.step} is not finite")
        wrong = difference(whole, copy.hashes)
        if wrong:
            raise CheckpointError(f"the copy of {wrong} is not what the device holds")
        self._store.write(effect.step, whole, {**metadata, "leaf_hashes": dict(copy.hashes)})
