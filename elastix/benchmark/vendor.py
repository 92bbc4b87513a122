"""The loop that the vendor of Pathways documents, on the same simulated slices.

A retry decorator (`elastic_retry` of pathwaysutils) around a function that, each time it is called,
builds the mesh of the slices that answer, initialises, compiles, and loads the newest snapshot of
Orbax's in-memory `Snapshotter`. Model, optimizer and data are those of the recipe; gradients are
summed in whatever order (`fast`), which compiles sooner than elastix's own step. What is put in its
place is what CPU devices lack: which slice a device belongs to, and that a dead slice does not
answer.
"""

from __future__ import annotations

import importlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import jax

from elastix.backends import Health
from elastix.backends.simulated import SimulatedBackend
from elastix.benchmark.parts import (
    DEVICES_PER_SLICE,
    NUM_SLICES,
    SNAPSHOT_EVERY,
    NotPossible,
    Task,
    policy,
)
from elastix.benchmark.recorder import say_to_stderr
from elastix.compile_cache import count_compiles
from elastix.program import Program, Slices
from elastix.recipe import Recipe

_REMEDY = "pip install 'elastix-jax[pathways]'"
_LOOK = 0.2
"""Seconds between two looks for slices that are back; ten by default, which measures nothing."""
_STEPS_AWAY, _STEPS_BETWEEN = 4, 6
_DEADLINE = 600.0


@dataclass
class Found:
    """What was measured, in seconds: from each loss being known to the next committed step, and
    the steps between which nothing happened."""

    losses: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    """Of each loss: where the seconds went, in their order."""
    programs: list[int] = field(default_factory=list)
    steps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def to_json(self, visits: int) -> dict[str, Any]:
        """Without the first `visits` losses."""
        kept = self.phases[visits:]
        return {
            "losses": self.losses[visits:],
            "programs": self.programs[visits:],
            "phases": {name: median(phases[name] for phases in kept) for name in kept[0]},
            "steady": {n: median(seconds) for n, seconds in sorted(self.steps.items())},
        }


def losses(task: Task, recipe: Recipe) -> dict[str, Any]:
    """Lose each slice in turn, and take it back."""
    try:
        vendor = importlib.import_module("pathwaysutils.elastic.manager")
        orbax = importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise NotPossible(f"{error.name} is not installed: {_REMEDY}") from error
    count_compiles()
    # A step that donates its input, as one would write it.
    recipe = replace(recipe, reduction="fast", policy=policy(recipe, lookback="host"))
    backend = SimulatedBackend(NUM_SLICES, DEVICES_PER_SLICE)
    # With the cache on, what counts is that a set that was visited is found in it.
    visits = NUM_SLICES if task.option == "on" else 0
    manager = _manager(vendor, backend)
    snapshots = orbax.v1.training.pathways.Snapshotter(replica_axis_index=0)
    loop = _Loop(recipe, backend, manager, snapshots, vendor.ScaleUpSignalError)
    loop.say = say_to_stderr(task.name)
    loop.wanted = visits + task.few
    manager.elastic_retry(minimum_slice_count=1, poll_interval=_LOOK)(loop.attempt)()
    return loop.found.to_json(visits) | {"snapshot_every": SNAPSHOT_EVERY}


class _Answering(dict[int, Any]):
    """The slices and their devices; only those that answer are there to be looked through."""

    def __init__(self, backend: SimulatedBackend):
        super().__init__({s: list(devices) for s, devices in backend.devices.items()})
        self._backend = backend

    def items(self) -> Any:
        return [(s, self[s]) for s in self if is_up(self._backend, s)]


def is_up(backend: SimulatedBackend, slice_id: int) -> bool:
    return backend.probe([slice_id], 1.0)[slice_id] is not Health.DOWN


def _manager(vendor: Any, backend: SimulatedBackend) -> Any:
    """Its manager, told which devices are a slice; a dead slice does not pass its check."""

    class Manager(vendor.Manager):
        def __init__(self) -> None:
            self.slice_to_devices = _Answering(backend)
            self.all_slice_indices = frozenset(backend.devices)
            self.available_inactive_slices: frozenset[int] = frozenset()
            self.active_slice_indices = self.all_slice_indices
            self._stop_event = self._monitor_thread = None

        def _check_inactive_slices(self) -> None:
            if all(is_up(backend, s) for s in self.inactive_slice_indices):
                super()._check_inactive_slices()

    return Manager()


class _Loop:
    """The function that is retried, and what it needs to be measured."""

    say: Any
    wanted: int

    def __init__(
        self,
        recipe: Recipe,
        backend: SimulatedBackend,
        manager: Any,
        snapshots: Any,
        scale_up: type[Exception],
    ):
        self._recipe, self._backend, self._manager = recipe, backend, manager
        self._snapshots, self._scale_up = snapshots, scale_up
        self._stream = recipe.data.build(recipe.global_batch, recipe.seed)
        self._sample = next(self._stream.batches(0))
        self.found = Found()
        self._known: tuple[float, int] | None = None
        """When the last loss was known, and how many programs had been asked of XLA by then."""
        self._phases: dict[str, float] = {}
        self._lost: int | None = None
        self._number = 0

    def attempt(self) -> None:
        """Build the mesh, initialise, compile, load, and train until something happens."""
        slices = frozenset(self._manager.active_slice_indices)
        self._mark("health check")
        self._backend.admit(slices)
        program = Program(self._recipe, self._sample, self._backend.devices)
        state = jax.block_until_ready(program.initial(slices))
        self._mark("initialise")
        step = program.step(slices)
        self._mark("compile")
        number = 0
        if self._snapshots.latest:
            abstract = program.spec.abstract(program.shardings(slices))
            number = self._snapshots.latest.step
            state = self._snapshots.load(abstract)
        self._mark("load")
        self._train(slices, program, step, state, number)

    def _mark(self, phase: str) -> None:
        """A phase of a recovery is over."""
        if self._known:
            so_far = sum(self._phases.values())
            self._phases[phase] = time.perf_counter() - self._known[0] - so_far

    def _train(self, slices: Slices, program: Program, step: Any, state: Any, number: int) -> None:
        batches = self._stream.batches(number)
        flying: deque[Any] = deque()
        calm = _Calm()
        while not self._is_done(calm):
            if self._manager.available_inactive_slices:
                raise self._scale_up
            state, results = step(state, program.put_batch(next(batches), slices))
            number += 1
            flying.append(results)
            if number % SNAPSHOT_EVERY == 0:
                self._snapshots.save(number, state)
            self._disturb(calm, slices)
            if len(flying) == self._recipe.policy.inflight:
                self._read(flying.popleft(), slices)
                self._committed(calm, len(slices), number)

    def _is_done(self, calm: _Calm) -> bool:
        return len(self.found.losses) == self.wanted and calm.steps > 1

    def _read(self, results: Any, slices: Slices) -> None:
        try:
            self._backend.read(results, slices, _DEADLINE)
        except jax.errors.JaxRuntimeError:
            self._known = (time.perf_counter(), sum(count_compiles()))
            raise

    def _committed(self, calm: _Calm, slices: int, number: int) -> None:
        now, programs = time.perf_counter(), sum(count_compiles())
        if self._known:
            self._mark("first step")
            self.found.phases.append(self._phases)
            self._phases = {}
            self.found.losses.append(now - self._known[0])
            self.found.programs.append(programs - self._known[1])
            self._known = None
        seconds = calm.committed(now)
        if seconds is not None and number % SNAPSHOT_EVERY > 2:
            self.found.steps[slices].append(seconds)
        if self._lost is not None and calm.steps == _STEPS_AWAY:
            self._backend.give_back(self._lost)
            self._lost = None

    def _disturb(self, calm: _Calm, slices: Slices) -> None:
        """Lose a slice, as a step that was dispatched is not read yet."""
        due = calm.steps >= _STEPS_BETWEEN and len(slices) == NUM_SLICES
        if not due or not self._snapshots.latest or len(self.found.losses) == self.wanted:
            return
        self._snapshots.join()
        if self._number % 2 == 0:
            self.say(f"loss {self._number + 1} of {self.wanted}")
        self._lost = self._number % NUM_SLICES
        self._number += 1
        self._backend.lose(self._lost)
        for array in _host_copies(self._backend.devices[self._lost]):
            array.delete()  # reading them raises, as with a host that is gone


class _Calm:
    """Steps committed since the mesh was built, and when the last one was."""

    def __init__(self) -> None:
        self.steps = 0
        self._last: float | None = None

    def committed(self, now: float) -> float | None:
        """The seconds since the last one; None for the first two."""
        seconds = None if self._last is None or self.steps < 2 else now - self._last
        self.steps, self._last = self.steps + 1, now
        return seconds


def _host_copies(devices: Any) -> Iterator[jax.Array]:
    """The snapshots that lie in the host memory of a slice."""
    for array in jax.live_arrays():
        on_host = array.sharding.memory_kind == "pinned_host"
        if on_host and array.sharding.device_set <= set(devices):
            yield array
