"""For tests of recovery: of your own recipe with `assert_recovers` and the pytest plugin, and of
elastix itself with fault schedules and a simulator that runs the real driver on them.

`elastix.testing.strategies` has Hypothesis strategies, and is imported by itself.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastix.backends.simulated import VirtualClock
    from elastix.testing.recovery import assert_recovers
    from elastix.testing.schedules import CELLS, Fault, Kind, Phase, Schedule, random_schedule
    from elastix.testing.shrinking import shrink
    from elastix.testing.simulation import Parts, Result, simulate
    from elastix.testing.slices import SteppingBackend
    from elastix.testing.world import Violation
else:
    from elastix.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "elastix.backends.simulated": ("VirtualClock",),
            "elastix.testing.recovery": ("assert_recovers",),
            "elastix.testing.schedules": (
                *("CELLS", "Fault", "Kind", "Phase", "Schedule", "random_schedule"),
            ),
            "elastix.testing.shrinking": ("shrink",),
            "elastix.testing.simulation": ("Parts", "Result", "simulate"),
            "elastix.testing.slices": ("SteppingBackend",),
            "elastix.testing.world": ("Violation",),
        },
    )

__all__ = [
    "CELLS",
    "Fault",
    "Kind",
    "Parts",
    "Phase",
    "Result",
    "Schedule",
    "SteppingBackend",
    "Violation",
    "VirtualClock",
    "assert_recovers",
    "random_schedule",
    "shrink",
    "simulate",
]
