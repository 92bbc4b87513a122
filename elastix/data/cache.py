"""Arrays that cost time to make, kept in files: made once, checked at each use, memory-mapped.

A folder of the cache has the name of the hash of what the arrays are made from, so nothing in it
ever changes or gets old: it may be deleted at any time, by anybody.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from elastix.data.stream import DataError

_FORMAT = 1
_MANIFEST = "manifest.json"
_ABANDONED = 24 * 3600.0
"""Seconds after which a half-made folder is taken for that of a process which was killed."""


@dataclass(frozen=True)
class CachedArrays:
    """Read-only arrays by name, and the sha256 of the file of each."""

    arrays: dict[str, np.ndarray]
    sha256: dict[str, str]


class ArrayWriter:
    """Writes `.npy` files piece by piece, so that an array may be larger than memory."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, tuple[BinaryIO, np.dtype, tuple[int, ...]]] = {}
        self._rows: dict[str, int] = {}

    def append(self, name: str, rows: np.ndarray) -> None:
        """Adds rows to the array `name`; the first ones decide its dtype and what a row is."""
        if name not in self._open:
            file: BinaryIO = (self._folder / f"{name}.npy").open("wb")
            self._open[name], self._rows[name] = (file, rows.dtype, rows.shape[1:]), 0
            self._write_header(name)
        file, dtype, shape = self._open[name]
        if (rows.dtype, rows.shape[1:]) != (dtype, shape):
            raise TypeError(f"{name} has rows {dtype}{shape}, got {rows.dtype}{rows.shape[1:]}")
        file.write(np.ascontiguousarray(rows).data.cast("B") if rows.size else b"")
        self._rows[name] += len(rows)

    def close(self) -> None:
        """Writes how long each array became."""
        for name, (file, _, _) in self._open.items():
            self._write_header(name)
            file.close()
        self._open.clear()

    def _write_header(self, name: str) -> None:
        file, dtype, shape = self._open[name]
        file.seek(0)
        # NumPy pads the header so that the first dim may grow in place.
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (self._rows[name], *shape),
        }
        np.lib.format.write_array_header_1_0(file, header)


def cached_arrays(what: Mapping[str, object], build: Callable[[ArrayWriter], None]) -> CachedArrays:
    """Returns the arrays that `build` writes, or wrote before for the same `what`.

    `what` holds JSON values that decide every bit of the arrays. They lie in
    `$XDG_CACHE_HOME/elastix/data` (`~/.cache` by default), and in a temporary folder where that
    cannot be written. What was damaged is built anew. Processes may build at once: each uses its
    own, and one of them is kept. Raises DataError if there is no space for them, and whatever
    `build` raises.
    """
    text = json.dumps({"format": _FORMAT, "arrays of": what}, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()
    parent = cache_folder()
    folder = parent / key
    found = _read(folder)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        scratch = _scratch_folder(parent, key)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        try:
            _write(scratch, text, build)
        except OSError as error:
            raise DataError(
                f"the cache {str(scratch.parent)!r} cannot be written ({error.strerror}); free "
                "space there, or set XDG_CACHE_HOME to another folder"
            ) from None
        # Mapped before it is given its name: whatever happens to the folder, the pages stay.
        made = _read(scratch)
        if made is None:
            raise DataError(f"what was written to {str(scratch.parent)!r} reads back damaged")
        _publish(scratch, folder)
    return made


def cache_folder() -> Path:
    """The folder that holds the cache; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "elastix" / "data"


def _scratch_folder(parent: Path, key: str) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent, key)
        return Path(tempfile.mkdtemp(prefix=f"{key}.", dir=parent))
    except OSError as error:  # read-only, say: then each process builds its own
        try:
            return Path(tempfile.mkdtemp(prefix="elastix-data-"))
        except OSError:
            raise DataError(
                f"the cache {str(parent)!r} cannot be written ({error.strerror}), nor can any "
                "temporary folder; set XDG_CACHE_HOME to one that can"
            ) from None


def _remove_abandoned(parent: Path, key: str) -> None:
    for left in parent.glob(f"{key}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left)


def _write(scratch: Path, text: str, build: Callable[[ArrayWriter], None]) -> None:
    writer = ArrayWriter(scratch)
    try:
        build(writer)
    finally:
        writer.close()
    sha256 = {path.stem: _sha256(path) for path in sorted(scratch.glob("*.npy"))}
    manifest = {"made from": json.loads(text), "sha256": sha256}
    (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _publish(scratch: Path, folder: Path) -> None:
    """Gives the folder its name, if it can be had; a damaged one that has it goes away."""
    with contextlib.suppress(OSError):
        if folder.exists() and _read(folder) is None:
            aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
            os.rename(folder, aside / "damaged")
            shutil.rmtree(aside, ignore_errors=True)
        os.rename(scratch, folder)  # fails if another process was faster: theirs is as good


def _read(folder: Path) -> CachedArrays | None:
    """The arrays of a folder; None if it is not there, or not as it was written."""
    try:
        sha256 = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["sha256"]
        if any(_sha256(folder / f"{name}.npy") != digest for name, digest in sha256.items()):
            return None
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in sha256}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return CachedArrays(arrays, sha256)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
