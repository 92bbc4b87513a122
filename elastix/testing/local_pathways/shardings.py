"""Shardings as the protocol writes them: read, made, and which part of an array is where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from elastix.testing.local_pathways.failures import Code, Failure
from elastix.testing.local_pathways.messages import Box
from elastix.testing.local_pathways.protocol import Protocol
from elastix.testing.local_pathways.topology import MEMORY_KINDS

HLO, SINGLE = "xla::ifrt::HloSharding", "xla::ifrt::SingleDeviceSharding"
_OTHERS = ("ConcreteEvenSharding", "ConcreteSharding", "OpaqueSharding")


class Sharding(NamedTuple):
    """Devices in order, the kind of memory, and (serialized `xla.OpSharding`) who has what.

    Without `op`, each device has the whole array or nobody knows: see `boxes`.
    """

    devices: tuple[int, ...]
    memory_kind: str = MEMORY_KINDS[0]
    op: bytes | None = None
    is_replicated: bool = False

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """The part of the array that each device has, in the order of the devices.

        Raises:
            Failure: the sharding does not say.
        """
        whole = tuple(slice(0, size) for size in shape)
        if len(self.devices) == 1 or self.is_replicated:
            return [whole] * len(self.devices)
        if self.op is None:
            raise Failure(Code.UNIMPLEMENTED, "a sharding that does not say which device has what")
        return op_boxes(self.op, shape, len(self.devices))


def read_sharding(protocol: Protocol, proto: Any) -> Sharding:
    """From a `ShardingProto`.

    Raises:
        Failure: UNIMPLEMENTED for a type of sharding that is not known.
    """
    name = proto.serialized_sharding.type_name.rpartition("::")[2]
    data = proto.serialized_sharding.data
    if name == "SingleDeviceSharding":
        single = protocol.message("xla.ifrt.SingleDeviceShardingProto").FromString(data)
        return Sharding((single.device_id,), _kind(single))
    if name == "HloSharding":
        hlo = protocol.message("xla.ifrt.HloShardingProto").FromString(data)
        op = hlo.xla_op_sharding.SerializeToString()
        return Sharding(tuple(hlo.devices.device_ids), _kind(hlo), op)
    if name in _OTHERS:
        other = protocol.message(f"xla.ifrt.{name}Proto").FromString(data)
        replicated = getattr(other, "is_fully_replicated", False)
        return Sharding(tuple(other.devices.device_ids), _kind(other), None, replicated)
    raise Failure(Code.UNIMPLEMENTED, f"sharding of type {name}")


def write_sharding(protocol: Protocol, sharding: Sharding) -> Any:
    """To a `ShardingProto`: of one device, or by HLO."""
    proto = protocol.message("xla.ifrt.ShardingProto")()
    if len(sharding.devices) == 1:
        inner = protocol.message("xla.ifrt.SingleDeviceShardingProto")()
        inner.device_id = sharding.devices[0]
        proto.serialized_sharding.type_name = SINGLE
    else:
        inner = protocol.message("xla.ifrt.HloShardingProto")()
        inner.devices.device_ids.extend(sharding.devices)
        inner.xla_op_sharding.ParseFromString(sharding.op or b"")
        proto.serialized_sharding.type_name = HLO
    inner.memory_kind = sharding.memory_kind
    proto.serialized_sharding.data = inner.SerializeToString()
    return proto


def _kind(proto: Any) -> str:
    return proto.memory_kind or MEMORY_KINDS[0]


def op_boxes(op: bytes, shape: Sequence[int], num_devices: int) -> list[Box]:
    """The parts of an array that are tiled as `xla.OpSharding` says; the last may be smaller."""
    from jaxlib import xla_client

    parsed = xla_client.OpSharding()
    parsed.ParseFromString(op)
    tiling = xla_client.HloSharding.from_proto(parsed)
    whole = tuple(slice(0, size) for size in shape)
    if tiling.is_replicated() or tiling.is_maximal() or not tiling.is_tiled():
        return [whole] * num_devices
    counts = tiling.tile_assignment_dimensions()
    placed = np.asarray(tiling.tile_assignment_devices()).reshape(counts)
    boxes: list[Box] = [whole] * num_devices
    for place, device in np.ndenumerate(placed):
        tiles = zip(place[: len(shape)], counts, shape, strict=False)
        boxes[int(device)] = tuple(_tile(index, count, size) for index, count, size in tiles)
    return boxes


def _tile(index: int, count: int, size: int) -> slice:
    step = -(-size // count)
    return slice(min(index * step, size), min((index + 1) * step, size))
