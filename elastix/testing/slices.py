"""Simulated slices for tests: no real time passes, and each step takes a second of the clock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax

from elastix.backends.simulated import SimulatedBackend, VirtualClock, simulate_devices
from elastix.faults import Fault

STEP_SECONDS = 1.0
"""What a committed step takes. On a clock that stood still while steps run, no slice that
returned would be probed, and no policy would take it back."""


class SteppingBackend(SimulatedBackend):
    """Simulated slices on a virtual clock, on which a committed step takes a second.

    Args:
        num_slices: slices, numbered from 0.
        devices_per_slice: CPU devices in each.
        faults: what is lost and returned, and when.

    Raises:
        ValueError: JAX has fewer CPU devices than that, or the faults cannot happen.
    """

    def __init__(
        self, num_slices: int = 4, devices_per_slice: int = 2, faults: Sequence[Fault] = ()
    ):
        for name, value in (("num_slices", num_slices), ("devices_per_slice", devices_per_slice)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: use a whole number, 1 or more")
        self._virtual = VirtualClock()
        super().__init__(num_slices, devices_per_slice, faults, self._virtual)

    def committed(self, step: int) -> None:
        self._virtual.sleep(STEP_SECONDS)
        super().committed(step)


def have_devices(count: int) -> None:
    """Give JAX at least `count` CPU devices, unless its user has set how many there are.

    Raises:
        ValueError: JAX is in use already, with fewer.
    """
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    config: Any = jax.config  # whose type does not tell all that it has
    if not forced and config.jax_num_cpu_devices < count:
        simulate_devices(count)
