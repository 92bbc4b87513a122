"""Meshes and shardings: built here, and nothing is moved."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax import Device
from jax.sharding import Mesh, PartitionSpec

from elastix.plain_values import whole

SLICE, FSDP, TENSOR = "slice", "fsdp", "tensor"
"""The mesh axes: across slices (data-centre network), and two inside a slice (ICI)."""

ShardingRules = Sequence[tuple[str, tuple[str | tuple[str, ...] | None, ...]]]
"""Pairs of a regex, searched in a leaf's key path, and the mesh axis, or axes, of each of its
dims."""


@dataclass(frozen=True)
class MeshSpec:
    """How the devices inside a slice are laid out: `fsdp` x `tensor`.

    `fsdp=None` takes all devices that `tensor` leaves.

    Raises:
        ValueError: a size is below 1, or the devices of a slice cannot be laid out so.
    """

    fsdp: int | None = None
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.fsdp is not None:
            whole("mesh.fsdp", self.fsdp, 1)
        whole("mesh.tensor", self.tensor, 1)

    def inner_shape(self, devices_per_slice: int) -> tuple[int, int]:
        """(fsdp, tensor) for a slice of so many devices."""
        fsdp = self.fsdp if self.fsdp is not None else devices_per_slice // self.tensor
        if fsdp * self.tensor != devices_per_slice:
            raise ValueError(
                f"mesh.fsdp={self.fsdp} x mesh.tensor={self.tensor} does not use the "
                f"{devices_per_slice} devices of a slice exactly: choose factors of "
                f"{devices_per_slice}"
            )
        return fsdp, self.tensor

    def build(self, devices: Mapping[int, Sequence[Device]], slices: frozenset[int]) -> Mesh:
        """The mesh (slice, fsdp, tensor) over `slices`, in the order of their ids."""
        ids = sorted(slices)
        shape = (len(ids), *self.inner_shape(len(devices[ids[0]])))
        grid = np.array([devices[s] for s in ids], dtype=object).reshape(shape)
        return Mesh(grid, (SLICE, FSDP, TENSOR))


def partition_spec(
    path: str, shape: tuple[int, ...], rules: ShardingRules, sizes: Mapping[str, int]
) -> PartitionSpec:
    """The spec of one leaf: the first rule whose regex is found in `path`, else replicated.

    Raises:
        ValueError: the rule shards over `slice` (then no slice holds a whole copy, and a loss
            could not be recovered) or over an axis that does not exist, has another rank than the
            leaf, or does not divide it.
    """
    for pattern, axes in rules:
        if not re.search(pattern, path):
            continue
        names = [name for axis in axes for name in _axis_names(axis)]
        if SLICE in names:
            raise ValueError(
                f"sharding rule {pattern!r} puts {path} on the axis 'slice': its shards would die "
                "with their slice; use 'fsdp' or 'tensor'"
            )
        if len(axes) != len(shape):
            raise ValueError(
                f"sharding rule {pattern!r} names {len(axes)} dims, but {path} has shape {shape}"
            )
        for name in names:
            if name not in sizes:
                raise ValueError(
                    f"sharding rule {pattern!r} puts {path} on the axis {name!r}: use 'fsdp' or "
                    "'tensor'"
                )
        for axis, dim in zip(axes, shape, strict=True):
            size = math.prod(sizes[name] for name in _axis_names(axis))
            if dim % size:
                raise ValueError(
                    f"{path} has a dim of {dim}, which mesh axis {axis!r} of size {size} "
                    "does not divide: change the model's size or the mesh"
                )
        return PartitionSpec(*axes)
    return PartitionSpec()


def _axis_names(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one dim is split over."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)
