"""PURE: plain values of a configuration, each refused in one line unless it will do."""

from __future__ import annotations

from numbers import Real

LARGEST_WHOLE = 2**31 - 1
"""As far as the counters of a train state count."""
_LARGEST = 3.4e38
"""Larger numbers are infinite in float32."""


def whole(name: str, value: object, least: int, most: int = LARGEST_WHOLE) -> None:
    """Refuse what is no whole number from `least` to `most`.

    Raises:
        ValueError: with the name, the value and the remedy.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: use a whole number, {least} or more")
    if value > most:
        raise ValueError(f"{name}={value!r}: use {most} or less")


def is_number(value: object) -> bool:
    """Whether a value is a real number that is finite in float32 too."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= _LARGEST  # type: ignore[operator]
