"""Canaries: a small array on each slice tells whether the slice still has its memory.

Nothing is compiled for it: a canary is put, and read. Slices are asked at once, each in a thread of
its own, so that one that does not answer holds up no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from elastix.backends import Health
from elastix.backends.remote_memory import unread
from elastix.background import start
from elastix.classification import StuckError, controller_is_lost

_CANARY = 0x5EED
_GLANCE = 1.0
"""Seconds between two looks at a slice that nobody asked for."""


class Canaries:
    """What is known of each slice's memory.

    Args:
        devices: the devices of each slice.
        put: `jax.device_put` of a list of arrays on a list of devices.
    """

    def __init__(
        self, devices: Mapping[int, Sequence[Any]], put: Callable[[list[Any], list[Any]], Any]
    ):
        self._devices = {s: one_of_each_host(own) for s, own in devices.items()}
        self._put = put
        self._arrays: dict[int, list[jax.Array]] = {}
        self._hung: dict[int, Future[Health]] = {}
        self._glances: dict[int, tuple[float, Future[Health]]] = {}
        self._lost: dict[int, jax.errors.JaxRuntimeError] = {}

    @property
    def lost(self) -> frozenset[int]:
        """Slices whose canary was found gone, and was not written again."""
        return frozenset(self._lost)

    def write(self, slices: Iterable[int]) -> None:
        """Give each slice a canary. If that fails, the next look tells."""
        for slice_id in slices:
            self._arrays[slice_id] = self._new(slice_id)
            self._lost.pop(slice_id, None)

    def ask(self, slices: Iterable[int], deadline: float) -> dict[int, Health]:
        """Look at all of them now; who does not answer within `deadline` seconds is down.

        Raises:
            JaxRuntimeError: the proxy is gone, and with it everything.
        """
        asked = list(slices)
        jobs = {s: start(self._look, s) for s in asked if not self._hangs(s)}
        _, late = wait(jobs.values(), timeout=deadline)
        self._hung |= {s: job for s, job in jobs.items() if job in late}
        in_time = {s: job.result() for s, job in jobs.items() if job not in late}
        return {s: in_time.get(s, Health.DOWN) for s in asked}

    def glance(self, slices: Iterable[int]) -> None:
        """Begin to look at slices at which nobody has looked for a second, and wait for nothing."""
        now = time.monotonic()
        for slice_id in slices:
            began, job = self._glances.get(slice_id, (-_GLANCE, None))
            if now - began >= _GLANCE and (job is None or job.done()):
                self._glances[slice_id] = now, start(self._look, slice_id)

    def raise_if_lost(self, slices: Iterable[int]) -> None:
        """Raise what a canary that is known to be gone was found gone by."""
        for error in (self._lost[s] for s in slices if s in self._lost):
            raise error

    def require(self, slices: Iterable[int]) -> None:
        """Read the canaries of these slices.

        Raises:
            JaxRuntimeError: one is gone.
        """
        read([a for s in slices for a in self._arrays.get(s, ())])

    def _hangs(self, slice_id: int) -> bool:
        job = self._hung.get(slice_id)
        return job is not None and not job.done()

    def _look(self, slice_id: int) -> Health:
        canary = () if slice_id in self._lost else self._arrays.get(slice_id, ())
        try:
            if canary and read(canary):
                return Health.UP
        except jax.errors.JaxRuntimeError as error:
            if controller_is_lost(error):
                raise
            if canary is self._arrays.get(slice_id):  # nobody wrote another meanwhile
                self._lost[slice_id] = error
        return self._answers(slice_id)

    def _answers(self, slice_id: int) -> Health:
        try:
            return Health.EMPTIED if read(self._new(slice_id)) else Health.DOWN
        except (jax.errors.JaxRuntimeError, StuckError) as error:
            if controller_is_lost(error):
                raise
            return Health.DOWN

    def _new(self, slice_id: int) -> list[jax.Array]:
        devices = self._devices[slice_id]
        return self._put([np.array(_CANARY, np.int32)] * len(devices), devices)


def read(canaries: Sequence[jax.Array]) -> bool:
    """Whether all hold what was written to them."""
    return all(int(value) == _CANARY for value in jax.device_get([unread(c) for c in canaries]))


def one_of_each_host(devices: Sequence[Any]) -> list[Any]:
    """A device for each machine of a slice, by `task_id`; all of them if that is not told."""
    return list({getattr(d, "task_id", ("device", d.id)): d for d in devices}.values())
