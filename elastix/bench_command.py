"""`elastix bench`: what a loss costs, and what a step costs more than by hand, measured."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from elastix.benchmark.figures import Found
from elastix.benchmark.parts import DEVICES_PER_SLICE, NUM_SLICES, PARTS, Task
from elastix.benchmark.report import Measured, svg, text
from elastix.benchmark.store import Store
from elastix.recipe_loading import load_recipe
from elastix.usage import UsageParser
from elastix.wording import plural

DEFAULT_OUT = "runs/bench"
DEFAULT_LOSSES = 20

_ABOUT = """\
Measure what elastix costs and what a lost slice costs, for each recipe, on four simulated slices
of two CPU devices, and compare with what it must reach: the loop against one written by hand; from
a loss being known to the next committed step, in steady steps; what is compiled, done again and
abandoned; the pause of a regrow; host snapshots; tokens per CPU-second; memory. Beside them, on the
same slices, the loop that the vendor of Pathways documents, and a process that is killed and
started again. All figures are ratios within one run, from the times of the events.

Of a recipe, its model, data, optimizer and loss are measured; its policy is replaced. Each part
runs in a process of its own, and is kept as it finishes: the same command goes on where an
interrupted one ended. Three sizes with 20 losses take about an hour on two cores; nothing else
should run meanwhile.

examples:
  elastix bench bench/sizes.py:small
  elastix bench bench/sizes.py:small bench/sizes.py:large --out runs/bench-2
  elastix bench bench/sizes.py:small --only overhead --out runs/overhead
  elastix bench --from runs/bench"""

_MORE = f"""\
parts, for --only:
{chr(10).join(f"  {name:<12}{about}" for name, about in PARTS.items())}

the folder holds:
  bench.json      every figure, and what each part measured
  bench.svg       each recovery as a dot, elastix beside the vendor's loop and the restart
  parts/          what each part measured, kept as it finishes

exit status: 0 measured, whether or not what must be is reached: the table tells
  1 a part failed, as the table tells   2 usage or bad input, nothing was changed"""


def bench_main(argv: Sequence[str]) -> int:
    """`elastix bench`: measure what is not measured yet, print the table; the exit status.

    Raises:
        ValueError: bad input, in one line with the remedy.
    """
    parser = _parser()
    if not argv or "-h" in argv or "--help" in argv:
        parser.print_help()
        return 0
    given = parser.parse_args(argv)
    if given.read is not None:
        return _print_again(given)
    bench = _Bench(given)
    with _ended_by_sigterm():
        return bench.run()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds, so that the child ends too and what finished is kept."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_again(given: argparse.Namespace) -> int:
    if given.recipes:
        raise ValueError(f"--from {given.read} measures nothing: leave out {given.recipes[0]}")
    report = Store(Path(given.read)).report()
    try:
        found = [Measured(one["recipe"], one["parts"]) for one in report["recipes"]]
        print(text(report["about"], found, report["settings"]["quick"]))
    except (KeyError, TypeError) as error:
        why = f"{given.read} holds another report than this program writes"
        raise ValueError(f"{why} ({error!r}): measure anew") from error
    return 0


class _Bench:
    """One bench: what was asked for, checked before anything is changed."""

    def __init__(self, given: argparse.Namespace):
        self._recipes: list[str] = given.recipes
        if not self._recipes:
            raise ValueError("no RECIPE: name one, such as bench/sizes.py:small")
        twice = next((r for r in self._recipes if self._recipes.count(r) > 1), None)
        if twice:
            raise ValueError(f"{twice} is named twice: name each recipe once")
        self._losses, self._quick = _losses(given), given.quick
        self._parts = [_part(name) for name in given.only] if given.only else list(PARTS)
        loaded = [load_recipe(recipe).recipe for recipe in self._recipes]
        for recipe in loaded:
            recipe.check_slices(NUM_SLICES)
        self._settings = {
            "recipes": self._recipes,
            "identities": [recipe.identity_sha256() for recipe in loaded],
            "losses": self._losses,
            "quick": self._quick,
            "versions": {name: version(name) for name in ("elastix-jax", "jax", "jaxlib")},
            "code": _code_sha256(),
        }
        self._out = Path(given.out)

    def run(self) -> int:
        """Measure the parts that are missing, in their order."""
        store = Store.open(self._out, self._settings)
        missing = [
            (recipe, part)
            for recipe in self._recipes
            for part in self._parts
            if store.part(recipe, part) is None
        ]
        if not missing:
            raise ValueError(
                f"--out {self._out} holds all of that already: name another folder, or print it "
                f"with elastix bench --from {self._out}"
            )
        kept = len(self._recipes) * len(self._parts) - len(missing)
        if kept:
            _say(f"{plural(kept, 'part')} kept from before in {self._out}")
        failed = self._measure(store, missing)
        self._report(store, failed)
        return 1 if failed else 0

    def _measure(
        self, store: Store, missing: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], Found]:
        """Keeps what each part finds, and returns why others failed; they are tried again by the
        same command."""
        failed = {}
        try:
            for number, (recipe, part) in enumerate(missing, 1):
                _say(f"part {number} of {len(missing)}: {recipe} {part}, {PARTS[part]}")
                task = Task(part, recipe, self._losses, self._quick, str(store.cache))
                found = _in_a_process(task)
                if "failed" in found:
                    failed[recipe, part] = found
                    _say(f"{recipe} {part} failed: {found['failed']}")
                else:
                    store.keep(recipe, part, found)
        finally:
            shutil.rmtree(store.cache, ignore_errors=True)
        return failed

    def _report(self, store: Store, failed: dict[tuple[str, str], Found]) -> None:
        found = [
            Measured(
                recipe,
                {
                    part: known
                    for part in PARTS
                    if (known := failed.get((recipe, part)) or store.part(recipe, part))
                },
            )
            for recipe in self._recipes
        ]
        about = _about()
        report = {
            "about": about,
            "settings": self._settings,
            "recipes": [
                {
                    "recipe": one.recipe,
                    "rows": [asdict(row) for row in one.rows],
                    "parts": one.parts,
                }
                for one in found
            ],
        }
        written = store.finish(report, svg(found))
        print(text(about, found, self._quick))
        print(f"\nwrote {written[0]} and {written[1]}")


def _code_sha256() -> str:
    """Of elastix as it is: parts that other code measured are not mixed with new ones."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _about() -> str:
    machine = f"{platform.machine()}, {plural(os.cpu_count() or 1, 'core')}"
    where = f"{NUM_SLICES} simulated slices of {DEVICES_PER_SLICE} CPU devices on {machine}"
    return f"elastix bench: {where}, Python {platform.python_version()}, jax {version('jax')}"


def _in_a_process(task: Task) -> dict[str, Any]:
    """What the part measured in a process of its own, or why it failed."""
    words = [sys.executable, "-m", "elastix.benchmark", json.dumps(task.to_json())]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        try:
            out, _ = child.communicate()
        except BaseException:
            child.terminate()
            raise
    if child.returncode:
        return {"failed": f"its process ended with {child.returncode}, as told on standard error"}
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def _say(line: str) -> None:
    print(f"elastix bench: {line}", file=sys.stderr, flush=True)


# --- what was written -------------------------------------------------------------------------


def _losses(given: argparse.Namespace) -> int:
    if given.losses is None:
        return NUM_SLICES if given.quick else DEFAULT_LOSSES
    if not given.losses.isdecimal() or not NUM_SLICES <= int(given.losses) <= 10_000:
        raise ValueError(
            f"--losses {given.losses}: use {NUM_SLICES} to 10000, so that each slice is lost"
        )
    return int(given.losses)


def _part(name: str) -> str:
    if name not in PARTS:
        raise ValueError(f"--only {name}: use {', '.join(PARTS)}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="elastix bench",
        usage="elastix bench RECIPE... [options]",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("recipes", metavar="RECIPE", nargs="*", help="file.py, file.py:function, package.module")
    add("--out", metavar="DIR", default=DEFAULT_OUT, help=f"(default: {DEFAULT_OUT})")
    add("--losses", metavar="N", help=f"that a median is of (default: {DEFAULT_LOSSES})")
    add("--only", metavar="PART", action="append", help="this part, and others named so")
    add("--quick", action="store_true", help="few losses and short blocks: see that it works")
    add("--from", dest="read", metavar="DIR", help="measure nothing: print what is there")
    return parser
