"""Work in other threads, waited for no longer than a deadline.

The threads are daemons: one that hangs, in a compiler or on a dead disk, cannot be ended, and must
not keep the process from ending.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

from elastix.backends import Backend
from elastix.classification import StuckError

_LOOK = 0.05
"""Seconds between two looks at the slices and the clock while something is waited for."""


_unfinished: dict[Future[Any], float] = {}
"""What runs, and how many seconds the end of the process waits for it."""


def start(do: Callable[..., Any], *args: Any, patience: float = 5.0) -> Future[Any]:
    """Run `do(*args)` in a thread of its own.

    Args:
        patience: seconds that the end of the process waits for it.
    """
    job: Future[Any] = Future()
    _unfinished[job] = patience
    job.add_done_callback(_unfinished.pop)
    threading.Thread(target=fill, args=(job, do, *args), name="elastix", daemon=True).start()
    return job


@atexit.register
def _finish() -> None:
    """Python up to 3.13 aborts the process when it ends while a daemon is inside C++."""
    begun = time.monotonic()
    for job, patience in sorted(_unfinished.items(), key=lambda item: item[1]):
        wait([job], timeout=max(0.0, begun + patience - time.monotonic()))


def wait_for(
    job: Future[Any], backend: Backend, slices: Iterable[int], deadline: float, what: str
) -> Any:
    """The result of `job`, or what it raised.

    Raises:
        StuckError: `what` did not finish within `deadline` seconds of the backend's clock.
        JaxRuntimeError: one of `slices` is known to be lost, so that nobody needs the result.
    """
    give_up = backend.now() + deadline
    while True:
        try:
            return job.result(timeout=_LOOK)
        except TimeoutError:
            if job.done():  # it raised that itself
                raise
        backend.check(slices)
        if backend.now() >= give_up:
            raise StuckError(what)


class Worker:
    """One thread that does what it is given, in order."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, do: Callable[..., Any], *args: Any) -> Future[Any]:
        job: Future[Any] = Future()
        self._jobs.put((job, do, args))
        return job

    def close(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds for what was given; then the thread is left to itself."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        while (given := self._jobs.get()) is not None:
            job, do, args = given
            fill(job, do, *args)


def fill(job: Future[Any], do: Callable[..., Any], *args: Any) -> None:
    """Do it in this thread, and put what it returns or raises into `job`."""
    try:
        job.set_result(do(*args))
    except BaseException as error:  # whatever it is, who waits for the job must hear it
        job.set_exception(error)
