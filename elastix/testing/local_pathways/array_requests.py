"""What clients ask about arrays. Each answer fills the response at once, or is a future of it; the
handles of new arrays are given at once, and what goes wrong is found by whoever reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from elastix.testing.local_pathways import messages
from elastix.testing.local_pathways.arrays import Array, Arrays
from elastix.testing.local_pathways.blobs import Blob
from elastix.testing.local_pathways.buffers import Buffers
from elastix.testing.local_pathways.dtypes import KIND_OF_NUMPY, NUMPY_OF_KIND
from elastix.testing.local_pathways.failures import Code, Failure, internal
from elastix.testing.local_pathways.futures import Future, after, failed, gather, then
from elastix.testing.local_pathways.messages import HostView, Key, Shard
from elastix.testing.local_pathways.moves import Moves, Source, error_of
from elastix.testing.local_pathways.protocol import Protocol
from elastix.testing.local_pathways.shardings import Sharding, read_sharding

ALWAYS_COPY, REUSE, DONATE = 1, 2, 3
"""The protocol's copy semantics."""


def dtype_of(proto: Any) -> str:
    """NumPy's name of a `DTypeProto`.

    Raises:
        Failure: UNIMPLEMENTED, such as for strings.
    """
    kind = type(proto).DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_number[proto.kind].name
    if kind not in NUMPY_OF_KIND:
        raise Failure(Code.UNIMPLEMENTED, f"arrays of {kind}")
    return NUMPY_OF_KIND[kind]


def set_dtype(proto: Any, dtype: str) -> None:
    """Write NumPy's name of a dtype to a `DTypeProto`."""
    values = type(proto).DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_name
    proto.kind = values[KIND_OF_NUMPY[dtype]].number


class ArrayRequests:
    """Handlers, by the name of the request."""

    def __init__(self, protocol: Protocol, arrays: Arrays, buffers: Buffers):
        self._protocol, self._arrays, self._buffers = protocol, arrays, buffers
        self._cluster, self._moves = arrays.cluster, Moves(arrays)
        self._slice_of = arrays.cluster.topology.slice_of

    # Made.

    def make_array_from_host_buffer(self, request: Any, response: Any) -> None:
        key = self._arrays.key(request.array_handle)
        blob = self._buffers.take(request.host_buffer_handle)
        response.array_handle = key.handle

        def make() -> None:
            sharding = read_sharding(self._protocol, request.sharding)
            shape, dtype = tuple(request.shape.dims), dtype_of(request.dtype)
            strides = _strides(request)
            boxes = sharding.boxes(shape)
            views = [(HostView(0, dtype, shape, strides, box), [blob]) for box in boxes]
            self._put(key, sharding, shape, dtype, views)

        self._new(key, make)

    def make_arrays_from_host_buffer_shards(self, request: Any, response: Any) -> None:
        keys = self._arrays.keys(request.array_handles, len(request.specs))
        response.array_handles.extend(key.handle for key in keys)
        for key, spec in zip(keys, request.specs, strict=True):
            blobs = [self._buffers.take(of.host_buffer_handle) for of in spec.host_buffers]
            self._new(key, partial(self._shards, key, spec, blobs))

    def _shards(self, key: Key, spec: Any, blobs: list[Blob]) -> None:
        sharding = read_sharding(self._protocol, spec.array_spec.sharding)
        views: dict[int, tuple[HostView, list[Blob]]] = {}
        for at, host, blob in zip(
            spec.addressable_shard_indices, spec.host_buffers, blobs, strict=True
        ):
            shape = tuple(host.shape.dims)
            whole = tuple(slice(0, size) for size in shape)
            view = HostView(0, dtype_of(host.dtype), shape, _strides(host), whole)
            views |= {index: (view, [blob]) for index in at.indices}
        ordered = [views[index] for index in range(len(sharding.devices))]
        dtype = dtype_of(spec.array_spec.dtype)
        self._put(key, sharding, spec.array_spec.shape.dims, dtype, ordered)

    def _put(
        self,
        key: Key,
        sharding: Sharding,
        shape: Sequence[int],
        dtype: str,
        views: Sequence[tuple[HostView, list[Blob]]],
    ) -> None:
        by_slice: dict[int, dict[Shard, tuple[HostView, Blob]]] = {}
        for device, (view, (blob,)) in zip(sharding.devices, views, strict=True):
            by_slice.setdefault(self._slice_of(device), {})[Shard(key, device)] = (view, blob)
        ready = {}
        for slice, shards in by_slice.items():
            blobs = list({id(blob): blob for _, blob in shards.values()}.values())
            command = messages.Put(
                {
                    shard: view._replace(blob=next(i for i, b in enumerate(blobs) if b is blob))
                    for shard, (view, blob) in shards.items()
                }
            )
            ready[slice] = self._cluster.ask(slice, command, blobs)
        self._arrays.add_new(key, sharding, shape, dtype, ready)

    def make_error_arrays(self, request: Any, response: Any) -> None:
        keys = self._arrays.keys(request.array_handles, len(request.array_specs))
        response.array_handles.extend(key.handle for key in keys)
        code = request.error.code
        known = code in Code.__members__.values()
        failure = Failure(Code(code) if known else Code.INTERNAL, request.error.message)
        for key in keys:
            self._arrays.add_error(key, failure)

    # Made of others, shard by shard.

    def assemble_array_from_single_device_arrays(self, request: Any, response: Any) -> None:
        key = self._arrays.key(request.result_handle)
        response.array_handle = key.handle

        def make() -> None:
            sharding = read_sharding(self._protocol, request.sharding)
            parts = [self._arrays.find_usable(i) for i in request.single_device_array_handles]
            dtype = parts[0].dtype if parts else dtype_of(request.dtype)
            self._moves.compose(
                key, sharding, request.shape.dims, dtype, [Source(part, 0) for part in parts]
            )

        self._new(key, make)

    def disassemble_into_single_device_arrays(self, request: Any, response: Any) -> None:
        array = self._arrays.find(request.array_handle)
        keys = self._arrays.keys(request.result_handles, len(array.sharding.devices))
        response.array_handles.extend(key.handle for key in keys)
        for index, key in enumerate(keys):
            self._new(key, partial(self._moves.take_shard, key, array, index))

    def fully_replicated_shard(self, request: Any, response: Any) -> None:
        array = self._arrays.find(request.array_handle)
        key = self._arrays.key(request.result_handle)
        response.array_handle = key.handle
        self._new(key, partial(self._moves.take_shard, key, array, 0))

    def copy_arrays(self, request: Any, response: Any) -> None:
        arrays = [self._arrays.find(handle) for handle in request.array_handles]
        keys = self._arrays.keys(request.result_handles, len(arrays))
        response.array_handles.extend(key.handle for key in keys)
        for key, array in zip(keys, arrays, strict=True):
            self._new(key, partial(self._copy, key, array, request))
        self._donate(request, request.array_handles)

    def _copy(self, key: Key, array: Array, request: Any) -> None:
        old = array.sharding
        sharding = old._replace(
            devices=tuple(request.device_ids) or old.devices,
            memory_kind=request.memory_kind or old.memory_kind,
        )
        if len(sharding.devices) != len(old.devices):
            raise Failure(Code.INVALID_ARGUMENT, "a copy to another number of devices")
        sources = [Source(array, index) for index in range(len(old.devices))]
        self._moves.compose(key, sharding, array.shape, array.dtype, sources)

    def remap_arrays(self, request: Any, response: Any) -> None:
        arrays = [self._arrays.find(handle) for handle in request.array_handles]
        specs = request.plan.output_specs
        keys = self._arrays.keys(request.result_handles, len(specs))
        response.array_handles.extend(key.handle for key in keys)
        for index, (key, spec) in enumerate(zip(keys, specs, strict=True)):
            self._new(key, partial(self._remap, key, index, spec, request.plan, arrays))
        self._donate(request, request.array_handles)

    def _remap(self, key: Key, index: int, spec: Any, plan: Any, arrays: Sequence[Array]) -> None:
        sharding = read_sharding(self._protocol, spec.sharding)
        sources = _by_device(index, plan, arrays) or _by_place(index, plan, arrays, sharding)
        ordered = [sources[device] for device in sharding.devices]
        self._moves.compose(key, sharding, spec.shape.dims, dtype_of(spec.dtype), ordered)

    def reshard_arrays(self, request: Any, response: Any) -> None:
        arrays = [self._arrays.find(handle) for handle in request.array_handles]
        keys = self._arrays.keys(request.result_handles, len(arrays))
        response.array_handles.extend(key.handle for key in keys)
        for key, array, spec in zip(keys, arrays, request.array_specs, strict=True):
            self._new(key, partial(self._reshard, key, array, spec))
        self._donate(request, request.array_handles)

    def _reshard(self, key: Key, array: Array, spec: Any) -> None:
        self._moves.reshard(key, array, read_sharding(self._protocol, spec.sharding))

    def bitcast_arrays(self, request: Any, response: Any) -> None:
        raise Failure(Code.UNIMPLEMENTED, "bitcast of arrays")

    # Read.

    def copy_to_host_buffer(self, request: Any, response: Any) -> Future[None]:
        array = self._arrays.find_usable(request.array_handle)
        if not array.sharding.devices:
            return failed(error_of(array))
        slice = self._moves.home(array, 0)
        there = self._moves.there(array, 0)
        if len(array.sharding.devices) > 1:
            there = self._arrays.is_there(array)
        # Asked for now: the client may forget the array before it is there.
        got = self._cluster.ask(slice, messages.Get(array.shard(0), _strides(request)))

        def keep(answer: Any) -> None:
            self._cluster.check({slice: array.homes[slice]})
            self._buffers.put(request.host_buffer_handle, answer[1][0])

        return then(after([there], got), keep)

    def check_value_ready(self, request: Any, response: Any) -> Future[Any]:
        arrays = [self._arrays.find(handle) for handle in request.value_handles]
        return gather([self._arrays.is_there(array) for array in arrays])

    # Ended.

    def is_array_deleted(self, request: Any, response: Any) -> None:
        response.deleted = self._arrays.find(request.array_handle).is_deleted

    def destruct_array(self, request: Any, response: Any) -> None:
        self._arrays.forget(request.array_handle)

    def _donate(self, request: Any, handles: Sequence[int]) -> None:
        if request.copy_semantics == DONATE:
            self._arrays.delete(handles)

    def _new(self, key: Key, make: Callable[[], None]) -> None:
        """Make an array; what goes wrong is its value."""
        try:
            make()
        except Exception as error:
            self._arrays.add_error(key, internal(error))


def _strides(request: Any) -> tuple[int, ...] | None:
    return tuple(request.byte_strides.strides) if request.HasField("byte_strides") else None


def _by_device(index: int, plan: Any, arrays: Sequence[Array]) -> dict[int, Source]:
    """What a plan says of an output by naming the devices whose shards stay where they are."""
    sources = {}
    for output in plan.input_devices_for_output:
        for of in output.input_devices if output.out_array == index else ():
            array = arrays[of.in_array]
            for device in of.device_list.device_ids:
                sources[device] = Source(array, array.sharding.devices.index(device))
    return sources


def _by_place(
    index: int, plan: Any, arrays: Sequence[Array], sharding: Sharding
) -> dict[int, Source]:
    """What a plan of the older form says: from which places to which, in steps."""
    sources = {}
    for mapping in plan.mappings:
        if mapping.out_array == index:
            source = zip(mapping.from_start, mapping.from_end, mapping.from_step, strict=True)
            target = zip(mapping.to_start, mapping.to_end, mapping.to_step, strict=True)
            for of, to in zip(source, target, strict=True):
                for place, new in zip(range(*of), range(*to), strict=True):
                    sources[sharding.devices[new]] = Source(arrays[mapping.in_array], place)
    return sources
