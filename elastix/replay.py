"""PURE: replay. The recorded events are fed to the machine, which must decide the same again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from elastix.event_log import VERSION, DecodeError, decode, decode_started, encode, join, short
from elastix.machine import (
    TABLE,
    Effect,
    Event,
    Live,
    Policy,
    Started,
    Starting,
    State,
    is_stale,
    transition,
)

_NOTHING = object()
_COLUMNS = ("v", "seq", "at", "epoch", "event", "state", "effects")


@dataclass(frozen=True)
class Process:
    """One process of a run: it begins with `Started`, and the machine begins anew."""

    pid: int
    first_row: int
    rows: int
    epochs: int
    """Meshes that were prepared, or waited for: the epoch it had reached."""
    end: State
    """`Done` or `Failed`; any other state is what it was in when it was killed."""


@dataclass(frozen=True)
class Decision:
    """What the machine made of the event of one row."""

    seq: int
    process: int
    """Counted from 1."""
    pid: int
    policy: Policy
    before: State
    event: Event
    after: State
    effects: tuple[Effect, ...]

    @property
    def rule(self) -> Callable[..., Any] | None:
        """The rule of the table that fired; None if the event was stale, and dropped before it."""
        if is_stale(self.before, self.event):
            return None
        return TABLE[type(self.before), type(self.event)]


@dataclass(frozen=True)
class Difference:
    """Where a row and the machine disagree: the path of the field, and both values as JSON. If the
    row makes no sense to the machine, `reason` says why, and nothing was made of it."""

    seq: int
    path: str
    recorded: str
    made: str
    reason: str = ""

    def __str__(self) -> str:
        what = self.reason or f"recorded {self.recorded}, made {self.made}"
        return f"row {self.seq} (line {self.seq + 1}): {self.path}: {what}"


@dataclass(frozen=True)
class Replay:
    """How far the log and the machine agree."""

    rows: int
    """In so many rows from the first, the machine decides what is recorded."""
    processes: tuple[Process, ...]
    difference: Difference | None = None
    """The first; None if there is none."""


@dataclass(frozen=True)
class Position:
    """Where a replay stands between two rows."""

    seq: int = 0
    """The next row's."""
    state: State = field(default_factory=Starting)
    policy: Policy = Policy()
    pid: int = 0
    processes: tuple[Process, ...] = ()

    def after(self, decision: Decision) -> Position:
        """The position once the decision's row was found to be as recorded."""
        state = decision.after
        if isinstance(decision.event, Started):
            earlier, process = self.processes, Process(decision.pid, decision.seq, 0, 0, state)
        else:
            earlier, process = self.processes[:-1], self.processes[-1]
        epochs = state.ledger.epoch if isinstance(state, Live) else process.epochs
        process = replace(process, rows=process.rows + 1, epochs=epochs, end=state)
        return Position(self.seq + 1, state, decision.policy, decision.pid, (*earlier, process))


def replay(rows: Iterable[Any], observe: Callable[[Decision], object] | None = None) -> Replay:
    """Check row by row that the machine makes the recorded decisions, effects included.

    Args:
        rows: of `events.jsonl`, from the first; none is kept.
        observe: called with what the machine made of each row, before it is compared.

    Raises:
        ValueError: a row is not of an event log, or of another version of it.
    """
    position = Position()
    for row in rows:
        decision = decide(position, row)
        if isinstance(decision, Decision) and observe:
            observe(decision)
        difference = decision if isinstance(decision, Difference) else compare(decision, row)
        if difference:
            return Replay(position.seq, position.processes, difference)
        assert isinstance(decision, Decision)
        position = position.after(decision)
    return Replay(position.seq, position.processes)


def decide(position: Position, row: Any) -> Decision | Difference:
    """Feed the event of the next row to the machine.

    Returns:
        what the machine made of it, or why it could make nothing of it.

    Raises:
        ValueError: as `replay`.
    """
    _check_version(position.seq, row)
    wrong = next(_wrong_columns(position.seq, row), None)
    if wrong:
        return wrong
    try:
        event, begun = _event(position, row["event"])
    except DecodeError as error:
        return Difference(position.seq, error.where, short(row["event"]), "", error.problem)
    try:
        after, effects = transition(begun.state, event, begun.policy)
    except Exception as error:  # a defect, or an event that cannot have happened
        reason = f"the machine refuses it: {type(error).__name__}: {error}"
        return Difference(position.seq, "event", short(row["event"]), "", reason)
    number = len(position.processes) + isinstance(event, Started)
    return Decision(
        position.seq, number, begun.pid, begun.policy, begun.state, event, after, effects
    )


def compare(decision: Decision, row: Any) -> Difference | None:
    """The first field of the row that is not what the machine made."""
    made = {
        "at": decision.event.at,
        "epoch": decision.event.epoch,
        "state": encode(decision.after),
        "effects": encode(decision.effects),
    }
    for column, value in made.items():
        for path, recorded, wanted in differences(row[column], value, column):
            return Difference(decision.seq, path, recorded, wanted)
    return None


def differences(recorded: Any, made: Any, where: str) -> Iterator[tuple[str, str, str]]:
    """(path, recorded, made), as short JSON, of each place where the two differ."""
    if isinstance(recorded, dict) and isinstance(made, dict):
        if recorded.get("type") != made.get("type"):
            made, recorded = {"type": made.get("type")}, {"type": recorded.get("type")}
        yield from _in_fields(recorded, made, where)
    elif _are_records(recorded) and _are_records(made):
        for n, (one, other) in enumerate(zip_longest(recorded, made, fillvalue=_NOTHING)):
            yield from differences(one, other, f"{where}[{n}]")
    elif not _same(recorded, made):
        yield where, _text(recorded), _text(made)


def _in_fields(
    recorded: dict[str, Any], made: dict[str, Any], where: str
) -> Iterator[tuple[str, str, str]]:
    for name in {**made, **recorded}:
        one, other = recorded.get(name, _NOTHING), made.get(name, _NOTHING)
        yield from differences(one, other, join(where, name))


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _text(value: Any) -> str:
    return "nothing" if value is _NOTHING else short(value)


def _same(recorded: Any, made: Any) -> bool:
    """Equal, and of one type: to Python, true is 1 and 1 is 1.0."""
    if isinstance(recorded, list) and isinstance(made, list):
        return len(recorded) == len(made) and all(map(_same, recorded, made))
    number = type(made) is float and type(recorded) is int  # a float may be written as an int
    return recorded == made and (number or type(recorded) is type(made))


def _check_version(seq: int, row: Any) -> None:
    found = row.get("v") if isinstance(row, dict) else None
    if type(found) is not int:
        raise ValueError(f"row {seq} (line {seq + 1}) is not of an event log: give events.jsonl")
    if found != VERSION:
        raise ValueError(
            f"row {seq} (line {seq + 1}) is of version {found} of the event log, and this elastix "
            f"knows version {VERSION}: use the elastix that wrote it"
        )


def _wrong_columns(seq: int, row: dict[str, Any]) -> Iterator[Difference]:
    for name in {**dict.fromkeys(_COLUMNS), **row}:
        if name not in row:
            yield Difference(seq, name, "nothing", "", "is missing")
        elif name not in _COLUMNS:
            yield Difference(seq, name, short(row[name]), "nothing")
    if not _same(row["seq"], seq):
        yield Difference(seq, "seq", short(row["seq"]), str(seq))


def _event(position: Position, value: Any) -> tuple[Event, Position]:
    """The event, and where the machine stands when it comes: at its beginning, for `Started`."""
    if isinstance(value, dict) and value.get("type") == "Started":
        started, policy, pid = decode_started(value)
        return started, replace(position, state=Starting(), policy=policy, pid=pid)
    return decode(value, Event, "event"), position
