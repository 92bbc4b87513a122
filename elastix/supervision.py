"""Signals for a run on the command line: none is held up by a long compile or a blocking read.

A Python signal handler runs on the main thread, and not while that is inside JAX. So the run goes
on in another thread, and the main thread does nothing but listen.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

Result = TypeVar("Result")


_LISTEN = 0.1
"""Seconds between two looks at what the signals asked for."""


class InterruptedRun(BaseException):
    """The run did not end by itself; `status` is how the process should end: 75 when the grace
    time is over, 130 at the second Ctrl-C. The thread still runs: leave by `os._exit`."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


class _Outcome(Generic[Result]):
    """What a thread returned or raised."""

    def __init__(self) -> None:
        self.result: Result | None = None
        self.error: BaseException | None = None

    def fill(self, work: Callable[[], Result]) -> None:
        try:
            self.result = work()
        except BaseException as error:
            self.error = error


def supervise(work: Callable[[threading.Event], Result], grace: float) -> Result:
    """Run `work(stop)` in a thread. SIGTERM and the first Ctrl-C set `stop`.

    Args:
        grace: seconds after the first signal until the run is given up.

    Raises:
        InterruptedRun: the run was given up.
        BaseException: whatever `work` raised.
    """
    stop, interrupts = threading.Event(), 0
    outcome: _Outcome[Result] = _Outcome()

    def listen(number: int, _: object) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        stop.set()
        if interrupts >= 2:
            raise InterruptedRun(130)

    before = {number: signal.signal(number, listen) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        thread = threading.Thread(
            target=outcome.fill, args=(lambda: work(stop),), name="elastix-driver", daemon=True
        )
        thread.start()
        give_up = inf
        while thread.is_alive():
            thread.join(_LISTEN)
            if stop.is_set():
                give_up = min(give_up, time.monotonic() + grace)
            if time.monotonic() > give_up:
                raise InterruptedRun(75)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if outcome.error is not None:
        raise outcome.error
    return outcome.result  # type: ignore[return-value]
