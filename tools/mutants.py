"""Mutation testing of the recovery machine and the driver: do the tests notice a small change?

    python tools/mutants.py --sample 120 --seed 0

Draws mutants, runs each through the tests until one fails, and lists those that live, with the
reason from `tools/mutants_survivors.txt` where there is one. Exit status 1 if fewer than 95 % die,
2 if the tests fail without any change. The draw depends on what a mutant changes, not on its line
number: an edit elsewhere leaves it as it is.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.mutant_trials import STAGES, Outcome, Trials
from tools.mutation_sites import Mutant, all_mutants

ROOT = Path(__file__).resolve().parents[1]
SHARE = 0.95
REASONS = ROOT / "tools" / "mutants_survivors.txt"
Key = tuple[str, str, str, str]


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    everything = all_mutants(ROOT)
    chosen = choose(everything, options)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.id}  {mutant.before}  ->  {mutant.after}")
        return 0
    if not chosen:
        print("no mutant has that name", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the copies are removed
    with tempfile.TemporaryDirectory(prefix="mutants-") as where:
        trials = Trials(ROOT, Path(where), options.through)
        baseline = trials.baseline()
        if baseline.stage:
            print(f"{baseline.output}\nthe tests fail as it is, in stage {baseline.stage}")
            return 2
        costs = ", ".join(f"{name} {s:.1f}" for name, s in baseline.seconds.items())
        print(f"without a change everything holds; seconds: {costs}")
        print(f"{len(chosen)} of {len(everything)} mutants, seed {options.seed}", flush=True)
        began = time.monotonic()
        outcomes = list(
            _with_progress(trials.run(chosen, options.jobs), len(chosen), options.verbose)
        )
    if options.only:
        print(*(o.output for o in outcomes), sep="\n")
    return report(outcomes, time.monotonic() - began, read_reasons(REASONS.read_text("utf-8")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=120, help="how many to draw; 0: all")
    parser.add_argument("--seed", default="0", help="another draw")
    parser.add_argument("--files", nargs="*", default=[], help="only paths that contain these")
    parser.add_argument("--only", nargs="*", default=[], help="these names, and what they print")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--through", choices=STAGES, default="arrays", help="the last stage")
    parser.add_argument("--verbose", action="store_true", help="a line for each mutant")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    return parser


def choose(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    """Those that were asked for, or a draw."""
    if options.only:
        return [m for m in mutants if m.id in options.only]
    if options.files:
        mutants = [m for m in mutants if any(f in m.path for f in options.files)]
    if options.list or not options.sample:
        return mutants
    return draw(mutants, options.seed, options.sample)


def draw(mutants: list[Mutant], seed: str, size: int) -> list[Mutant]:
    """The `size` mutants with the smallest hashes of seed and key."""

    def rank(mutant: Mutant) -> bytes:
        words = (str(seed), *mutant.key, str(mutant.number))
        return hashlib.sha256("\0".join(words).encode()).digest()

    return sorted(mutants, key=rank)[:size]


def _with_progress(outcomes, total: int, verbose: bool):
    """A line every ten seconds, on a terminal one that is rewritten."""
    lived, told, terminal = 0, time.monotonic(), sys.stdout.isatty()
    for number, outcome in enumerate(outcomes, 1):
        lived += outcome.stage is None
        if verbose:
            print(f"{outcome.mutant.id} {outcome.stage} {outcome.how}", flush=True)
        if terminal or time.monotonic() > told + 10:
            told = time.monotonic()
            end = "\r" if terminal and number < total else "\n"
            print(f"{number} of {total}, {lived} live", end=end, flush=True)
        yield outcome


# --- the report ------------------------------------------------------------------------------


def report(outcomes: list[Outcome], seconds: float, reasons: dict[Key, str]) -> int:
    """Print the score and who lives; the exit status."""
    alive = [o.mutant for o in outcomes if o.mutant and o.stage is None]
    died = len(outcomes) - len(alive)
    stages = Counter(o.stage for o in outcomes if o.stage)
    hows = Counter(o.how for o in outcomes if o.stage)
    share = died / len(outcomes)
    print(f"killed {died} of {len(outcomes)} ({share:.1%}) in {seconds:.0f} s", end=": ")
    print(*(f"{name} {stages[name]}" for name in STAGES if stages[name]), sep=", ")
    if hows["time"] or hows["crash"]:
        print(f"of these {hows['time']} by the time limit, {hows['crash']} by a crash")
    for mutant in sorted(alive, key=lambda m: (m.path, m.line, m.column)):
        print(f"\n{mutant.id} lives\n{_changed_lines(mutant)}")
        print(f"  {reasons.get(mutant.key, 'NO REASON IS LISTED')}")
    for outcome in outcomes:
        if outcome.mutant and outcome.stage and outcome.mutant.key in reasons:
            print(f"{outcome.mutant.id} is listed, and dies in {outcome.stage}")
    return 0 if share >= SHARE else 1


def _changed_lines(mutant: Mutant) -> str:
    before = (ROOT / mutant.path).read_text(encoding="utf-8")
    lines = difflib.unified_diff(
        _plain(before).splitlines(), mutant.make().splitlines(), lineterm="", n=0
    )
    return "\n".join(f"  {line}" for line in lines if line[:3] not in ("---", "+++", "@@ "))


def _plain(text: str) -> str:
    return ast.unparse(ast.parse(text))


def read_reasons(text: str) -> dict[Key, str]:
    """The reasons by key. A block is the file and the function, the change, and why."""
    found = {}
    for block in text.split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line and line[0] != "#"]
        if lines:
            path, _, scope = lines[0].partition(" ")
            before, _, after = lines[1].partition("  ->  ")
            found[path, scope, before, after] = " ".join(lines[2:])
    return found


if __name__ == "__main__":
    sys.exit(main())
