"""How long a recovery takes, by the size of the state and the number of slices, on simulated
slices; a fit; and the floor of a 70B model on 64 slices of v5p, by arithmetic.

Each point is a process of its own that trains a state of that size, loses a slice and takes it
back several times. The first time compiles; those after it are what is reported. Simulated slices
share one machine's memory and cores: the figures are of the machine, not of any TPU.

    python bench/scale.py --out scale.json
    python bench/scale.py --from scale.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.floor import Curve, curves, floor, floor_text, svg

MEGABYTES, SLICES, REPEATS = (1, 4, 16, 64, 200, 500), (2, 4, 8), 3
QUICK = ((1,), (2,), 1)
COPIES = 4
"""About how many copies of the state each slice needs: itself, gradients, two host snapshots."""
MOST_OF_MEMORY = 0.7
PERIOD = 16
"""Steps from one loss to the next."""


@dataclass(frozen=True)
class Point:
    """One size on one number of slices. Seconds, medians over the recoveries that compiled
    nothing, waiting for slices left out; `cold_compile` is of the first."""

    megabytes: float
    slices: int
    loss: float
    regrow: float
    recoveries: int
    cold_compile: float
    costs: dict[str, float]


@dataclass(frozen=True)
class Fit:
    """Least squares: seconds as a sum of terms, each a coefficient and what it is multiplied by."""

    of: str
    terms: dict[str, float]
    points: int
    r_squared: float
    worst: float
    """The largest difference from a point, in seconds."""


def main(argv: list[str] | None = None) -> int:
    """Measure, or read what was measured; print the table, the fits and the floor."""
    given = _parse(argv)
    if given.child:
        print(json.dumps(asdict(measure(*json.loads(given.child)))))
        return 0
    report = given.read or _measure_all(given)
    points = [Point(**point) for point in report["points"]]
    print("\n\n".join([_about(report), table(points), *map(fit_text, fits(points)), floor_text()]))
    return 0


def _measure_all(given: argparse.Namespace) -> dict[str, Any]:
    """Measure and write the report, and the picture beside it."""
    report = _report(*measured(*_wanted(given)))
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    picture = given.out.with_suffix(".svg")
    picture.write_text(svg(*_picture()), encoding="utf-8")
    print(f"wrote {given.out} and {picture}\n")
    return report


def _report(points: list[Point], skipped: list[str]) -> dict[str, Any]:
    """What is written; `costs` are those of the largest state on the most slices, as `elastix
    advise --costs` and `elastix simulate --costs` read them."""
    largest = max(points, key=lambda point: (point.megabytes, point.slices))
    return {
        "about": "simulated slices on one machine; not measured on TPUs",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "points": [asdict(point) for point in points],
        "skipped": skipped,
        "fits": [asdict(fit) for fit in fits(points)],
        "costs": largest.costs,
        "floor": {"seconds_of_a_loss": floor().loss, "seconds_of_a_regrow": floor().regrow},
    }


def _about(report: dict[str, Any]) -> str:
    head = f"{report['about']}: {report['machine']}, Python {report['python']}"
    return "\n".join([head, *(f"left out: {why}" for why in report["skipped"])])


# --- measuring --------------------------------------------------------------------------------


def measured(
    megabytes: list[float], slices: list[int], repeats: int
) -> tuple[list[Point], list[str]]:
    """Each point, in a process of its own, and why others were left out."""
    points, skipped = [], []
    for size in megabytes:
        for count in slices:
            need, there = size * count * COPIES / 1024, _free_gigabytes() * MOST_OF_MEMORY
            if need > there:
                why = f"{size:g} MB on {count} slices: needs {need:.1f} GB, {there:.1f} to be used"
                print(f"left out: {why}", file=sys.stderr, flush=True)
                skipped.append(why)
                continue
            print(f"measuring {size:g} MB on {count} slices", file=sys.stderr, flush=True)
            points.append(_in_a_process(size, count, repeats))
    if not points:
        raise SystemExit("scale.py: no point fits into memory: give smaller --megabytes")
    return points, skipped


def _free_gigabytes() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _in_a_process(size: float, count: int, repeats: int) -> Point:
    words = [sys.executable, __file__, "--child", json.dumps([size, count, repeats])]
    ran = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise SystemExit(f"scale.py: {size:g} MB on {count} slices failed, as told above")
    return Point(**json.loads(ran.stdout.splitlines()[-1]))


def measure(megabytes: float, slices: int, repeats: int) -> Point:
    """Train, lose slice 1 and take it back, `repeats` times and once before, to compile."""
    from bench.scale_recipe import faults, recipe
    from elastix import SimulatedBackend, simulate_devices, train
    from elastix.measured_costs import measure_run

    simulate_devices(slices)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        backend = SimulatedBackend(slices, 1, faults(repeats, PERIOD))
        summary = train(
            recipe(megabytes, slices, repeats, PERIOD), backend=backend, run_dir=run_dir
        )
        if summary.outcome != "done":
            raise SystemExit(f"scale.py: the run {summary.outcome}: {summary.reason}")
        costs = measure_run(run_dir).costs
    losses = [r for r in summary.recoveries if r["kind"] == "loss"]
    regrows = [r for r in summary.recoveries if r["kind"] == "regrow"]
    warm = [[_seconds(r) for r in kind if not r["compiles"]] for kind in (losses, regrows)]
    if not (warm[0] and warm[1]):
        raise SystemExit("scale.py: no recovery without a compile: raise --repeats")
    cold = losses[0]["seconds"]["compile"]
    costs["compile"] = 0.0  # the sets were visited before: what is reported is warm
    number = len(warm[0]) + len(warm[1])
    return Point(megabytes, slices, median(warm[0]), median(warm[1]), number, cold, costs)


def _seconds(recovery: dict[str, Any]) -> float:
    return sum(s for phase, s in recovery["seconds"].items() if phase != "wait")


# --- what was found ---------------------------------------------------------------------------


def fits(points: list[Point]) -> list[Fit]:
    """Of losses, which restore on all slices but one, and of regrows, which do on all."""
    return [
        fit(f"recovery from a {kind}", [getattr(p, kind) for p in points], _terms(points, fewer))
        for kind, fewer in (("loss", 1), ("regrow", 0))
    ]


def _terms(points: list[Point], fewer: int) -> dict[str, list[float]]:
    return {
        "s": [1.0 for _ in points],
        "s per GB on all slices": [p.megabytes / 1024 * (p.slices - fewer) for p in points],
        "s per slice": [float(p.slices) for p in points],
    }


def fit(of: str, seconds: list[float], terms: dict[str, list[float]]) -> Fit:
    """Least squares of the terms that the points can tell apart, in their order."""
    kept: list[str] = []
    for name in terms:
        columns = np.array([terms[n] for n in [*kept, name]]).T
        if np.linalg.matrix_rank(columns) > len(kept):
            kept.append(name)
    columns, wanted = np.array([terms[name] for name in kept]).T, np.array(seconds)
    coefficients = np.linalg.lstsq(columns, wanted, rcond=None)[0]
    off = wanted - columns @ coefficients
    spread = float(np.sum((wanted - wanted.mean()) ** 2))
    r_squared = 1 - float(np.sum(off**2)) / spread if spread else 1.0
    named = dict(zip(kept, map(float, coefficients), strict=True))
    return Fit(of, named, len(seconds), r_squared, float(np.abs(off).max()))


def table(points: list[Point]) -> str:
    """The points as text."""
    head = (
        f"{'state':>8}{'slices':>8}{'step':>9}{'loss':>9}{'regrow':>9}{'of':>5}{'cold compile':>14}"
    )
    rows = (
        f"{p.megabytes:>5g} MB{p.slices:>8}{p.costs['step']:>9.3f}{p.loss:>9.3f}{p.regrow:>9.3f}"
        f"{p.recoveries:>5}{p.cold_compile:>14.2f}"
        for p in points
    )
    return "\n".join(
        ["seconds of a recovery, the median of those that compile nothing", head, *rows]
    )


def fit_text(found: Fit) -> str:
    """The fit in one line and how good it is in another."""
    terms = " + ".join(f"{value:.3g} {name}" for name, value in found.terms.items())
    good = f"R^2 {found.r_squared:.3f}, at most {found.worst:.3g} s off"
    exact = found.points == len(found.terms)
    return (
        f"{found.of} = {terms}\n  {'no more points than terms: it says nothing' if exact else good}"
    )


def _picture() -> tuple[str, dict[str, Curve]]:
    assumed = floor()
    title = "Goodput of 70B on 64 slices of v5p, by a model with assumed costs"
    return title, curves(assumed.costs, assumed.job)


# --- the command line -------------------------------------------------------------------------


def _wanted(given: argparse.Namespace) -> tuple[list[float], list[int], int]:
    sizes, slices, repeats = QUICK if given.quick else (MEGABYTES, SLICES, REPEATS)
    return given.megabytes or list(sizes), given.slices or list(slices), given.repeats or repeats


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--megabytes", metavar="M,M", type=_sizes, help="of state (default: 1 to 500)")
    add("--slices", metavar="N,N", type=_slices, help="simulated slices (default: 2,4,8)")
    add("--repeats", metavar="N", type=_repeats, help="recoveries that count (default: 3)")
    add("--quick", action="store_true", help="one small point, to see that it works")
    add("--out", metavar="FILE", type=Path, default=Path("scale.json"), help="and FILE.svg")
    add("--from", dest="read", metavar="FILE", type=_report_file, help="measure nothing: read this")
    add("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    for path in (given.out, given.out.with_suffix(".svg")):
        if path.exists() and not (given.read or given.child):
            parser.error(f"{path} exists: name another file with --out")
    return given


def _iterate(text: str) -> Iterator[float]:
    for word in text.split(","):
        try:
            yield float(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: write numbers with commas") from None


def _sizes(text: str) -> list[float]:
    sizes = list(_iterate(text))
    if not all(0.01 <= size <= 100_000 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: use 0.01 to 100000 megabytes")
    return sizes


def _slices(text: str) -> list[int]:
    counts = list(_iterate(text))
    if not all(count in range(2, 65) for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r}: use 2 to 64 slices")
    return [int(count) for count in counts]


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use 1 or more")
    return int(text)


def _report_file(text: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(text).read_text(encoding="utf-8"))
        [Point(**point) for point in report["points"]], _about(report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{text!r} is no report of this program ({error}): name a file of --out"
        raise argparse.ArgumentTypeError(why) from None
    return report


if __name__ == "__main__":
    sys.exit(main())
