"""The least that a recovery of a 70B model on 64 slices of v5p can take, by arithmetic.

Nothing here was measured on TPUs. Each assumption is a named parameter with its source, or says
that it is assumed; another value gives another floor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log
from xml.sax.saxutils import escape

from elastix.durations import long_duration
from elastix.goodput_model import STRATEGIES, Costs, Job, best_intervals, break_even, move_seconds

V5P = "docs.cloud.google.com/tpu/docs/v5p"


@dataclass(frozen=True)
class Assumption:
    """A parameter of the floor, and who says so."""

    name: str
    value: float
    unit: str
    source: str


ASSUMPTIONS = (
    Assumption("parameters", 70e9, "", "the question"),
    Assumption("slices", 64, "", "the question"),
    Assumption("chips_per_slice", 64, "", f"assumed: topology 4x4x4, one cube ({V5P})"),
    Assumption("state_bytes_per_parameter", 12, "bytes", "elastix: f32 weights and Adam's moments"),
    Assumption("peak_flops_per_chip", 459e12, "FLOP/s", f"bf16, {V5P}"),
    Assumption("dcn_bytes_per_chip", 50e9 / 8, "bytes/s", f"50 Gbps, all of it, {V5P}"),
    Assumption("host_bytes_per_chip", 16e9, "bytes/s", "assumed: host memory to HBM, each chip"),
    Assumption("flops_per_parameter_and_token", 6, "", "forward and backward, no recomputation"),
    Assumption("tokens_per_step", 2**24, "", "assumed: 16 Mi tokens, 4,096 a chip"),
    Assumption("mfu", 0.5, "", "assumed"),
    Assumption("replicas", 256, "", "assumed: logical replicas, 4 a slice"),
    Assumption("notice", 10, "s", "assumed: nobody measured when a TPU slice's loss surfaces"),
    Assumption(
        "cold_compile", 120, "s", "assumed: only if the smaller set was not compiled before"
    ),
    Assumption("restart", 300, "s", "assumed: pods scheduled, processes up, compiled"),
    Assumption("disk_bytes_per_slice", 20e9, "bytes/s", "assumed: a checkpoint read by each slice"),
    Assumption("write_bytes", 20e9, "bytes/s", "assumed: one slice writes a checkpoint"),
    Assumption("repair", 600, "s", "assumed: until a slice, or another in its place, answers"),
)


@dataclass(frozen=True)
class Floor:
    """Seconds of the parts of the fastest recovery; `costs` are the same for the goodput model."""

    step: float
    slower_step: float
    notice: float
    from_host: float
    """From each survivor's host snapshot to its own devices: nothing crosses the network."""
    to_new_slice: float
    """The whole state over the network, into the slice that joins."""
    cold_compile: float
    costs: Costs
    job: Job

    @property
    def loss(self) -> float:
        """From a loss to the end of the first step after it, everything compiled before."""
        return self.notice + self.from_host + self.slower_step

    @property
    def regrow(self) -> float:
        """From the last step on fewer slices to the end of the first on all."""
        return self.to_new_slice + self.step


def floor(assumptions: Iterable[Assumption] = ASSUMPTIONS, mtbf: float = 1e6) -> Floor:
    """The floor of what is assumed; `mtbf` is of one slice, in seconds, for the goodput."""
    a = {assumption.name: assumption.value for assumption in assumptions}
    state, chips = a["parameters"] * a["state_bytes_per_parameter"], a["chips_per_slice"]
    slices, replicas = int(a["slices"]), int(a["replicas"])
    flops = a["flops_per_parameter_and_token"] * a["parameters"] * a["tokens_per_step"]
    step = flops / (slices * chips * a["peak_flops_per_chip"] * a["mfu"])
    from_host = move_seconds(state, a["host_bytes_per_chip"] * chips)
    to_new = move_seconds(state, a["dcn_bytes_per_chip"] * chips)
    job = Job(slices, replicas, mtbf, a["repair"])
    costs = Costs(
        step=step,
        notice=a["notice"],
        move=max(from_host, to_new),
        snapshot=from_host,
        write=state / a["write_bytes"],
        disk=state / a["disk_bytes_per_slice"],
        restart=a["restart"],
    )
    slower = step / job.speed(slices - 1)
    compile = a["cold_compile"]
    return Floor(step, slower, a["notice"], from_host, to_new, compile, costs, job)


def floor_text() -> str:
    """The assumptions, the floor, and the goodput that would follow."""
    found = floor()
    rows = [f"  {a.name:<30}{a.value:>10.4g} {a.unit:<8}{a.source}" for a in ASSUMPTIONS]
    parts = (
        ("notice", found.notice),
        ("move: host snapshot to devices, each slice its own", found.from_host),
        ("compile: warmed before it is needed", 0.0),
        (f"step on {found.job.num_slices - 1} slices", found.slower_step),
        ("a loss, in all", found.loss),
        ("the same, if the set was not compiled", found.loss + found.cold_compile),
        ("a return: the state over the network, and a step", found.regrow),
    )
    told = [f"  {name:<52}{seconds:>9.2f} s" for name, seconds in parts]
    even = long_duration(break_even(found.costs, found.job))
    return "\n".join(
        [
            "the floor for a 70B model on 64 slices of v5p, by arithmetic; nothing of it was "
            "measured on TPUs",
            *rows,
            "least seconds",
            *told,
            f"break-even of waiting and resizing: a slice that is back within {even}",
        ]
    )


# --- goodput, as a picture --------------------------------------------------------------------

MTBF_HOURS = tuple(10 ** (n / 8) for n in range(8, 33))
"""Of one slice: 10 to 10,000 hours."""

Curve = list[tuple[float, float]]
"""(losses a day in the whole job, goodput)."""


def curves(costs: Costs, job: Job) -> dict[str, Curve]:
    """The goodput of each strategy against how often the job loses a slice, by the closed forms,
    each with the intervals of Daly for its losses."""
    found: dict[str, Curve] = {name: [] for name in STRATEGIES}
    for hours in MTBF_HOURS:
        at = replace(job, mtbf=hours * 3600)
        at = best_intervals(costs, at, 1 / at.failure_rate)
        for name, goodput in STRATEGIES.items():
            found[name].append((at.failure_rate * 86400, goodput(costs, at)))
    return found


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 400, 60, 50, 90, 50
COLORS = {"wait": "#1f77b4", "resize": "#2ca02c", "restart": "#d62728"}


def svg(title: str, lines: dict[str, Curve]) -> str:
    """The curves as an SVG: losses a day on a logarithmic axis, goodput from 0 to 1."""
    rates = [rate for line in lines.values() for rate, _ in line]
    low, high = min(rates), max(rates)

    def x(rate: float) -> float:
        share = log(rate / low) / log(high / low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(goodput: float) -> float:
        return TOP + (1 - goodput) * (HEIGHT - TOP - BOTTOM)

    powers = [10.0**n for n in range(-9, 10) if low <= 10.0**n <= high]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 10}">slices lost a day, in the whole job</text>',
        f'<text x="10" y="{TOP - 10}">goodput</text>',
        *(_grid(LEFT, y(g / 4), WIDTH - RIGHT, y(g / 4), f"{g / 4:.0%}", 20) for g in range(5)),
        *(_grid(x(p), TOP, x(p), HEIGHT - BOTTOM, f"{p:g}", x(p) - 8) for p in powers),
    ]
    for name, line in lines.items():
        points = " ".join(f"{x(rate):.1f},{y(goodput):.1f}" for rate, goodput in line)
        color = COLORS[name]
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>')
    for row, name in enumerate(lines):
        where = f'x="{WIDTH - RIGHT + 12}" y="{TOP + 18 * row + 10}"'
        parts.append(f'<text {where} fill="{COLORS[name]}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _grid(x1: float, y1: float, x2: float, y2: float, text: str, text_x: float) -> str:
    text_y = y2 + 16 if x1 == x2 else y1 + 4
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'
        f'<text x="{text_x:.1f}" y="{text_y:.1f}" fill="#555555">{text}</text>'
    )
