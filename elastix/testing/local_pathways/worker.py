"""The process of one slice: it holds the slice's arrays and runs programs on its devices.

The main thread does what is quick in the order in which it is asked. Programs run in lanes, one
for the slice alone and one for each gang: a program that waits for another slice for ever holds up
neither the heartbeat, nor the memory, nor the programs of this slice alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elastix.testing.local_pathways import messages, runtime
from elastix.testing.local_pathways.blobs import Blob, pack, view
from elastix.testing.local_pathways.futures import Future, gather, settle, then
from elastix.testing.local_pathways.lanes import ABORTED, Lane, OwnLane
from elastix.testing.local_pathways.messages import Shard
from elastix.testing.local_pathways.serving import attach, serve
from elastix.testing.local_pathways.store import Store
from elastix.testing.local_pathways.topology import Topology


class Worker:
    """Does what the server asks, and answers."""

    def __init__(self, topology: Topology, slice: int):
        self._topology, self._slice = topology, slice
        self._store = Store()
        own = topology.devices(slice)
        self._lanes: dict[int | None, Lane] = {None: OwnLane(own, lambda: runtime.alone(own))}

    def do(self, command: Any, blobs: list[Blob]) -> Any:
        """The answer, or a future of it. A tuple is a value and the blobs that go with it."""
        store = self._store
        match command:
            case messages.Ping():
                return None
            case messages.Usage():
                return tuple(store.usage()), []
            case messages.Put(shards):
                for shard, host in shards.items():
                    settle(store.new(shard), _from_host(host, blobs))
            case messages.Alias(shards):
                cells = {shard: store.find(source) for shard, source in shards.items()}
                for shard, cell in cells.items():
                    store.name(shard, cell)
                return then(gather(list(cells.values())), lambda _: None)
            case messages.Gather():
                return self._gather(command)
            case messages.Expect(shard):
                return then(store.expect(shard), lambda _: None)
            case messages.Supply(shard, dtype, shape):
                value = np.array(np.frombuffer(view(blobs[0]), _dtype(dtype)).reshape(shape))
                settle(store.expected(shard), value)
            case messages.Fail(shard, failure):
                settle(store.expected(shard), error=failure)
            case messages.Get(shard, strides):
                return then(store.find(shard), lambda value: _to_host(value, strides))
            case messages.Delete(arrays):
                store.forget(arrays)
            case messages.EndSession(session):
                store.end(session)
                for lane in self._lanes.values():
                    lane.end(session)
            case messages.JoinGang(gang, port, slices):
                rank = slices.index(self._slice)
                devices = [self._topology.devices(i) for i in slices]
                self._lanes[gang] = Lane(devices[rank], lambda: runtime.gang(port, rank, devices))
            case messages.LeaveGang(gang):
                return self._lanes.pop(gang).leave()
            case messages.Load(program, gang):
                return then(self._lane(gang).load(command, blobs[0]), lambda _: None)
            case messages.Unload(program):
                for lane in self._lanes.values():
                    lane.unload(program)
            case messages.Execute():
                return self._execute(command)
            case _:
                raise TypeError(f"no such command: {command!r}")
        return None

    def _lane(self, gang: int | None) -> Lane:
        if gang not in self._lanes:
            raise ABORTED
        return self._lanes[gang]

    def _execute(self, command: messages.Execute) -> Future[None]:
        lane = self._lane(command.gang)
        devices = lane.devices_of(command.program)
        arguments = [self._store.find_all(key) for key in command.arguments]
        self._store.forget(command.donated)
        cells = [
            {device: self._store.new(Shard(key, device)) for device in devices}
            for key in command.results
        ]
        done: Future[None] = Future()

        def finish(ran: Future[list[runtime.Shards]]) -> None:
            error = ran.exception()
            for index, of in enumerate(cells):
                for device, cell in of.items():
                    settle(cell, None if error else ran.result()[index][device], error)
            settle(done, error=error)

        lane.execute(command.program, arguments).add_done_callback(finish)
        return done

    def _gather(self, command: messages.Gather) -> Future[None]:
        target = self._store.new(command.shard)
        sources = [self._store.find(piece.shard) for piece in command.pieces]

        def assemble(_: Any) -> None:
            value = np.empty(command.shape, _dtype(command.dtype))
            for piece, source in zip(command.pieces, sources, strict=True):
                value[piece.target] = source.result()[piece.source]
            settle(target, value)

        done = then(gather(sources), assemble)
        done.add_done_callback(lambda of: settle(target, error=of.exception()))
        return done


def _dtype(name: str) -> np.dtype:
    import ml_dtypes  # names the types that NumPy does not have

    return np.dtype(getattr(ml_dtypes, name, name))


def _from_host(host: messages.HostView, blobs: list[Blob]) -> np.ndarray:
    dtype, data = _dtype(host.dtype), view(blobs[host.blob])
    if 0 in host.shape:
        whole = np.empty(host.shape, dtype)
    else:
        steps = zip(host.strides or (), host.shape, strict=False)
        first = -sum(min(step, 0) * (size - 1) for step, size in steps)
        whole = np.ndarray(host.shape, dtype, data, first, host.strides)
    return np.array(whole[host.box], order="C")


def _to_host(value: np.ndarray, strides: tuple[int, ...] | None) -> tuple[Any, list[Blob]]:
    """The bytes of the smallest region that holds the array laid out by `strides`."""
    if strides is not None and value.size and value.ndim > 1:
        order = sorted(range(value.ndim), key=lambda dim: -strides[dim])
        value = value.transpose(order)
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return (value.dtype.name, value.shape), [pack(flat.data)]


def main(argv: list[str]) -> None:
    """Be a slice: FD PARENT_PID SLICES DEVICES_PER_SLICE SLICE."""
    slices, per_slice, slice = map(int, argv[2:])
    link = attach(argv)
    runtime.survive_peers()
    serve(link, Worker(Topology(slices, per_slice), slice).do)
