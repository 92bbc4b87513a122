"""Compiles that take a fixed time of the world's clock, however long they take on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from elastix.machine import Slices
from elastix.testing.world import World

COMPILE_SECONDS = 2.0


@dataclass(frozen=True)
class TimedCompile:
    """A compile that is done at second `ready_at`; real ones are waited for then."""

    world: World
    ready_at: float
    jobs: Sequence[Future[Any]]

    def done(self) -> bool:
        if self.world.clock.now() < self.ready_at:
            return False
        for job in self.jobs:
            job.exception()
        return True


class TimedCompiles:
    """One for each set of slices, begun when it is first asked for."""

    def __init__(self, world: World):
        self._world = world
        self._begun: dict[Slices, TimedCompile] = {}

    def begin(self, mesh: Slices, jobs: Sequence[Future[Any]] = ()) -> TimedCompile:
        if mesh not in self._begun:
            ready_at = self._world.clock.now() + COMPILE_SECONDS
            self._begun[mesh] = TimedCompile(self._world, ready_at, jobs)
        return self._begun[mesh]

    def is_making(self, mesh: Slices) -> bool:
        return mesh in self._begun and not self._begun[mesh].done()

    def wait(self, mesh: Slices) -> None:
        """Let the time pass that it takes, or still takes."""
        left = self.begin(mesh).ready_at - self._world.clock.now()
        if left > 0:
            self._world.pass_time(left)
