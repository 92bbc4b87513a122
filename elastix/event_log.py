"""The flight recorder: every event and the state it led to, one JSON row each."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

from elastix.jsonl import append, read_rows
from elastix.machine import Effect, Event, Policy, State

VERSION = 1


def encode(value: Any) -> Any:
    """A value of the machine as JSON: dataclasses by type and fields, sets as sorted lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    return value


class EventLog:
    """Appends rows to `events.jsonl`; each is flushed before the effects it names are run.

    `path=None` keeps nothing.
    """

    def __init__(self, path: Path | None, policy: Policy, pid: int):
        self._policy, self._pid = policy, pid
        self._seq = len(read_rows(path)) if path else 0
        self._file = path.open("a", encoding="utf-8") if path else None

    def append(self, event: Event, state: State, effects: tuple[Effect, ...]) -> None:
        if self._file is None:
            return
        row = {
            "v": VERSION,
            "seq": self._seq,
            "at": event.at,
            "epoch": event.epoch,
            "event": encode(event),
            "state": encode(state),
            "effects": encode(effects),
        }
        if type(event).__name__ == "Started":
            row["event"] |= {"policy": encode(self._policy), "pid": self._pid}
        self._seq += 1
        append(self._file, row)

    def close(self) -> None:
        if self._file:
            self._file.close()
