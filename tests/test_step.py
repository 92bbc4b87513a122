"""The step: the same bits on any slices, and no slice computes what is not its own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from elastix.data import Text
from elastix.mesh import FSDP, SLICE, MeshSpec, partition_spec
from elastix.program import Program
from elastix.reduction import MOST_REPLICAS, sum_over_replicas
from elastix.snapshots import LocalTransfers
from elastix.step import Work
from elastix.train_state import StateSpec
from models.qwen3 import next_token_loss, qwen3
from tests.recipes.net import DIM, NetConfig, loss, recipe

ALL = frozenset({0, 1, 2, 3})
PLACE = LocalTransfers().place


def slice_devices(count: int = 4, each: int = 2) -> dict[int, list[jax.Device]]:
    devices = jax.devices()
    return {s: devices[s * each : (s + 1) * each] for s in range(count)}


def program_of(recipe, devices=None) -> tuple[Program, list]:
    batches = recipe.data.build(recipe.global_batch, recipe.seed).batches(0)
    taken = [next(batches) for _ in range(3)]
    return Program(recipe, taken[0], devices or slice_devices()), taken


def train_steps(program: Program, batches, slices, initial=None) -> tuple[str, list[bytes]]:
    """(hash of the state, loss bits) after a step for each batch, from the seed's state, which is
    compiled for `slices`, or from the one given, in host memory."""
    if initial is None:
        leaves = program.initial(slices)
    else:
        shardings = program.shardings(slices)
        leaves = {path: PLACE(leaf, shardings[path]) for path, leaf in initial.items()}
    losses = []
    for batch in batches:
        leaves, results = program.step(slices)(leaves, program.put_batch(batch, slices))
        losses.append(np.asarray(results["loss"]).tobytes())
        ids = program.consumed_ids(np.asarray(results["example_id"]))
        np.testing.assert_array_equal(ids, batch["example_id"])
    return program.spec.sha256({k: np.asarray(v) for k, v in leaves.items()}), losses


def seed_state(program: Program) -> dict[str, np.ndarray]:
    """The seed's state, in host memory."""
    return {path: np.array(leaf) for path, leaf in program.initial(ALL).items()}


FEWER = [[0, 1, 2, 3], [1, 2, 3], [1, 3], [2]]
"""Four slices, three, two and one. Whoever tests one recipe on them compiles it once."""


@pytest.mark.parametrize("num_replicas", [12, 6, pytest.param(4, marks=pytest.mark.soak)])
def test_any_slices_give_the_same_bits(num_replicas):
    program, batches = program_of(replace(recipe(), num_replicas=num_replicas))
    results = [train_steps(program, batches, frozenset(s)) for s in (*FEWER, [0, 2, 3])]
    assert all(r == results[0] for r in results), "slices 4, 3, 2, 1, 3"


class Narrow(eqx.Module):
    """Computes in bfloat16 what its master parameters, in any dtype, are rounded to."""

    net: eqx.Module

    def __call__(self, x, key):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), self.net)
        return low(x.astype(jnp.bfloat16), key).astype(jnp.float32)


@dataclass(frozen=True)
class NarrowConfig(NetConfig):
    master: str = "float32"

    def build(self, key):
        net = super().build(key)
        return Narrow(jax.tree.map(lambda p: p.astype(self.master), net))


def masked_loss(model, batch, keys):
    """Of some replicas every example, of most some, is masked out."""
    mask = jnp.floor(jnp.abs(batch["x"][:, 0]) * 2)
    return loss(model, {**batch, "w": mask}, keys)


@pytest.mark.parametrize(
    ("num_replicas", "master", "microbatches", "devices"),
    [
        *((12, "float32", 1, 2), (5, "float32", 2, 1), (5, "bfloat16", 1, 2)),
        pytest.param(12, "bfloat16", 2, 1, marks=pytest.mark.soak),
    ],
)
def test_narrow_arithmetic_uneven_masks_and_clipping_give_the_same_bits(
    num_replicas, master, microbatches, devices
):
    """The bias is not decayed, and the norm of the gradients is above what it is clipped to. With
    one device a slice, a slice alone is a program without a mesh, of which XLA could do more."""
    narrow = replace(
        recipe(),
        model=NarrowConfig(master=master),
        optimizer=replace(recipe().optimizer, clip=0.1),
        loss=masked_loss,
        num_replicas=num_replicas,
        global_batch=2 * num_replicas,
        microbatches=microbatches,
    )
    program, batches = program_of(narrow, slice_devices(each=devices))
    assert all(s.dtype == master for s in program.spec.leaves if s.path.startswith(".model"))
    seed = seed_state(program)
    _, results = program.step(ALL)(program.initial(ALL), program.put_batch(batches[0], ALL))
    assert float(results["grad_norm"]) > 0.1
    # Nothing is padded where 12 replicas are split: on two slices as little as on three.
    sets = FEWER if num_replicas == 5 else FEWER[:2] + FEWER[3:]
    trained = [train_steps(program, batches, frozenset(s), seed) for s in sets]
    assert all(t == trained[0] for t in trained)


def test_the_seed_matters():
    program, batches = program_of(recipe())
    other, _ = program_of(replace(recipe(), seed=1))
    assert train_steps(program, batches, ALL) != train_steps(other, batches, ALL)


def test_fast_and_ordered_agree_to_rounding():
    (ordered, batches), (fast, _) = (
        program_of(replace(recipe(), reduction=r)) for r in ("ordered", "fast")
    )
    seed = seed_state(ordered)
    for slices in map(frozenset, ([0, 1, 2, 3], [1, 2, 3], [2])):
        losses = [
            np.frombuffer(b"".join(train_steps(p, batches, slices, seed)[1]), np.float32)
            for p in (ordered, fast)
        ]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


# --- microbatches -----------------------------------------------------------------------------


def test_microbatches_learn_the_same_from_the_same_draws_of_dropout():
    whole, batches = program_of(replace(recipe(), num_replicas=4))
    seed = seed_state(whole)
    wanted = np.frombuffer(b"".join(train_steps(whole, batches, ALL, seed)[1]), np.float32)
    for parts in (2, 6):  # each of three examples, and each of one
        split, _ = program_of(replace(recipe(), num_replicas=4, microbatches=parts))
        trained = [
            train_steps(split, batches, frozenset(s), seed) for s in ([0, 1, 2, 3], [0, 3], [1])
        ]
        assert all(t == trained[0] for t in trained), f"{parts} parts, slices 4, 2, 1"
        losses = np.frombuffer(b"".join(trained[0][1]), np.float32)
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    other, _ = program_of(replace(recipe(), num_replicas=4, seed=1))
    assert abs(np.frombuffer(train_steps(other, batches, ALL)[1][0], np.float32) - wanted[0]) > 0.01


def test_microbatches_need_less_memory():
    wide = replace(recipe(), model=NetConfig(hidden=256), global_batch=192, num_replicas=4)
    held = []
    for parts in (1, 4, 12):
        program, _ = program_of(replace(wide, microbatches=parts))
        held.append(program.step(ALL).memory_analysis().temp_size_in_bytes)
    assert held[0] > 1.5 * held[1] > 1.5 * held[2], held


# --- the sum over replicas --------------------------------------------------------------------

WIDTH = 6


@cache
def summing(num_slices: int, num_replicas: int):
    """`gradients [num_replicas, WIDTH] -> sum`, on so many slices of two devices."""
    mesh = MeshSpec().build(slice_devices(), frozenset(range(num_slices)))
    padded = Work(num_replicas, num_replicas, num_slices).padded
    specs = [P(FSDP), P()]

    def both(rows):
        grads = {"split": rows, "whole": rows[:, :3]}
        return sum_over_replicas(grads, specs, mesh, num_replicas)

    step = jax.jit(both)

    def total(values):
        garbage = np.full((padded - num_replicas, WIDTH), np.nan, values.dtype)
        rows = jax.device_put(np.concatenate([values, garbage]), NamedSharding(mesh, P(SLICE)))
        sums = jax.tree.map(np.asarray, step(rows))
        assert sums["split"][:3].tobytes() == sums["whole"].tobytes()
        return sums["split"]

    return total


def same_sum(values: np.ndarray) -> np.ndarray:
    """The sum, which is the same bits on 4, 3, 2 and 1 slices and in the reverse order."""
    sums = [summing(s, len(values))(values) for s in (4, 3, 2, 1)]
    sums.append(summing(3, len(values))(values[::-1].copy()))
    assert len({s.tobytes() for s in sums}) == 1, sums
    assert sums[0].dtype == values.dtype
    return sums[0]


def gradients(num_replicas: int) -> st.SearchStrategy[np.ndarray]:
    """All floats, in any mix: bit patterns, decades apart, or of one magnitude."""
    shape = (num_replicas, WIDTH)
    plain = arrays(np.float32, shape, elements=st.floats(-4, 4, width=32))
    anything = arrays(np.float32, shape, elements=st.floats(width=32))
    tiny = arrays(np.uint32, shape, elements=st.integers(0, 2**25)).map(
        lambda bits: bits.view(np.float32) * np.float32(-1) ** np.arange(num_replicas)[:, None]
    )
    signs = arrays(np.float32, shape, elements=st.sampled_from([-0.0, 0.0, 1.0, -1.0]))
    return plain | anything | tiny.map(np.float32) | signs


EDGES = np.zeros((5, WIDTH), np.float32)
EDGES[:, 0] = -0.0
EDGES[:, 1] = [1, -1, -0.0, 0, -0.0]
EDGES[:, 2] = [np.inf, 1, 3e38, -3e38, np.inf]
EDGES[:, 3] = [-np.inf, np.nan, 0, 0, 0]
EDGES[:, 4] = [3e38, 3e38, -3e38, -3e38, 1e-45]
EDGES[:, 5] = [1e38, 1e-45, -1e38, 0, 0]


@settings(max_examples=25)
@given(st.sampled_from([5, 12]).flatmap(gradients))
@example(EDGES)
@example(-EDGES)
@example(np.full((12, WIDTH), 3e38, np.float32))
@example(np.array([[1.0] * WIDTH] + [[0.75 * 2**-26] * WIDTH] * 11, np.float32))
def test_the_sum_is_the_same_on_any_slices_and_nearer_than_a_float_sum_must_be(values):
    total = same_sum(values)
    for column, got in zip(values.T.tolist(), total.tolist(), strict=True):
        if not all(map(math.isfinite, column)):
            plain = sum(column)
            assert got == plain or (math.isnan(got) and math.isnan(plain)), column
            continue
        exact, largest = math.fsum(column), max(map(abs, column))
        if not math.isfinite(got):
            assert abs(exact) > 3.4028e38 and got * exact > 0, column
            continue
        rounded = len(column) * 2.0**-28 * largest + 2.0**-24 * abs(exact) + 2.0**-150
        assert abs(got - exact) <= rounded, (column, exact, got)
        if got == 0 and exact == 0:
            minus = all(x == 0 and math.copysign(1, x) < 0 for x in column)
            assert (math.copysign(1, got) < 0) == minus, column


@settings(max_examples=8)
@given(gradients(5))
def test_bfloat16_gradients_are_summed_in_float32_and_rounded_once(values):
    with np.errstate(all="ignore"):
        narrow = values.astype(jnp.bfloat16)
    total, wide = same_sum(narrow), same_sum(narrow.astype(np.float32))
    with np.errstate(all="ignore"):
        wanted = wide.astype(jnp.bfloat16)
    np.testing.assert_array_equal(total.astype(np.float32), wanted.astype(np.float32))


def test_the_sum_is_nearer_to_float64_than_a_float_sum():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((12, 20000)) * 2.0 ** rng.integers(-8, 8, (1, 20000))
    values = values.astype(np.float32)
    exact = values.astype(np.float64).sum(0)
    mesh = MeshSpec().build(slice_devices(), frozenset(range(3)))
    ours = jax.jit(lambda x: sum_over_replicas([x], [P()], mesh, 12)[0])(values)
    ordered = np.zeros(20000, np.float32)
    for row in values:
        ordered += row
    errors = [
        np.sqrt(np.mean(((np.asarray(x, np.float64) - exact) / np.abs(values).max(0)) ** 2))
        for x in (ours, ordered)
    ]
    assert errors[0] < 0.6 * errors[1]


def test_more_replicas_than_can_be_counted_are_refused():
    with pytest.raises(ValueError, match=f"use at most {MOST_REPLICAS}"):
        summing(1, MOST_REPLICAS + 1)(np.ones((MOST_REPLICAS + 1, WIDTH), np.float32))


def test_the_loss_is_the_weighted_mean_over_the_global_batch():
    """Against one plain evaluation of the whole batch, without replicas, slices or padding."""
    plain = replace(recipe(), model=replace(recipe().model, dropout=0.0), num_replicas=4)
    program, batches = program_of(plain)
    slices = frozenset({0, 1, 2})
    leaves = program.initial(slices)
    whole = {k: np.asarray(v) for k, v in leaves.items()}
    state = program.spec.unflatten(whole)
    model = eqx.combine(state.model, program.spec.static_model)
    keys = jax.random.split(jax.random.key(0), plain.global_batch)
    total, weight, _ = plain.loss(model, batches[0], keys)
    _, results = program.step(slices)(leaves, program.put_batch(batches[0], slices))
    np.testing.assert_allclose(results["loss"], total / weight, rtol=1e-6)
    assert float(results["weight"]) == float(weight)


@pytest.mark.parametrize("num_replicas", [12, 4])
def test_flops_of_a_device_grow_with_its_replicas(num_replicas):
    """No slice computes what is not its own: FLOPs of the compiled step, trip counts included,
    over ceil(R / S), are the same for every number of slices S."""
    program, _ = program_of(replace(recipe(), num_replicas=num_replicas))
    per_replica = []
    for slices in map(frozenset, FEWER):
        flops = dot_flops(program.step(slices).as_text())
        per_replica.append(flops / Work(24, num_replicas, len(slices)).per_slice)
    assert per_replica[0] > 0
    np.testing.assert_allclose(per_replica, per_replica[0], rtol=0.01)


def dot_flops(hlo: str) -> int:
    """FLOPs of all dots of an optimized HLO module, loop bodies times their trip counts."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S))
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M).group(1)

    def flops(name: str) -> int:
        body, total = bodies[name], 0
        shapes = {
            n: [int(x) for x in dims.split(",") if x]
            for n, dims in re.findall(r"%?([\w.\-]+) = \w+\[([\d,]*)\]", body)
        }
        for line in body.splitlines():
            called = re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", line)
            trips = re.search(r"known_trip_count[^\d]*(\d+)", line)
            times = int(trips.group(1)) if trips else 1
            total += sum(times * flops(c) for c in called if c in bodies)
            dot = re.search(
                r"%?([\w.\-]+) = \w+\[[^\]]*\][^=]* dot\((?:\w+\[[\d,]*\]\S* )?%?([\w.\-]+)", line
            )
            if dot:
                contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line).group(1)
                lhs = shapes[dot.group(2)]
                inner = np.prod([lhs[int(d)] for d in contracted.split(",") if d], dtype=int)
                total += 2 * int(np.prod(shapes[dot.group(1)], dtype=int)) * int(inner)
        return total

    return flops(entry)


def test_every_leaf_lies_whole_on_every_slice():
    program, _ = program_of(recipe())
    leaves = program.initial(ALL)
    for path, array in leaves.items():
        for devices in slice_devices().values():
            held = {
                str(s.index): s.data.size for s in array.addressable_shards if s.device in devices
            }
            assert sum(held.values()) == array.size, path


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_a_step_leaves_every_leaf_where_it_lay(reduction):
    """XLA would split the replicated weights of the norms, and the next step would refuse them."""
    model = replace(qwen3("tiny"), vocab_size=260, hidden_size=16, num_layers=1)
    data, loss = Text(seq_len=8), next_token_loss
    program, _ = program_of(
        replace(recipe(), model=model, data=data, loss=loss, num_replicas=4, reduction=reduction)
    )
    slices = frozenset({0, 1, 2})
    kept, _ = program.step(slices).output_shardings
    for path, sharding in program.shardings(slices).items():
        assert kept[path].is_equivalent_to(sharding, len(program.shapes[path])), path


@pytest.mark.parametrize(
    ("replicas", "slices", "each", "useful"),
    [(12, 4, 3, 1.0), (12, 3, 4, 1.0), (4, 3, 2, 4 / 6), (5, 4, 2, 5 / 8), (1, 1, 1, 1.0)],
)
def test_the_share_of_useful_work(replicas, slices, each, useful):
    work = Work(replicas * 2, replicas, slices)
    assert (work.per_slice, work.useful) == (each, useful)


def test_the_state_counts_its_steps_and_its_leaves_are_keyed_by_path():
    program, batches = program_of(recipe())
    leaves = program.initial(ALL)
    for batch in batches:
        leaves, _ = program.step(ALL)(leaves, program.put_batch(batch, ALL))
    assert int(leaves[".step"]) == 3
    counts = [int(v) for k, v in leaves.items() if k.endswith(".count")]
    assert counts and set(counts) == {3}, "the optimizer's own count is the step"
    key = next(s for s in program.spec.leaves if s.path == ".key")
    assert key.dtype_name.startswith("key<") and key.key_impl


def test_the_hash_depends_on_every_leaf_and_on_no_order():
    program, _ = program_of(recipe())
    leaves = {k: np.asarray(v) for k, v in program.initial(ALL).items()}
    spec: StateSpec = program.spec
    assert spec.sha256(dict(reversed(leaves.items()))) == spec.sha256(leaves)
    for path in leaves:
        changed = np.array(leaves[path])
        changed.reshape(-1).view(np.uint8)[0] ^= 1
        assert spec.sha256({**leaves, path: changed}) != spec.sha256(leaves), path


# --- sharding rules ---------------------------------------------------------------------------

SIZES = {"slice": 4, "fsdp": 2, "tensor": 1}


def test_a_rule_places_the_leaf_and_the_moments_that_end_with_its_path():
    rules = [(r"\.first$", (None, "fsdp"))]
    for path in (".model.first", ".opt_state[1][0].mu.first"):
        assert partition_spec(path, (DIM, 16), rules, SIZES) == P(None, "fsdp")
    assert partition_spec(".model.second", (16, DIM), rules, SIZES) == P()


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (("slice", None), (8, 16), "on the axis 'slice'"),
        (("fsdp",), (8, 16), "names 1 dims"),
        (("fsdp", None), (7, 16), "has a dim of 7"),
    ],
)
def test_a_rule_that_would_lose_or_cut_a_leaf_is_refused(axes, shape, message):
    with pytest.raises(ValueError, match=message):
        partition_spec(".model.first", shape, [("first", axes)], SIZES)


def test_a_mesh_that_does_not_use_a_slice_exactly_is_refused():
    with pytest.raises(ValueError, match="choose factors of 2"):
        MeshSpec(fsdp=3).inner_shape(2)
    assert MeshSpec(tensor=2).inner_shape(8) == (4, 2)
