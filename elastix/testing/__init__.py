"""For tests of recovery: fault schedules, and a simulator that runs the real driver on them."""

from elastix.backends.simulated import VirtualClock
from elastix.testing.schedules import CELLS, Fault, Kind, Phase, Schedule, random_schedule
from elastix.testing.shrinking import shrink
from elastix.testing.simulation import Parts, Result, simulate
from elastix.testing.world import Violation

__all__ = [
    "CELLS",
    "Fault",
    "Kind",
    "Parts",
    "Phase",
    "Result",
    "Schedule",
    "Violation",
    "VirtualClock",
    "random_schedule",
    "shrink",
    "simulate",
]
