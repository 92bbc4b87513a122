"""Arrays made of others: the same shards under another name, shards brought from slice to slice,
and shards put together from pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from elastix.testing.local_pathways import messages
from elastix.testing.local_pathways.arrays import Array, Arrays
from elastix.testing.local_pathways.failures import Code, Failure, internal
from elastix.testing.local_pathways.futures import Future, after, gather
from elastix.testing.local_pathways.messages import Key, Piece, Shard
from elastix.testing.local_pathways.shardings import Sharding


class Source(NamedTuple):
    """A shard of an array, by its place in the sharding."""

    array: Array
    place: int


class Moves:
    """Makes arrays of others."""

    def __init__(self, arrays: Arrays):
        self._arrays, self._cluster = arrays, arrays.cluster
        self._slice_of = arrays.cluster.topology.slice_of

    def take_shard(self, key: Key, array: Array, index: int) -> None:
        if not array.sharding.devices:
            raise error_of(array)
        device = array.sharding.devices[index]
        sharding = Sharding((device,), array.sharding.memory_kind)
        try:
            box = array.sharding.boxes(array.shape)[index]
        except Failure:
            box = ()
        shape = [part.stop - part.start for part in box]
        self.compose(key, sharding, shape, array.dtype, [Source(array, index)])

    def compose(
        self,
        key: Key,
        sharding: Sharding,
        shape: Sequence[int],
        dtype: str,
        sources: Sequence[Source],
    ) -> None:
        """An array whose shards are those of others, in order, on the same devices or on others."""
        ready: dict[int, list[Future[Any]]] = {}
        near: dict[int, dict[Shard, Shard]] = {}
        for device, (array, place) in zip(sharding.devices, sources, strict=True):
            slice = self._slice_of(device)
            source = self._usable_shard(array, place)
            if self._slice_of(source.device) == slice:
                near.setdefault(slice, {})[Shard(key, device)] = source
            else:
                moved = self._move(source, self.there(array, place), Shard(key, device))
                ready.setdefault(slice, []).append(moved)
        for slice, shards in near.items():
            local = [self.there(*of) for of in sources if self.home(*of) == slice]
            asked = self._cluster.ask(slice, messages.Alias(shards))
            ready.setdefault(slice, []).append(after(local, asked))
        self._arrays.add_new(
            key, sharding, shape, dtype, {slice: gather(of) for slice, of in ready.items()}
        )

    def _usable_shard(self, array: Array, index: int) -> Shard:
        if array.is_deleted:
            raise Failure(Code.INVALID_ARGUMENT, "the array was deleted or donated")
        if not array.sharding.devices:
            raise error_of(array)
        return array.shard(index)

    def home(self, array: Array, index: int) -> int:
        return self._slice_of(array.sharding.devices[index])

    def there(self, array: Array, index: int) -> Future[Any]:
        return self._arrays.shard_ready(array, self.home(array, index))

    def _move(self, source: Shard, there: Future[Any], target: Shard) -> Future[Any]:
        """From slice to slice, through the server: the target knows at once that it will come."""
        giver, taker = self._slice_of(source.device), self._slice_of(target.device)
        if there.done() and there.exception() is not None:
            return there  # nothing can come: no slice need wait for it
        expected = self._cluster.ask(taker, messages.Expect(target))
        got = self._cluster.ask(giver, messages.Get(source))

        def hand_on(future: Future[Any]) -> None:
            error = there.exception() if there.done() else future.exception()
            error = error or future.exception()
            if error is not None:
                self._cluster.ask(taker, messages.Fail(target, internal(error)))
            else:
                (dtype, shape), blobs = future.result()
                self._cluster.ask(taker, messages.Supply(target, dtype, shape), blobs)

        got.add_done_callback(hand_on)
        return after([there], gather([expected, got]))

    def reshard(self, key: Key, array: Array, sharding: Sharding) -> None:
        """Each new shard from the pieces of old ones that cover it."""
        boxes = sharding.boxes(array.shape)
        ready: dict[int, list[Future[Any]]] = {}
        for device, box in zip(sharding.devices, boxes, strict=True):
            made = self._gather(Shard(key, device), array, box)
            ready.setdefault(self._slice_of(device), []).append(made)
        homes = {slice: gather(of) for slice, of in ready.items()}
        self._arrays.add_new(key, sharding, array.shape, array.dtype, homes)

    def _gather(self, target: Shard, array: Array, box: messages.Box) -> Future[Any]:
        """One shard, from pieces that are on its slice or brought there."""
        slice = self._slice_of(target.device)
        pieces, causes, passing = [], [], []
        cover = _cover(box, array.sharding.boxes(array.shape), self._preferred(array, slice))
        for index, source_box, target_box in cover:
            source, there = self._usable_shard(array, index), self.there(array, index)
            if self._slice_of(source.device) != slice:
                passing.append(Shard(self._arrays.key(), target.device))
                there, source = self._move(source, there, passing[-1]), passing[-1]
            causes.append(there)
            pieces.append(Piece(source, source_box, target_box))
        shape = tuple(part.stop - part.start for part in box)
        command = messages.Gather(target, array.dtype, shape, tuple(pieces))
        made = self._cluster.ask(slice, command)
        self._cluster.ask(slice, messages.Delete(tuple(shard.array for shard in passing)))
        return after(causes, made)

    def _preferred(self, array: Array, slice: int) -> list[int]:
        """The shards, those on the slice itself first."""
        devices = array.sharding.devices
        return sorted(range(len(devices)), key=lambda i: self._slice_of(devices[i]) != slice)


def error_of(array: Array) -> BaseException:
    """Of an array that was an error from the start."""
    error = next(iter(array.ready.values())).exception()
    assert error is not None
    return error


def _cover(
    box: messages.Box, old: Sequence[messages.Box], order: Sequence[int]
) -> list[tuple[int, messages.Box, messages.Box]]:
    """(shard, part of it, part of the new one) for each old shard that holds something of `box`;
    of replicas, the first in `order`."""
    pieces, seen = [], set()
    for index in order:
        both = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(box, old[index], strict=True)
        ]
        name = tuple((part.start, part.stop) for part in both)
        if name in seen or any(part.start >= part.stop for part in both):
            continue
        seen.add(name)
        source = _moved(both, [part.start for part in old[index]])
        pieces.append((index, source, _moved(both, [part.start for part in box])))
    return pieces


def _moved(box: Sequence[slice], origin: Sequence[int]) -> messages.Box:
    return tuple(
        slice(part.start - at, part.stop - at) for part, at in zip(box, origin, strict=True)
    )
