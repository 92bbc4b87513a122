"""A slice whose memory holds wrong bits: found at the next snapshot, left out, undone."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from elastix import Lose, Return, SimulatedBackend, train
from elastix.backends.simulated import VirtualClock
from elastix.checkpoints import CheckpointStore
from elastix.classification import SliceCorruptError
from elastix.faults import Corrupt
from elastix.leaf_hash import agreed, difference, hashes_of, hashes_on_device
from elastix.machine import (
    Committed,
    Probed,
    Restoring,
    SlicesLost,
    Source,
    Tier,
    Waiting,
)
from elastix.testing.slices import SteppingBackend
from tests.recipes import net
from tests.test_machine import ALL, POLICY, host, ledger, on, slices, snapshotting, training

NET = replace(
    net.recipe(),
    eval_data=net.WavesConfig(size=48),
    policy=replace(net.recipe().policy, eval_every=6),
)


def run(*faults, recipe=NET, **options):
    return train(
        recipe, backend=SimulatedBackend(4, 2, clock=VirtualClock()), faults=faults, **options
    )


@pytest.fixture(scope="module")
def undisturbed():
    return run()


# --- the hash -------------------------------------------------------------------------------------

LEAVES = {
    "f32": np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32),
    "i32": np.arange(60, dtype=np.int32).reshape(3, 4, 5),
    "f16": np.linspace(0, 1, 9).astype(np.float16),
    "u8": np.arange(11, dtype=np.uint8),
    "bool": np.array([True, False, True]),
    "scalar": np.float32(3.0)[None][0:1].reshape(()),
    "empty": np.zeros((0, 4), np.float32),
    "c64": np.array([[1 + 2j, -0.0 - 1j], [complex(np.nan, 3), 0.5j]], np.complex64),
    "i4": np.arange(-8, 8).astype(ml_dtypes.int4).reshape(2, 8),
    "u2": np.array([3, 0, 1], ml_dtypes.uint2),
    "f8": np.array([-1, 0.5, np.nan], ml_dtypes.float8_e4m3fn),
}


@pytest.mark.parametrize("name", LEAVES)
def test_device_and_host_hash_alike(name):
    import jax

    words = np.asarray(jax.jit(hashes_on_device)([LEAVES[name]]))[0]
    assert hashes_of(LEAVES)[name] == "".join(f"{w:08x}" for w in words)


def test_one_flipped_bit_anywhere_changes_the_hash():
    good = hashes_of(LEAVES)
    used = {"i4": 4, "u2": 2}  # of the eight bits that host memory gives to each
    for name in ("f32", "i32", "f16", "u8", "c64", "i4", "u2", "f8"):
        for bit in range(LEAVES[name].nbytes * 8):
            if bit % 8 >= used.get(name, 8):
                continue
            data = bytearray(LEAVES[name].tobytes())
            data[bit // 8] ^= 1 << bit % 8
            flipped = np.frombuffer(data, LEAVES[name].dtype).reshape(LEAVES[name].shape)
            assert difference({**LEAVES, name: flipped}, good) == name


def test_bits_of_host_memory_that_no_element_uses_do_not_count():
    codes = np.arange(16, dtype=np.uint8)
    for code in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn):
        assert hashes_of({"x": codes.view(code)}) == hashes_of({"x": (codes | 0xA0).view(code)})


def test_two_elements_that_changed_places_are_noticed():
    swapped = LEAVES["f32"].copy()
    swapped[0, 0], swapped[0, 1] = swapped[0, 1], swapped[0, 0]
    assert difference({**LEAVES, "f32": swapped}, hashes_of(LEAVES)) == "f32"


def rows(*values):
    return {s: np.array([[1, 2], [v, 4]], np.uint32) for s, v in enumerate(values)}


def test_the_majority_is_right():
    assert agreed(rows(7, 7, 7), ["a", "b"]) == {"a": "0000000100000002", "b": "0000000700000004"}
    with pytest.raises(SliceCorruptError, match="slice 1 holds other bits than the rest, in b"):
        agreed(rows(7, 8, 7), ["a", "b"])
    with pytest.raises(SliceCorruptError) as error:
        agreed(rows(7, 8, 7, 7, 9), ["a", "b"])
    assert error.value.slices == {1, 4}
    for tied in (rows(7, 8), rows(7, 7, 8, 8), rows(7, 8, 9)):
        with pytest.raises(RuntimeError, match="no majority"):
            agreed(tied, ["a", "b"])


# --- the machine ----------------------------------------------------------------------------------


def test_what_came_of_wrong_bits_is_no_source_even_with_lookback_live():
    live = replace(POLICY, lookback="live", eval_every=5)
    book = ledger(evaluated=50, sources=(Source(Tier.SEED, 0), host(40)))
    before = replace(snapshotting(50), ledger=book)
    state, _ = on(before, SlicesLost, live, slices=slices(1), corrupt=True)
    assert isinstance(state, Restoring) and state.source == host(40, slices(0, 2, 3))
    assert state.ledger.evaluated == 40, "what was evaluated since is evaluated again"
    assert state.ledger.corrupt == slices(1)


def test_a_corrupt_slice_is_never_taken_back():
    book = ledger(up=slices(0, 2, 3), corrupt=slices(1))
    before = training(45, 46, mesh=slices(0, 2, 3), ledger=book)
    eager = replace(POLICY, stable_probes=1)
    state, effects = on(before, Probed, eager, up=slices(1))
    assert state.ledger.up == slices(0, 2, 3)
    state, _ = on(state, Committed, eager, step=46)
    assert state.mesh == slices(0, 2, 3) and not isinstance(state, Restoring)


def test_patience_does_not_wait_for_a_corrupt_slice():
    patient = replace(POLICY, patience=30.0)
    state, _ = on(snapshotting(50), SlicesLost, patient, slices=slices(1), corrupt=True)
    assert isinstance(state, Restoring), "all that can return are there"
    book = ledger(corrupt=slices(1), up=ALL - {1})
    state, _ = on(training(45, mesh=ALL - {1}, ledger=book), SlicesLost, patient, slices=slices(2))
    assert isinstance(state, Waiting) and state.want == 3


# --- runs on arrays -----------------------------------------------------------------------------


@pytest.mark.parametrize("lookback", ["host", "live"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_corrupt_slice_is_left_out_and_leaves_no_trace(undisturbed, victim, lookback, tmp_path):
    recipe = replace(NET, policy=replace(NET.policy, lookback=lookback))
    summary = run(Corrupt(victim, step=12), recipe=recipe, run_dir=tmp_path / "run")
    assert summary.outcome == "done", summary.reason
    assert summary.state_sha256 == undisturbed.state_sha256
    assert summary.losses == undisturbed.losses and summary.consumed == undisturbed.consumed
    (found,) = summary.recoveries
    assert found["kind"] == "corrupt" and found["lost"] == [victim]
    assert "holds other bits than the rest" in found["cause"]
    assert found["resumed_at"] == 10 and victim not in found["slices"]
    kept = [(r["step"], r["loss"]) for r in summary.evaluations]
    assert kept == [(r["step"], r["loss"]) for r in undisturbed.evaluations]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 41))
    wrong = (tmp_path / "run" / "metrics-retracted.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in wrong] == [11, 12, 13, 14, 15]


def test_two_slices_that_differ_end_the_run_and_keep_its_checkpoints(tmp_path):
    faults = (Lose(0, step=3), Lose(1, step=4), Corrupt(2, step=12))
    summary = run(*faults, run_dir=tmp_path / "run")
    assert summary.outcome == "failed" and "no majority says which are right" in summary.reason
    assert CheckpointStore(tmp_path / "run/checkpoints", keep=3).steps()[-1] == 10


def test_a_slice_that_returned_holds_what_the_others_do(undisturbed):
    faults = (Lose(1, step=7), Return(1, step=12), Corrupt(0, step=22))
    policy = replace(NET.policy, stable_probes=1)
    summary = train(replace(NET, policy=policy), backend=SteppingBackend(4, 2), faults=faults)
    assert summary.state_sha256 == undisturbed.state_sha256
    assert [r["kind"] for r in summary.recoveries] == ["loss", "regrow", "corrupt"]


def test_a_checkpoint_holds_the_hashes_that_the_devices_computed(tmp_path):
    run(recipe=replace(NET, num_steps=10), run_dir=tmp_path / "run")
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=3)
    leaves, metadata = store.load(10)
    assert metadata["leaf_hashes"] == hashes_of(leaves)
