"""The parts of a bench, each measured in a process of its own, and what they are given."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastix.machine import Policy
from elastix.recipe import Recipe

NUM_SLICES, DEVICES_PER_SLICE = 4, 2
SNAPSHOT_EVERY = 10
NEVER = 10**9
NUM_STEPS = 10**6
"""More than any part takes: each ends when it has measured enough."""

PARTS = {
    "live-2": "losses with lookback live, two steps in flight; and slices left after a notice",
    "live-1": "the same with one step in flight",
    "host-2": "losses with lookback host, two steps in flight",
    "host-1": "the same with one step in flight",
    "overhead": "the elastic loop and a hand-written one in turns",
    "snapshots": "no host snapshots, one every 10 steps and one every step, in turns",
    "tokens-12": "tokens per CPU-second with a slice gone, 12 logical replicas",
    "tokens-4": "the same with 4 logical replicas",
    "memory": "bytes held on the devices, lookback live and host",
    "vendor-off": "the vendor's documented loop, JAX's persistent cache off",
    "vendor-on": "the same with the cache on",
    "restart-off": "killed and started again, JAX's persistent cache off",
    "restart-on": "the same with the cache on",
}
"""What is measured, by name, in the order in which it is."""


@dataclass(frozen=True)
class Task:
    """One part of one recipe: what a child process is given.

    `losses` is how many a median is of; `cache` is the folder of JAX's persistent cache.
    """

    part: str
    recipe: str
    losses: int
    quick: bool
    cache: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def few(self) -> int:
        """How often what takes long is measured: two fifths as often, each slice at least once."""
        return max(NUM_SLICES, self.losses * 2 // 5)

    @property
    def option(self) -> str:
        """What stands after the dash in the name of the part."""
        return self.part.partition("-")[2]

    @property
    def name(self) -> str:
        """How progress names it."""
        return f"{self.recipe} {self.part}"


Measure = Callable[[Task, Recipe], dict[str, Any]]
"""A part: measures, and returns JSON values."""


class NotPossible(ValueError):
    """A part that this recipe or this machine does not allow; the message says why."""


def measured_recipe(recipe: Recipe, policy: Policy) -> Recipe:
    """The recipe, for as long as it takes, without its hooks and evaluations."""
    return replace(recipe, num_steps=NUM_STEPS, policy=policy, hooks=(), eval_data=None)


def policy(recipe: Recipe, **fields: Any) -> Policy:
    """The recipe's policy, as far as it does not bear on what is measured."""
    measured = dict(
        min_slices=1,
        max_slices=None,
        patience=0.0,
        inflight=2,
        snapshot_every=SNAPSHOT_EVERY,
        checkpoint_every=0,
        checkpoint_seconds=0.0,
        eval_every=0,
        keep_best=0,
        probe_every=0.05,
        stable_probes=1,
    )
    return replace(recipe.policy, **{**measured, **fields})


@contextmanager
def run_folder() -> Iterator[Path]:
    """A run directory, gone afterwards: what is measured writes its logs, as runs do."""
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as folder:
        yield Path(folder, "run")
