"""The arrays of one slice, in its process."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from elastix.testing.local_pathways.failures import Code, Failure
from elastix.testing.local_pathways.futures import Future
from elastix.testing.local_pathways.lanes import Cells
from elastix.testing.local_pathways.messages import Key, Shard


class Usage(NamedTuple):
    """How many arrays are here, and their bytes; one that is shared counts once."""

    arrays: int
    num_bytes: int


class Store:
    """The arrays of the slice, by name and device. Only the main thread changes what it names."""

    def __init__(self) -> None:
        self._cells: dict[Key, Cells] = {}
        self._expected: dict[Shard, Future[np.ndarray]] = {}

    def new(self, shard: Shard) -> Future[np.ndarray]:
        """A shard that is to come."""
        cell: Future[np.ndarray] = Future()
        self.name(shard, cell)
        return cell

    def name(self, shard: Shard, cell: Future[np.ndarray]) -> None:
        """Give a shard that exists another name."""
        self._cells.setdefault(shard.array, {})[shard.device] = cell

    def expect(self, shard: Shard) -> Future[np.ndarray]:
        """A shard that another slice will supply, even if its name is forgotten before."""
        cell = self._expected[shard] = self.new(shard)
        return cell

    def expected(self, shard: Shard) -> Future[np.ndarray]:
        """The shard that has come."""
        return self._expected.pop(shard)

    def find(self, shard: Shard) -> Future[np.ndarray]:
        """Raises a Failure, NOT_FOUND, where there is none."""
        try:
            return self._cells[shard.array][shard.device]
        except KeyError:
            raise Failure(Code.NOT_FOUND, f"device {shard.device} has no such array") from None

    def find_all(self, key: Key) -> Cells:
        """All shards of an array that are here."""
        return dict(self._cells.get(key, {}))

    def forget(self, keys: tuple[Key, ...]) -> None:
        """Free what no other name and no program needs."""
        for key in keys:
            self._cells.pop(key, None)

    def end(self, session: int) -> None:
        """Forget all of one client."""
        self.forget(tuple(key for key in self._cells if key.session == session))

    def usage(self) -> Usage:
        """Of the arrays that are there now."""
        cells = {id(cell): cell for of in self._cells.values() for cell in of.values()}
        there = [cell for cell in cells.values() if cell.done() and cell.exception() is None]
        values = {id(value): value for cell in there if (value := cell.result()) is not None}
        return Usage(len(self._cells), sum(value.nbytes for value in values.values()))
