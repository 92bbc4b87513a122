"""recipes/: they build, and their shapes fit together and onto their slices, on no device."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastix import Recipe
from elastix.data import Mixture, PackedRecords, PackedText, Text
from elastix.mesh import FSDP, SLICE, TENSOR, partition_spec
from elastix.overrides import override
from elastix.recipe_loading import load_recipe
from elastix.run_directory import RunDirectory
from elastix.step import TrainStep, Work
from elastix.train_state import StateSpec
from recipes import pretrain_qwen3_0_6b, quickstart
from tests.recipes import tiny

ROOT = Path(__file__).resolve().parents[1]
V5E_CHIP_BYTES = 16e9


@pytest.fixture(scope="module")
def pretraining() -> Recipe:
    return pretrain_qwen3_0_6b.recipe()


@pytest.fixture(scope="module")
def spec(pretraining) -> StateSpec:
    return StateSpec(pretraining.model.build, pretraining.optimizer.build(), pretraining.seed)


@pytest.mark.parametrize("module", [quickstart, pretrain_qwen3_0_6b])
def test_a_recipe_is_the_same_by_file_and_by_module(module):
    by_file = load_recipe(module.__file__)
    assert by_file.recipe == load_recipe(module.__name__).recipe == module.recipe()
    assert by_file.name == module.__name__.removeprefix("recipes.")


@pytest.mark.parametrize("module", [quickstart, pretrain_qwen3_0_6b])
def test_no_number_of_slices_wastes_work(module):
    recipe = module.recipe()
    assert set(recipe.useful_shares(3).values()) == {1.0}


def test_quickstart_promises_of_the_readme_hold():
    recipe = quickstart.recipe()
    assert recipe.policy.checkpoint_every <= 20
    assert recipe.model.vocab_size >= recipe.data.vocab_size


def test_pretraining_is_of_qwen3_0_6b(pretraining, spec):
    params = [leaf for leaf in spec.leaves if leaf.path in spec.trainable_paths]
    assert sum(np.prod(p.shape, dtype=int) for p in params) == pretraining.model.num_params
    assert round(pretraining.model.num_params / 1e9, 1) == 0.6
    assert pretraining.model.vocab_size >= pretraining.data.vocab_size


def test_pretraining_fits_the_chips_of_a_slice(pretraining, spec):
    fsdp, tensor = pretraining.mesh.inner_shape(16)
    sizes = {SLICE: 3, FSDP: fsdp, TENSOR: tensor}
    rules = pretraining.model.sharding_rules()
    held = 0
    for leaf in spec.leaves:
        axes = partition_spec(leaf.path, leaf.shape, rules, sizes)
        held += leaf.nbytes // np.prod([sizes[a] for a in axes if a], dtype=int)
    replicas = Work(pretraining.global_batch, pretraining.num_replicas, 2).per_slice
    gradients = replicas * 4 * pretraining.model.num_params // 16
    assert held + gradients < V5E_CHIP_BYTES / 2


@pytest.mark.parametrize("num_slices", [4, 2])
def test_the_pretraining_step_keeps_the_shapes_of_its_state(pretraining, spec, num_slices):
    grid = np.array(jax.devices()[:8]).reshape(num_slices, -1, 1)
    mesh = jax.sharding.Mesh(grid, (SLICE, FSDP, TENSOR))
    work = Work(pretraining.global_batch, pretraining.num_replicas, num_slices)
    step = TrainStep(
        spec,
        pretraining.loss,
        pretraining.global_batch,
        pretraining.num_replicas,
        pretraining.reduction,
        pretraining.optimizer.learning_rate,
    )(mesh, spec.specs(pretraining.model.sharding_rules(), mesh))
    struct = jax.ShapeDtypeStruct
    leaves = {leaf.path: struct(leaf.shape, leaf.dtype) for leaf in spec.leaves}
    tokens = (work.padded, work.examples, pretraining.data.seq_len + 1)
    batch = {
        "replica": struct((work.padded,), jnp.int32),
        "example_id": struct((work.padded, work.examples, 2), jnp.uint32),
        "tokens": struct(tokens, jnp.int32),
    }
    new, results = jax.eval_shape(step, leaves, batch)
    assert {path: (x.shape, x.dtype) for path, x in new.items()} == {
        path: (x.shape, x.dtype) for path, x in leaves.items()
    }
    assert results["loss"].shape == results["learning_rate"].shape == ()


def test_a_loss_with_some_arguments_given_has_an_identity():
    def of(**given):
        return replace(tiny.recipe(), loss=partial(tiny.squared_error, **given)).identity()

    assert of(batch=1) != of(batch=2) and of(batch=1) == of(batch=1)
    json.dumps(of(batch=1))


@dataclass(frozen=True)
class Holding:
    """A model of anything."""

    anything: Any

    def build(self, key):
        raise NotImplementedError


def identity_in_a_process(hash_seed: int) -> str:
    code = "from tests.test_recipes import *; print(of_a_set())"
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def of_a_set() -> str:
    return replace(tiny.recipe(), model=Holding({"q", "k", "v", "out"})).identity_sha256()


def test_a_set_has_one_identity_in_every_process():
    assert identity_in_a_process(1) == identity_in_a_process(2) == f"{of_a_set()}\n"


def test_what_is_known_by_its_place_in_memory_alone_is_refused():
    for value in (object(), [object()], {"x": object()}):
        with pytest.raises(ValueError, match="holds <object object at 0x.*a frozen dataclass"):
            replace(tiny.recipe(), model=Holding(value)).identity()


def test_values_that_compare_oddly_are_the_same_only_if_they_are(tmp_path):
    def take_up(value):
        recipe = replace(tiny.recipe(), model=Holding(value))
        RunDirectory.open(tmp_path, recipe, {}, {}).close()

    take_up([math.nan, True, 1])
    take_up([math.nan, True, 1.0])
    for other in ([math.nan, 1, 1], [0.0, True, 1], [math.nan, True], [math.nan, True, True]):
        with pytest.raises(ValueError, match=r"another recipe \(model.anything was"):
            take_up(other)


def test_microbatches_split_a_replica_and_are_part_of_the_identity():
    one = tiny.recipe()  # two examples in a replica
    two = override(one, ["--microbatches", "2"])
    assert two == replace(one, microbatches=2)
    assert two.identity_sha256() != one.identity_sha256()
    with pytest.raises(ValueError, match=r"microbatches=3 cannot split the 2 .* a divisor of 2"):
        override(one, ["--microbatches", "3"])
    with pytest.raises(ValueError, match=r"microbatches=0: use a whole number, 1 or more"):
        replace(one, microbatches=0)


def test_where_the_data_lie_and_how_far_ahead_they_are_read_is_no_part_of_the_identity():
    def of(data):
        return replace(tiny.recipe(), data=data).identity()

    here = PackedText(files=("a/x.jsonl",), seq_len=16)
    assert of(here) == of(replace(here, files=("b/x.jsonl",), tokenizer="t.json", prefetch=0))
    assert of(here) != of(replace(here, seq_len=8))
    assert of(Mixture((here,))) == of(Mixture((replace(here, prefetch=4),), prefetch=1))
    assert of(PackedRecords("a")) == of(PackedRecords("b", prefetch=0))
    assert of(Text()) == of(Text(("x.txt",))) != of(Text(seq_len=9))


def test_not_every_set_of_very_many_slices_can_be_compiled_for():
    recipe = tiny.recipe()
    of_all = replace(recipe, policy=replace(recipe.policy, warm="all"), global_batch=24)
    of_all.check_slices(4)
    many = replace(of_all, num_replicas=12)
    with pytest.raises(ValueError, match="would compile for 4095 sets of 12 slices"):
        many.check_slices(12)
    replace(many, policy=replace(many.policy, min_slices=11)).check_slices(12)
