"""The child process of `elastix bench` that measures one part, and prints what it found."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import warnings

import jax

from elastix.backends.simulated import simulate_devices
from elastix.benchmark.parts import DEVICES_PER_SLICE, NUM_SLICES, Measure, NotPossible, Task
from elastix.preparation import keep_compiled_programs
from elastix.recipe_loading import load_recipe

_MEASURES = {
    "live": "recovery:losses",
    "host": "recovery:losses",
    "overhead": "side_by_side:overhead",
    "snapshots": "side_by_side:snapshots",
    "tokens": "recovery:tokens",
    "memory": "memory:held",
    "vendor": "vendor:losses",
    "restart": "restart:restarts",
}


def main(task: Task) -> None:
    """Measure; the last line of standard output is what was found, as JSON."""
    recipe = load_recipe(task.recipe).recipe
    if task.option != "off":
        keep_compiled_programs(task.cache)
    jax.config.update("jax_platforms", "cpu")
    simulate_devices(NUM_SLICES * DEVICES_PER_SLICE)
    try:
        found = _measure(task.part)(task, recipe)
    except NotPossible as error:
        found = {"not_possible": str(error)}
    print(json.dumps(found))


def _measure(part: str) -> Measure:
    module, _, name = _MEASURES[part.partition("-")[0]].partition(":")
    measure: Measure = getattr(importlib.import_module(f"elastix.benchmark.{module}"), name)
    return measure


if __name__ == "__main__":
    for library in ("absl", "grain", "jax", "orbax"):
        logging.getLogger(library).setLevel(logging.ERROR)
    logging.getLogger("pathwaysutils").setLevel(logging.CRITICAL)  # it logs each loss, with a trace
    warnings.simplefilter("ignore")
    main(Task(**json.loads(sys.argv[1])))
