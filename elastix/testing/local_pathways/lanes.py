"""What runs programs in a slice's process: lanes, on arrays that may be under way."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from elastix.testing.local_pathways import messages, runtime
from elastix.testing.local_pathways.blobs import Blob, view
from elastix.testing.local_pathways.failures import Code, Failure, internal
from elastix.testing.local_pathways.futures import Future, chain, gather, settle, submit, then
from elastix.testing.local_pathways.messages import Key

Cells = dict[int, Future[np.ndarray]]
"""The shards of one array on this slice, by device: there, to come, or errors."""
ABORTED = Failure(Code.CANCELLED, "the gang was left")
_letting_go = threading.Lock()


class Loaded(NamedTuple):
    """A program, when it is loaded, and the devices of this slice that it runs on."""

    program: Future[runtime.Program]
    devices: tuple[int, ...]


class Lane:
    """Programs of one gang, one after the other in a thread of their own: in the order in which all
    its slices run them, also if one has to wait for its arguments."""

    def __init__(self, own: tuple[int, ...], make: Callable[[], runtime.Devices]):
        self._own = own
        self._thread = ThreadPoolExecutor(1)
        self._waiting: set[Future[Any]] = set()
        self._devices = self._run(make)
        self._programs: dict[Key, Loaded] = {}
        self._broken: BaseException | None = None

    def load(self, command: messages.Load, executable: Blob) -> Future[runtime.Program]:
        def load() -> runtime.Program:
            return runtime.Program(
                self._devices.result(),
                bytes(view(executable)),
                command.options,
                command.assignment,
                command.parameter_shapes,
            )

        assigned = {device for replica in command.assignment for device in replica}
        here = tuple(device for device in self._own if device in assigned)
        loaded = self._programs[command.program] = Loaded(self._run(load), here)
        return loaded.program

    def devices_of(self, program: Key) -> tuple[int, ...]:
        """Of this slice, those the program runs on."""
        if program not in self._programs:
            raise Failure(Code.NOT_FOUND, "the program is not loaded")
        return self._programs[program].devices

    def unload(self, program: Key) -> None:
        self._programs.pop(program, None)

    def end(self, session: int) -> None:
        for key in [key for key in self._programs if key.session == session]:
            self.unload(key)

    def execute(self, program: Key, arguments: list[Cells]) -> Future[list[runtime.Shards]]:
        """The results, when the program has run."""
        return self._run(self._call(program, arguments))

    def _call(self, program: Key, arguments: list[Cells]) -> Callable[[], list[runtime.Shards]]:
        """To be run later, also if the program is forgotten meanwhile."""
        loaded, devices = self._programs[program]

        def execute() -> list[runtime.Shards]:
            values = [_values(of, devices) for of in arguments]
            if self._broken is not None:
                raise self._broken
            try:
                return loaded.result()(values)
            except Exception as error:
                if runtime.is_of_peer(error):
                    # To go on would send the peers that wait in this program parts of the next.
                    self._broken = internal(error)
                raise

        return execute

    def leave(self) -> Future[None]:
        """What is under way has failed; the thread may be inside XLA for long, and is not ours.
        The client is let go when nothing runs there any more, in a thread that can wait for it.

        Returns:
            when the gang's coordination service may end without this process.
        """
        for future in list(self._waiting):
            settle(future, error=ABORTED)
        self._thread.shutdown(wait=False, cancel_futures=True)
        parted: Future[None] = Future()
        threading.Thread(target=self._let_go, args=(parted,), daemon=True).start()
        return parted

    def _let_go(self, parted: Future[None]) -> None:
        """The end of a client waits for its threads, and one that Gloo has broken never comes. A
        client is part of a cycle: collected by any other thread, it could hold that up for ever.
        One that was not made yet when the gang was left, perhaps in vain, parts by its end."""
        if then(self._devices, runtime.Devices.part).exception() is None:
            settle(parted)
        self._thread.shutdown(wait=True)
        with _letting_go:
            gc.disable()
            self._programs.clear()
            del self._devices
            gc.collect()
            gc.enable()
        settle(parted)

    def _run(self, work: Callable[[], Any]) -> Future[Any]:
        future = submit(self._thread, work)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future


class OwnLane(Lane):
    """Programs of the slice alone: one that has its arguments goes before one that waits, for ever
    perhaps, for those of a gang."""

    def execute(self, program: Key, arguments: list[Cells]) -> Future[list[runtime.Shards]]:
        call, devices = self._call(program, arguments), self.devices_of(program)
        needed = [cells[i] for cells in arguments for i in devices if i in cells]
        return chain(gather(needed), lambda _: self._run(call))


def _values(cells: Cells, devices: tuple[int, ...]) -> runtime.Shards:
    """Waits for those that are under way."""
    missing = [device for device in devices if device not in cells]
    if missing:
        raise Failure(Code.NOT_FOUND, f"no argument on devices {missing}")
    return {device: cells[device].result() for device in devices}
