"""What the same bits cost: `reduction="ordered"` against `"fast"`.

Both steps of one recipe are timed in turn, on simulated slices of two CPU devices each. The memory
is what XLA plans for the temporaries of one device. The bytes are counted from the compiled steps:
what the devices of one slice send to other slices in a step, on the mean, where XLA's all-reduce
and all-gather go around a ring. Nothing here is a test; the figures go to standard output.

    python bench/reduction.py --models tiny small --repeats 20
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from elastix import AdamW, Recipe
from elastix.data import Text
from elastix.program import Program
from elastix.recipe import Reduction
from models.qwen3 import SIZES, Qwen3Config, next_token_loss

DEVICES_PER_SLICE, MOST_SLICES = 2, 4
REDUCTIONS: tuple[Reduction, ...] = ("fast", "ordered")

MODELS: dict[str, Qwen3Config] = {
    "least": replace(SIZES["tiny"], vocab_size=260, hidden_size=16, num_layers=1),
    "tiny": replace(SIZES["tiny"], vocab_size=260),
    "small": replace(SIZES["small"], vocab_size=260),
}

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
"""Bytes of an element, by XLA's names."""


@dataclass(frozen=True)
class Measured:
    """One compiled step: seconds, of a step and to compile, and bytes."""

    compiling: float
    step: float
    temporaries: int
    sent: float


def main(argv: list[str] | None = None) -> int:
    """Measure, and print a table for each model."""
    given = _parse(argv)
    jax.config.update("jax_num_cpu_devices", DEVICES_PER_SLICE * MOST_SLICES)
    print(f"JAX {jax.__version__}, Python {platform.python_version()} on {platform.machine()}")
    print(f"R={given.replicas}, replicas of {given.examples} x {given.seq_len} tokens", end="")
    print(f", slices of {DEVICES_PER_SLICE} devices, medians of {given.repeats}")
    for name in given.models:
        config = MODELS[name]
        print(f"\n{name}: {config.num_params:,} parameters\n{head()}")
        for num_slices in given.slices:
            fast, ordered = measure(recipe(config, given), num_slices, given.repeats)
            print(row(num_slices, fast, ordered, config.num_params), flush=True)
    return 0


def recipe(config: Qwen3Config, given: argparse.Namespace) -> Recipe:
    return Recipe(
        model=config,
        data=Text(seq_len=given.seq_len),
        optimizer=AdamW(),
        loss=next_token_loss,
        num_steps=1,
        global_batch=given.examples * given.replicas,
        num_replicas=given.replicas,
    )


def measure(recipe: Recipe, num_slices: int, repeats: int) -> list[Measured]:
    """The steps of both reductions, `fast` first; their turns alternate."""
    batch = next(recipe.data.build(recipe.global_batch, 0).batches(0))
    slices, devices = frozenset(range(num_slices)), jax.devices()
    steps, times, costs = [], [], []
    for reduction in REDUCTIONS:
        each = DEVICES_PER_SLICE
        held = {s: devices[s * each : (s + 1) * each] for s in range(num_slices)}
        program = Program(replace(recipe, reduction=reduction), batch, held)
        begin = perf_counter()
        compiled = program.lower_step(slices).compile()
        costs.append((perf_counter() - begin, compiled))
        steps.append(Chain(compiled, program.initial(slices), program.put_batch(batch, slices)))
    for step in steps:
        step()
    for _ in range(repeats):
        times.append([step() for step in steps])
    return [
        Measured(
            compiling,
            median(taken),
            compiled.memory_analysis().temp_size_in_bytes,
            bytes_sent(compiled.as_text(), num_slices),
        )
        for (compiling, compiled), taken in zip(costs, zip(*times, strict=True), strict=True)
    ]


@dataclass
class Chain:
    """Does step after step of one executable, which may donate the state it is given."""

    compiled: Any
    leaves: Any
    batch: Any

    def __call__(self) -> float:
        """Seconds of one step."""
        begin = perf_counter()
        self.leaves, results = self.compiled(self.leaves, self.batch)
        jax.block_until_ready((self.leaves, results))
        return perf_counter() - begin


def head() -> str:
    return (
        f"{'':>6}{'step, s':>16}{'':>9}{'compile, s':>18}{'temporaries, MB':>18}"
        f"{'sent by a slice, MB':>28}\n"
        f"{'slices':>6}{'fast':>8}{'ordered':>8}{'ratio':>9}{'fast':>10}{'ordered':>8}"
        f"{'fast':>10}{'ordered':>8}{'ideal':>12}{'fast':>8}{'ordered':>8}"
    )


def row(num_slices: int, fast: Measured, ordered: Measured, num_params: int) -> str:
    ideal = 2 * (num_slices - 1) / num_slices * 4 * num_params
    return (
        f"{num_slices:>6}{fast.step:>8.3f}{ordered.step:>8.3f}{ordered.step / fast.step:>9.3f}"
        f"{fast.compiling:>10.1f}{ordered.compiling:>8.1f}"
        f"{fast.temporaries / 1e6:>10.1f}{ordered.temporaries / 1e6:>8.1f}"
        f"{ideal / 1e6:>12.2f}{fast.sent / 1e6:>8.2f}{ordered.sent / 1e6:>8.2f}"
    )


def bytes_sent(hlo: str, num_slices: int) -> float:
    """Bytes that a slice sends to others in one execution of an optimized HLO module.

    Loop bodies count as often as they run. The slices' parts of a collective go around a ring.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S))
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)
    assert entry

    def total(name: str) -> float:
        sent = 0.0
        for line in bodies[name].splitlines():
            trips = re.search(r"known_trip_count[^\d]*(\d+)", line)
            called = re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", line)
            called += re.findall(r"%?([\w.\-]+)", "".join(re.findall(r"tations=\{(.*?)\}", line)))
            inner = sum(total(c) for c in called if c in bodies)
            sent += inner * (int(trips.group(1)) if trips else 1) + _sent_by(line)
        return sent

    return total(entry.group(1)) / num_slices


def _sent_by(line: str) -> float:
    """Bytes of all slices together."""
    found = re.search(r"= (.*?) (collective-permute|all-reduce|all-gather|all-to-all)\(", line)
    if not found:
        return 0.0
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", found.group(1))
    result = sum(WIDTHS[kind] * prod(int(d) for d in dims.split(",") if d) for kind, dims in shapes)
    if found.group(2) == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", line)
        return float(result * sum(_slice(a) != _slice(b) for a, b in pairs))
    crossing = [g for g in _groups(line) if len({_slice(d) for d in g}) > 1]
    rounds = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}[found.group(2)]
    return sum(rounds * (len(group) - 1) * result for group in crossing)


def _groups(line: str) -> list[list[int]]:
    """The device groups of a collective: written out, a transposed iota, or axes of a mesh."""
    plain = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    if plain:
        return [[int(d) for d in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", plain.group(1))]
    ids = r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))?"
    mesh = re.search(rf"replica_groups=mesh\[([^\]]*)\]{ids} \{{([^}}]*)\}}", line)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", mesh.group(1))}
        inside = mesh.group(4).split(",")
        names = [name for name in sizes if name not in inside] + inside
        devices = _iota(mesh.group(2) or str(prod(sizes.values())), mesh.group(3))
        devices = devices.reshape(list(sizes.values()))
        devices = devices.transpose([list(sizes).index(n) for n in names])
        return devices.reshape(-1, prod(sizes[name] for name in inside)).tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert iota, f"no device groups in: {line}"
    return _iota(iota.group(2), iota.group(3)).reshape(_numbers(iota.group(1))).tolist()


def _iota(dims: str, order: str | None) -> np.ndarray:
    """All device ids, in an array of these dims, transposed."""
    ids = np.arange(prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _slice(device: int | str) -> int:
    return int(device) // DEVICES_PER_SLICE


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["tiny", "small"])
    add("--slices", nargs="+", type=int, choices=range(1, 5), default=[4, 3, 2, 1])
    add("--repeats", metavar="N", type=_positive, default=20, help="steps timed of each kind")
    add("--replicas", metavar="R", type=_positive, default=12)
    add("--examples", metavar="N", type=_positive, default=8, help="in a replica")
    add("--seq-len", metavar="N", type=_positive, default=64)
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number, 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
