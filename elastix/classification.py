"""What kind of failure an exception is, from its type and the head of its message."""

from __future__ import annotations

import jax


class StuckError(Exception):
    """Something did not finish before its deadline, and nobody reported a loss."""


class SliceLostError(Exception):
    """The memory of these slices is gone: the world's doing, nobody's defect."""

    def __init__(self, slices: frozenset[int], cause: str):
        super().__init__(cause)
        self.slices, self.cause = slices, cause


def status_code(error: BaseException | None) -> str | None:
    """The status code at the head of a JAX runtime error, looked for through `__cause__`."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            head = str(error).split(":", 1)[0].strip()
            return head if head.isupper() and " " not in head else "UNKNOWN"
        error = error.__cause__
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
