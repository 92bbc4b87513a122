"""What a run is refused for before anything of it is made, in one line with value and remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from elastix.backends import Backend
from elastix.background import start, wait_for
from elastix.checkpoints import CheckpointError
from elastix.classification import StuckError
from elastix.data import Stream
from elastix.host_memory import host_memory
from elastix.leaf_hash import width_in_bits
from elastix.lineage import refuse_other_leaves
from elastix.program import Batch, Program
from elastix.recipe import Recipe
from elastix.run_directory import RunDirectory, newest_step
from elastix.step import Reduction
from elastix.train_state import StateSpec
from elastix.user_code import building
from elastix.wording import size

_TRAINED = ("float32", "bfloat16", "float16")
_RESTORES_PARTS_OF_BYTES = (0, 12)


def build_data(recipe: Recipe) -> Stream:
    """The stream of a recipe's data.

    Raises:
        ValueError: it cannot be built.
    """
    with building(f"data {recipe.data!r}"):
        return recipe.data.build(recipe.global_batch, recipe.seed)


def build_eval_data(recipe: Recipe) -> tuple[Stream, int] | None:
    """The stream of what is evaluated on, and the batches of an evaluation; None without any.

    Raises:
        ValueError: it cannot be built, or is less than that.
    """
    if not recipe.policy.eval_every:
        return None
    with building(f"eval_data {recipe.eval_data!r}"):
        return recipe.build_eval_data()


def first_batch(what: str, stream: Stream, recipe: Recipe, backend: Backend) -> Batch:
    """The first global batch of a stream, for its shapes.

    Raises:
        ValueError: it cannot be read, or not by the deadline of a compile.
    """
    deadline = recipe.policy.prepare_deadline
    with building(f"the first batch of {what}"):
        try:
            job = start(lambda: next(stream.batches(0)))
            return wait_for(job, backend, (), deadline, f"{what}: reading the first batch")
        except StuckError as error:
            why = f"{error} ({deadline:g} s): see whether its source answers"
            raise ValueError(why) from error


def build_program(
    recipe: Recipe, sample: Batch, eval_sample: Batch | None, backend: Backend
) -> Program:
    """The program of a recipe, of which nothing has been compiled.

    Raises:
        ValueError: its model or its optimizer cannot be built, or they make leaves that cannot be
            trained, or that the memory of simulated slices cannot hold.
    """
    with building("the recipe's model and optimizer"):
        program = Program(recipe, sample, backend.devices, eval_sample, backend.transfers)
    _refuse_untrainable(program.spec, recipe.reduction)
    _refuse_unrestorable(program.spec)
    _refuse_too_large(program.spec.nbytes, backend.devices)
    return program


def _refuse_untrainable(spec: StateSpec, reduction: Reduction) -> None:
    """Gradients of other dtypes cannot be added up, or not without a loss."""
    trained = (*_TRAINED, "float64") if reduction == "fast" else _TRAINED
    for leaf in spec.leaves:
        if leaf.path in spec.trainable_paths and leaf.dtype_name not in trained:
            raise ValueError(
                f"{leaf.path} is {leaf.dtype_name}, which reduction={reduction!r} cannot train: "
                f"make it {' or '.join(trained)}, and convert it where it is used"
            )


def _refuse_unrestorable(spec: StateSpec) -> None:
    """Older JAX puts what is narrower than a byte on a device in a layout that a compiled step
    does not take."""
    if jax.__version_info__ >= _RESTORES_PARTS_OF_BYTES:
        return
    for leaf in spec.leaves:
        if width_in_bits(leaf.dtype) < 8:
            raise ValueError(
                f"{leaf.path} is {leaf.dtype_name}, which JAX {jax.__version__} cannot restore: "
                "use a dtype of whole bytes, or JAX 0.12 (Python 3.12)"
            )


def _refuse_too_large(nbytes: int, devices: Mapping[int, Sequence[Any]]) -> None:
    """The system would end a process that takes more memory than there is, without a word."""
    if any(device.platform != "cpu" for each in devices.values() for device in each):
        return
    if nbytes * len(devices) > host_memory():
        raise ValueError(
            f"the train state is {size(nbytes)}, and each of {len(devices)} slices holds one, in "
            f"{size(host_memory())} of memory: use a smaller model, or fewer slices"
        )


def refuse_leaves_of_another(directory: RunDirectory, program: Program) -> None:
    """The identity of a recipe does not tell that the code of its model has changed: the newest
    checkpoint that is not damaged does. An older one does not matter while that is good; if it
    ever does, a restore refuses it.

    Raises:
        ValueError: with the leaves that differ.
    """
    with contextlib.suppress(CheckpointError):  # what is bad, a restore will tell
        if step := newest_step(directory.store):
            own: Any = directory.store.metadata(step)["checkpoint"]
            refuse_other_leaves(f"run directory {directory.name}", program.spec, own["leaves"])
