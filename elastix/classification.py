"""What kind of failure an exception is, from its type and the head of its message."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from elastix.machine import ControllerLost, Event, ProgramFailed, Slices, SlicesLost, StepStuck


class StuckError(Exception):
    """Something, `what` if that is known, did not finish before its deadline, and nobody reported a
    loss."""

    def __init__(self, what: str | None = None):
        super().__init__(f"{what or 'something'} did not finish in time")
        self.what = what


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """If something inside is stuck, and does not say what it is, it is `what`."""
    try:
        yield
    except StuckError as error:
        error.what = error.what or what
        raise


class SliceLostError(Exception):
    """The memory of these slices is gone: the world's doing, nobody's defect."""

    def __init__(self, slices: frozenset[int], cause: str):
        super().__init__(cause)
        self.slices, self.cause = slices, cause


class SliceCorruptError(SliceLostError):
    """These slices live, and hold other bits than the others."""


def status_code(error: BaseException | None) -> str | None:
    """The status code at the head of a JAX runtime error, looked for through `__cause__`."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            head = str(error).split(":", 1)[0].strip()
            return head if head.isupper() and " " not in head else "UNKNOWN"
        error = error.__cause__
    return None


_DISCONNECTED = ("Connection to IFRT proxy server was terminated", "writes no longer allowed")


def controller_is_lost(error: BaseException) -> bool:
    """Whether the proxy, and with it every device of this process, is out of reach for good.

    The first call after the connection broke raises UNAVAILABLE; those that follow raise
    FAILED_PRECONDITION, for ever.
    """
    code = status_code(error)
    broken = any(text in str(error) for text in _DISCONNECTED)
    return code == "UNAVAILABLE" or (code is not None and broken)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def trace_of(error: BaseException) -> str:
    """The traceback, as Python prints it."""
    return "".join(traceback.format_exception(error))


def failure_event(
    error: BaseException, mesh: Slices, ask: Callable[[Slices], Slices]
) -> tuple[type[Event], Any]:
    """(event, its fields) for an exception that something on `mesh` raised.

    By the status code at the head of the message, through `__cause__`; then by what the slices
    say: `ask` tells which of them are gone. An error with every canary intact is the program's.
    """
    match error:
        case SliceLostError():
            corrupt = isinstance(error, SliceCorruptError)
            return SlicesLost, {"slices": error.slices, "cause": error.cause, "corrupt": corrupt}
        case StuckError():
            return StepStuck, {"during": error.what or "what was asked for"}
    code, line = status_code(error), first_line(error)
    if controller_is_lost(error):
        return ControllerLost, {"reason": line}
    try:
        gone = ask(mesh)
    except Exception as another:  # to ask the slices may fail as well
        return failure_event(another, mesh, lambda _: frozenset())
    if code == "DATA_LOSS" or (code and gone):
        return SlicesLost, {"slices": gone or mesh, "cause": line}
    reason = f"{type(error).__name__}: {line}"
    return ProgramFailed, {"reason": reason, "trace": trace_of(error)}
