"""What elastix needs of the devices it runs on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, Protocol

from elastix.faults import Fault
from elastix.snapshots import HostSnapshot, Transfers


class Health(StrEnum):
    """What a slice's canary tells: intact, gone though the slice answers, or no answer."""

    UP = "up"
    EMPTIED = "emptied"
    DOWN = "down"


class Backend(Protocol):
    """Slices of devices, their health, their host memory and a clock.

    Failures surface as `jax.errors.JaxRuntimeError` from `check` and `read`, or from JAX itself.
    """

    name: str

    @property
    def transfers(self) -> Transfers:
        """How arrays travel to and from these devices."""
        ...

    @property
    def devices(self) -> Mapping[int, Sequence[Any]]:
        """The devices of each slice."""
        ...

    def now(self) -> float:
        """Seconds since the backend began."""
        ...

    def idle(self, seconds: float) -> None:
        """Let up to `seconds` pass while nothing trains; may return early."""
        ...

    def ended(self, jobs: Sequence[Future[Any]]) -> bool:
        """Whether all of this work in the background is over. Where time is virtual none passes
        meanwhile, so there it is waited for."""
        ...

    def probe(self, slices: Iterable[int], deadline: float) -> dict[int, Health]:
        """Read the canary of each slice; one that does not answer within `deadline` seconds is
        down. Compiles nothing."""
        ...

    def admit(self, slices: Iterable[int]) -> None:
        """Write a canary on slices that are about to hold state."""
        ...

    def check(self, slices: Iterable[int]) -> None:
        """Raise if work dispatched to these slices would fail at once."""
        ...

    def dispatched(self, step: int, slices: Iterable[int]) -> None:
        """A step was dispatched to these slices."""
        ...

    def committed(self, step: int) -> None:
        """A step was committed."""
        ...

    def wait(self, arrays: Any, slices: Iterable[int], deadline: float) -> None:
        """Wait until `arrays` on these slices are computed.

        Raises:
            StuckError: they are not within `deadline` seconds. A loss that is known by then is
                raised instead, at once.
        """
        ...

    def read(self, results: Any, slices: Iterable[int], deadline: float) -> Any:
        """Wait for results and bring them to the host, as values that share no device memory.

        Raises:
            StuckError: as `wait`.
        """
        ...

    def suspend(self, slices: Iterable[int]) -> None:
        """These slices do not finish what they were given: they count as down until they do."""
        ...

    def check_faults(self, faults: Sequence[Fault], num_steps: int) -> None:
        """Refuse faults that cannot happen in a run of so many steps.

        Raises:
            ValueError: such a fault, or a backend whose slices die by themselves.
        """
        ...

    def script_faults(self, faults: Sequence[Fault]) -> None:
        """Add faults to what will happen."""
        ...

    def unfired_faults(self) -> Sequence[Fault]:
        """Scripted faults that did not strike."""
        ...

    def host_memory(self, slice_id: int) -> dict[int, HostSnapshot]:
        """The host memory of a slice: its snapshots by step. Empty after the slice died."""
        ...


def slices_of(health: Mapping[int, Health], *kinds: Health) -> frozenset[int]:
    """The slices found in one of these conditions."""
    return frozenset(s for s, h in health.items() if h in kinds)
