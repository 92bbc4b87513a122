"""PURE: the flight recorder. Every event and the state it led to, one JSON row each, and back."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from elastix import machine
from elastix.jsonl import append, read_rows
from elastix.machine import Effect, Event, Policy, Started, State

VERSION = 5


# --- one value ------------------------------------------------------------------------------------


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


class DecodeError(ValueError):
    """What was read is no value of the machine: `where` is the path of the field, `problem` what is
    wrong with it, in one line."""

    def __init__(self, where: str, problem: str):
        super().__init__(f"{where}: {problem}" if where else problem)
        self.where, self.problem = where, problem


def decode(value: Any, expected: Any = object, where: str = "") -> Any:
    """The value that `encode` wrote: its exact inverse.

    Args:
        expected: the annotation it was written under, such as `tuple[Effect, ...]`; by default any
            dataclass of the machine, which says itself what it is.
        where: the path that an error begins with.

    Raises:
        DecodeError: a type that is not known, a field that is missing or one too many, a value
            that its annotation does not allow, or fields that the class refuses.
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return _one_of(value, arguments, where)
    if origin is Literal:
        return _member(value, arguments, where)
    if origin is frozenset:
        return _set(value, arguments[0], where)
    if origin is tuple:
        return _tuple(value, arguments, where)
    if expected is object or _is_record(expected):
        return _record(value, (expected,), where)
    if issubclass(expected, Enum):
        return expected(_member(value, [e.value for e in expected], where))
    return _scalar(value, expected, where)


def short(value: Any, most: int = 200) -> str:
    """JSON on one line, with the middle left out if it is long."""
    text = json.dumps(value)
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def join(where: str, name: str) -> str:
    """The path of the field `name` of what is at `where`."""
    return f"{where}.{name}" if where else name


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    records = tuple(filter(_is_record, kinds))
    if records and isinstance(value, dict):
        return _record(value, records, where)
    for kind in kinds:
        try:
            return decode(value, kind, where)
        except DecodeError:
            continue
    raise DecodeError(where, f"{short(value)} is not {_names(kinds)}")


def _member(value: Any, members: Any, where: str) -> Any:
    if not isinstance(value, str) or value not in members:
        raise DecodeError(where, f"{short(value)} is not one of {', '.join(members)}")
    return value


def _set(value: Any, kind: Any, where: str) -> frozenset[Any]:
    items = _tuple(value, (kind, ...), where)
    found = frozenset(items)
    if list(items) != sorted(found):
        raise DecodeError(where, f"{short(value)} is not sorted, each once, as a set is written")
    return found


def _tuple(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise DecodeError(where, f"{short(value)} is not a list")
    assert kinds[1:] == (...,), "tuples of the machine have any length and one type"
    return tuple(decode(item, kinds[0], f"{where}[{n}]") for n, item in enumerate(value))


def _scalar(value: Any, kind: type, where: str) -> Any:
    # JSON has one kind of number: a float of whole seconds may have been written as an int.
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not kind:
        raise DecodeError(where, f"{short(value)} is not {_names((kind,))}")
    return value


def _record(value: Any, bases: tuple[type, ...], where: str) -> Any:
    if not isinstance(value, dict):
        raise DecodeError(where, f"{short(value)} is not {_names(bases)}")
    name = value.get("type")
    kind: Any = _types().get(name) if isinstance(name, str) else None
    if kind is None or not issubclass(kind, bases):
        raise DecodeError(join(where, "type"), f"{short(name)} is not {_names(bases)}")
    hints = _hints(kind)
    for field in [*hints, *value]:
        if field not in value:
            raise DecodeError(join(where, field), f"is missing: {name} has it")
        if field not in hints and field != "type":
            raise DecodeError(join(where, field), f"is too much: {name} has no such field")
    fields = {
        field: decode(value[field], hint, join(where, field)) for field, hint in hints.items()
    }
    try:
        return kind(**fields)
    except ValueError as error:
        raise DecodeError(where, str(error)) from error


def _is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


@cache
def _types() -> dict[str, type]:
    """The dataclasses of the machine, by name."""
    exported = ((name, getattr(machine, name)) for name in machine.__all__)
    classes = ((name, value) for name, value in exported if isinstance(value, type))
    return {name: value for name, value in classes if _is_record(value)}


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The annotation of each field. A state names effects that its own module never imports."""
    hints = get_type_hints(kind, localns=_types())
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _names(kinds: tuple[Any, ...]) -> str:
    plain = {object: "a value of the machine", NoneType: "null", int: "an int", float: "a number"}
    return " or ".join(plain.get(kind) or str(getattr(kind, "__name__", kind)) for kind in kinds)


# --- the rows -------------------------------------------------------------------------------------


def encode_row(
    seq: int,
    event: Event,
    state: State,
    effects: tuple[Effect, ...],
    policy: Policy,
    pid: int,
) -> dict[str, Any]:
    """One row: an event, and the state and the effects it led to. `Started` carries the policy and
    the process id too: with them, the rows of a process say all that its decisions depend on."""
    row = {
        "v": VERSION,
        "seq": seq,
        "at": event.at,
        "epoch": event.epoch,
        "event": encode(event),
        "state": encode(state),
        "effects": encode(effects),
    }
    if isinstance(event, Started):
        row["event"] |= {"policy": encode(policy), "pid": pid}
    return row


def decode_started(value: Any, where: str = "event") -> tuple[Started, Policy, int]:
    """The event, the policy and the process id of a row that begins a process.

    Raises:
        DecodeError: as `decode`.
    """
    extra = {"policy": Policy, "pid": int}
    for name in extra:
        if name not in value:
            raise DecodeError(join(where, name), "is missing: Started has it in a log")
    policy, pid = (decode(value[n], kind, join(where, n)) for n, kind in extra.items())
    event = {name: field for name, field in value.items() if name not in extra}
    return decode(event, Started, where), policy, pid


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
        row = encode_row(self._seq, event, state, effects, self._policy, self._pid)
        self._seq += 1
        append(self._file, row)

    def close(self) -> None:
        if self._file:
            self._file.close()
