"""Copies of the train state that outlive a step: on surviving devices and in host memory.

A host snapshot is one whole copy for each slice, held in that slice's host memory. Nothing here
asks whether a slice is alive: the driver does, before and after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from elastix.train_state import Leaves

Index = tuple[slice, ...]


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

    def whole(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """The leaves put together, as new arrays."""
        return {path: _assemble(shards, shapes[path]) for path, shards in self.shards.items()}


def _assemble(shards: list[tuple[Index, np.ndarray]], shape: tuple[int, ...]) -> np.ndarray:
    whole = np.empty(shape, shards[0][1].dtype)
    for index, values in shards:
        whole[index] = values
    return whole


def copy_to_host(
    leaves: Leaves, devices: frozenset[Any], step: int, hashes: Mapping[str, str]
) -> HostCopy:
    """Copy the distinct shards that lie on `devices` to host memory.

    The copy shares no buffer with the device: on CPU, `np.asarray` of a shard would be a view.
    """
    shards: dict[str, list[tuple[Index, np.ndarray]]] = {}
    for path, array in leaves.items():
        distinct = {str(s.index): s for s in array.addressable_shards if s.device in devices}
        shards[path] = [(s.index, np.array(s.data, copy=True)) for s in distinct.values()]
    return HostCopy(step, shards, hashes)


def to_devices(whole: Mapping[str, np.ndarray], shardings: Mapping[str, NamedSharding]) -> Leaves:
    """Put host arrays on a mesh, each device with a buffer of its own.

    `jax.device_put` of a replicated numpy array shares one buffer between all CPU devices, and
    with the array itself; a copy for each device is what a real device would have.
    """
    return {path: _to_devices(array, shardings[path]) for path, array in whole.items()}


def _to_devices(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    # Device by device: JAX asks once for all that a replicated leaf is equal on, and shares it.
    parts = [
        jax.device_put(np.array(array[index], copy=True), device)
        for device, index in sharding.addressable_devices_indices_map(array.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def move(leaves: Leaves, donors: frozenset[Any], shardings: Mapping[str, NamedSharding]) -> Leaves:
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
