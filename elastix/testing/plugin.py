"""The pytest plugin: simulated slices as a fixture, and fault scripts as a marker.

    @pytest.mark.slices(3, devices_per_slice=1)
    @pytest.mark.faults("lose 1@12", "return 1@20")
    def test_a_lost_slice_is_taken_back(slices):
        assert elastix.train(recipe(), backend=slices).outcome == "done"

Every pytest that finds elastix installed imports this module: JAX is imported only for a session
that has a test of slices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from elastix.faults import Fault
    from elastix.testing.slices import SteppingBackend

_MARKERS = (
    "slices(num_slices=4, devices_per_slice=2): how many simulated slices, of how many CPU "
    "devices, the fixture `slices` has.",
    "faults(*lines): the fault script of the fixture `slices`, a fault a line or string: "
    "`lose SLICE@STEP`, `hang SLICE@STEP` or `return SLICE@STEP`, or SLICE@SECONDSs; # begins a "
    "comment. A test whose faults do not all strike fails.",
)
_LEAST_DEVICES = 8
_ANY = 2**63
"""More steps than a run has. How many it has, `train` will know."""
_BACKEND = pytest.StashKey["SteppingBackend"]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, which `pytest --markers` shows."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Give JAX the devices that the largest test needs, while it can still be given any."""
    wanted = [_devices(item) for item in session.items if _of_slices(item)]
    if wanted and not session.config.option.collectonly:
        from elastix.testing.slices import have_devices

        # If JAX is in use already, the tests that need more than it has will say so.
        with contextlib.suppress(ValueError):
            have_devices(max(_LEAST_DEVICES, *wanted))


@pytest.fixture
def slices(request: pytest.FixtureRequest) -> Iterator[SteppingBackend]:
    """Simulated slices on a virtual clock: 4 of 2 CPU devices, or what the marker `slices` says.

    They run the fault script of the marker `faults`. No real time passes: a committed step takes
    one second of the clock. A lost slice takes every JAX array on its devices with it, the test's
    own too. The test fails if a fault of the script did not strike.
    """
    item = request.node
    try:
        backend = _backend(item)
    except ValueError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    item.stash[_BACKEND] = backend
    yield backend
    del item.stash[_BACKEND]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a fault script that nothing would run."""
    if item.get_closest_marker("faults") and "slices" not in _fixtures(item):
        pytest.fail(
            f"{_place(item)}: the marker `faults` is for the fixture `slices`: add it to the "
            "test's arguments",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that passed although a fault of its script did not strike."""
    result = yield
    backend = item.stash.get(_BACKEND, None)
    unfired = backend.unfired_faults() if backend else ()
    if unfired:
        from elastix.faults import script_line

        told = ", ".join(script_line(fault) for fault in unfired)
        pytest.fail(f"{_place(item)}: did not strike: {told}", pytrace=False)
    return result


def _backend(item: pytest.Item) -> SteppingBackend:
    from elastix.faults import validate
    from elastix.testing.slices import SteppingBackend

    options = _options(item)
    try:
        backend = SteppingBackend(**options)
    except ValueError as error:
        raise ValueError(f"{_place(item)}: slices: {error}") from error
    faults = _script(item)
    validate(faults, backend.devices, num_steps=_ANY)
    backend.script_faults(faults)
    return backend


def _script(item: pytest.Item) -> tuple[Fault, ...]:
    from elastix.faults import parse_script

    marker = item.get_closest_marker("faults")
    lines = marker.args if marker else ()
    if marker and (marker.kwargs or not all(isinstance(line, str) for line in lines)):
        raise ValueError(
            f"{_place(item)}: faults{_call(marker)}: write strings such as 'lose 1@12'"
        )
    return parse_script("\n".join(lines), f"{_place(item)}: fault script")


def _options(item: pytest.Item) -> dict[str, Any]:
    """What the marker `slices` says, by name."""
    marker = item.get_closest_marker("slices")
    if marker is None:
        return {}
    names = ("num_slices", "devices_per_slice")
    given = {**dict(zip(names, marker.args, strict=False)), **marker.kwargs}
    if len(marker.args) > len(names) or not given.keys() <= set(names):
        raise ValueError(
            f"{_place(item)}: slices{_call(marker)}: write slices(4, devices_per_slice=2)"
        )
    return given


def _devices(item: pytest.Item) -> int:
    """How many devices a test asks for; what makes no sense is refused when it runs."""
    try:
        numbers = ({"num_slices": 4, "devices_per_slice": 2} | _options(item)).values()
    except ValueError:
        return 0
    return math.prod(numbers) if all(isinstance(n, int) for n in numbers) else 0


def _of_slices(item: pytest.Item) -> bool:
    return "slices" in _fixtures(item) or item.get_closest_marker("slices") is not None


def _fixtures(item: pytest.Item) -> tuple[str, ...]:
    return tuple(getattr(item, "fixturenames", ()))


def _place(item: pytest.Item) -> str:
    """Where the test is, as `file:line`."""
    path, line, _ = item.location
    return path if line is None else f"{path}:{line + 1}"


def _call(marker: pytest.Mark) -> str:
    keywords = (f"{name}={value!r}" for name, value in marker.kwargs.items())
    return f"({', '.join([*map(repr, marker.args), *keywords])})"
