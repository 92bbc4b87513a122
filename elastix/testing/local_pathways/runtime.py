"""The one module that uses what JAX does not promise: CPU clients for one slice and for gangs of
slices, coordination services, and executables that are compiled once and loaded anywhere.

A *gang* is a set of slices with a client over all their devices. Each gang has a coordination
service of its own (in the server: a slice may die), so a gang that loses a slice is left behind
while those without that slice, and the programs loaded in them, go on as if nothing had happened.
XLA keeps its communicators by gang, too. Tried on jaxlib 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elastix.testing.local_pathways.dtypes import NUMPY_OF_MLIR
from elastix.testing.local_pathways.messages import Compiled, Result

NEVER = 10**6
"""Seconds. The server knows who is dead: XLA must neither wait for less nor end a process."""
Assignment = Sequence[Sequence[int]]
"""Devices by replica and partition."""
Shards = dict[int, np.ndarray]
"""The parts of one array that are here, by device."""


def set_flags() -> None:
    """For a slice's process, before JAX is imported: CPU only, and collectives that wait for a
    slice that is stopped as long as a TPU would."""
    names = ("timeout", "call_terminate_timeout", "call_warn_stuck_timeout")
    flags = [f"--xla_cpu_collective_{name}_seconds={NEVER}" for name in names]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ["JAX_PLATFORMS"] = "cpu"


def start_service(num_slices: int) -> tuple[int, Any]:
    """A coordination service on a free port of this machine. It is six threads and half a megabyte;
    it ends with its last reference, and ends every process that is still connected."""
    from jaxlib import _jax

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return port, _jax.get_distributed_runtime_service(
        f"127.0.0.1:{port}",
        num_slices,
        heartbeat_timeout=NEVER,
        shutdown_timeout=1,
        recoverable=True,
    )


def warm_up() -> None:
    """Import what the first program would have to wait for."""
    from jax._src import sharding_impls
    from jax._src.interpreters import mlir
    from jaxlib.mlir.dialects import stablehlo

    assert sharding_impls and mlir and stablehlo


def survive_peers() -> None:
    """Keep this process when Gloo would end it for the death of another (Linux).

    A collective that breaks lets its program go on to the next; a peer's message of another size
    is then an exception in a thread of Gloo's, where nothing catches it. That thread sleeps for
    ever instead: the gang is broken and will be left, and the memory here is as good as before.
    """
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        set_terminate = library["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return
    set_terminate(_sleep_for_ever)


@ctypes.CFUNCTYPE(None)
def _sleep_for_ever() -> None:
    threading.Event().wait()


def is_of_peer(error: BaseException) -> bool:
    """Whether a program failed because another process of its gang did."""
    return "Gloo" in str(error)


class Devices:
    """A client, and its devices by the ids that the controller knows."""

    def __init__(self, client: Any, by_id: Mapping[int, Any], peers: Any = None):
        self.client, self.by_id, self._peers = client, by_id, peers
        self.id_of = {device.id: ifrt_id for ifrt_id, device in by_id.items()}

    def part(self) -> None:
        """Disconnect from the gang's coordination service, whose end would end this process. It
        does not wait for peers, nor for a program that never ends."""
        if self._peers is not None:
            self._peers.shutdown()


def alone(devices: Sequence[int]) -> Devices:
    """A client for this process's devices alone, or for a rehearsal on all."""
    from jaxlib import xla_client

    client: Any = xla_client.make_cpu_client(asynchronous=False, num_devices=len(devices))
    return Devices(client, dict(zip(devices, _sorted(client.devices()), strict=True)))


def gang(port: int, rank: int, devices: Sequence[Sequence[int]]) -> Devices:
    """A client over the devices of several slices; returns when all of them have called this."""
    from jaxlib import _jax, xla_client

    peers = _jax.get_distributed_runtime_client(
        f"127.0.0.1:{port}",
        rank,
        init_timeout=NEVER,
        heartbeat_timeout=NEVER,
        shutdown_timeout=1,
        shutdown_on_destruction=False,
    )
    peers.connect()
    collectives = _jax.make_gloo_tcp_collectives(distributed_client=peers, hostname="127.0.0.1")
    client: Any = xla_client.make_cpu_client(
        asynchronous=False,
        distributed_client=peers,
        node_id=rank,
        num_nodes=len(devices),
        collectives=collectives,
        num_devices=len(devices[rank]),
    )
    by_id: dict[int, Any] = {}
    for process, ids in enumerate(devices):
        theirs = [device for device in client.devices() if device.process_index == process]
        by_id |= dict(zip(ids, _sorted(theirs), strict=True))
    return Devices(client, by_id, peers)


def _sorted(devices: Sequence[Any]) -> list[Any]:
    return sorted(devices, key=lambda device: device.id)


def compile_program(
    devices: Devices, artifact: bytes, options: bytes, assignment: Assignment
) -> tuple[bytes, Compiled]:
    """Compile on a client that has all devices; the executable runs on any with as many.

    Returns:
        the executable, serialized, and what is known of it.
    """
    from jax._src.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    with mlir.make_ir_context() as context:
        try:
            module = stablehlo.deserialize_portable_artifact(context, artifact)
        except ValueError:
            module = ir.Module.parse(artifact)
        signature = _Signature(module)
        executable = devices.client.compile_and_load(
            module,
            xla_client.DeviceList(_assigned(devices, assignment)),
            _options(options, devices, assignment),
        )
    return executable.serialize(), signature.compiled(executable)


class _Signature:
    """What the program's text says of its arguments and results."""

    def __init__(self, module: Any):
        from jaxlib.mlir import ir

        main = next(op for op in module.body.operations if _name(op) == "main")
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        self.parameters = [tuple(ir.RankedTensorType(x).shape) for x in kind.inputs]
        self.results = [ir.RankedTensorType(x) for x in kind.results]
        self.types = [(NUMPY_OF_MLIR[str(x.element_type)], tuple(x.shape)) for x in self.results]
        arguments = _attributes(main, "arg_attrs", len(self.parameters))
        self.donated = tuple(
            i
            for i, of in enumerate(arguments)
            if {"tf.aliasing_output", "jax.buffer_donor"} & of.keys()
        )
        told = _attributes(main, "res_attrs", len(self.results))
        self.memory_kinds = [of.get("mhlo.memory_kind", "device").strip('"') for of in told]

    def compiled(self, executable: Any) -> Compiled:
        layouts = _layouts(executable.get_output_layouts())
        rows = zip(self.types, self.memory_kinds, layouts, strict=True)
        modules = executable.hlo_modules()
        stats = executable.get_compiled_memory_stats()
        names = [name for name in dir(stats) if name.endswith("_in_bytes")]
        return Compiled(
            name=modules[0].name,
            results=tuple(Result(*of, kind, layout) for of, kind, layout in rows),
            donated=self.donated,
            parameter_shapes=tuple(self.parameters),
            parameter_layouts=_layouts(executable.get_parameter_layouts()),
            parameter_shardings=_shardings(executable.get_parameter_shardings()),
            result_shardings=_shardings(executable.get_output_shardings()),
            memory={name: int(getattr(stats, name)) for name in names},
            code_size=executable.size_of_generated_code_in_bytes(),
            text="\n\n".join(module.to_string() for module in modules),
            costs={name: float(cost) for name, cost in executable.cost_analysis().items()},
        )


def _name(op: Any) -> str | None:
    return str(op.attributes["sym_name"]).strip('"') if "sym_name" in op.attributes else None


def _attributes(main: Any, name: str, count: int) -> list[dict[str, str]]:
    """The attributes of each argument or result."""
    if name not in main.attributes:
        return [{}] * count
    return [{item.name: str(item.attr) for item in of} for of in main.attributes[name]]


def _layouts(layouts: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(layout._xla_layout().minor_to_major()) for layout in layouts)


def _shardings(shardings: Sequence[Any] | None) -> tuple[bytes, ...] | None:
    return None if shardings is None else tuple(x.SerializeToString() for x in shardings)


def _assigned(devices: Devices, assignment: Assignment) -> tuple[Any, ...]:
    """In the order of IFRT: partition by partition."""
    return tuple(devices.by_id[i] for partition in zip(*assignment, strict=True) for i in partition)


def _options(options: bytes, devices: Devices, assignment: Assignment) -> Any:
    """The compile options, with the client's own names of the devices."""
    from jaxlib import xla_client

    own = [[devices.by_id[i].id for i in replica] for replica in assignment]
    parsed = xla_client.CompileOptions.ParseFromString(options)
    assigned = xla_client.DeviceAssignment.create(np.asarray(own))
    parsed.device_assignment = parsed.executable_build_options.device_assignment = assigned
    return parsed


class Program:
    """An executable loaded on a client, called with this process's shards of the arguments."""

    def __init__(
        self,
        devices: Devices,
        executable: bytes,
        options: bytes,
        assignment: Assignment,
        parameter_shapes: Sequence[tuple[int, ...]],
    ):
        from jaxlib import xla_client

        everywhere = _assigned(devices, assignment)
        self._executable = devices.client.deserialize_executable(
            executable,
            xla_client.DeviceList(everywhere),
            _options(options, devices, assignment),
        )
        self._shapes, self._local = parameter_shapes, self._executable.local_devices()
        self.devices = [devices.id_of[device.id] for device in self._local]
        told = self._executable.get_parameter_shardings()
        self._shardings = _as_shardings(told, everywhere, len(parameter_shapes))

    def __call__(self, arguments: Sequence[Shards]) -> list[Shards]:
        """Run it to its end: the shards of each result, in memory of their own."""
        rows = zip(arguments, self._shapes, self._shardings, strict=True)
        results = self._executable.execute_sharded([self._put(*row) for row in rows])
        arrays = results.disassemble_into_single_device_arrays()
        return [{i: np.array(x) for i, x in zip(self.devices, of, strict=True)} for of in arrays]

    def _put(self, shards: Shards, shape: tuple[int, ...], sharding: Any) -> Any:
        from jax.core import ShapedArray
        from jaxlib import xla_client

        parts = [shards[i] for i in self.devices]
        whole = ShapedArray(shape, parts[0].dtype)
        return xla_client.batched_device_put(whole, sharding, parts, list(self._local))


def _as_shardings(told: Sequence[Any] | None, devices: tuple[Any, ...], count: int) -> list[Any]:
    from jax._src.sharding_impls import GSPMDSharding, SingleDeviceSharding
    from jaxlib import xla_client

    if len(devices) == 1:
        return [SingleDeviceSharding(devices[0])] * count
    if told is None:
        return [GSPMDSharding.get_replicated(devices)] * count
    return [GSPMDSharding(devices, xla_client.HloSharding.from_proto(x)) for x in told]
