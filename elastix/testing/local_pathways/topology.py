"""PURE: which devices belong to which slice, and the memories they have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")
"""The first is the default. On a CPU all are the same memory."""


@dataclass(frozen=True)
class Topology:
    """So many slices of so many devices; ids count through the slices."""

    num_slices: int
    devices_per_slice: int

    def devices(self, slice: int) -> tuple[int, ...]:
        """The ids of a slice's devices."""
        first = slice * self.devices_per_slice
        return tuple(range(first, first + self.devices_per_slice))

    @property
    def all_devices(self) -> tuple[int, ...]:
        return tuple(range(self.num_slices * self.devices_per_slice))

    def slice_of(self, device: int) -> int:
        """The slice of a device."""
        return device // self.devices_per_slice

    def slices_of(self, devices: Iterable[int]) -> tuple[int, ...]:
        """The slices of some devices, in order."""
        return tuple(sorted({self.slice_of(device) for device in devices}))

    def memory_id(self, device: int, kind: str) -> int:
        """An id for each memory of each device."""
        return device * len(MEMORY_KINDS) + MEMORY_KINDS.index(kind)
