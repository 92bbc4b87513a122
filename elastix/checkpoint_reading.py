"""Checkpoints as they lie in a folder: which there are, what they say, and their verified leaves.

All leaves of a checkpoint lie in ONE flat uint8 array, which Orbax wrote (`checkpoints` says why).
They are read range by range, through TensorStore as Orbax does itself, so that a state need not be
in host memory at once: on its way to the devices there is one leaf of it, and one chunk.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint
import tensorstore

from elastix.checkpoint_folder import Folder, LocalFolder, Stamp
from elastix.checkpoint_format import CheckpointError, checked, error_of, unpack

_LINE = 64


class SetAside(NamedTuple):
    """A checkpoint taken out of use but kept: its step, where it lies now, and why."""

    step: int
    path: Path | str
    why: str


class CheckpointReader:
    """Checkpoints under `root`, which another process may be writing: nothing there is changed.

    Args:
        where: a directory, or a folder of another kind.
    """

    def __init__(self, where: Path | Folder) -> None:
        self._folder: Folder = LocalFolder(where) if isinstance(where, Path) else where
        self.root: Any = self._folder.root
        """Where that is: a path, or the URL of what is no directory."""

    def steps(self) -> tuple[int, ...]:
        """The steps that were committed, ascending; whether they are good only a load can tell."""
        with explained(f"{self.root} cannot be listed"):
            return tuple(sorted(self._folder.committed()))

    def unfinished(self) -> tuple[int, ...]:
        """The steps that are being written or removed, or were when their process was killed."""
        with explained(f"{self.root} cannot be listed"):
            return tuple(sorted(set(self._folder.unfinished())))

    def size(self, step: int) -> int:
        """The bytes of all files of `step`."""
        return self._folder.size(step)

    def stamp(self, step: int) -> Stamp:
        """When `step` was written, and what tells it from another of the same step.

        Raises FileNotFoundError if there is none.
        """
        return self._folder.stamp(step)

    def metadata(self, step: int) -> dict[str, object]:
        """The caller's metadata, and under "checkpoint" our own, without reading the leaves.

        "checkpoint" holds format_version, step and leaves: path, dtype, shape, bytes, offset and
        crc32 (zlib, of the little-endian C-order bytes) of each. Raises CheckpointError.
        """
        return _with_own(self._document(step))

    def load(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """The leaves by path, sorted, with exact dtype, shape and bits, and the caller's metadata.

        Raises CheckpointError naming the first bad leaf, or UnreadableHereError.
        """
        leaves, metadata = self.stream(step)
        return dict(leaves), {k: v for k, v in metadata.items() if k != "checkpoint"}

    def stream(self, step: int) -> tuple[Iterator[tuple[str, np.ndarray]], dict[str, object]]:
        """As `load`, but the leaves are read one by one as they are asked for: (path, values), and
        the metadata are those of `metadata`.

        Each is verified before it is given, so only who has seen the end has a good checkpoint.
        """
        document = self._document(step)
        return self._leaves(step, document), _with_own(document)

    def _leaves(self, step: int, document: dict) -> Iterator[tuple[str, np.ndarray]]:
        with explained(f"step {step} cannot be read"):
            chunks = _Chunks(self._folder.array(step), self._folder.deadline)
        for row in document["checkpoint"]["leaves"]:
            # Bound to no name here, or it would live until the next leaf is read.
            yield row["path"], _leaf(step, row, chunks)

    def set_aside_list(self) -> tuple[SetAside, ...]:
        """Everything that was set aside under this root, by step and then in order of time."""
        with explained(f"{self.root} cannot be listed"):
            found = sorted(self._folder.aside())
        return tuple(self._set_aside(step, k) for step, k in found)

    def _set_aside(self, step: int, k: int) -> SetAside:
        return SetAside(step, self._folder.aside_path(step, k), self._folder.why_aside(step, k))

    def _document(self, step: int) -> dict:
        with explained(f"step {step} cannot be read"):
            document = self._folder.document(step)
        return checked(step, document)


def _with_own(document: dict) -> dict[str, object]:
    return {**document["metadata"], "checkpoint": document["checkpoint"]}


def _leaf(step: int, row: dict[str, Any], chunks: _Chunks) -> np.ndarray:
    with explained(f"step {step} cannot be read"):
        part = chunks.read(row["offset"], row["bytes"])
    return unpack(step, row, part)


class _Chunks:
    """The flat array of a checkpoint, of which the chunk that was read last is kept."""

    def __init__(self, files: dict[str, Any], deadline: float | None) -> None:
        self._array, self._deadline = _open(files, deadline), deadline
        self._size = self._array.chunk_layout.read_chunk.shape[0]
        self._first, self._chunk = 0, np.empty(0, np.uint8)

    def read(self, start: int, size: int) -> np.ndarray:
        """uint8[size] from `start` on, in memory of its own; less if the array ends before."""
        end = min(start + size, self._array.shape[0])
        part = _aligned(max(0, end - start))
        for first in range(start - start % self._size, end, self._size):
            chunk = self._at(first)
            low, high = max(start, first), min(end, first + self._size)
            part[low - start : high - start] = chunk[low - first : high - first]
            if size > self._size:
                _trim_memory()
        return part

    def _at(self, first: int) -> np.ndarray:
        if not self._chunk.size or first != self._first:
            self._chunk = np.empty(0, np.uint8)  # never two of them
            reading = self._array[first : first + self._size].read()
            self._chunk = reading.result(timeout=self._deadline)
            self._first = first
        return self._chunk


def _trim_memory() -> None:
    """Give freed memory back to the system: glibc keeps chunks of this size in an arena for each
    of TensorStore's threads, in all about as much as the largest leaf."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _aligned(size: int) -> np.ndarray:
    """uint8[size] on a cache line, where a CPU device can read it without another copy."""
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size]


def _open(files: dict[str, Any], deadline: float | None) -> Any:
    """The array as TensorStore sees it: Orbax writes Zarr 3 into an OCDBT database."""
    database = {"driver": "ocdbt", "base": files, "path": "leaves/"}
    opening = tensorstore.open({"driver": "zarr3", "kvstore": database}, read=True)
    array = opening.result(timeout=deadline)
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
