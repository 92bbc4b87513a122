"""PURE: files of one JSON row a line, written by one process after another."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


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


class RowReader:
    """Iterates over the rows of a file that another process may be writing, one at a time, and
    never changes it.

    A last line without its end is not a row; `torn` says that there was one.

    Raises:
        ValueError: while iterating, a line that has its end is not JSON.
        OSError: while iterating, the file cannot be read.
    """

    def __init__(self, path: Path):
        self._path = path
        self.torn = False

    def __iter__(self) -> Iterator[Any]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self.torn = True
                    return
                yield _row(self._path, number, line, "only the lines before it can be read")


def retract(path: Path, after: int) -> None:
    """Move the rows of steps after `after`, which turned out to be wrong, to a file beside it."""
    rows = read_rows(path)
    wrong = [row for row in rows if row["step"] > after]
    with path.with_name(f"{path.stem}-retracted.jsonl").open("a", encoding="utf-8") as file:
        for row in wrong:
            append(file, row)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            if row["step"] <= after:
                append(file, row)
    os.replace(temporary, path)


def append(file: TextIO, row: Any) -> None:
    """Write one row, and hand it to the operating system before going on."""
    file.write(json.dumps(row) + "\n")
    file.flush()


def _row(path: Path, number: int, line: bytes, remedy: str = "move the file away") -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} is damaged: {remedy}") from error
