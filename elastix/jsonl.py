"""PURE: files of one JSON row a line, written by one process after another."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol


def read_rows(path: Path) -> list[Any]:
    """The rows of earlier processes; none if there is no file.

    A process that was killed may have left a torn last line: it is cut.

    Raises:
        ValueError: another line is not JSON.
    """
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [_row(path, n, line) for n, line in enumerate(whole.splitlines(), 1)]


class Openable(Protocol):
    """A file that can be read, wherever it is; its text is its name."""

    def open(self, mode: str, /) -> IO[bytes]:
        """Open it to read bytes."""
        ...


class RowReader:
    """Iterates over the rows of a file that another process may be writing, one at a time, and
    never changes it.

    A last line without its end is not a row; `torn` says that there was one.

    Raises:
        ValueError: while iterating, a line that has its end is not JSON.
        OSError: while iterating, the file cannot be read.
    """

    def __init__(self, path: Path | Openable):
        self._path = path
        self.torn = False

    def __iter__(self) -> Iterator[Any]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self.torn = True
                    return
                yield _row(self._path, number, line, "only the lines before it can be read")


class RowFile:
    """Appends rows, each with a `step`, in ascending order.

    A full disk does not stop who writes: what cannot be written is kept, and written with a later
    row, or at the end, if there is room again. That is told once on standard error; `problem` says
    at any time whether rows are missing, and sees to it that a power cut takes none.
    """

    def __init__(self, path: Path):
        self._path, self._file = path, path.open("ab", buffering=0)
        self._kept: list[dict[str, Any]] = []
        self._why: OSError | None = None

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, or keep it."""
        self._kept.append(row)
        self.flush()

    def flush(self) -> None:
        """Write what was kept, as much as there is room for."""
        try:
            while self._kept:
                append(self._file, self._kept[0])
                del self._kept[0]
        except OSError as error:
            if self._why is None:
                kept = "its rows are kept in memory, and written when there is room"
                _tell(f"{self._path} cannot be written ({_reason(error)}): {kept}")
            self._why = error
        else:
            if self._why:
                _tell(f"{self._path} is written again, and no row is missing")
            self._why = None

    def problem(self) -> str | None:
        """Why rows are missing on disk, in one line; None if none is."""
        why = self._why or self._sync()
        return f"{self._path.name} lacks rows: {_reason(why)}" if why else None

    def _sync(self) -> OSError | None:
        """No power cut can take what was written; else why that is not so."""
        try:
            if not self._file.closed:
                os.fsync(self._file.fileno())
                _sync_entries(self._path.parent)
        except OSError as error:
            return error
        return None

    def retract(self, after: int) -> None:
        """Take back the rows of steps after `after`, which turned out to be wrong; those that were
        written are moved to a file beside it."""
        self._kept = [row for row in self._kept if row["step"] <= after]
        rows = read_rows(self._path)
        aside = self._path.with_name(f"{self._path.stem}-retracted.jsonl")
        try:
            with aside.open("ab", buffering=0) as file:
                for row in rows:
                    if row["step"] > after:
                        append(file, row)
        except OSError as error:  # to be right matters more than to keep what was wrong
            _tell(f"{aside} cannot be written ({_reason(error)})")
        lines = self._path.read_bytes().splitlines(keepends=True)
        right = sum(row["step"] <= after for row in rows)
        os.ftruncate(self._file.fileno(), sum(map(len, lines[:right])))
        self.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()


def append(file: IO[Any], row: Any) -> None:
    """Write one row, whole or not at all, and hand it to the operating system before going on.

    Past the buffer of `file`: what a full disk did not take would stay in there, and fail again
    when the file is closed.
    """
    descriptor, data = file.fileno(), (json.dumps(row) + "\n").encode()
    before = os.fstat(descriptor)
    if before.st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, "the file was removed")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        os.ftruncate(descriptor, before.st_size)
        raise


def _sync_entries(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"elastix: {line}", file=sys.stderr, flush=True)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _row(
    path: Path | Openable, number: int, line: bytes, remedy: str = "move the file away"
) -> Any:
    try:
        row = json.loads(line)
        if isinstance(row, dict):
            return row
        why: Exception = TypeError(f"{type(row).__name__}, no object")
    except (ValueError, RecursionError) as error:
        why = error
    raise ValueError(f"{path}, line {number} is damaged: {remedy}") from why
