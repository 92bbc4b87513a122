"""A client's arrays as the server knows them: where they live, and when they are there. Their
values are with the slices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastix.testing.local_pathways import messages
from elastix.testing.local_pathways.cluster import Cluster
from elastix.testing.local_pathways.failures import Code, Failure
from elastix.testing.local_pathways.futures import Future, done, failed, gather, then
from elastix.testing.local_pathways.messages import Key, Shard
from elastix.testing.local_pathways.shardings import Sharding

FIRST_SERVER_HANDLE = 1 << 62
"""Handles up to here are given by the client."""


@dataclass(eq=False)
class Array:
    """One array: its shards, the generation of each slice that has some, and when they are there.

    `shape` and `dtype` are those of the whole array, where the server was told.
    """

    key: Key
    sharding: Sharding
    shape: tuple[int, ...]
    dtype: str
    homes: Mapping[int, int]
    ready: Mapping[int, Future[Any]]
    is_deleted: bool = False

    def shard(self, index: int) -> Shard:
        """The shard on the device at a place in the sharding."""
        return Shard(self.key, self.sharding.devices[index])


class Arrays:
    """All arrays of one client, by handle; used by the thread that takes its requests."""

    def __init__(self, cluster: Cluster, session: int):
        self.cluster, self._session = cluster, session
        self._arrays: dict[int, Array] = {}
        self._handles = itertools.count(FIRST_SERVER_HANDLE)

    def handle(self) -> int:
        """A handle that nothing has."""
        return next(self._handles)

    def key(self, handle: int = 0) -> Key:
        """The name for a new array: the client's handle, or (0) one that is made here."""
        return Key(self._session, handle or self.handle())

    def keys(self, handles: Sequence[int], count: int) -> list[Key]:
        """As `key`, for several."""
        return [self.key(handle) for handle in handles or [0] * count]

    def find(self, handle: int) -> Array:
        """The array of a handle.

        Raises:
            Failure: NOT_FOUND.
        """
        if handle not in self._arrays:
            raise Failure(Code.NOT_FOUND, f"unknown array handle {handle}")
        return self._arrays[handle]

    def find_usable(self, handle: int) -> Array:
        """As `find`, for one that was neither deleted nor donated."""
        array = self.find(handle)
        if array.is_deleted:
            raise Failure(Code.INVALID_ARGUMENT, "the array was deleted or donated")
        return array

    def add(self, array: Array) -> int:
        """Keep it, and tell its handle."""
        self._arrays[array.key.handle] = array
        return array.key.handle

    def add_new(
        self,
        key: Key,
        sharding: Sharding,
        shape: Sequence[int],
        dtype: str,
        ready: Mapping[int, Future[Any]],
    ) -> int:
        """Keep an array that its slices' present processes are making."""
        homes = {i: self.cluster.generation(i) for i in ready}
        return self.add(Array(key, sharding, tuple(shape), dtype, homes, ready))

    def add_error(self, key: Key, error: BaseException) -> int:
        """Keep an array that is an error for whoever reads it."""
        return self.add(Array(key, Sharding(()), (), "float32", {}, {-1: failed(error)}))

    def is_there(self, array: Array) -> Future[None]:
        """When the array can be read; DATA_LOSS if a slice that has a part of it was lost."""
        return then(gather(list(array.ready.values())), lambda _: self.check(array))

    def check(self, array: Array) -> None:
        """Raises the failure if a slice that has a part of it was lost."""
        self.cluster.check(array.homes)

    def shard_ready(self, array: Array, slice: int) -> Future[Any]:
        """When the part on one slice is there: others may be lost."""
        if slice not in array.homes:
            return next(iter(array.ready.values()), done(None))
        try:
            self.cluster.check({slice: array.homes[slice]})
        except Failure as failure:
            return failed(failure)
        return array.ready[slice]

    def delete(self, handles: Iterable[int]) -> None:
        """Free the memory; the handles stay, of arrays that are deleted."""
        living = [array for array in map(self.find, handles) if not array.is_deleted]
        for array in living:
            array.is_deleted = True
        self._free(living)

    def forget(self, handles: Iterable[int]) -> None:
        """The client has no more use for the handles."""
        known = [self._arrays.pop(handle) for handle in handles if handle in self._arrays]
        self._free([array for array in known if not array.is_deleted])

    def end(self) -> None:
        """The client is gone: all its memory is free."""
        self._arrays.clear()
        for slice in self.cluster.up():
            self.cluster.ask(slice, messages.EndSession(self._session))

    def _free(self, arrays: Sequence[Array]) -> None:
        by_slice: dict[int, list[Key]] = {}
        for array in arrays:
            for slice, generation in array.homes.items():
                if generation == self.cluster.generation(slice):
                    by_slice.setdefault(slice, []).append(array.key)
        for slice, keys in by_slice.items():
            self.cluster.ask(slice, messages.Delete(tuple(keys)))
