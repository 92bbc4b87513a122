"""Checkpoints as they lie on disk: which there are, what they say, and their leaves, verified.

All leaves of a checkpoint lie in ONE flat uint8 array, which Orbax wrote (`checkpoints` says why).
They are read range by range, through TensorStore as Orbax does itself, so that a state need not be
in host memory at once: on its way to the devices there is one leaf of it, and one chunk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint
import tensorstore
from orbax.checkpoint import v1 as ocp

from elastix.checkpoint_format import CheckpointError, checked, error_of, unpack

TMP = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"0|[1-9][0-9]*")
_TEMPORARY = re.compile(rf"({_STEP.pattern}){re.escape(TMP)}(-.*)?")
_SET_ASIDE = re.compile(rf"set-aside-({_STEP.pattern})-({_STEP.pattern})")


class SetAside(NamedTuple):
    """A checkpoint taken out of use but kept: its step, where it lies now, and why."""

    step: int
    path: Path
    why: str


class CheckpointReader:
    """Checkpoints under `root`, which another process may be writing: nothing there is changed."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()

    def steps(self) -> tuple[int, ...]:
        """The steps that were committed, ascending; whether they are good only a load can tell."""
        with explained(f"{self.root} cannot be listed"):
            # Orbax takes any directory with a number for a checkpoint, an empty one too.
            found = [p for p in self.root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()]
            return tuple(sorted(int(path.name) for path in found if any(path.iterdir())))

    def unfinished(self) -> tuple[int, ...]:
        """The steps that are being written or removed, or were when their process was killed."""
        with explained(f"{self.root} cannot be listed"):
            return tuple(sorted({step for step, _ in self._temporaries()}))

    def size(self, step: int) -> int:
        """The bytes of all files of `step`."""
        files = (path for path in self._path(step).rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in files)

    def metadata(self, step: int) -> dict[str, object]:
        """The caller's metadata, and under "checkpoint" our own, without reading the leaves.

        "checkpoint" holds format_version, step and leaves: path, dtype, shape, bytes, offset and
        crc32 (zlib, of the little-endian C-order bytes) of each. Raises CheckpointError.
        """
        document = self._document(step)
        return {**document["metadata"], "checkpoint": document["checkpoint"]}

    def load(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """The leaves by path, sorted, with exact dtype, shape and bits, and the caller's metadata.

        Raises CheckpointError naming the first bad leaf, or UnreadableHereError.
        """
        document = self._document(step)
        return dict(self._leaves(step, document)), document["metadata"]

    def leaves(self, step: int) -> Iterator[tuple[str, np.ndarray]]:
        """(path, values) of each leaf, sorted by path, read one by one as they are asked for.

        Each is verified before it is given, so only who has seen the end has a good checkpoint.
        Raises CheckpointError naming the first bad leaf, or UnreadableHereError.
        """
        return self._leaves(step, self._document(step))

    def _leaves(self, step: int, document: dict) -> Iterator[tuple[str, np.ndarray]]:
        with explained(f"step {step} cannot be read"):
            chunks = _Chunks(self._path(step))
        for row in document["checkpoint"]["leaves"]:
            with explained(f"step {step} cannot be read"):
                part = chunks.read(row["offset"], row["bytes"])
            yield row["path"], unpack(step, row, part)

    def set_aside_list(self) -> tuple[SetAside, ...]:
        """Everything that was set aside under this root, by step and then in order of time."""
        with explained(f"{self.root} cannot be listed"):
            matches = [m for p in self.root.iterdir() if (m := _SET_ASIDE.fullmatch(p.name))]
        matches.sort(key=lambda m: (int(m[1]), int(m[2])))
        return tuple(SetAside(int(m[1]), p := self.root / m[0], _why(p)) for m in matches)

    def _path(self, step: int) -> Path:
        return self.root / str(step)

    def _temporaries(self) -> list[tuple[int, Path]]:
        matches = [(_TEMPORARY.fullmatch(p.name), p) for p in self.root.iterdir() if p.is_dir()]
        return [(int(match[1]), path) for match, path in matches if match]

    def _document(self, step: int) -> dict:
        with explained(f"step {step} cannot be read"):
            document = ocp.metadata(self._path(step)).custom_metadata
        return checked(step, document)


class _Chunks:
    """The flat array of a checkpoint, of which the chunk that was read last is kept."""

    def __init__(self, path: Path) -> None:
        self._array = _open(path)
        self._size = self._array.chunk_layout.read_chunk.shape[0]
        self._first, self._chunk = 0, np.empty(0, np.uint8)

    def read(self, start: int, size: int) -> np.ndarray:
        """uint8[size] from `start` on, in memory of its own; less if the array ends before."""
        end = min(start + size, self._array.shape[0])
        part = np.empty(max(0, end - start), np.uint8)
        for first in range(start - start % self._size, end, self._size):
            chunk = self._at(first)
            low, high = max(start, first), min(end, first + self._size)
            part[low - start : high - start] = chunk[low - first : high - first]
        return part

    def _at(self, first: int) -> np.ndarray:
        if not self._chunk.size or first != self._first:
            self._chunk = np.empty(0, np.uint8)  # never two of them
            self._chunk = self._array[first : first + self._size].read().result()
            self._first = first
        return self._chunk


def _open(path: Path) -> Any:
    """The array as TensorStore sees it: Orbax writes Zarr 3 into an OCDBT database."""
    files = {"driver": "file", "path": f"{path}/state/"}
    database = {"driver": "ocdbt", "base": files, "path": "leaves/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": database}, read=True).result()
    if array.rank != 1 or array.dtype != tensorstore.uint8:
        raise CheckpointError("state: not the array that was saved")
    return array


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn a failure into a CheckpointError: `what`, and the innermost cause on the same line.

    What Orbax logs meanwhile is dropped, since the exception says it.
    """
    home, logger = os.path.dirname(orbax.checkpoint.__file__), logging.getLogger("absl")

    def foreign(record: logging.LogRecord) -> bool:
        return not record.pathname.startswith(home)

    logger.addFilter(foreign)
    try:
        yield
    except Exception as error:
        raise error_of(what, error) from error
    finally:
        logger.removeFilter(foreign)


def note(path: Path) -> Path:
    return path.with_name(path.name + ".txt")


def _why(path: Path) -> str:
    try:
        return note(path).read_text(encoding="utf-8").strip()
    except OSError:  # none was written, or it is being put back
        return ""
