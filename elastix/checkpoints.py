"""The durable tier: whole train states on disk, written by Orbax, verified byte for byte on load.

Orbax gives the atomic commit (a temporary directory, renamed when complete) but no checksum on
array data. So each leaf gets one here, and their table, with the caller's metadata, is sealed by
another.

All leaves travel as ONE flat uint8 array. With an array per leaf, the first read or write to fail
closes Orbax's event loop over the others: those then print errors from foreign threads, and bring
a removed temporary directory back. And every dtype, 0-d, empty or NaN leaf is just bytes.

For the same reason this uses Orbax's free functions: a `Checkpointer` opens all sibling steps, so
one rotten metadata file in an old step would make every later save fail.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from elastix.checkpoint_folder import Folder
from elastix.checkpoint_format import (
    FORMAT_VERSION,
    CheckpointError,
    UnreadableHereError,
    pack,
)
from elastix.checkpoint_reading import CheckpointReader, SetAside, explained

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointStore",
    "SetAside",
    "UnreadableHereError",
]


class Checkpoint(NamedTuple):
    """A verified checkpoint: its step, host arrays by path, and the caller's metadata."""

    step: int
    leaves: dict[str, np.ndarray]
    metadata: dict[str, object]


class CheckpointStore(CheckpointReader):
    """Checkpoints of one run under `root`, one directory a step; all calls block, one at a time.

    Only one live store may write to a root: opening one removes unfinished saves. `keep` is the
    number of newest steps that survive a save. Raises ValueError if `root` cannot be created or
    written, or `keep` < 1.
    """

    def __init__(self, where: Path | Folder, *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
        super().__init__(where)
        self.keep, self._num_best = keep, 0
        self._loss_of: Callable[[int], float | None] = lambda step: None
        self._hindrance: Callable[[], str | None] = lambda: None
        try:
            self._folder.prepare()
        except OSError as error:
            raise ValueError(f"checkpoints cannot be written to {self.root}: {error}") from error

    def keep_best(self, count: int, loss_of: Callable[[int], float | None]) -> None:
        """From now on let the `count` steps of the lowest loss survive too, besides the newest.

        `loss_of` gives the loss of a step, or None if nobody knows it: such a step never counts.
        """
        self._num_best, self._loss_of = count, loss_of

    def hold_while(self, hindrance: Callable[[], str | None]) -> None:
        """While `hindrance` gives a reason, saves fail for it: a record must be written before."""
        self._hindrance = hindrance

    def save(
        self, step: int, leaves: Mapping[str, np.ndarray], metadata: Mapping[str, object]
    ) -> int:
        """`write`, and then `retire`: for a save that nobody gives up once it is written."""
        size = self.write(step, leaves, metadata)
        self.retire(step)
        return size

    def write(
        self, step: int, leaves: Mapping[str, np.ndarray], metadata: Mapping[str, object]
    ) -> int:
        """Commit `leaves` and `metadata` as `step`, and return the bytes written once durable.

        Returns 0 if the same content is there already; other content of the same step is set
        aside first, and put back if the save fails. What was written is read back. Needs host
        memory for one more copy of the leaves. `metadata` is JSON (no NaN); tuples come back as
        lists. Raises CheckpointError, after removing what it had written.
        """
        if why := self._hindrance():
            raise CheckpointError(f"step {step} was not saved: {why}")
        document, packed = pack(step, leaves, metadata)
        moved = None
        if self._holds(step):
            difference = self._difference(step, document)
            if difference is None:
                return 0
            moved = self._move_aside(step, difference)
        with explained(f"step {step} was not saved"):
            try:
                self._folder.write(step, document, packed)
                self._verify_same(step, document)
            except Exception:
                self._undo(step, moved)
                raise
        return self.size(step)

    def retire(self, step: int) -> None:
        """Let the oldest go, now that `step` is known to count: nothing newer goes."""
        with contextlib.suppress(CheckpointError):  # tried again after the next save
            steps = self.steps()
            # Apart from each other: the best never take the place of the newest, to resume from.
            kept = {*steps[-self.keep :], *self._best(steps)}
            for old in steps:
                if old < step and old not in kept:
                    self.remove(old)

    def newest(self) -> tuple[Checkpoint | None, tuple[SetAside, ...]]:
        """The newest checkpoint that passes `load`, and the bad newer ones, now set aside.

        Raises UnreadableHereError rather than pass over a checkpoint that may be good.
        """
        bad: list[SetAside] = []
        for step in reversed(self.steps()):
            try:
                return Checkpoint(step, *self.load(step)), tuple(bad)
            except UnreadableHereError:
                raise
            except CheckpointError as error:
                bad.append(SetAside(step, self.set_aside(step, str(error)), str(error)))
        return None, tuple(bad)

    def set_aside(self, step: int, why: str) -> Path | str:
        """Rename `step` to set-aside-<step>-<k>, with `why` in a .txt beside it; deletes nothing.

        Returns the new path. Raises CheckpointError if there is no such step.
        """
        return self._folder.aside_path(step, self._move_aside(step, why))

    def remove(self, step: int) -> None:
        """Delete `step` and its temporaries, for a save that was abandoned; absent is fine.

        Raises CheckpointError if something cannot be deleted.
        """
        with explained(f"step {step} cannot be removed"):
            self._folder.remove(step)

    def close(self) -> None:
        """End the use of the store; nothing stays open or running between calls."""

    def _holds(self, step: int) -> bool:
        with explained(f"step {step} was not saved"):
            return self._folder.holds(step)

    def _move_aside(self, step: int, why: str) -> int:
        with explained(f"step {step} cannot be set aside"):
            return self._folder.set_aside(step, why)

    def _verify_same(self, step: int, document: dict) -> None:
        if self._document(step) != document:
            raise CheckpointError(f"step {step}: the metadata on disk are not those given")
        for _ in self._leaves(step, document):
            pass

    def _difference(self, step: int, document: dict) -> str | None:
        """Why what is on disk as `step` is not a good copy of `document`; None if it is."""
        try:
            self._verify_same(step, document)
        except UnreadableHereError:  # it may be the same, or a better one
            raise
        except CheckpointError as error:
            return f"a new save of step {step} took its place; {error}"
        return None

    def _undo(self, step: int, moved: int | None) -> None:
        # Suppressed, because the failure of the save is the one to report.
        with contextlib.suppress(OSError, CheckpointError):
            self.remove(step)
            if moved is not None:
                self._folder.put_back(step, moved)

    def _best(self, steps: tuple[int, ...]) -> list[int]:
        known = [(loss, -step) for step in steps if (loss := self._loss_of(step)) is not None]
        ranked = sorted(item for item in known if not math.isnan(item[0]))
        return [-step for _, step in ranked[: self._num_best]]
