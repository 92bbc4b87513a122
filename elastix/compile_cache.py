"""Executables compiled ahead of time, kept by mesh: the second visit compiles nothing.

What is needed now is compiled at once, in a thread of its own. What may be needed soon is compiled
by one other thread, one after another, while training goes on; it yields to the threads that train.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Any

import jax

from elastix.background import fill, start

_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"

_NICE = 10
"""How much less than training the thread that warms is scheduled, where the system can tell."""
_PATIENCE = 300.0
"""Seconds that the end of the process waits for a compile in the background."""


class _Counts(threading.local):
    """Compiles of this thread: JAX tells its listeners in the thread that compiles."""

    requests = 0
    hits = 0


class _Process:
    """Compiles of this process. JAX's listeners are global, so there is one of these."""

    requests = 0
    hits = 0
    listening = False


_counts = _Counts()


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _COMPILE:
        _Process.requests += 1
        _counts.requests += 1


def _on_event(event: str, **_: str | int) -> None:
    if event == _HIT:
        _Process.hits += 1
        _counts.hits += 1


def count_compiles() -> tuple[int, int]:
    """(XLA compiles of any program, hits of JAX's persistent cache) since the first call."""
    if not _Process.listening:
        jax.monitoring.register_event_duration_secs_listener(_on_duration)
        jax.monitoring.register_event_listener(_on_event)
        _Process.listening = True
    return _Process.requests - _Process.hits, _Process.hits


def compiles_of_this_thread() -> int:
    """XLA compiles that this thread made, since `count_compiles` was first called."""
    return _counts.requests - _counts.hits


Slices = frozenset[int]


@dataclass(frozen=True)
class Build:
    """Something to be compiled: what it is, for which slices, and how it is traced and lowered."""

    name: str
    slices: Slices
    lower: Callable[[], Any]


class Compilation(Future[Any]):
    """An executable, or on its way to be one; once made, how many XLA compiles it took and its
    size."""

    compiles = 0
    nbytes = 0

    def make(self, build: Build) -> None:
        """Trace, lower and compile, in this thread."""
        fill(self, self._compile, build)

    def _compile(self, build: Build) -> Any:
        before = compiles_of_this_thread()
        executable = build.lower().compile()
        self.compiles = compiles_of_this_thread() - before
        self.nbytes = size_of(executable)
        return executable

    @property
    def failed(self) -> bool:
        return self.done() and self.exception() is not None


def size_of(executable: Any) -> int:
    """Bytes of code where the compiler tells, else of the serialised executable; 0 if neither."""
    with contextlib.suppress(jax.errors.JaxRuntimeError, AttributeError, NotImplementedError):
        code: int = executable.memory_analysis().generated_code_size_in_bytes
        return code or len(executable.runtime_executable().serialize())
    return 0


class CompileCache:
    """Executables by the set of slices and what they are.

    A compiled executable is bound to its devices, so sets of equal size do not share one.

    Args:
        most_bytes: of executables to keep. Beyond it, those of the set that was used least recently
            go first; the set used last stays whatever its size.
    """

    def __init__(self, most_bytes: float = inf) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.RLock()
        self._sets: dict[Slices, dict[str, Compilation]] = {}
        """The first is the first to go, the last is the one in use."""
        self._queue: deque[Build] = deque()
        self._warming = False

    def get(self, build: Build) -> Compilation:
        """The executable, begun now if it was not.

        A compile that failed is begun again in the next call; one that hangs is not.
        """
        with self._lock:
            jobs = self._keep_longest(build.slices)
            job = jobs.get(build.name)
            if job is None or job.failed:
                job = jobs[build.name] = Compilation()
                start(self._make, job, build)
        return job

    def warm(self, builds: Sequence[Build]) -> None:
        """From now on these are made in the background, in this order, and no others: what is being
        made is finished, and what is there already is not made again. It ends where there is no
        room for more."""
        with self._lock:
            in_use = next(reversed(self._sets), None)
            likeliest_first = dict.fromkeys(b.slices for b in builds)
            for slices in (*reversed(likeliest_first), in_use):
                if slices is not None:
                    self._keep_longest(slices)
            self._queue = deque(builds)
            if self._queue and not self._warming:
                self._warming = True
                start(self._warm, patience=_PATIENCE)

    def is_making(self, slices: Slices) -> bool:
        """Whether an executable for `slices` is on its way."""
        with self._lock:
            return any(not job.done() for job in self._sets.get(slices, {}).values())

    @property
    def nbytes(self) -> int:
        """Of all executables that are kept."""
        with self._lock:
            return sum(job.nbytes for jobs in self._sets.values() for job in jobs.values())

    @property
    def sets(self) -> frozenset[Slices]:
        """The sets for which something is made, or is being made."""
        with self._lock:
            return frozenset(slices for slices, jobs in self._sets.items() if jobs)

    def _keep_longest(self, slices: Slices) -> dict[str, Compilation]:
        jobs = self._sets.pop(slices, {})
        self._sets[slices] = jobs
        return jobs

    def _make(self, job: Compilation, build: Build) -> None:
        job.make(build)
        with self._lock:
            if build.slices in self._evict():
                self._queue.clear()  # there is no room for what is less likely than this

    def _warm(self) -> None:
        _yield_to_others()
        while (begun := self._begin()) is not None:
            self._make(*begun)

    def _begin(self) -> tuple[Compilation, Build] | None:
        """The next executable to warm; None if none is left."""
        with self._lock:
            while self._queue:
                build = self._queue.popleft()
                jobs = self._sets.setdefault(build.slices, {})
                if build.name not in jobs:
                    job = jobs[build.name] = Compilation()
                    return job, build
            self._warming = False
        return None

    def _evict(self) -> list[Slices]:
        """Let go of sets, from the first on, until the rest fits; returns which."""
        gone = []
        for slices in list(self._sets)[:-1]:
            jobs = self._sets[slices].values()
            if self.nbytes > self._most_bytes and jobs and all(job.done() for job in jobs):
                gone.append(slices)
                del self._sets[slices]
        return gone


def _yield_to_others() -> None:
    """Let the threads that train go first. Linux schedules each thread for itself."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
