"""`elastix advise`: how often a recipe should save, how long wait, and what goodput to expect."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastix.advice import Advice, advise, as_text
from elastix.durations import parse_duration
from elastix.goodput import Spent, spent
from elastix.goodput_model import Job, whole_steps
from elastix.jsonl import RowReader
from elastix.measured_costs import KnownCosts, MeasuredRun, measure_run, read_costs
from elastix.overrides import override
from elastix.recipe import Recipe
from elastix.recipe_loading import load_recipe
from elastix.usage import UsageParser

DEFAULT_SLICES = 4
DEFAULT_REPAIR = "10m"

_ABOUT = """\
For a recipe and how often a slice fails: the best snapshot_every and checkpoint_every, the repair
time up to which waiting for a slice is better than going on without it, and the goodput to expect
of waiting, of resizing, and of a job that restarts at every loss. Nothing is run: what steps and
recoveries cost is taken from --step-seconds, --costs or --run-dir, and what those do not say is
assumed, and listed as assumed.

examples:
  elastix advise recipes/quickstart.py --mtbf 3h --step-seconds 0.4
  elastix advise recipes/quickstart.py --mtbf 3h --repair 15m --run-dir runs/quickstart"""

_MORE = """\
  --FIELD VALUE           replaces a field of the recipe, as for elastix run, and comes after RECIPE

times are written 90s, 10m, 3h or 2d; exit status: 0, or 2 for bad input"""


@dataclass(frozen=True)
class _Given:
    """What was written, read and checked."""

    name: str
    recipe: Recipe
    job: Job
    known: KnownCosts
    job_mtbf: float
    spent: Spent | None
    notes: tuple[str, ...]


def advise_main(argv: Sequence[str]) -> int:
    """`elastix advise`: print the advice; returns 0.

    Raises:
        ValueError: bad input, in one line with the remedy.
    """
    parser = _parser()
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return 0
    options, fields = parser.parse_known_args(argv)
    given = _read(options, fields)
    deadline = given.recipe.policy.deadline
    advice = advise(given.name, given.known, given.job, given.job_mtbf, deadline, given.notes)
    if options.json:
        print(json.dumps(_as_json(advice, given.spent), indent=2))
    else:
        print(as_text(advice, given.spent))
    return 0


def _as_json(advice: Advice, where: Spent | None) -> dict[str, Any]:
    """Numbers as JSON has them: what is infinite is null."""
    values = asdict(advice)
    if math.isinf(advice.break_even):
        values["break_even"] = None
    return values | {"spent": asdict(where) if where else None}


# --- what was written -------------------------------------------------------------------------


def _read(options: argparse.Namespace, fields: list[str]) -> _Given:
    mtbf = parse_duration(options.mtbf, "--mtbf")
    repair = parse_duration(options.repair or DEFAULT_REPAIR, "--repair")
    job_mtbf = parse_duration(options.job_mtbf, "--job-mtbf") if options.job_mtbf else mtbf
    loaded = load_recipe(options.recipe)
    recipe = override(loaded.recipe, fields)
    directory = None if options.run_dir is None else Path(options.run_dir)
    run = measure_run(directory) if directory else None
    slices = _slices(options.slices, run)
    recipe.check_slices(slices)
    working = min(slices, recipe.policy.max_slices or slices)
    known = _costs(options, run, recipe, working)
    notes = [
        *(["mtbf of the whole job, as of one slice"] if not options.job_mtbf else []),
        *([f"repair, {DEFAULT_REPAIR}"] if not options.repair else []),
        *([f"number of slices, {slices}"] if not (options.slices or run) else []),
    ]
    job = _job(recipe, working, mtbf, repair, known.costs.step)
    where = spent(RowReader(directory / "events.jsonl")) if directory else None
    return _Given(loaded.name, recipe, job, known, job_mtbf, where, tuple(notes))


def _slices(text: str | None, run: MeasuredRun | None) -> int:
    if text is None:
        return run.num_slices if run else DEFAULT_SLICES
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise ValueError(f"--slices {text!r}: use 1 to 10000")
    return int(text)


def _costs(
    options: argparse.Namespace, run: MeasuredRun | None, recipe: Recipe, slices: int
) -> KnownCosts:
    """What was measured, then what a file says, then what the command line says."""
    known = KnownCosts()
    if run:
        for name, seconds in run.costs.items():
            known = known.given({name: seconds}, run.origin(name))
        if run.num_slices != slices:
            known = _on_other_slices(known, run, recipe.num_replicas, slices)
    if options.costs is not None:
        known = known.given(read_costs(Path(options.costs)), options.costs)
    if options.step_seconds is not None:
        known = known.given({"step": _step(options.step_seconds)}, "--step-seconds")
    return known


def _on_other_slices(
    known: KnownCosts, run: MeasuredRun, num_replicas: int, slices: int
) -> KnownCosts:
    """A step takes as long as the replicas of one slice do."""
    here, there = -(-num_replicas // slices), -(-num_replicas // run.num_slices)
    origin = f"{run.origin('step')} on {run.num_slices} slices, scaled by {here} / {there}"
    return known.given({"step": known.costs.step * here / there}, origin)


def _step(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"--step-seconds {text!r}: use the seconds of a step, such as 0.4")
    return seconds


def _job(recipe: Recipe, slices: int, mtbf: float, repair: float, step: float) -> Job:
    policy = recipe.policy
    due = [policy.checkpoint_every] if policy.checkpoint_every else []
    due += [whole_steps(policy.checkpoint_seconds, step)] if policy.checkpoint_seconds else []
    job = Job(slices, recipe.num_replicas, mtbf, repair, policy.min_slices, policy.lookback)
    return replace(
        job,
        snapshot_every=policy.snapshot_every,
        checkpoint_every=min(due, default=0),
        probe_every=policy.probe_every,
        stable_probes=policy.stable_probes,
    )


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="elastix advise",
        usage="elastix advise RECIPE --mtbf T [options] [--FIELD VALUE]...",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="file.py, file.py:function or package.module:function")
    add("--mtbf", metavar="T", required=True, help="mean time between failures of one slice")
    add("--repair", metavar="T", help="mean time until a failed slice answers (default: 10m)")
    add("--job-mtbf", metavar="T", help="between losses of the whole job (default: as --mtbf)")
    add("--slices", metavar="N", help="number of slices (default: the run's, or 4)")
    add("--step-seconds", metavar="S", help="seconds of a step on all slices")
    add("--costs", metavar="FILE", help="JSON: costs in seconds; `elastix simulate --help`")
    add("--run-dir", metavar="DIR", help="take the costs that a run measured; it is only read")
    add("--json", action="store_true", help="print JSON")
    return parser
