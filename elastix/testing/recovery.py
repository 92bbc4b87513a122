"""`assert_recovers`: a recipe loses slices, and ends as if nothing had happened."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from elastix.faults import Fault, parse_script, script_line, validate
from elastix.machine import Policy
from elastix.recipe import Recipe
from elastix.run import train
from elastix.summary import Summary
from elastix.testing.slices import SteppingBackend, have_devices
from elastix.verify import compare_runs
from elastix.wording import names


def assert_recovers(
    recipe: Recipe,
    faults: str | Sequence[str] | Sequence[Fault],
    *,
    num_slices: int = 4,
    devices_per_slice: int = 2,
    run_dir: str | Path | None = None,
) -> Summary:
    """Train a recipe with faults, and assert that they left no trace in what it learned.

        def test_both_ends_may_die():
            summary = assert_recovers(recipe(), ["lose 0@12", "lose 3@15", "return 0@20"])
            assert summary.recoveries[0]["steps_lost"] <= 5

    It is trained on simulated slices whose clock is virtual: a step takes one second of it. The
    undisturbed run is trained once for all tests of one recipe in this process, under the default
    policy and without hooks, since neither may change what is learned.

    Args:
        faults: a fault script, its lines, or faults.
        run_dir: where the run with faults keeps its checkpoints and logs; None: nowhere.

    Returns:
        The summary of the run with faults.

    Raises:
        AssertionError: that run did not end as done, a fault did not strike, the final state is
            not finite, or its bits, the losses or the examples consumed are not those of the
            undisturbed run.
        ValueError: bad input, with the value and the remedy, before anything is trained.
    """
    __tracebackhide__ = True  # pytest shows the test, and not this
    script = _script(faults)
    recipe.check_slices(num_slices)
    validate(script, range(num_slices), recipe.num_steps)
    have_devices(num_slices * devices_per_slice)
    undisturbed = _undisturbed(recipe, num_slices, devices_per_slice)
    backend = SteppingBackend(num_slices, devices_per_slice, script)
    summary = _train(recipe, backend, run_dir)
    unfired = {"unfired_faults": [script_line(fault) for fault in summary.unfired_faults]}
    wrong = _ended(summary, "with faults")
    wrong = wrong or compare_runs(asdict(summary) | unfired, asdict(undisturbed))
    if wrong:
        raise AssertionError(_message(wrong, script, summary))
    return summary


def _script(faults: str | Sequence[str] | Sequence[Fault]) -> tuple[Fault, ...]:
    given = [faults] if isinstance(faults, str) else list(faults)
    lines = [line for line in given if isinstance(line, str)]
    script = parse_script("\n".join(lines)) if lines else ()
    script += tuple(fault for fault in given if not isinstance(fault, str))
    if not script:
        raise ValueError("faults: there is none, and so nothing to recover from")
    return script


def _undisturbed(recipe: Recipe, num_slices: int, devices_per_slice: int) -> Summary:
    policy = Policy(on_nonfinite=recipe.policy.on_nonfinite)
    plain = replace(recipe, policy=policy, hooks=())
    try:
        hash(plain)
    except TypeError:  # a list in it, say: what may change is no key
        return _train_undisturbed.__wrapped__(plain, num_slices, devices_per_slice)
    return _train_undisturbed(plain, num_slices, devices_per_slice)


@lru_cache(maxsize=32)
def _train_undisturbed(recipe: Recipe, num_slices: int, devices_per_slice: int) -> Summary:
    __tracebackhide__ = True
    summary = _train(recipe, SteppingBackend(num_slices, devices_per_slice))
    wrong = _ended(summary, "undisturbed")
    if wrong:
        raise AssertionError(_message(wrong, (), summary))
    return summary


def _train(recipe: Recipe, backend: SteppingBackend, run_dir: str | Path | None = None) -> Summary:
    # Ctrl-C is pytest's: without an event of ours it would end the run as preempted.
    return train(recipe, backend=backend, run_dir=run_dir, stop=threading.Event())


def _ended(summary: Summary, label: str) -> list[str]:
    """Why a run is no run to compare, a line each."""
    if summary.outcome == "done":
        return []
    wrong = [f"the run {label} {summary.outcome} after step {summary.steps}: {summary.reason}"]
    return wrong + summary.trace.splitlines()


def _message(wrong: Sequence[str], script: Sequence[Fault], summary: Summary) -> str:
    told = [
        f"{r['kind']} of {names(r['lost'] or r['found'])} after step {r['step']}, went on from "
        f"step {r['resumed_at']} ({r['source']}) on {names(r['slices'])}"
        for r in summary.recoveries
    ]
    return "\n  ".join(
        [
            "the run did not recover from its faults" if script else "the recipe does not train",
            *wrong,
            f"faults: {', '.join(map(script_line, script)) or 'none'}",
            *(f"recovery: {line}" for line in told),
        ]
    )
