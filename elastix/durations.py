"""PURE: spans of time as they are written on a command line."""

from __future__ import annotations

import math
import re

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, option: str) -> float:
    """Seconds of `90s`, `10m`, `1.5h` or `2d`.

    Raises:
        ValueError: it is none of these, or no time above 0; the message names `option`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{option} {text!r}: write a time above 0 such as 90s, 10m, 3h or 2d")
    return seconds


def long_duration(seconds: float) -> str:
    """The same in words, to three digits: `1.43 s`, `45 min`, `3 h`, `41.7 days`."""
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit or (seconds >= unit and name != "days"):
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
