"""Files of one JSON row a line, written by one process after another."""

from __future__ import annotations

import json
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


def append(file: TextIO, row: Any) -> None:
    """Write one row, and hand it to the operating system before going on."""
    file.write(json.dumps(row) + "\n")
    file.flush()


def _row(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number} is damaged: move the file away") from error
