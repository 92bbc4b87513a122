"""Numbers for values, and other names for slices and epochs: how a search tells worlds apart.

Two worlds that differ only in how the slices are numbered are one, and so are two that differ in
how epochs are counted: the rules compare epochs, and look at nothing else of them.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from itertools import permutations
from typing import Any

from elastix.machine import Source, Tier

Perm = tuple[int, ...]
"""The new id of each slice."""

_SLICE = ("slice_id", "holder")
"""The fields that name one slice; a set of ints is a set of slices wherever it stands."""


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def said_of(value: Any, slice_id: int) -> Any:
    """All that a value says of one slice; None if it is about another slice.

    Whatever is said of slices is said of each alone: nothing relates two of them. So a world is
    known, up to the numbering, by how often each thing is said.
    """
    if isinstance(value, frozenset):
        return slice_id in value
    if isinstance(value, tuple):
        said = (said_of(v, slice_id) for v in value)
        return tuple(s for s in said if s is not None)
    if not is_dataclass(value):
        return ()
    names = _field_names(type(value))
    if "slice_id" in names:
        if value.slice_id != slice_id:
            return None
        return tuple(getattr(value, n) for n in names if n != "slice_id")
    holds = (value.holder == slice_id,) if "holder" in names else ()
    return holds + tuple(said_of(getattr(value, n), slice_id) for n in names)


def renumbered(value: Any, perm: Perm) -> Any:
    """The value with other slice ids. What is listed by slice is listed in their order: no rule
    looks at the order."""
    kind = type(value)
    if kind is frozenset:
        return frozenset([perm[s] for s in value])
    if kind is tuple:
        renamed = tuple([renumbered(v, perm) for v in value])
        by_slice = renamed and hasattr(renamed[0], "slice_id")
        return tuple(sorted(renamed, key=lambda v: v.slice_id)) if by_slice else renamed
    if kind in _PLAIN or not is_dataclass(kind):
        return value
    new = []
    for name in _field_names(kind):
        v = getattr(value, name)
        if name in _SLICE:
            v = perm[v]
        elif type(v) not in _PLAIN:
            v = renumbered(v, perm)
        new.append(v)
    return _made(kind, new)


def recounted(value: Any, epochs: dict[int, int]) -> Any:
    """The value with other epochs. On disk, and for the seed, there is no epoch."""
    kind = type(value)
    if kind is tuple:
        return tuple([recounted(v, epochs) for v in value])
    if kind in _PLAIN or not is_dataclass(kind) or _timeless(value):
        return value
    new = []
    for name in _field_names(kind):
        v = getattr(value, name)
        new.append(epochs[v] if name == "epoch" else recounted(v, epochs))
    return _made(kind, new)


_PLAIN = frozenset({int, str, float, bool, type(None), Tier})


def _made(kind: type, values: list[Any]) -> Any:
    """A message or a state with these fields, in their order."""
    return kind(**dict(zip(_field_names(kind), values, strict=True)))


def epochs_of(value: Any) -> frozenset[int]:
    """The epochs that a value names."""
    if isinstance(value, tuple):
        return frozenset().union(*map(epochs_of, value))
    if not is_dataclass(value) or isinstance(value, type) or _timeless(value):
        return frozenset()
    names = _field_names(type(value))
    own = {value.epoch} if "epoch" in names else set()
    return frozenset(own).union(*(epochs_of(getattr(value, n)) for n in names))


def _timeless(value: Any) -> bool:
    return isinstance(value, Source) and value.tier in (Tier.DISK, Tier.SEED)


def anonymous(value: Any, spares: bool) -> Any:
    """The value without the names of single slices; if some stand by, without those of all."""
    if isinstance(value, frozenset):
        return len(value) if spares else value
    if isinstance(value, tuple):
        return tuple(anonymous(v, spares) for v in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = [
        n for n in _field_names(type(value)) if n != "holder" and not (spares and n == "slice_id")
    ]
    return type(value), *(anonymous(getattr(value, n), spares) for n in names)


class Book:
    """Every value that was met, by number; and what is worked out once for each."""

    def __init__(self, num_slices: int):
        self.num_slices = num_slices
        self.values: list[Any] = []
        self.sets = [_members(mask) for mask in range(1 << num_slices)]
        self._numbers: dict[Any, int] = {}
        self._said: dict[int, tuple[int, ...]] = {}
        self._sayings: dict[Any, int] = {}
        self._renumbered: dict[tuple[int, Perm], int] = {}
        self._recounted: dict[tuple[int, tuple[int, ...]], int] = {}
        self._epochs: dict[int, frozenset[int]] = {}
        self._masks: dict[Perm, list[int]] = {}
        self._events: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found

    def event(self, kind: type, epoch: int, **said: Any) -> int:
        """The number of an event; quicker than to make it."""
        key = (kind, epoch, *said.values())
        found = self._events.get(key)
        if found is None:
            at = said.pop("at", 0.0)
            found = self._events[key] = self.number(kind(at=at, epoch=epoch, **said))
        return found

    def said(self, number: int) -> tuple[int, ...]:
        """For each slice, the number of what the value says of it."""
        found = self._said.get(number)
        if found is None:
            each = (said_of(self.values[number], s) for s in range(self.num_slices))
            found = tuple(self._sayings.setdefault(s, len(self._sayings)) for s in each)
            self._said[number] = found
        return found

    def renumbered(self, number: int, perm: Perm) -> int:
        key = (number, perm)
        found = self._renumbered.get(key)
        if found is None:
            found = self._renumbered[key] = self.number(renumbered(self.values[number], perm))
        return found

    def recounted(self, number: int, old: tuple[int, ...]) -> int:
        """The value with these epochs counted as ..., -1, 0."""
        key = (number, old)
        found = self._recounted.get(key)
        if found is None:
            epochs = dict(zip(old, range(1 - len(old), 1), strict=True))
            found = self._recounted[key] = self.number(recounted(self.values[number], epochs))
        return found

    def epochs(self, number: int) -> frozenset[int]:
        found = self._epochs.get(number)
        if found is None:
            found = self._epochs[number] = epochs_of(self.values[number])
        return found

    def masks(self, perm: Perm) -> list[int]:
        """Each set of slices, as bits, after a renumbering."""
        found = self._masks.get(perm)
        if found is None:
            moved = (sum(1 << perm[s] for s in members) for members in self.sets)
            found = self._masks[perm] = list(moved)
        return found

    def arrangements(self, *numbers: int) -> list[Perm]:
        """Renumberings under which the values differ, each once; the first changes nothing.

        All of them up to four slices. With more, the rotations: they let each of several equal
        slices be the one that a rule picks.
        """
        ids = range(self.num_slices)
        each = list(zip(*(self.said(n) for n in numbers), strict=True))
        many = self.num_slices > 4
        perms = [(*ids[r:], *ids[:r]) for r in ids] if many else list(permutations(ids))
        seen: dict[Any, Perm] = {}
        for perm in perms:
            seen.setdefault(tuple(each[perm.index(s)] for s in ids), perm)
        return list(seen.values())


def _members(mask: int) -> frozenset[int]:
    return frozenset(s for s in range(mask.bit_length()) if mask >> s & 1)


def inverse(perm: Perm) -> Perm:
    return tuple(sorted(range(len(perm)), key=perm.__getitem__))


def mask_of(slices: frozenset[int]) -> int:
    return sum(1 << s for s in slices)
