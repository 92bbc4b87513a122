"""What was recorded while a slice held wrong bits is taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elastix.machine import Effect, Event, Live, SlicesLost, State, is_stale, trusted_step


class Log(Protocol):
    """A record of steps."""

    def retract(self, after: int) -> None:
        """Take back what was recorded of steps after `after`."""
        ...


def retract_wrong_steps(*logs: Log) -> Callable[[State, Event, State, tuple[Effect, ...]], None]:
    """An observer of the driver: a wrong slice has added to every gradient since, so the steps
    after the last that was right are no longer on record. They are done again."""

    def observe(before: State, event: Event, _: State, __: tuple[Effect, ...]) -> None:
        corrupt = isinstance(event, SlicesLost) and event.corrupt
        if corrupt and isinstance(before, Live) and not is_stale(before, event):
            for log in logs:
                log.retract(trusted_step(before))

    return observe
