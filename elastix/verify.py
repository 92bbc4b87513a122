"""`elastix verify`: the same run with and without its faults, compared bit for bit."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from elastix.checkpoints import CheckpointError, CheckpointStore
from elastix.command import Command
from elastix.faults import validate
from elastix.object_store.bucket import bucket_url
from elastix.preparation import prepare, simulated_backend
from elastix.recipe import Recipe
from elastix.train_state import StateSpec
from elastix.wording import plural

_USAGE = 2
_LABELS = ("with faults", "undisturbed")


class Child:
    """One of the two runs: a process, and what it said."""

    def __init__(self, label: str, command: Command, run_dir: Path):
        self.label, self.run_dir = label, run_dir
        arguments = command.child_arguments(str(run_dir), with_faults=label == _LABELS[0])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "elastix", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        """The lines of its standard error; the last says why it failed."""
        self._readers = [
            threading.Thread(target=self._show, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._collect, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def wait(self) -> int:
        """Its exit status, once it has ended and all it said was read."""
        status = self._process.wait()
        for reader in self._readers:
            reader.join()
        return status

    def when_ended(self, tell: Callable[[Child], None]) -> None:
        """Call `tell` with this child, from another thread, when it has ended."""

        def follow() -> None:
            self.wait()
            tell(self)

        threading.Thread(target=follow, daemon=True).start()

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self.wait()

    @property
    def summary(self) -> dict[str, Any]:
        """Its `summary.json`."""
        return json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))

    @property
    def last_error(self) -> str:
        """Why it failed, in its own words."""
        return self.errors[-1].removeprefix("elastix: ") if self.errors else "it said nothing"

    def _show(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                print(f"[{self.label}] {line}", end="", flush=True)

    def _collect(self, lines: IO[str]) -> None:
        with lines:
            self.errors += (line.rstrip("\n") for line in lines if line.strip())


def verify(command: Command) -> str | None:
    """Run `command` with and without its faults; returns what differs, in one line, or None.

    Both run in child processes, at the same time, with run directories of their own, which are
    kept unless all is equal.

    Raises:
        ValueError: bad input, in one line with the remedy.
    """
    recipe = _checked(command)
    with _directory(command) as where:
        with _children(command, where) as children:
            failed = _first_failure(children)
        if failed and failed.wait() == _USAGE:
            raise ValueError(failed.last_error)
        difference = _tell_failure(failed) if failed else _compare(command, recipe, *children)
        if difference is None:
            _tell(children)
            if not (command.keep or command.run_dir):
                shutil.rmtree(where)
                return None
        print(f"kept: {where}")
        return difference


def _checked(command: Command) -> Recipe:
    """The recipe, once what can be refused without data or devices is refused.

    What else is bad input, a child that exits with 2 tells.
    """
    if not command.faults:
        raise ValueError("verify compares a run with faults to one without: give --lose S@STEP")
    recipe = prepare(command).recipe
    recipe.check_slices(command.slices)
    validate(command.faults, range(command.slices), recipe.num_steps)
    return recipe


@contextmanager
def _directory(command: Command) -> Iterator[Path]:
    """A new directory for both runs, which is gone if there is nothing to compare in it."""
    if command.run_dir is None:
        where = Path(tempfile.mkdtemp(prefix="elastix-verify-"))
    else:
        where = Path(command.run_dir)
        if bucket_url(command.run_dir):
            raise ValueError(f"--run-dir {command.run_dir}: verify works on a disk: name a path")
        try:
            where.mkdir(parents=True)
        except OSError as error:
            raise ValueError(
                f"--run-dir {where} cannot be made ({error.strerror}): name a new directory"
            ) from error
    try:
        yield where
    except BaseException:
        shutil.rmtree(where)
        raise


@contextmanager
def _children(command: Command, where: Path) -> Iterator[list[Child]]:
    """Both runs; none outlives the block."""
    children: list[Child] = []
    try:
        for label in _LABELS:
            children.append(Child(label, command, where / label.replace(" ", "-")))
        yield children
    finally:
        for child in children:
            child.kill()


def _first_failure(children: Sequence[Child]) -> Child | None:
    """Wait until all have ended well, or one has not; returns that one."""
    ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
    for child in children:
        child.when_ended(ended.put)
    in_order = (ended.get() for _ in children)
    return next((child for child in in_order if child.wait()), None)


def _tell_failure(child: Child) -> str:
    """Which run failed and why; its traceback, if it has one, goes to standard error."""
    for line in child.errors[:-1]:
        print(f"[{child.label}] {line}", file=sys.stderr)
    return f"the run {child.label} ended with status {child.wait()}: {child.last_error}"


def _compare(command: Command, recipe: Recipe, faulted: Child, undisturbed: Child) -> str | None:
    """What is wrong with the two runs, or differs between them; None: nothing."""
    wrong = compare_runs(faulted.summary, undisturbed.summary)
    if not wrong:
        wrong += _check_states(command, recipe, faulted, undisturbed)
    return "; ".join(wrong) or None


def compare_runs(faulted: dict[str, Any], undisturbed: dict[str, Any]) -> list[str]:
    """What is wrong with the summaries of two runs, or differs between them, a line each."""
    wrong = []
    if faulted["unfired_faults"]:
        wrong.append(f"did not fire: {', '.join(faulted['unfired_faults'])}")
    wrong += [
        f"the final state of the run {label} is not finite"
        for label, summary in zip(_LABELS, (faulted, undisturbed), strict=True)
        if not summary["finite"]
    ]
    return wrong + compare_summaries(faulted, undisturbed)


def compare_summaries(faulted: dict[str, Any], undisturbed: dict[str, Any]) -> list[str]:
    """What differs between two runs that should have been the same, a line each."""
    found = []
    losses = list(zip(faulted["losses"], undisturbed["losses"], strict=False))
    first = next((n for n, (a, b) in enumerate(losses, 1) if a != b), None)
    if first is not None:
        a, b = losses[first - 1]
        found.append(f"the loss of step {first} is {a!r} with faults and {b!r} without")
    evaluated = [[_exact(row) for row in run["evaluations"]] for run in (faulted, undisturbed)]
    if evaluated[0] != evaluated[1]:
        found.append(f"evaluations are {evaluated[0]} with faults and {evaluated[1]} without")
    for key in ("steps", "consumed", "state_sha256"):
        if faulted[key] != undisturbed[key]:
            found.append(f"{key} is {faulted[key]} with faults and {undisturbed[key]} without")
    return found


def _exact(row: dict[str, Any]) -> dict[str, Any]:
    """What of an evaluation must not depend on what died."""
    return {key: value for key, value in row.items() if key not in ("seconds", "slices")}


def _check_states(command: Command, recipe: Recipe, *children: Child) -> list[str]:
    """What is on disk is the state reported, and its model is not the seed's."""
    devices = simulated_backend(command).devices
    spec = StateSpec(recipe.model.build, recipe.optimizer.build(), recipe.seed)
    found = []
    for child in children:
        try:
            leaves = _last_checkpoint(child)
        except CheckpointError as error:
            found.append(f"the last checkpoint of the run {child.label} is bad: {error}")
            continue
        if spec.sha256(leaves) != child.summary["state_sha256"]:
            found.append(f"the last checkpoint of the run {child.label} is of another state")
    if found:
        return found
    rules = tuple(getattr(recipe.model, "sharding_rules", tuple)())
    build = spec.compile_init(rules, recipe.mesh.build(devices, frozenset({0})))
    seed = {path: np.asarray(leaf) for path, leaf in build().items()}
    if all(np.array_equal(leaves[path], seed[path]) for path in spec.trainable_paths):
        found.append("the final model is that of the seed: training changed nothing")
    return found


def _last_checkpoint(child: Child) -> dict[str, np.ndarray]:
    store = CheckpointStore(child.run_dir / "checkpoints", keep=1)
    return store.load(child.summary["steps"])[0]


def _tell(children: Sequence[Child]) -> None:
    summary = children[0].summary
    consumed = summary["consumed"]
    recoveries = plural(len(summary["recoveries"]), "recovery", "recoveries")
    print(f"equal after {recoveries}: state_sha256 {summary['state_sha256']}")
    print(f"equal: {consumed['examples']} examples consumed, sha256 {consumed['sha256']}")
    print(f"equal: the losses of all {len(summary['losses'])} steps")
