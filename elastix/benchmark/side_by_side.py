"""Loops that take turns in one process, in short blocks, so that drift of the machine cancels."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from statistics import mean, median
from time import perf_counter, thread_time
from typing import Any

import jax
import numpy as np

from elastix.backends.simulated import SimulatedBackend
from elastix.benchmark.hand_written import hand_written
from elastix.benchmark.parts import (
    DEVICES_PER_SLICE,
    NEVER,
    NUM_SLICES,
    SNAPSHOT_EVERY,
    Task,
    measured_recipe,
    policy,
    run_folder,
)
from elastix.benchmark.recorder import say_to_stderr
from elastix.program import Program
from elastix.recipe import Hook, Recipe
from elastix.run import train
from elastix.step import Work

SKIP = 4
"""Steps at the begin of a block that do not count: what was in flight before is among them."""


class Block:
    """A hook that notes when steps were committed, and calls `between` after each block of steps.

    Args:
        between: given the number of blocks so far; what it does is in no block.
    """

    def __init__(self, size: int, between: Callable[[int], None]):
        self.seconds: list[list[float]] = []
        """Of the steps of each block, without its first ones."""
        self.cpu: list[float] = []
        """CPU seconds of the loop's thread for a step of each block, as `seconds`."""
        self._size, self._between = size, between
        self._times: list[float] = []
        self._cpu: list[float] = []

    def __call__(self, row: dict[str, Any]) -> None:
        self._times.append(perf_counter())
        self._cpu.append(thread_time())
        if len(self._times) == self._size:
            self.seconds.append(seconds_of(self._times))
            self.cpu.append(mean(seconds_of(self._cpu)))
            self._between(len(self.seconds))
            self._times, self._cpu = [], []


def seconds_of(times: list[float]) -> list[float]:
    """The seconds of each step of a block, without its first ones."""
    return [after - before for before, after in pairwise(times[SKIP - 1 :])]


def overhead(task: Task, recipe: Recipe) -> dict[str, Any]:
    """A block of the elastic loop, then one of the hand-written loop around the same step, on the
    same devices and data, and so on."""
    size, rounds = (SKIP + 4, 3) if task.quick else (SKIP + 8, task.losses)
    chosen = policy(recipe, lookback="host", snapshot_every=NEVER)
    recipe = measured_recipe(recipe, chosen)
    backend, stop, say = _backend(), threading.Event(), say_to_stderr(task.name)
    by_hand = ByHand(recipe, backend)
    blocks: list[tuple[list[float], float]] = []

    def between(done: int) -> None:
        blocks.append(by_hand.run(size))
        if done > rounds:  # the first compiles
            stop.set()
        elif done % 5 == 1:
            say(f"block {done} of {rounds}")

    elastic = Block(size, between)
    _train(recipe, backend, elastic, stop)
    seconds = zip(elastic.seconds, (block for block, _ in blocks), strict=True)
    cpu = {"elastix": elastic.cpu, "by hand": [spent for _, spent in blocks]}
    return {
        "pairs": [[median(one), median(other)] for one, other in seconds][1:],
        "cpu": {name: median(each[1:]) for name, each in cpu.items()},
        "put": by_hand.put_seconds(),
        "source": loop_source(),
        "inflight": chosen.inflight,
    }


class ByHand:
    """What the hand-written loop needs: a compiled step, a state, data, and how to place it."""

    def __init__(self, recipe: Recipe, backend: SimulatedBackend):
        stream = recipe.data.build(recipe.global_batch, recipe.seed)
        self._batches: Iterator[Any] = stream.batches(0)
        sample = next(self._batches)
        self._inflight = recipe.policy.inflight
        self._mesh = frozenset(backend.devices)
        self._program = Program(recipe, sample, backend.devices)
        self._step = self._program.step(self._mesh)
        self._state = self._program.initial(self._mesh)
        self._work = Work(recipe.global_batch, recipe.num_replicas, NUM_SLICES)
        self._sample, placed = sample, self._program.put_batch(sample, self._mesh)
        self._shardings = {name: array.sharding for name, array in placed.items()}
        for name, value in arrange(sample, self._work).items():
            if not np.array_equal(value, placed[name]):
                raise RuntimeError(f"{name} is arranged in another way than the step's batch")

    def run(self, size: int) -> tuple[list[float], float]:
        """Seconds of the steps of a block, without its first ones, and CPU seconds of the thread
        for one."""
        times: list[float] = []
        batches, begun = islice(self._batches, size), thread_time()
        self._state = hand_written(
            self._step, self._state, batches, self._put, self._inflight, times
        )
        # The last ones are read without another step behind them.
        return seconds_of(times[: size - self._inflight + 1]), (thread_time() - begun) / size

    def _put(self, batch: Any) -> Any:
        return jax.device_put(arrange(batch, self._work), self._shardings)

    def put_seconds(self) -> dict[str, float]:
        """What it takes to place a batch: as elastix does, and as this loop does."""
        ways = {
            "elastix": lambda: self._program.put_batch(self._sample, self._mesh),
            "by hand": lambda: self._put(self._sample),
        }
        return {name: _median_seconds(way) for name, way in ways.items()}


def arrange(batch: dict[str, np.ndarray], work: Work) -> dict[str, np.ndarray]:
    """The columns of a batch as the step takes them: [padded replicas, examples, ...], with the
    index of each replica and the halves of the example ids."""
    index = np.arange(work.padded, dtype=np.int32)
    ids = batch["example_id"].astype("<i8").view("<u4").reshape(-1, 2)
    columns = {**batch, "example_id": ids}
    shape = (work.num_replicas, work.examples)
    rows = np.where(index < work.num_replicas, index, 0)
    arranged = {k: v.reshape(shape + v.shape[1:])[rows] for k, v in columns.items()}
    return {"replica": index, **arranged}


def _median_seconds(do: Callable[[], Any], times: int = 30) -> float:
    found = []
    for _ in range(times):
        begun = perf_counter()
        jax.block_until_ready(do())
        found.append(perf_counter() - begun)
    return median(found)


def loop_source() -> str:
    """The hand-written loop, as it is printed."""
    return inspect.getsource(hand_written).rstrip()


# --- snapshots --------------------------------------------------------------------------------


class Turns:
    """Threads that take turns: one goes on, the others wait."""

    def __init__(self, number: int):
        self._condition, self._turn = threading.Condition(), 0
        self._waiting = list(range(number))

    def wait(self, who: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == who)

    def next(self, who: int, leaves: bool = False) -> None:
        """`who` lets the next one go on; and takes no turn any more if it `leaves`."""
        with self._condition:
            later = [w for w in self._waiting if w > who]
            first = later or [w for w in self._waiting if w < who or not leaves]
            self._turn = first[0] if first else -1
            if leaves:
                self._waiting.remove(who)
            self._condition.notify_all()


EVERY = {"none": NEVER, "every 10": SNAPSHOT_EVERY, "every step": 1}


def snapshots(task: Task, recipe: Recipe) -> dict[str, Any]:
    """Three runs that differ in how often they take host snapshots, in turns, a block each."""
    size, rounds = SKIP + 2 * SNAPSHOT_EVERY, 2 if task.quick else task.few
    turns, say = Turns(len(EVERY)), say_to_stderr(task.name)
    runs = [
        _InTurn(turns, who, measured_recipe(recipe, policy(recipe, snapshot_every=every)), rounds)
        for who, every in enumerate(EVERY.values())
    ]
    for run in runs:
        run.begin(size, say if run is runs[-1] else lambda _: None)
    for run in runs:
        run.end()
    return {name: run.means for name, run in zip(EVERY, runs, strict=True)}


class _InTurn:
    """A run that goes on while it is its turn. Its first block, which compiles, does not count."""

    def __init__(self, turns: Turns, who: int, recipe: Recipe, rounds: int):
        self._turns, self._who, self._recipe, self._rounds = turns, who, recipe, rounds
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def begin(self, size: int, say: Callable[[str], None]) -> None:
        def between(done: int) -> None:
            if done > self._rounds:
                self._stop.set()
                return
            say(f"round {done} of {self._rounds}")
            self._turns.next(self._who)
            self._turns.wait(self._who)

        self._block = Block(size, between)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._turns.wait(self._who)
        try:
            _train(self._recipe, _backend(), self._block, self._stop)
        except BaseException as error:  # told by `end`
            self._error = error
        finally:
            self._turns.next(self._who, leaves=True)

    def end(self) -> None:
        """Wait for it."""
        self._thread.join()
        if self._error:
            raise self._error

    @property
    def means(self) -> list[float]:
        """The mean seconds of a step in each block."""
        return [sum(block) / len(block) for block in self._block.seconds[1:]]


# --- what both need ---------------------------------------------------------------------------


def _backend() -> SimulatedBackend:
    return SimulatedBackend(NUM_SLICES, DEVICES_PER_SLICE)


def _train(recipe: Recipe, backend: SimulatedBackend, block: Block, stop: threading.Event) -> None:
    """Train until `stop`; a hook that fails would be turned off, and never stop it."""
    errors: list[BaseException] = []

    def guarded(row: dict[str, Any]) -> None:
        try:
            if not stop.is_set():
                block(row)
        except BaseException as error:
            errors.append(error)
            stop.set()

    hooks: tuple[Hook, ...] = (guarded,)
    with run_folder() as run_dir:
        summary = train(replace(recipe, hooks=hooks), backend=backend, run_dir=run_dir, stop=stop)
    if errors:
        raise errors[0]
    if summary.outcome != "preempted":
        raise RuntimeError(f"the run {summary.outcome}: {summary.reason}")
