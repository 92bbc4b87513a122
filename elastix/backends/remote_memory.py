"""Arrays on devices of other machines, which one controller moves by handles.

Nothing is gathered in the controller on the way: a host snapshot lies in the host memory of the
slice's own workers, and is restored from there, each slice from its own copy where it has one. Only
`RemoteCopy.whole`, of which checkpoints are written, brings values here, one leaf after another.

What goes wrong on a device surfaces when a result is read, and not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from elastix.background import Worker
from elastix.classification import StuckError
from elastix.snapshots import Index, Shapes, Shardings, assemble
from elastix.train_state import Leaves

InTime = Callable[[Callable[[Any], Any], Any], Any]


class OneAtATime:
    """Calls of any thread, made one after another by a thread of its own.

    Concurrent transfers can deadlock in the proxy. One that hangs is left behind with its thread
    after `deadline` seconds, and `StuckError` is raised: those that follow get a new thread.
    """

    def __init__(self, deadline: float):
        self._deadline = deadline
        self._worker = Worker("elastix-transfers")

    def __call__(self, do: Callable[..., Any], *args: Any) -> Any:
        worker = self._worker
        job: Future[Any] = worker.submit(do, *args)
        try:
            return job.result(timeout=self._deadline)
        except TimeoutError:
            if job.done():  # it raised that itself
                raise
            worker.close(timeout=0.0)
            self._worker = Worker("elastix-transfers")
            raise StuckError from None


@dataclass(frozen=True)
class Shard:
    """One shard of a leaf, alone on a device: its index into the whole array, and its values."""

    index: Index
    array: jax.Array


@dataclass(frozen=True)
class RemoteCopy:
    """One whole copy of the leaves in the host memory of one slice's workers: for each path, the
    distinct shards of that slice. Reading it after the slice died raises DATA_LOSS."""

    step: int
    shards: Mapping[str, list[Shard]]
    hashes: Mapping[str, str]
    in_time: InTime

    def whole(self, shapes: Shapes) -> dict[str, np.ndarray]:
        """The leaves put together, as new arrays in the controller, read one after another.

        Raises:
            StuckError: a leaf was not read in time.
        """
        return {path: self._leaf(shards, shapes[path]) for path, shards in self.shards.items()}

    def arrays(self) -> list[jax.Array]:
        """Every array of the copy."""
        return [shard.array for shards in self.shards.values() for shard in shards]

    def _leaf(self, shards: list[Shard], shape: tuple[int, ...]) -> np.ndarray:
        # Read through another handle: this one would keep the values in the controller.
        values = self.in_time(jax.device_get, [unread(shard.array) for shard in shards])
        return assemble([(s.index, v) for s, v in zip(shards, values, strict=True)], shape)


@dataclass(frozen=True)
class RemoteCopying:
    """Copies that were asked for, by slice and path."""

    step: int
    shards: Mapping[int, Mapping[str, list[Shard]]]
    in_time: InTime

    def finish(self, hashes: Mapping[str, str]) -> dict[int, RemoteCopy]:
        each = self.shards.items()
        copies = {s: RemoteCopy(self.step, shards, hashes, self.in_time) for s, shards in each}
        self.in_time(jax.block_until_ready, [copy.arrays() for copy in copies.values()])
        return copies


class RemoteTransfers:
    """Transfers for devices of other machines: all of a call in one go, whatever the mesh.

    Args:
        devices: the devices of each slice.
        in_turn: makes one call after another.
        in_time: calls a function of arrays that waits for them, or raises `StuckError`.
        memory_kind: where host snapshots are kept on the slices.
    """

    def __init__(
        self,
        devices: Mapping[int, Sequence[Any]],
        in_turn: OneAtATime,
        in_time: InTime,
        memory_kind: str,
    ):
        self._slice_of = {device: s for s, own in devices.items() for device in own}
        self._in_turn, self._in_time, self._memory_kind = in_turn, in_time, memory_kind

    def put(self, whole: Mapping[str, np.ndarray], shardings: Shardings) -> Leaves:
        paths = list(whole)
        arrays = self._in_turn(
            jax.device_put, [whole[p] for p in paths], [shardings[p] for p in paths]
        )
        return dict(zip(paths, arrays, strict=True))

    def place(self, leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
        placed = self._in_turn(jax.device_put, leaf, sharding)
        return self._in_time(jax.block_until_ready, placed)

    def move(self, leaves: Leaves, donors: frozenset[Any], shardings: Shardings) -> Leaves:
        shards = {path: _shards(array, donors) for path, array in leaves.items()}
        shapes = {path: array.shape for path, array in leaves.items()}
        return self._in_turn(self._rebuild, shards, shapes, shardings, True)

    def copied(self, shardings: Shardings) -> Shardings:
        return {}

    def copy(
        self, leaves: Leaves, devices: Mapping[int, Sequence[Any]], step: int
    ) -> RemoteCopying:
        return RemoteCopying(step, self._in_turn(self._copy, leaves, devices), self._in_time)

    def restore(self, copies: Sequence[RemoteCopy], shapes: Shapes, shardings: Shardings) -> Leaves:
        paths = copies[0].shards
        shards = {path: [s for copy in copies for s in copy.shards[path]] for path in paths}
        # What is made here may be donated, and the snapshot must outlive it.
        return self._in_turn(self._rebuild, shards, shapes, shardings, False)

    def _copy(
        self, leaves: Leaves, devices: Mapping[int, Sequence[Any]]
    ) -> dict[int, dict[str, list[Shard]]]:
        """Taken apart by slices now: an array of which one slice is lost may be lost as a whole."""
        distinct = [
            (slice_id, path, shard)
            for slice_id, own in devices.items()
            for path, array in leaves.items()
            for shard in _distinct(_shards(array, frozenset(own)))
        ]
        arrays = [shard.array for _, _, shard in distinct]
        copies = jax.device_put(arrays, [self._host_of(a) for a in arrays], may_alias=False)
        shards: dict[int, dict[str, list[Shard]]] = {s: {} for s in devices}
        for (slice_id, path, shard), array in zip(distinct, copies, strict=True):
            shards[slice_id].setdefault(path, []).append(Shard(shard.index, array))
        return shards

    def _rebuild(
        self,
        shards: Mapping[str, list[Shard]],
        shapes: Shapes,
        shardings: Shardings,
        may_alias: bool,
    ) -> Leaves:
        """Arrays on a mesh, from shards on any devices and in any memory, all moved by one call."""
        parts: list[jax.Array] = []
        places: list[SingleDeviceSharding] = []
        for path, held in shards.items():
            donors = _Donors(held, self._slice_of)
            for device, index in _places(shardings[path], shapes[path]).items():
                parts.append(donors.nearest(device, str(index)))
                kind = device.default_memory().kind
                places.append(SingleDeviceSharding(device, memory_kind=kind))
        moved = iter(jax.device_put(parts, places, may_alias=may_alias))
        return {
            path: jax.make_array_from_single_device_arrays(
                shapes[path],
                shardings[path],
                [next(moved) for _ in _places(shardings[path], shapes[path])],
            )
            for path in shards
        }

    def _host_of(self, array: jax.Array) -> SingleDeviceSharding:
        return SingleDeviceSharding(_device_of(array), memory_kind=self._memory_kind)


def _device_of(array: jax.Array) -> Any:
    (device,) = array.sharding.device_set
    return device


def _shards(array: jax.Array, devices: frozenset[Any]) -> list[Shard]:
    found = (s for s in array.addressable_shards if s.device in devices)
    return [Shard(s.index, s.data) for s in found]


def _distinct(shards: list[Shard]) -> list[Shard]:
    return list({str(shard.index): shard for shard in shards}.values())


def _places(sharding: NamedSharding, shape: tuple[int, ...]) -> Mapping[Any, Index | None]:
    return sharding.addressable_devices_indices_map(shape)


class _Donors:
    """Who has the shards of one leaf. The device itself comes first, then its own slice, and then
    the others, each in its turn."""

    def __init__(self, held: list[Shard], slice_of: Mapping[Any, int]):
        self._slice_of = slice_of
        self._on_device: dict[tuple[str, Any], jax.Array] = {}
        self._on_slice: dict[tuple[str, int], jax.Array] = {}
        self._anywhere: dict[str, list[jax.Array]] = {}
        for shard in held:
            device, index = _device_of(shard.array), str(shard.index)
            self._on_device[index, device] = shard.array
            self._on_slice[index, slice_of[device]] = shard.array
            self._anywhere.setdefault(index, []).append(shard.array)

    def nearest(self, device: Any, index: str) -> jax.Array:
        own = self._on_device.get((index, device))
        near = own if own is not None else self._on_slice.get((index, self._slice_of[device]))
        if near is not None:
            return near
        others = self._anywhere[index]
        others.append(others.pop(0))
        return others[-1]


def unread(array: jax.Array) -> jax.Array:
    """Another handle of an array on one device. JAX keeps what it has read of an array, and would
    not ask the device again; a long-lived handle would keep the memory too."""
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
