"""Breadth-first over every history of a world, to its fixpoint.

A *transition* that is counted is one edge of the graph that was searched: a world, and one choice
of what happens next, checked once. Worlds are counted after the reductions.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

from elastix.machine import TABLE, Done, Failed, is_stale
from tests.world_checks import Checks
from tests.world_play import Play
from tests.world_values import Setting, World

UNDRIVEN = ("lose", "return", "notice", "preempt", "tick")
"""What happens by itself; where nothing else can, a run stalls."""


@dataclass
class Explored:
    """What a search over all histories saw."""

    worlds: int = 0
    transitions: int = 0
    seconds: float = 0.0
    states: Counter[str] = field(default_factory=Counter)
    """Worlds by the state of the machine."""
    rows: set[tuple[type, type]] = field(default_factory=set)
    """The rows of the table that were used."""
    edges: set[tuple[str, str, str]] = field(default_factory=set)
    """(state, event, next state), by type, of what was not dropped as stale."""
    ends: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        states = ", ".join(f"{name} {count}" for name, count in sorted(self.states.items()))
        speed = self.transitions / max(self.seconds, 1e-9)
        return (
            f"{self.worlds} worlds, {self.transitions} transitions, {self.seconds:.1f} s "
            f"({speed:.0f}/s): {states}"
        )


class Search:
    """The worlds that were seen, by number, in breadth-first order."""

    def __init__(self, setting: Setting):
        self.play = Play(setting)
        self.checks = Checks(self.play)
        self.worlds: list[World] = []
        self.seen = Explored()
        self._numbers: dict[World, int] = {}
        self._first = array("q")
        """The world from which each was reached first."""
        self._from, self._to = array("q"), array("q")
        self._ends: dict[str, int] = {}

    def run(self) -> Explored:
        """Visit every world that can be reached; each must be able to reach an end.

        Raises:
            AssertionError: an invariant does not hold; the message has the shortest history.
        """
        begun = time.process_time()
        collects = gc.isenabled()
        gc.disable()  # nothing here is garbage, and looking for it would take half of the time
        try:
            self._walk()
        finally:
            if collects:
                gc.enable()
        self._all_can_end()
        self._count()
        self.seen.seconds = time.process_time() - begun
        return self.seen

    def _walk(self) -> None:
        self._add(-1, self.play.canonical(self.play.begin()))
        here = 0
        while here < len(self.worlds):  # grows while it is walked: breadth first
            self._expand(here)
            here += 1

    def _expand(self, here: int) -> None:
        world, play, check = self.worlds[here], self.play, self.checks.edge
        driven, count = False, 0
        name = "?"
        try:
            for name, after in play.choices(world):
                count += 1
                driven = driven or not name.startswith(UNDRIVEN)
                check(world, name, after)
                self._add(here, self._end(after) or play.canonical(after))
        except Exception as error:
            raise AssertionError(f"{error}\n{self.history(here)}\n{name}: {error!r}") from error
        self.seen.transitions += count
        if not driven and here not in self._ends.values():
            raise AssertionError(f"stalled\n{self.history(here)}")

    def _end(self, after: World) -> World | None:
        """Of all worlds in which a run ended in the same way, one."""
        state = self.play.values[after.machine]
        if not isinstance(state, Done | Failed):
            return None
        how = state.outcome if isinstance(state, Done) else "failed"
        if how not in self._ends:
            self._ends[how] = len(self.worlds)
            return self.play.canonical(after)
        return self.worlds[self._ends[how]]

    def _add(self, here: int, world: World) -> None:
        number = self._numbers.setdefault(world, len(self.worlds))
        if number == len(self.worlds):
            self.worlds.append(world)
            self._first.append(here)
        if here >= 0:
            self._from.append(here)
            self._to.append(number)

    def _all_can_end(self) -> None:
        """Backwards from the ends: no world may be left over."""
        last = array("q", [-1]) * len(self.worlds)
        before = array("q", [-1]) * len(self._to)
        for edge, to in enumerate(self._to):
            before[edge], last[to] = last[to], edge
        reached, stack = bytearray(len(self.worlds)), list(self._ends.values())
        for number in stack:
            reached[number] = 1
        while stack:
            edge = last[stack.pop()]
            while edge >= 0:
                number = self._from[edge]
                if not reached[number]:
                    reached[number] = 1
                    stack.append(number)
                edge = before[edge]
        endless = reached.find(0)
        if endless >= 0:
            raise AssertionError(f"no end can be reached\n{self.history(endless)}")

    def _count(self) -> None:
        seen, values = self.seen, self.play.values
        seen.worlds, seen.ends = len(self.worlds), set(self._ends)
        seen.states = Counter(type(values[w.machine]).__name__ for w in self.worlds)
        for (machine, event), outcomes in self.play.outcomes.items():
            state, said = values[machine], values[event]
            if is_stale(state, said):
                continue
            seen.rows.add((type(state), type(said)))
            for outcome in outcomes:
                kinds = (state, said, values[outcome.machine])
                seen.edges.add(tuple(type(k).__name__ for k in kinds))

    def history(self, number: int) -> str:
        """The shortest way to a world, and its machine. Slices may change their numbers on it."""
        lines, values = [], self.play.values
        end = values[self.worlds[number].machine]
        while number >= 0:
            before, world = self._first[number], self.worlds[number]
            name = self._name(before, number) if before >= 0 else "begin"
            lines.append(f"{name} -> {type(values[world.machine]).__name__}")
            number = before
        return "\n".join(reversed(lines)) + f"\n{end}"

    def _name(self, before: int, number: int) -> str:
        """What happened between two worlds."""
        world = self.worlds[before]
        for name, after in self.play.choices(world):
            if self._numbers.get(self._end(after) or self.play.canonical(after)) == number:
                queue = {"answer": world.answers, "event": world.events}.get(name)
                return f"{name} {self.play.values[queue[0]]}" if queue else name
        return "?"


def explore(setting: Setting) -> Explored:
    return Search(setting).run()


def missing_rows(*seen: Explored) -> set[tuple[str, str]]:
    """The rows of the table that no search used."""
    used = set().union(*(s.rows for s in seen))
    return {(state.__name__, event.__name__) for state, event in set(TABLE) - used}
