"""What will be told to the machine: events, a wake-up, and what is compiled in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from typing import Any

from elastix.machine import Compile, Compiled, Event, WakeAt, Woke


class Pending:
    """Events in the order in which they happened, then what its time has come for.

    Args:
        ended: whether work in the background is over.
    """

    def __init__(self, ended: Callable[[Sequence[Future[Any]]], bool]) -> None:
        self._events: deque[Event] = deque()
        self._wake: WakeAt | None = None
        self._compile: tuple[Compile, Sequence[Future[Any]]] | None = None
        self._ended = ended

    def tell(self, event: Event) -> None:
        self._events.append(event)

    def wake_at(self, effect: WakeAt) -> None:
        """Wake at that time, and not at one that was asked for before."""
        self._wake = effect

    def when_compiled(self, effect: Compile, jobs: Sequence[Future[Any]]) -> None:
        """Tell when all the jobs have ended, and no more of those that were asked for before."""
        self._compile = effect, jobs

    def next(self, now: float) -> Event | None:
        """What to tell now, if there is anything."""
        if self._events:
            return self._events.popleft()
        if self._wake and now >= self._wake.at:
            epoch, self._wake = self._wake.epoch, None
            return Woke(at=now, epoch=epoch)
        if self._compile and self._ended(self._compile[1]):
            effect, self._compile = self._compile[0], None
            return Compiled(at=now, epoch=effect.epoch, mesh=effect.mesh)
        return None

    @property
    def wakes_at(self) -> float:
        """When the next wake-up is due: never, if none was asked for."""
        return self._wake.at if self._wake else inf

    def begin_epoch(self) -> None:
        """Nobody waits for wake-ups and compiles any more."""
        self._wake = self._compile = None
