"""PURE: numbers, sizes and times in words."""

from __future__ import annotations

import math
from collections.abc import Iterable


def names(slices: Iterable[int]) -> str:
    """Slice ids, in order: `0, 2, 3`."""
    return ", ".join(map(str, sorted(slices)))


def plural(number: int, noun: str, many: str = "") -> str:
    """A count and its noun: `1 step`, `2 steps`, or with `many`: `2 recoveries`."""
    return f"{number} {noun}" if number == 1 else f"{number} {many or noun + 's'}"


def count(value: float) -> str:
    """A number of three digits: `165 k`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def size(value: int) -> str:
    """Bytes in binary units: `1.88 MiB`."""
    for unit_bytes, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit_bytes:
            return f"{value / unit_bytes:.3g} {unit}"
    return f"{value} bytes"


def duration(seconds: float) -> str:
    """Seconds as a person reads them: `7.5 s`, `1:15 min`, `2:00:00`; `?` for NaN."""
    if math.isnan(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02} min"
