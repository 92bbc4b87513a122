"""Cloud TPU slices through Pathways: one controller, and slices that die and come back.

The controller is this process; it reaches the slices through a proxy (`JAX_PLATFORMS=proxy`). State
is moved by our own code alone: pathwaysutils is asked to register the proxy, and for nothing else.

Pathways keeps compiled programs itself, so JAX's own cache stays off. Its way to write checkpoints
from the workers (`ENABLE_PATHWAYS_PERSISTENCE=1`, a handler for `jax.Array` in Orbax) is not used:
our checkpoints are one array of bytes with a checksum for each leaf, which are made in the
controller, from the host snapshot of one slice, leaf by leaf. So the controller needs host memory
for two copies of the train state while it saves. The variable may be set; it changes nothing here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from elastix.backends import Health
from elastix.backends.canaries import Canaries
from elastix.backends.proxy import (
    await_port,
    client_deadline,
    no_devices,
    proxy_address,
    proxy_timeout,
    silent,
)
from elastix.backends.remote_memory import OneAtATime, RemoteTransfers
from elastix.background import start, wait_for
from elastix.classification import StuckError, first_line
from elastix.faults import Fault
from elastix.snapshots import HOST_MEMORY, HostSnapshot

_ADMIT_SECONDS = 5.0
"""How long a slice that is about to get a canary is asked for the one it has."""
_LAST_WORDS = 2.0
"""Seconds for the proxy's client, once its time is over, to say what it waited for."""


class PathwaysBackend:
    """The slices that a Pathways proxy shows.

    Args:
        transfer_deadline: seconds for one transfer from or to devices.

    Raises:
        ValueError: there is no proxy, or what it shows is no set of equal slices.
    """

    name = "pathways"

    def __init__(self, transfer_deadline: float = 60.0):
        self.devices = slices_of_equal_size(connect())
        self._began = time.monotonic()
        self._deadline = transfer_deadline
        in_turn = OneAtATime(transfer_deadline)
        kind = host_memory_kind(self.devices)
        self.transfers = RemoteTransfers(self.devices, in_turn, self._in_time, kind)
        self.notes = tuple(_notes(kind))
        """What a user should know before training starts, a line each."""
        put: Callable[..., Any] = lambda values, places: in_turn(jax.device_put, values, places)  # noqa: E731
        self._canaries = Canaries(self.devices, put)
        self._memory: dict[int, dict[int, HostSnapshot]] = {s: {} for s in self.devices}
        self._stuck: list[tuple[frozenset[int], Future[Any]]] = []
        """What did not finish in time, and on which slices."""
        self._suspended: set[int] = set()

    # --- time -------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic() - self._began

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    # --- health -----------------------------------------------------------------------------

    def ended(self, jobs: Sequence[Future[Any]]) -> bool:
        return all(job.done() for job in jobs)

    def probe(self, slices: Iterable[int], deadline: float) -> dict[int, Health]:
        self._resume()
        health = self._canaries.ask(slices, deadline)
        return {s: Health.DOWN if s in self._suspended else h for s, h in health.items()}

    def admit(self, slices: Iterable[int]) -> None:
        """Also the first thing that a recovery does: a profiler trace would not survive it."""
        if self._canaries.lost:
            stop_traces(self._deadline)
        asked = self._canaries.ask(slices, _ADMIT_SECONDS)
        emptied = [s for s, health in asked.items() if health is not Health.UP]
        for slice_id in emptied:
            self._memory[slice_id].clear()
        self._canaries.write(emptied)

    def check(self, slices: Iterable[int]) -> None:
        ids = tuple(slices)
        self._canaries.raise_if_lost(ids)
        self._canaries.glance(ids)

    def wait(self, arrays: Any, slices: Iterable[int], deadline: float) -> None:
        self._within(lambda: jax.block_until_ready(arrays), slices, deadline)

    def read(self, results: Any, slices: Iterable[int], deadline: float) -> Any:
        return self._within(lambda: jax.device_get(results), slices, deadline)

    def _within(self, do: Callable[[], Any], slices: Iterable[int], deadline: float) -> Any:
        """What `do` returns, if it is there by the deadline and the slices are alive after it."""
        ids = frozenset(slices)

        def done() -> Any:
            result = do()
            self._canaries.require(ids)
            return result

        job = start(done)
        try:
            return wait_for(job, self, ids, deadline, "")
        except StuckError:
            self._stuck.append((ids, job))
            raise StuckError from None  # who asked knows better what it was

    def _in_time(self, do: Callable[[Any], Any], arrays: Any) -> Any:
        """For host snapshots: who asks for them looks at the slices afterwards."""
        return wait_for(start(do, arrays), self, (), self._deadline, "copying a host snapshot")

    def suspend(self, slices: Iterable[int]) -> None:
        self._suspended.update(slices)

    def _resume(self) -> None:
        """A slice that has drained, or died over it, counts again."""
        self._stuck = [(ids, job) for ids, job in self._stuck if not job.done()]
        self._suspended &= {s for ids, _ in self._stuck for s in ids}

    # --- what is only asked of simulated slices -----------------------------------------------

    def dispatched(self, step: int, slices: Iterable[int]) -> None:
        """Faults come from the world."""

    def committed(self, step: int) -> None:
        """Faults come from the world."""

    def check_faults(self, faults: Sequence[Fault], num_steps: int) -> None:
        refuse_faults(faults)

    def script_faults(self, faults: Sequence[Fault]) -> None:
        """There are none: `check_faults` refuses them."""

    def unfired_faults(self) -> Sequence[Fault]:
        return ()

    def host_memory(self, slice_id: int) -> dict[int, HostSnapshot]:
        return {} if slice_id in self._canaries.lost else self._memory[slice_id]


def refuse_faults(faults: Sequence[Fault]) -> None:
    """Slices of Pathways die by themselves.

    Raises:
        ValueError: there are faults.
    """
    if faults:
        raise ValueError(
            f"{faults[0].told}: slices of Pathways die by themselves; leave it out, or use "
            "--backend simulated"
        )


# --- the proxy --------------------------------------------------------------------------------


def connect() -> list[Any]:
    """The devices behind the Pathways proxy that the environment names.

    To be called before JAX is used. `PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS` says how many seconds
    the proxy has to answer, 60 by default.

    Raises:
        ValueError: pathwaysutils is missing, the environment names no proxy, or it does not answer.
    """
    try:
        import pathwaysutils
    except ImportError as error:
        raise ValueError(
            f"Pathways needs pathwaysutils ({error}): pip install 'elastix-jax[pathways]'"
        ) from error
    config: Any = jax.config  # whose type does not tell all that it has
    target, seconds = proxy_address(os.environ, config.jax_platforms), proxy_timeout(os.environ)
    give_up = time.monotonic() + seconds
    await_port(target, give_up)
    pathwaysutils.initialize()
    left = max(give_up - time.monotonic(), 1.0)
    with client_deadline(left):
        job = start(jax.devices)
        try:
            return job.result(timeout=left + _LAST_WORDS)
        except TimeoutError:
            why = f"it accepts connections, and says nothing in {seconds:g} s"
            raise ValueError(silent(target, why, seconds)) from None
        except RuntimeError as error:
            raise ValueError(no_devices(target, first_line(error), seconds)) from error


def slices_of_equal_size(devices: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
    """The devices of each slice, by `slice_index`, in the order of their ids.

    Raises:
        ValueError: a device does not tell its slice, or the slices differ in size.
    """
    slices: dict[int, list[Any]] = defaultdict(list)
    for device in sorted(devices, key=lambda d: d.id):
        index = getattr(device, "slice_index", None)
        if index is None:
            raise ValueError(
                f"device {device} has no slice_index: it is none of Pathways. See that JAX was not "
                "used before elastix, and that JAX_PLATFORMS=proxy"
            )
        slices[index].append(device)
    sizes = {s: len(own) for s, own in sorted(slices.items())}
    if len(set(sizes.values())) != 1:
        told = ", ".join(f"slice {s} has {size}" for s, size in sizes.items())
        raise ValueError(
            f"the slices differ in their number of devices ({told or 'there are none'}): start "
            "Pathways with slices of one topology"
        )
    return {s: tuple(slices[s]) for s in sizes}


def host_memory_kind(devices: Mapping[int, Sequence[Any]]) -> str:
    """The memory in which a slice keeps its snapshots: its hosts', or the devices' own if that is
    all there is."""
    device = next(iter(devices.values()))[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    return HOST_MEMORY if HOST_MEMORY in kinds else device.default_memory().kind


def _notes(memory_kind: str) -> Iterable[str]:
    yield "Pathways keeps compiled programs itself: JAX's own cache is off"
    if memory_kind != HOST_MEMORY:
        yield (
            f"the devices have no {HOST_MEMORY} memory: host snapshots are kept in their "
            f"{memory_kind} memory, two copies of the train state on each slice"
        )


def stop_traces(deadline: float) -> None:
    """Stop a profiler trace that somebody began; there may be none."""

    job = start(lambda: jax.profiler.stop_trace())  # pathwaysutils replaces the function
    with contextlib.suppress(TimeoutError):
        job.exception(timeout=deadline)
