"""The step: the same bits on any slices, and no slice computes what is not its own."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from elastix.mesh import MeshSpec, partition_spec
from elastix.program import Program
from elastix.step import Work
from elastix.train_state import StateSpec
from tests.recipes.net import DIM, recipe

ALL = frozenset({0, 1, 2, 3})


def slice_devices(count: int = 4, each: int = 2) -> dict[int, list[jax.Device]]:
    devices = jax.devices()
    return {s: devices[s * each : (s + 1) * each] for s in range(count)}


def program_of(recipe, devices=None) -> tuple[Program, list]:
    batches = recipe.data.build(recipe.global_batch, recipe.seed).batches(0)
    taken = [next(batches) for _ in range(3)]
    return Program(recipe, taken[0], devices or slice_devices()), taken


def train_steps(program: Program, batches, slices) -> tuple[str, list[bytes]]:
    """(hash of the state, loss bits) after a step for each batch."""
    leaves, losses = program.initial(slices), []
    for batch in batches:
        leaves, results = program.step(slices)(leaves, program.put_batch(batch, slices))
        losses.append(np.asarray(results["loss"]).tobytes())
        ids = program.consumed_ids(np.asarray(results["example_id"]))
        np.testing.assert_array_equal(ids, batch["example_id"])
    return program.spec.sha256({k: np.asarray(v) for k, v in leaves.items()}), losses


@pytest.mark.parametrize("num_replicas", [12, 4, 6])
def test_any_slices_give_the_same_bits(num_replicas):
    program, batches = program_of(replace(recipe(), num_replicas=num_replicas))
    results = [
        train_steps(program, batches, frozenset(s))
        for s in ([0, 1, 2, 3], [1, 2, 3], [0, 2, 3], [1, 3], [2])
    ]
    assert all(r == results[0] for r in results), "slices 4, 3, 3, 2, 1"


def test_the_seed_matters():
    program, batches = program_of(recipe())
    other, _ = program_of(replace(recipe(), seed=1))
    assert train_steps(program, batches, ALL) != train_steps(other, batches, ALL)


def test_fast_and_ordered_agree_to_rounding():
    (ordered, batches), (fast, _) = (
        program_of(replace(recipe(), reduction=r)) for r in ("ordered", "fast")
    )
    for slices in (ALL, frozenset({1}), frozenset({0, 1, 3})):
        losses = [
            np.frombuffer(b"".join(train_steps(p, batches, slices)[1]), np.float32)
            for p in (ordered, fast)
        ]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_the_loss_is_the_weighted_mean_over_the_global_batch():
    """Against one plain evaluation of the whole batch, without replicas, slices or padding."""
    plain = replace(recipe(), model=replace(recipe().model, dropout=0.0), num_replicas=4)
    program, batches = program_of(plain)
    slices = frozenset({0, 1, 2})
    leaves = program.initial(slices)
    whole = {k: np.asarray(v) for k, v in leaves.items()}
    state = program.spec.unflatten(whole)
    import equinox as eqx

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
    for count in (4, 3, 2, 1):
        slices = frozenset(range(count))
        flops = dot_flops(program.step(slices).as_text())
        per_replica.append(flops / Work(24, num_replicas, count).per_slice)
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
