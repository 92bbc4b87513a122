"""Trials of mutants: each in a copy of the tree and a process of its own, until a test fails.

The parent has loaded what elastix needs, but nothing of elastix: a child that is forked from it
loads the changed code in a tenth of a second, where a new interpreter takes two.
"""

from __future__ import annotations

import compileall
import gc
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutation_sites import Mutant

PACKAGES = ("elastix", "models", "recipes", "tests")
MEMORY = 6 << 30
"""Bytes of data a child may hold: endless loops are often endless lists."""


def _pytest(*arguments: str) -> bool:
    import pytest

    # Plain assertions: what the parent has loaded cannot be rewritten.
    options = ("-x", "-q", "-p", "no:cacheprovider", "--assert=plain")
    return pytest.main([*options, *arguments]) == pytest.ExitCode.OK


def _machine() -> bool:
    return _pytest(*(str(p) for p in sorted(Path("tests").glob("test_machine*.py"))))


def _simulate(seeds: range) -> bool:
    from elastix.testing import random_schedule, simulate

    schedules = (random_schedule(seed, n) for seed in seeds for n in (4, 2, 8))
    return not any(simulate(s).violation for s in schedules)


def _seeds() -> bool:
    return _simulate(range(250))


def _more_seeds() -> bool:
    return _simulate(range(250, 850))


def _histories() -> bool:
    quick = "pause or resumed or live or asked or standby or patience"
    return _pytest("tests/test_histories.py", "-k", f"small_world and ({quick})")


def _arrays() -> bool:
    chosen = "leave_no_trace or lookback or pause or last_step or data_source or users or stays"
    return _pytest("tests/recovery/test_runs.py", "-k", f"{chosen} or told_to_stop")


STAGES: dict[str, Callable[[], bool]] = {
    "machine": _machine,
    "seeds": _seeds,
    "histories": _histories,
    "more seeds": _more_seeds,
    "arrays": _arrays,
}
"""What a mutant goes through, the cheapest first. Each says whether everything held."""

NOT_IN = {"histories": "elastix/driver.py", "arrays": "elastix/machine/"}
"""Stages that would find nothing new there: histories have a driver of their own, and arrays obey
the same rules as ghosts."""


@dataclass(frozen=True)
class Outcome:
    """How the trial of a mutant went: the stage that it died in, or None, and of what."""

    mutant: Mutant | None
    stage: str | None
    how: str
    seconds: dict[str, float]
    """For each stage that it lived through."""
    output: str


class Trials:
    """Runs mutants of the tree at `root` through the first stages, up to `last`.

    Args:
        where: an empty directory, for copies of the tree.
    """

    def __init__(self, root: Path, where: Path, last: str = "arrays"):
        names = list(STAGES)
        self.stages = names[: names.index(last) + 1]
        self._where, self._base = where, where / "base"
        self._limits: dict[str, float] = {}
        for package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / package, self._base / package, ignore=ignored)
        shutil.copy(root / "pyproject.toml", self._base)
        compileall.compile_dir(self._base, quiet=2)
        _load(self._base)

    def baseline(self) -> Outcome:
        """The tree as it is: it has to live. How long it takes gives the limits."""
        (outcome,) = self.run([None], jobs=1)
        self._limits = {name: 5 + 2 * s for name, s in outcome.seconds.items()}
        return outcome

    def run(self, mutants: Sequence[Mutant | None], jobs: int) -> Iterator[Outcome]:
        """The outcomes, in the order in which the trials end."""
        todo, running = list(reversed(mutants)), {}
        try:
            while todo or running:
                while todo and len(running) < jobs:
                    trial = _Trial(self._copy(todo[-1]), todo[-1], self._stages_of(todo.pop()))
                    running[trial.start(self._limits)] = trial
                pid, status = os.wait()
                if trial := running.pop(pid, None):
                    yield trial.end(status)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _stages_of(self, mutant: Mutant | None) -> list[str]:
        path = mutant.path if mutant else ""
        return [s for s in self.stages if not (s in NOT_IN and path.startswith(NOT_IN[s]))]

    def _copy(self, mutant: Mutant | None) -> Path:
        """The tree with one file changed; the others are links."""
        copy = self._where / str(time.monotonic_ns())
        shutil.copytree(self._base, copy, copy_function=os.link)
        if mutant:
            path = copy / mutant.path
            for old in (path, *path.parent.glob(f"__pycache__/{path.stem}.*")):
                old.unlink()
            path.write_text(mutant.make(), encoding="utf-8")
        return copy


class _Trial:
    """One child. It writes a line for each stage that it lives through."""

    def __init__(self, copy: Path, mutant: Mutant | None, stages: list[str]):
        self._copy, self._mutant, self._stages = copy, mutant, stages
        self._lived, self._output = copy / "lived", copy / "output"

    def start(self, limits: dict[str, float]) -> int:
        self._lived.touch()
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no thread runs yet that could hold a lock
            pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            self._enter()
            status = 0 if all(self._stage(name, limits.get(name)) for name in self._stages) else 1
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _enter(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(self._copy)
        sys.path.insert(0, str(self._copy))
        sys.dont_write_bytecode = True
        output = os.open(self._output, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Compiled programs are shared between the trials, and with nobody else.
        os.environ["XDG_CACHE_HOME"] = str(self._copy.parent / "cache")

    def _stage(self, name: str, limit: float | None) -> bool:
        if limit:  # in seconds of this process; the clock on the wall only for one that sleeps
            signal.setitimer(signal.ITIMER_PROF, limit)
            signal.setitimer(signal.ITIMER_REAL, 20 + 4 * limit)
        start = time.process_time()
        held = STAGES[name]()
        import elastix

        assert Path(elastix.__file__).is_relative_to(self._copy), elastix.__file__
        if held:
            with self._lived.open("a") as lived:
                lived.write(f"{name}: {time.process_time() - start}\n")
        return held

    def end(self, status: int) -> Outcome:
        rows = [line.split(": ") for line in self._lived.read_text().splitlines()]
        seconds = {name: float(s) for name, s in rows}
        output = self._output.read_text(errors="replace") if self._output.exists() else ""
        shutil.rmtree(self._copy, ignore_errors=True)
        if status == 0 and list(seconds) == self._stages:
            return Outcome(self._mutant, None, "lives", seconds, output)
        how = "test" if os.waitstatus_to_exitcode(status) == 1 else "crash"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
            how = "time"
        return Outcome(self._mutant, self._stages[len(seconds)], how, seconds, output)


def _load(base: Path) -> None:
    """Load what elastix and its tests import, and forget what is ours."""
    sys.path.insert(0, str(base))
    import beartype
    import hypothesis
    import pytest

    import elastix.run
    import elastix.testing

    assert beartype and hypothesis and pytest and elastix.run and elastix.testing
    sys.path.remove(str(base))
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]
    gc.collect()
    gc.freeze()
