"""Copies of the train state that outlive a step: on surviving devices and in host memory.

A host snapshot is one whole copy for each slice, held in that slice's host memory. Nothing here
asks whether a slice is alive: the driver does, before and after.

How arrays travel depends on where the devices are: `LocalTransfers` is for devices of this process,
whose host memory is the process's own.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding

from elastix.train_state import Leaves

HOST_MEMORY = "pinned_host"
"""JAX's name for the memory of the machine that a device sits in."""

Index = tuple[slice, ...]
Shapes = Mapping[str, tuple[int, ...]]
Shardings = Mapping[str, NamedSharding]


class HostSnapshot(Protocol):
    """One whole copy of the leaves after `step` in the host memory of one slice, and the hash of
    each leaf that its devices computed."""

    @property
    def step(self) -> int: ...

    @property
    def hashes(self) -> Mapping[str, str]: ...

    def whole(self, shapes: Shapes) -> dict[str, np.ndarray]:
        """The leaves put together, as new arrays in this process."""
        ...


class Copying(Protocol):
    """A host snapshot of some slices, on its way."""

    def finish(self, hashes: Mapping[str, str]) -> Mapping[int, HostSnapshot]:
        """Wait for it: the copy of each slice, with the hashes that its devices computed."""
        ...


@runtime_checkable
class Transfers(Protocol):
    """How arrays get to devices, from one to another, and to host memory and back."""

    def put(self, whole: Mapping[str, np.ndarray], shardings: Shardings) -> Leaves:
        """Put arrays of this process on a mesh. No two slices may be given the same part of one,
        and nobody may write to them later: a device may share their memory."""
        ...

    def place(self, leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """Put one leaf of a train state on a mesh, to be donated to a step; it is there on return,
        and nothing of it is left in this process."""
        ...

    def move(self, leaves: Leaves, donors: frozenset[Any], shardings: Shardings) -> Leaves:
        """Rebuild live leaves on another mesh, reading only what lies on the devices `donors`."""
        ...

    def copied(self, shardings: Shardings) -> Shardings:
        """Where a program on the devices is to put the copies that `copy` takes apart: nowhere, if
        `copy` takes the leaves themselves."""
        ...

    def copy(self, leaves: Leaves, devices: Mapping[int, Sequence[Any]], step: int) -> Copying:
        """Begin to copy what lies on the `devices` of each slice to the host memory of that slice.
        `leaves` may be donated to a step right after."""
        ...

    def restore(self, copies: Sequence[Any], shapes: Shapes, shardings: Shardings) -> Leaves:
        """Put a host snapshot on a mesh.

        Args:
            copies: the same snapshot of one or more slices, made by `copy`.
        """
        ...


@dataclass(frozen=True)
class HostCopy:
    """One whole copy of the leaves in the host memory of one slice: for each path, the distinct
    shards of that slice as (index into the whole array, values), and the hash that its devices
    computed of the leaf."""

    step: int
    shards: Mapping[str, list[tuple[Index, np.ndarray]]]
    hashes: Mapping[str, str] = field(default_factory=dict)

    def arrays(self) -> list[np.ndarray]:
        """Every buffer of the copy."""
        return [array for shards in self.shards.values() for _, array in shards]

    def whole(self, shapes: Shapes) -> dict[str, np.ndarray]:
        """The leaves put together, as new arrays."""
        return {path: assemble(shards, shapes[path]) for path, shards in self.shards.items()}


def assemble(shards: Sequence[tuple[Index, np.ndarray]], shape: tuple[int, ...]) -> np.ndarray:
    """The whole array of its shards, as a new one."""
    whole = np.empty(shape, shards[0][1].dtype)
    for index, values in shards:
        whole[index] = values
    return whole


@dataclass(frozen=True)
class LocalCopying:
    """Leaves in the host memory of this process, to be taken apart by slices."""

    leaves: Leaves
    devices: Mapping[int, Sequence[Any]]
    step: int

    def finish(self, hashes: Mapping[str, str]) -> dict[int, HostCopy]:
        each = self.devices.items()
        return {s: host_copy(self.leaves, frozenset(d), self.step, hashes) for s, d in each}


def host_copy(
    leaves: Leaves, devices: frozenset[Any], step: int, hashes: Mapping[str, str]
) -> HostCopy:
    """The distinct shards that lie in the host memory of `devices`, as views."""
    shards: dict[str, list[tuple[Index, np.ndarray]]] = {}
    for path, array in leaves.items():
        assert array.sharding.memory_kind == HOST_MEMORY, "what is on a device may be donated"
        distinct = {str(s.index): s for s in array.addressable_shards if s.device in devices}
        shards[path] = [(s.index, np.asarray(s.data)) for s in distinct.values()]
    return HostCopy(step, shards, hashes)


class LocalTransfers:
    """Transfers for devices of this process; see `move` and `host_copy`."""

    def put(self, whole: Mapping[str, np.ndarray], shardings: Shardings) -> Leaves:
        placed: Leaves = jax.device_put(dict(whole), dict(shardings))
        return placed

    def place(self, leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
        placed = jax.block_until_ready(_on_devices(leaf, sharding))
        gc.collect(0)  # JAX lets go of a numpy array that it shared when Python collects garbage
        return placed

    def move(self, leaves: Leaves, donors: frozenset[Any], shardings: Shardings) -> Leaves:
        return move(leaves, donors, shardings)

    def copied(self, shardings: Shardings) -> Shardings:
        return {path: place.with_memory_kind(HOST_MEMORY) for path, place in shardings.items()}

    def copy(self, leaves: Leaves, devices: Mapping[int, Sequence[Any]], step: int) -> LocalCopying:
        return LocalCopying(leaves, devices, step)

    def restore(self, copies: Sequence[HostCopy], shapes: Shapes, shardings: Shardings) -> Leaves:
        whole = copies[0].whole(shapes)
        return {path: self.place(leaf, shardings[path]) for path, leaf in whole.items()}


def _on_devices(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    # Device by device: `jax.device_put` of a replicated array shares one buffer between all CPU
    # devices, and with the array itself.
    places = sharding.addressable_devices_indices_map(array.shape).items()
    parts = [_owned(array[index], device) for device, index in places]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _owned(values: np.ndarray, device: Any) -> jax.Array:
    """In memory that is JAX's own: a CPU device shares a numpy array that is aligned, and then
    could not reuse the memory of what is donated."""
    shared = jax.device_put(values, device)
    return jax.device_put(shared, device, may_alias=False)


def move(leaves: Leaves, donors: frozenset[Any], shardings: Shardings) -> Leaves:
    """Rebuild live leaves on another mesh from the shards that lie on `donors`.

    A device that already holds the right shard keeps it without a copy; the others copy from
    donors of the same index, taken in turn. Only buffers on `donors` are read.
    """
    return {path: _move(array, donors, shardings[path]) for path, array in leaves.items()}


def _move(array: jax.Array, donors: frozenset[Any], sharding: NamedSharding) -> jax.Array:
    shards = [s for s in array.addressable_shards if s.device in donors]
    holds = {s.device: s for s in shards}
    by_index: dict[str, list[Any]] = {}
    for shard in shards:
        by_index.setdefault(str(shard.index), []).append(shard)
    parts = []
    for turn, (device, index) in enumerate(
        sharding.addressable_devices_indices_map(array.shape).items()
    ):
        own = holds.get(device)
        if own is not None and str(own.index) == str(index):
            parts.append(own.data)
        else:
            same = by_index[str(index)]
            parts.append(jax.device_put(same[turn % len(same)].data, device))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)
