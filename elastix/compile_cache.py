"""Executables compiled ahead of time, kept by mesh: the second visit compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from elastix.background import start

_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"


class _Counts:
    """Counts of this process. JAX's listeners are global, so there is one of these."""

    requests = 0
    hits = 0
    listening = False


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _COMPILE:
        _Counts.requests += 1


def _on_event(event: str, **_: str | int) -> None:
    if event == _HIT:
        _Counts.hits += 1


def count_compiles() -> tuple[int, int]:
    """(XLA compiles of any program, hits of JAX's persistent cache) since the first call."""
    if not _Counts.listening:
        jax.monitoring.register_event_duration_secs_listener(_on_duration)
        jax.monitoring.register_event_listener(_on_event)
        _Counts.listening = True
    return _Counts.requests - _Counts.hits, _Counts.hits


class CompileCache:
    """Executables by (what it is, set of slices).

    A compiled executable is bound to its devices, so sets of equal size do not share one.
    """

    def __init__(self) -> None:
        self._executables: dict[tuple[str, frozenset[int]], Future[Any]] = {}

    def get(self, name: str, slices: frozenset[int], lower: Callable[[], Any]) -> Future[Any]:
        """The executable for these slices, traced and compiled in a thread by the first call.

        A compile that failed is begun again in the next call; one that hangs is not.
        """
        key = (name, slices)
        job = self._executables.get(key)
        if job is None or (job.done() and job.exception()):
            job = self._executables[key] = start(lambda: lower().compile())
        return job
