"""What a bench found: a table for a person, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from statistics import median
from textwrap import fill, indent
from typing import Any
from xml.sax.saxutils import escape

from elastix.benchmark.figures import Found, Row, rows

QUICK = (
    "quick: this shows that the bench works; with so few losses the figures mean nothing, and "
    "those that were not reached say nothing either"
)
NOTES = (
    "A loss is known when it is an event (SlicesLost), and over at the next step committed, "
    "whichever that is; both times are the events' own.",
    "A steady step is the median from commit to commit of steps between which nothing happened, on "
    "as many slices as train after the change, in the same run.",
    "Before what is measured, each slice was lost once and taken back, so that every set of slices "
    "was trained on, and nothing was compiled for 15 steps.",
    "Simulated slices share the cores and memory of one machine: nothing here was measured on "
    "TPUs.",
    "The vendor's loop is elastic_retry of pathwaysutils around a function that builds the mesh, "
    "initialises, compiles and loads from Orbax's Snapshotter; its step sums gradients in any "
    "order, which compiles sooner, and the slices die in the same way.",
    "A restart is from SIGKILL to the first step committed by the same command, `elastix run`, "
    "which resumes from its newest checkpoint.",
)


@dataclass(frozen=True)
class Measured:
    """The parts of one recipe, by name."""

    recipe: str
    parts: dict[str, Found]

    @property
    def rows(self) -> list[Row]:
        return rows(self.parts)

    @property
    def head(self) -> str:
        """The recipe, its size, and what its step takes."""
        found = next((p for p in self.parts.values() if "params" in p), None)
        if found is None:
            return self.recipe
        steps = ", ".join(f"{s * 1e3:.1f} ms on {n}" for n, s in sorted(found["steady"].items()))
        size = f"{found['params']:,} parameters, state of {found['state_bytes'] / 1e6:.1f} MB"
        return f"{self.recipe}: {size}; a step takes {steps} slices"


def text(about: str, found: Sequence[Measured], quick: bool) -> str:
    """The table of each recipe, the hand-written loop, and what the words mean."""
    blocks = [about, *([QUICK] if quick else []), *(_table(measured) for measured in found)]
    source = next((m.parts["overhead"].get("source") for m in found if "overhead" in m.parts), None)
    if source:
        blocks.append("the hand-written loop:\n" + indent(source, "    "))
    notes = (fill(note, 98, initial_indent="- ", subsequent_indent="  ") for note in NOTES)
    return "\n\n".join([*blocks, "\n".join(notes)])


_WORDS = {True: "yes", False: "NO", None: ""}


def _table(measured: Measured) -> str:
    lines = [("", "must reach", "reached", "measured")]
    lines += [(r.figure, r.must, _WORDS[r.reached], r.measured) for r in measured.rows if r.there]
    wide = [max(len(line[column]) for line in lines) for column in range(3)]
    told = (
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, wide, strict=False)), line[3]]).rstrip()
        for line in lines
    )
    return "\n".join([measured.head, *told, _verdict(measured.rows)])


def _verdict(found: Sequence[Row]) -> str:
    asked = [row.reached for row in found if row.reached is not None]
    missing = sum(row.reached is None and bool(row.must) for row in found)
    left = f"; {missing} that must be were not measured" if missing else ""
    return f"reached: {sum(asked)} of {len(asked)}{left}"


# --- the picture ------------------------------------------------------------------------------

WIDTH, LEFT, TOP, ROW, RIGHT = 760, 250, 60, 22, 70
COLORS = {"elastix": "#2ca02c", "the vendor's loop": "#1f77b4", "restart": "#d62728"}

Line = tuple[str, str, list[float]]
"""(whose, which, seconds of each recovery)"""


def recoveries(parts: dict[str, Found]) -> list[Line]:
    """The seconds from each loss being known, or each kill, to the next committed step."""
    wanted = (
        ("elastix", "live, inflight 2", "live-2"),
        ("elastix", "host, inflight 2", "host-2"),
        ("the vendor's loop", "cache on", "vendor-on"),
        ("the vendor's loop", "cache off", "vendor-off"),
        ("restart", "cache on", "restart-on"),
        ("restart", "cache off", "restart-off"),
    )
    found = ((who, which, _seconds_of(parts.get(part, {}))) for who, which, part in wanted)
    return [line for line in found if line[2]]


def _seconds_of(found: Found) -> list[float]:
    if "seconds" in found:
        return list(found["seconds"])
    return [x["known"] if isinstance(x, dict) else x for x in found.get("losses", [])]


def svg(found: Sequence[Measured]) -> str:
    """Each recovery as a dot, and their medians as lines, on a logarithmic axis of seconds."""
    groups = [(m.recipe, recoveries(m.parts)) for m in found]
    seconds = [s for _, lines in groups for _, _, each in lines for s in each] or [0.1, 1.0]
    low, high = _powers(min(seconds), max(seconds))

    def x(value: float) -> float:
        return LEFT + (log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    body, y = [], TOP
    for recipe, lines in groups:
        body.append(_text(10, y + 4, recipe, "#000000"))
        for line in lines:
            y += ROW
            body += _dots(line, y, x)
        y += ROW + 8
    axis = [part for n in range(low, high + 1) for part in _tick(x(10.0**n), y, f"{10.0**n:g}")]
    title = _text(10, 20, "Seconds from a loss being known, or a kill, to the next committed step")
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 40}" '
        'font-family="sans-serif" font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{y + 40}" fill="white"/>'
    return "\n".join([start, ground, title, *axis, *body, "</svg>\n"])


def _powers(least: float, most: float) -> tuple[int, int]:
    """Exponents of ten around the values; at least one apart."""
    low = int(log10(least) // 1)
    return low, max(low + 1, -int(-log10(most) // 1))


def _dots(line: Line, y: float, x: Any) -> list[str]:
    who, which, seconds = line
    color, middle = COLORS[who], median(seconds)
    return [
        _text(24, y + 4, f"{who}, {which}"),
        *(
            f'<circle cx="{x(s):.1f}" cy="{y}" r="3" fill="{color}" fill-opacity="0.4"/>'
            for s in seconds
        ),
        f'<line x1="{x(middle):.1f}" y1="{y - 7}" x2="{x(middle):.1f}" y2="{y + 7}" '
        f'stroke="{color}" stroke-width="2"/>',
        _text(x(max(seconds)) + 8, y + 4, f"{middle:.3g} s", color),
    ]


def _tick(x: float, bottom: float, words: str) -> list[str]:
    line = f'<line x1="{x:.1f}" y1="34" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>'
    return [line, _text(x - 8, bottom + 18, words)]


def _text(x: float, y: float, words: str, color: str = "#333333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}">{escape(words)}</text>'
