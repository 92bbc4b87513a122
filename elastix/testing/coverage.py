"""What simulated runs came by: rows of the machine's table, and lines of a module."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from elastix.machine import TABLE, Effect, Event, Policy, Starting, State, is_stale
from elastix.testing.simulation import Result

Row = tuple[type, type]
"""A key of the table: (type of the state, type of the event)."""


class Decided(NamedTuple):
    """One transition of a run."""

    before: State
    event: Event
    policy: Policy
    after: State
    effects: tuple[Effect, ...]


def histories(result: Result) -> Iterator[list[Decided]]:
    """The transitions of each process of a run; the machine begins anew with each."""
    for rows in result.processes:
        before: State = Starting()
        history = []
        for event, after, effects in rows:
            history.append(Decided(before, event, result.schedule.policy, after, effects))
            before = after
        yield history


def rows_hit(result: Result) -> set[Row]:
    """The rows of the table that a run used. An answer of an older epoch uses none."""
    return {
        (type(d.before), type(d.event))
        for history in histories(result)
        for d in history
        if not is_stale(d.before, d.event)
    }


def rows_missed(hit: Iterable[Row]) -> list[str]:
    """The rows of the table that are not among these, as `State, Event`, in its order."""
    used = set(hit)
    return [f"{s.__name__}, {e.__name__}" for s, e in TABLE if (s, e) not in used]


class LineCoverage:
    """Which lines inside the functions of a module were run `within` it.

    What runs is traced, and several times slower for it.
    """

    def __init__(self, module: ModuleType):
        assert module.__file__
        self._path = module.__file__
        code = compile(Path(self._path).read_text(encoding="utf-8"), self._path, "exec")
        self.lines = frozenset(_lines_inside_functions(code))
        self._seen: set[int] = set()

    @property
    def missed(self) -> list[int]:
        """The lines that were not run."""
        return sorted(self.lines - self._seen)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Note the lines that are run inside; another tracer, a debugger's, is put back after."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self._path:
            return None
        self._seen.add(frame.f_lineno)
        return self._trace


def _lines_inside_functions(code: CodeType, inside: bool = False) -> Iterator[int]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _lines_inside_functions(const, bool(const.co_flags & inspect.CO_OPTIMIZED))
    if inside:
        first = code.co_firstlineno
        yield from (line for *_, line in code.co_lines() if line and line > first)
