"""CPU devices grouped into slices that can be lost and returned, by a script.

A lost slice's memory is really gone: once nothing is in flight, the shards of all live JAX arrays
on its devices are overwritten, and so are the host snapshots it held. Code that reads them gets
NaN (integers: -1). Losses surface as `JaxRuntimeError("DATA_LOSS: ...")`, where they would on
Pathways: when a result is read, or at a dispatch.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

import jax
import numpy as np

from elastix.backends import Health
from elastix.classification import StuckError
from elastix.faults import Corrupt, Fault, Hang, Lose, Return, Script, validate
from elastix.snapshots import HOST_MEMORY, HostCopy, LocalTransfers

_CANARY = 0x5EED
_POISON = 0xFF
_MOST_DEVICES = 4096


class Clock(Protocol):
    """Seconds, and how they pass: by themselves, if it is `real`."""

    real: bool

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The machine's monotonic clock, from 0."""

    real = True

    def __init__(self) -> None:
        self._start = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._start

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """A clock that passes only while somebody sleeps: no test waits."""

    real = False

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class SimulatedBackend:
    """Slices of CPU devices, with a fault script.

    Args:
        num_slices: slices, numbered from 0.
        devices_per_slice: CPU devices in each.
        faults: what is lost and returned, and when.
        clock: real by default; a `VirtualClock` makes waiting free.

    Raises:
        ValueError: JAX has fewer CPU devices than that.
    """

    name = "simulated"
    transfers = LocalTransfers()

    def __init__(
        self,
        num_slices: int = 4,
        devices_per_slice: int = 2,
        faults: Sequence[Fault] = (),
        clock: Clock | None = None,
    ):
        devices = _cpu_devices(num_slices * devices_per_slice)
        self.devices = {
            s: tuple(devices[s * devices_per_slice : (s + 1) * devices_per_slice])
            for s in range(num_slices)
        }
        self._clock = clock or RealClock()
        self.script = Script(faults)
        self._dead: dict[int, str] = {}
        """Lost slices, and where the loss surfaces: at the next `dispatch`, or at a `read`."""
        self._hung: set[int] = set()
        self._suspended: set[int] = set()
        self._silent: set[int] = set()
        self._emptied: set[int] = set()
        """Slices that came back, and hold nothing until they are admitted."""
        self._memory: dict[int, dict[int, HostCopy]] = {s: {} for s in self.devices}
        self._canaries: dict[int, list[jax.Array]] = {}
        self.admit(self.devices)

    def check_faults(self, faults: Sequence[Fault], num_steps: int) -> None:
        validate([*self.script.pending, *faults], self.devices, num_steps)

    def script_faults(self, faults: Sequence[Fault]) -> None:
        self.script = Script([*self.script.pending, *faults])

    def unfired_faults(self) -> list[Fault]:
        return self.script.pending

    # --- time -------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock.now()

    def idle(self, seconds: float) -> None:
        event_in = self.script.next_return_in(self.now())
        if event_in is not None:
            seconds = min(seconds, event_in)
        before = self.now()
        self._clock.sleep(seconds)
        self.script.idled(self.now() - before)
        self._strike_timed()
        self._bring_back(self.script.returns_due())

    def ended(self, jobs: Sequence[Future[Any]]) -> bool:
        if not self._clock.real:
            wait(jobs)
        return all(job.done() for job in jobs)

    def dispatched(self, step: int, slices: Iterable[int]) -> None:
        self._strike(self.script.dispatched(step))

    def committed(self, step: int) -> None:
        self._bring_back(self.script.committed(step, self.now()))
        self._strike_timed()

    # --- health -----------------------------------------------------------------------------

    def probe(self, slices: Iterable[int], deadline: float) -> dict[int, Health]:
        asked = tuple(slices)
        silent = self._silent.intersection(asked)
        if silent:
            self._clock.sleep(deadline)
            self._silent -= silent
        return {s: Health.DOWN if s in silent else self._health(s) for s in asked}

    def _health(self, slice_id: int) -> Health:
        if slice_id in self._dead or slice_id in self._suspended:
            return Health.DOWN
        intact = all(int(np.asarray(c)) == _CANARY for c in self._canaries[slice_id])
        return Health.UP if intact else Health.EMPTIED

    def admit(self, slices: Iterable[int]) -> None:
        for slice_id in slices:
            if self._canaries.get(slice_id) and self._health(slice_id) is Health.UP:
                continue
            self._emptied.discard(slice_id)
            self._canaries[slice_id] = [
                jax.device_put(np.array(_CANARY, np.int32), d) for d in self.devices[slice_id]
            ]

    def check(self, slices: Iterable[int]) -> None:
        self._strike_timed()
        noticed = [s for s in slices if self._dead.get(s) == "dispatch" or s in self._emptied]
        if noticed:
            raise _data_loss(noticed, "dispatch")

    def wait(self, arrays: Any, slices: Iterable[int], deadline: float) -> None:
        ids = tuple(slices)
        self._raise_if_dead(ids)
        if self._hung.intersection(ids):
            self._withhold(ids, deadline)
        jax.block_until_ready(arrays)
        self._raise_if_dead(ids)

    def read(self, results: Any, slices: Iterable[int], deadline: float) -> Any:
        ids = tuple(slices)
        self.wait(results, ids, deadline)
        values = jax.tree.map(lambda x: np.array(x, copy=True), jax.device_get(results))
        self._raise_if_dead(ids)
        return values

    def _withhold(self, slices: Sequence[int], deadline: float) -> None:
        """Let time pass until the deadline, or until a loss is known or the hang is over."""
        give_up = self.now() + deadline
        while self._hung.intersection(slices):
            left = give_up - self.now()
            if left <= 0:
                raise StuckError
            self.idle(min(left, 0.1))
            self._raise_if_dead(slices)

    def suspend(self, slices: Iterable[int]) -> None:
        self._suspended.update(self._hung.intersection(slices))

    def hang(self, slice_id: int) -> None:
        """From now on the slice answers probes and finishes no step, until it is lost or
        returned."""
        self._hung.add(slice_id)

    def corrupt(self, slice_id: int) -> None:
        """Flip one bit of each array of floats on a slice's devices, and tell nobody."""
        live = [a for a in jax.live_arrays() if not a.is_deleted()]
        jax.block_until_ready(live)
        for array in live:
            if array.sharding.memory_kind == HOST_MEMORY:
                continue
            floats = jax.dtypes.issubdtype(array.dtype, np.floating)
            for shard in array.addressable_shards if floats else ():
                if shard.device in self.devices[slice_id] and shard.data.nbytes:
                    first = ctypes.c_uint8.from_address(shard.data.unsafe_buffer_pointer())
                    first.value ^= 1

    def silence(self, slice_id: int) -> None:
        """The slice lives, and does not answer its next probe in time."""
        self._silent.add(slice_id)

    def _raise_if_dead(self, slices: Sequence[int]) -> None:
        dead = [s for s in slices if s in self._dead or s in self._emptied]
        if dead:
            raise _data_loss(dead, "reading a result")

    def host_memory(self, slice_id: int) -> dict[int, Any]:
        return self._memory[slice_id]

    # --- faults -----------------------------------------------------------------------------

    def lose(self, slice_id: int, surfaces: str = "dispatch") -> None:
        """Kill a slice: what its devices and its host memory hold is overwritten."""
        self._dead[slice_id] = surfaces
        self._hung.discard(slice_id)
        self._suspended.discard(slice_id)
        self._wipe(slice_id)

    def give_back(self, slice_id: int) -> None:
        """Return a slice, with empty memory."""
        self._wipe(slice_id)
        self._memory[slice_id].clear()
        self._dead.pop(slice_id, None)
        self._hung.discard(slice_id)
        self._suspended.discard(slice_id)
        self._emptied.add(slice_id)

    def _strike(self, faults: Iterable[Lose | Hang | Corrupt]) -> None:
        for fault in faults:
            if fault.slice in self._dead:
                continue
            if isinstance(fault, Hang):
                self.hang(fault.slice)
            elif isinstance(fault, Corrupt):
                self.corrupt(fault.slice)
            else:
                self.lose(fault.slice, fault.surfaces)
            self.script.struck(fault)

    def _bring_back(self, returns: Iterable[Fault]) -> None:
        for fault in returns:
            if fault.slice in self._dead or fault.slice in self._hung:
                self.give_back(fault.slice)
                self.script.struck(fault)

    def _strike_timed(self) -> None:
        for fault in self.script.timed_due(self.now()):
            if isinstance(fault, Return):
                self._bring_back([fault])
            else:
                self._strike([fault])

    def _wipe(self, slice_id: int) -> None:
        overwrite(jax.live_arrays(), self.devices[slice_id])
        for copy in self._memory[slice_id].values():
            for array in copy.arrays():
                ctypes.memset(array.ctypes.data, _POISON, array.nbytes)


def overwrite(arrays: Sequence[jax.Array], devices: Sequence[Any]) -> None:
    """Overwrite the shards of `arrays` on `devices`, once nothing is in flight.

    Raises:
        RuntimeError: a buffer there is shared with another slice, so that its loss cannot be
            simulated without harming the other.
    """
    live = [a for a in arrays if not a.is_deleted()]
    jax.block_until_ready(live)
    doomed, kept = {}, set()
    for array in live:
        for shard in array.addressable_shards:
            if shard.data.nbytes == 0:
                continue
            data = _raw(shard.data)
            pointer = data.unsafe_buffer_pointer()
            if shard.device in devices:
                doomed[pointer] = (data.nbytes, array)
            else:
                kept.add(pointer)
    for pointer, (nbytes, array) in doomed.items():
        if pointer in kept:
            raise RuntimeError(
                f"an array of shape {array.shape} shares one buffer between slices: "
                "make it with a copy for each device"
            )
        ctypes.memset(pointer, _POISON, nbytes)


def _raw(array: jax.Array) -> jax.Array:
    typed = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if typed else array


def _data_loss(slices: Sequence[int], where: str) -> jax.errors.JaxRuntimeError:
    names = ", ".join(map(str, slices))
    return jax.errors.JaxRuntimeError(f"DATA_LOSS: slice {names} is gone ({where})")


def simulate_devices(count: int) -> None:
    """Give JAX `count` CPU devices. To be called before JAX is used.

    Raises:
        ValueError: JAX is in use already, with fewer, or they are too many for one process.
    """
    if count > _MOST_DEVICES:
        raise ValueError(
            f"{count} simulated devices: use {_MOST_DEVICES} at most, in fewer slices or with "
            "fewer in each"
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        _cpu_devices(count)


def _cpu_devices(count: int) -> list[Any]:
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"{count} CPU devices are needed and JAX has {len(devices)}: call "
            f"elastix.simulate_devices({count}) before JAX is used, or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]
