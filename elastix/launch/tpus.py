"""PURE: the TPU machines of GKE, and which topologies a slice of each may have.

Sources: xpk 1.16 (`core/system_characteristics.py`), the controller of google/pathways-job
(`MachineTypeToTPUVersionMap`, `ValidTpuTopologiesMap`) and pathwaysutils 0.1.13
(`experimental/gke/jobset.py`), which agree wherever more than one of them has an entry. Slices of a
single chip are left out: they are no use to a run on several slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product


@dataclass(frozen=True)
class Tpu:
    """One machine type of one TPU generation."""

    name: str
    """What `--tpu` calls it."""
    accelerator: str
    """Value of the node label `cloud.google.com/gke-tpu-accelerator`."""
    machine: str
    """Compute Engine machine type of a node."""
    chips_per_vm: int
    instance: str
    """What Pathways calls it, before the colon of `tpuv5e:4x4`."""
    xpk: str
    """What `xpk --tpu-type` calls it, before the topology; empty: xpk does not know it."""
    devices_per_chip: int
    """Devices that JAX sees for a chip: 7x shows both of its TensorCores."""
    topologies: frozenset[str]
    """Allowed topologies of a slice, in chips."""


@dataclass(frozen=True)
class SliceType:
    """A slice: a machine type and a topology, such as `v5e:4x4`.

    Raises:
        ValueError: there is no such slice; the message names those that are near.
    """

    tpu: Tpu
    topology: str

    def __post_init__(self) -> None:
        if self.topology not in self.tpu.topologies:
            raise ValueError(
                f"--tpu {self.tpu.name}:{self.topology}: {self.tpu.name} has no such topology, "
                f"use one of {', '.join(_some(self.tpu.topologies))}"
            )

    @property
    def chips(self) -> int:
        return num_chips(self.topology)

    @property
    def vms(self) -> int:
        """Machines in the slice, each a pod."""
        return self.chips // self.tpu.chips_per_vm

    @property
    def devices(self) -> int:
        """Devices of the slice that JAX sees."""
        return self.chips * self.tpu.devices_per_chip

    @property
    def instance_type(self) -> str:
        """The slice as Pathways names it."""
        return f"{self.tpu.instance}:{self.topology}"

    def __str__(self) -> str:
        return f"{self.tpu.name}:{self.topology}"


def parse_slice_type(text: str) -> SliceType:
    """`v5e:4x4` as a slice type.

    Raises:
        ValueError: it is none.
    """
    name, colon, topology = text.partition(":")
    if not colon or name not in TPUS:
        raise ValueError(
            f"--tpu {text}: write TYPE:TOPOLOGY, such as v5e:4x4, with one of the types "
            f"{', '.join(TPUS)}"
        )
    return SliceType(TPUS[name], topology)


def num_chips(topology: str) -> int:
    """Chips of a topology such as `2x2x4`."""
    return math.prod(map(int, topology.split("x")))


def _some(topologies: frozenset[str], most: int = 14) -> list[str]:
    """The smallest topologies, and dots if there are more."""
    ordered = sorted(topologies, key=lambda t: (num_chips(t), t))
    return ordered if len(ordered) <= most else [*ordered[:most], "..."]


def _flat(*topologies: str) -> frozenset[str]:
    return frozenset(topologies)


def _cubic(most_cubes: int) -> frozenset[str]:
    """Below a cube of 4x4x4 chips: parts of it; else up to so many cubes, sides ascending."""
    parts = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
    return frozenset((*parts, *("x".join(map(str, sides)) for sides in _sides(most_cubes))))


def _cubic_in_any_order(most_cubes: int) -> frozenset[str]:
    turned = {"x".join(map(str, t)) for s in _sides(most_cubes) for t in permutations(s)}
    return _cubic(most_cubes) | turned


def _sides(most_cubes: int) -> Iterator[tuple[int, int, int]]:
    cubes = range(1, most_cubes + 1)
    for a, b in product(cubes, cubes):
        if a <= b and a * b * b <= most_cubes:
            for c in range(b, most_cubes // (a * b) + 1):
                yield 4 * a, 4 * b, 4 * c


_V5E = _flat("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

TPUS = {
    tpu.name: tpu
    for tpu in (
        Tpu(
            *("v4", "tpu-v4-podslice", "ct4p-hightpu-4t", 4, "tpuv4", "v4"),
            devices_per_chip=1,
            topologies=_cubic_in_any_order(64),
        ),
        Tpu(
            *("v5e", "tpu-v5-lite-podslice", "ct5lp-hightpu-4t", 4, "tpuv5e", "v5litepod"),
            devices_per_chip=1,
            topologies=_V5E,
        ),
        Tpu(
            *("v5e-8t", "tpu-v5-lite-podslice", "ct5lp-hightpu-8t", 8, "tpuv5e1t", ""),
            devices_per_chip=1,
            topologies=_flat("2x4"),
        ),
        Tpu(
            *("v5p", "tpu-v5p-slice", "ct5p-hightpu-4t", 4, "tpuv5", "v5p"),
            devices_per_chip=1,
            topologies=_cubic(140),
        ),
        Tpu(
            *("v6e", "tpu-v6e-slice", "ct6e-standard-4t", 4, "tpuv6e", "v6e"),
            devices_per_chip=1,
            topologies=_V5E,
        ),
        Tpu(
            *("v6e-8t", "tpu-v6e-slice", "ct6e-standard-8t", 8, "tpuv6e1t", ""),
            devices_per_chip=1,
            topologies=_flat("2x4"),
        ),
        Tpu(
            *("7x", "tpu7x", "tpu7x-standard-4t", 4, "tpu7x", "tpu7x"),
            devices_per_chip=2,
            topologies=_cubic(144),
        ),
    )
}
"""Every machine type, by what `--tpu` calls it."""
