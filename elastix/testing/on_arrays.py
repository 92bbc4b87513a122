"""`OnArrays`: the schedules of the simulator, run on real arrays, against an undisturbed run."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastix.backends import Backend
from elastix.data import Stream
from elastix.driver import Driver
from elastix.evaluation import EvalLog
from elastix.machine import Policy
from elastix.metrics import MetricsLog
from elastix.program import Program
from elastix.progress import Progress
from elastix.recipe import Recipe
from elastix.saver import Saver
from elastix.testing.array_parts import ArrayBackend, ArrayFeed, ArraySaver, PointedArrays
from elastix.testing.invariants import Rules
from elastix.testing.process import Process, require
from elastix.testing.schedules import Phase, Schedule
from elastix.testing.simulation import Result
from elastix.testing.world import Violation, World


class OnArrays:
    """Runs schedules of one recipe on CPU devices, in virtual time.

    The same driver, machine, arrays, checkpoints and data as in a real run; what differs is that
    faults come by schedule, in every phase, and that nothing waits. A run that ends must have the
    final state, the losses, the evaluations and the examples of the undisturbed run, bit for bit.

    Args:
        recipe: with `eval_data`, if schedules evaluate. Its policy and steps are the schedule's.
        num_slices: of every run, whatever its schedule says, so that programs are compiled once.
        arrays: a test of this class puts defective ones here.
    """

    def __init__(
        self,
        recipe: Recipe,
        num_slices: int = 4,
        devices_per_slice: int = 2,
        arrays: Callable[..., PointedArrays] = PointedArrays,
    ):
        self.recipe, self.num_slices = recipe, num_slices
        self.devices_per_slice, self.arrays = devices_per_slice, arrays
        self._programs: dict[str, Program] = {}
        self._undisturbed: dict[int, _Truth] = {}

    def run(self, schedule: Schedule) -> Result:
        """Run one schedule, from its first process to its end; `violation` says what is wrong."""
        schedule = replace(schedule, num_slices=self.num_slices, on_disk=())
        truth = self._truth(schedule.num_steps)
        with tempfile.TemporaryDirectory() as directory:
            return self._run(schedule, Path(directory), truth)

    def _truth(self, num_steps: int) -> _Truth:
        """What a run of so many steps ends with."""
        if num_steps not in self._undisturbed:
            policy = Policy(eval_every=int(self.recipe.eval_data is not None))
            quiet = Schedule(self.num_slices, num_steps, policy, durable=False)
            truth = _Truth()
            with tempfile.TemporaryDirectory() as directory:
                result = self._run(quiet, Path(directory), truth)
            if result.violation:
                raise result.violation
            self._undisturbed[num_steps] = truth
        return self._undisturbed[num_steps]

    def _run(self, schedule: Schedule, directory: Path, truth: _Truth) -> Result:
        world = World(schedule)
        metrics, evaluated = MetricsLog(None), EvalLog(None)
        processes: list[_OnArrays] = []
        violation = None
        try:
            while not processes or processes[-1].goes_on(len(processes)):
                process = _OnArrays(world, metrics, evaluated, self, directory, truth)
                processes.append(process)
                process.run()
        except Violation as error:
            violation = error
        return Result(
            schedule,
            tuple(p.end for p in processes if p.end),
            violation,
            Counter(world.hits),
            sum(len(p.rows) for p in processes),
            tuple(tuple(p.rows) for p in processes),
        )

    def program(self, policy: Policy, backend: Backend) -> Program:
        """The compiled programs, which outlive runs."""
        if policy.lookback not in self._programs:
            recipe = replace(self.recipe, policy=Policy(lookback=policy.lookback))
            samples = [next(s.batches(0)) for s in self.streams()]
            self._programs[policy.lookback] = Program(
                recipe, samples[0], backend.devices, samples[-1]
            )
        return self._programs[policy.lookback]

    def streams(self) -> tuple[Stream, Stream]:
        """Of the steps and of the evaluations."""
        recipe = self.recipe
        data = recipe.data.build(recipe.global_batch, recipe.seed)
        return data, recipe.build_eval_data()[0] if recipe.eval_data else data


class _Truth:
    """What the undisturbed run gave; filled by it."""

    def __init__(self) -> None:
        self.sha256: str | None = None
        self.losses: list[float] = []
        self.evaluations: dict[int, tuple[float, float]] = {}
        self.consumed: Progress | None = None


class _OnArrays(Process):
    """One process that runs on arrays."""

    def __init__(
        self,
        world: World,
        metrics: MetricsLog,
        evaluated: EvalLog,
        cluster: OnArrays,
        directory: Path,
        truth: _Truth,
    ):
        self._cluster, self._directory, self._truth = cluster, directory, truth
        super().__init__(world, metrics, evaluated)

    def _make(self) -> tuple[Backend, Saver | None, Rules, Driver]:
        world, cluster = self.world, self._cluster
        policy = world.schedule.policy
        backend = ArrayBackend(world, cluster.devices_per_slice)
        self._program = cluster.program(policy, backend)
        saver = None
        if world.schedule.durable:
            saver = ArraySaver(world, backend, self._program, self._directory)
        arrays = cluster.arrays(world, self._program, backend, saver)
        rules = Rules(world, backend, arrays)
        steps, evals = cluster.streams()
        batches = cluster.recipe.build_eval_data()[1] if cluster.recipe.eval_data else 1
        driver = Driver(
            arrays,
            ArrayFeed(world, steps, Phase.DATA),
            backend,
            policy,
            self.metrics,
            saver,
            (self.record, rules),
            self._announced,
            self.evaluations(ArrayFeed(world, evals, Phase.EVALUATION), batches),
        )
        return backend, saver, rules, driver

    def _check_final(self, final: dict[str, Any] | None) -> None:
        truth, steps = self._truth, self.world.schedule.num_steps
        require(final is not None, "nothing dead is done", "there is no final state")
        assert final
        sha256, consumed = self._program.spec.sha256(final), self._driver.progress(steps)
        evaluations = {r["step"]: (r["loss"], r["tokens"]) for r in self.evaluated.rows}
        if truth.sha256 is None:
            truth.sha256, truth.consumed = sha256, consumed
            truth.losses, truth.evaluations = self.metrics.losses, evaluations
            return
        require(sha256 == truth.sha256, "the same bits", f"{sha256}, not {truth.sha256}")
        same = self.metrics.losses == truth.losses
        require(same, "the same losses", f"{self.metrics.losses}, not {truth.losses}")
        same = consumed in (truth.consumed, None)
        require(same, "exactly once, in order", f"{consumed}, not {truth.consumed}")
        for step, row in evaluations.items():
            same = row == truth.evaluations[step]
            require(same, "an evaluation is right", f"{row}, not {truth.evaluations[step]}")
