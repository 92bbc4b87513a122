"""What users of other systems ran into, replayed by whole runs on arrays (see test_lessons.py)."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from elastix import Lose, Policy, Return, train
from elastix.checkpoints import CheckpointStore
from elastix.compile_cache import count_compiles
from elastix.faults import Hang
from elastix.snapshots import HOST_MEMORY, LocalCopying, LocalTransfers
from elastix.testing.slices import STEP_SECONDS, SteppingBackend
from tests.recipes import net
from tests.recipes.net import NetConfig, WavesConfig

NET = replace(
    net.recipe(),
    num_steps=24,
    policy=Policy(
        snapshot_every=5, checkpoint_every=10, probe_every=0.5, stable_probes=1, warm="off"
    ),
)
# Which slices are lost makes no difference here, and each set of slices is a program of its own to
# compile. So it is slice 1 or 0, first one and then the other, wherever nothing asks for another.
ALL_TIERS = (
    *(Lose(1, step=13), Return(1, step=14)),
    *(Lose(s, step=20) for s in range(4)),
    *(Return(s, step=21) for s in range(4)),
)
"""A restore from host memory, a regrow, and one from disk, since nobody is left."""


def run(recipe=NET, *faults, backend=None, **options):
    backend = backend or SteppingBackend(4, 2)
    return train(recipe, backend=backend, faults=faults, **options)


@pytest.fixture(scope="module")
def undisturbed():
    return run()


def assert_same(summary, undisturbed):
    assert summary.outcome == "done", summary.reason + summary.trace
    assert summary.unfired_faults == []
    assert summary.losses == undisturbed.losses
    assert summary.consumed == undisturbed.consumed
    assert summary.state_sha256 == undisturbed.state_sha256


def run_through_all_tiers(recipe, path, **options):
    """In two processes: a save takes real time, and must be over when it is needed."""
    run(replace(recipe, num_steps=10), run_dir=path)
    summary = run(recipe, *ALL_TIERS, run_dir=path, **options)
    assert summary.resumed_at == 10, summary.trace
    assert [r["source"] for r in summary.recoveries] == ["host", "live", "disk"]
    return summary


@dataclass(frozen=True)
class WatchedCopies(LocalTransfers):
    """Calls `report(leaves)` with every host snapshot that is there."""

    report: Callable

    def copy(self, leaves, devices, step):
        return WatchedCopy(leaves, devices, step, self.report)


@dataclass(frozen=True)
class WatchedCopy(LocalCopying):
    report: Callable

    def finish(self, hashes):
        self.report(self.leaves)
        return super().finish(hashes)


class Watching(SteppingBackend):
    """Calls `saw(leaves)` with every train state that was restored, `copied(leaves)` with every
    host snapshot, and `after(step)` with every step that was committed."""

    def __init__(
        self, saw=lambda leaves: None, after=lambda step: None, copied=lambda leaves: None
    ):
        self._saw, self._after = saw, after
        self.transfers = WatchedCopies(copied)
        super().__init__(4, 2)

    def wait(self, arrays, slices, deadline):
        super().wait(arrays, slices, deadline)
        if ".step" in arrays:
            self._saw(arrays)

    def committed(self, step):
        super().committed(step)
        self._after(step)


# --- an error is taken for what it is, and not for what its text contains -------------------------

CODES = ("INTERNAL", "NOT_FOUND", "DEADLINE_EXCEEDED", "DATA_LOSS")


def plain(code):
    raise KeyError(f"no such column ({code}: a slice is gone)")


def at_the_head(code):
    raise OSError(f"{code}: a slice is gone")


def from_a_runtime_error(code):
    try:
        raise jax.errors.JaxRuntimeError(f"the file says {code}: a slice is gone")
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(f"wrapped: {code}") from error


def runtime_error(code):
    if code == "DATA_LOSS":  # at the head of a runtime error, this one is a loss
        raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: {code}")
    raise jax.errors.JaxRuntimeError(f"{code}: no such kernel")


ERRORS = [plain, at_the_head, from_a_runtime_error, runtime_error]
RAISE = []
"""What the loss raises when it is traced: the loss is the same one in the run that resumes."""


def loss(model, batch, keys):
    for error in RAISE:
        error()
    return net.loss(model, batch, keys)


@pytest.fixture
def raising():
    yield RAISE.append
    RAISE.clear()


def failing(undisturbed_steps, summary, error, code):
    assert (summary.outcome, summary.recoveries) == ("failed", [])
    assert summary.steps == undisturbed_steps
    assert error.__name__ in summary.trace and code in summary.trace


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_an_error_of_the_loss_ends_the_run_at_once_and_its_checkpoints_are_intact(
    undisturbed, raising, error, tmp_path
):
    path, recipe = tmp_path / "run", replace(NET, loss=loss)
    run(replace(recipe, num_steps=12), run_dir=path)
    before = {p: p.read_bytes() for p in (path / "checkpoints").rglob("*") if p.is_file()}
    for code in CODES:
        raising(partial(error, code))
        summary = run(recipe, run_dir=path)
        RAISE.clear()
        failing(0, summary, error, code)
        assert {p: p.read_bytes() for p in before} == before
    assert_same(run(recipe, run_dir=path), undisturbed)


class Failing(SteppingBackend):
    """Reading the results of step `at` raises, once; `also` happens then."""

    def __init__(self, at, error, also=lambda backend: None):
        self._left, self._error, self._also = at, error, also
        super().__init__(4, 2)

    def read(self, results, slices, deadline):
        self._left -= "loss" in results
        if self._left == 0:
            self._left = -1
            self._also(self)
            self._error()
        return super().read(results, slices, deadline)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_an_error_of_a_step_with_every_canary_intact_is_the_programs(error, code):
    summary = run(backend=Failing(8, partial(error, code)))
    failing(7, summary, error, code)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (from_a_runtime_error, "NOT_FOUND"),
        (runtime_error, "INTERNAL"),
        (runtime_error, "DATA_LOSS"),
    ],
)
def test_a_runtime_error_with_a_canary_gone_is_a_loss(undisturbed, error, code):
    backend = Failing(8, partial(error, code), also=lambda b: b.lose(1))
    summary = run(backend=backend)
    assert_same(summary, undisturbed)
    assert [r["lost"] for r in summary.recoveries] == [[1]]


def deep():
    """DATA_LOSS at the head of the cause of the cause."""
    try:
        try:
            raise jax.errors.JaxRuntimeError("DATA_LOSS: somebody is gone")
        except jax.errors.JaxRuntimeError as error:
            raise OSError("while reading") from error
    except OSError as error:
        raise ValueError("INTERNAL: wrapped") from error


@pytest.mark.parametrize("gone", [(), (0,), (0, 1)])
def test_data_loss_is_a_loss_through_every_cause(undisturbed, gone, tmp_path):
    backend = Failing(8, deep, also=lambda b: [b.lose(s) for s in gone])
    summary = run(backend=backend, run_dir=tmp_path / "run")
    assert_same(summary, undisturbed)
    (recovery,) = (r for r in summary.recoveries if r["kind"] == "loss")
    assert recovery["lost"] == list(gone or range(4)), "nobody answers for it: all are suspect"


class Broken:
    """A stream that cannot be read from batch `at` on."""

    def __init__(self, stream, at, error):
        self._stream, self._at, self._error = stream, at, error

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def batches(self, position):
        for number, batch in enumerate(self._stream.batches(position), position):
            if number >= self._at:
                self._error()
            yield batch


@dataclass(frozen=True)
class BrokenData:
    error: Callable
    code: str

    def build(self, global_batch, seed):
        stream = WavesConfig().build(global_batch, seed)
        return Broken(stream, 8, partial(self.error, self.code))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("error", [plain, at_the_head], ids=lambda e: e.__name__)
def test_an_error_of_the_data_is_never_taken_for_a_loss(error, code, tmp_path):
    path = tmp_path / "run"
    recipe = replace(NET, data=BrokenData(error, code))
    summary = run(recipe, run_dir=path)
    assert (summary.outcome, summary.recoveries) == ("failed", [])
    assert summary.reason.startswith("the data stream failed twice at step 9: ")
    assert code in summary.reason


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_an_error_of_a_hook_disturbs_nothing_whatever_its_text(undisturbed, error, capsys):
    summary = run(replace(NET, hooks=tuple(lambda row, c=c: error(c) for c in CODES)))
    assert_same(summary, undisturbed)
    assert summary.recoveries == [] and summary.trace == ""


# --- budgets, deadlines and what a log sees -------------------------------------------------------


def test_any_number_of_losses_and_regrows_with_progress_in_between_is_survived(undisturbed):
    """As many times as `max_losses` allows in a row, in the same slice and in others. No save in
    real time forgives a slice that it was lost: so the same happens each time."""
    policy = replace(NET.policy, max_losses=1, checkpoint_every=0, snapshot_every=1)
    victims = (0, 1, 0)
    faults = [
        fault
        for n, s in enumerate(victims)
        for fault in (Lose(s, step=3 + 7 * n), Return(s, step=4 + 7 * n))
    ]
    summary = run(replace(NET, policy=policy), *faults)
    assert_same(summary, undisturbed)
    kinds = [r["kind"] for r in summary.recoveries]
    assert kinds == ["loss", "regrow"] * len(victims)


def test_the_first_step_on_a_mesh_has_the_deadline_of_a_compile(undisturbed):
    """Then the restore before the second try hangs, and a step of the slice alone."""
    policy, steps = NET.policy, NET.num_steps * STEP_SECONDS
    for step, deadline in ((1, policy.prepare_deadline), (12, policy.step_deadline)):
        summary = run(NET, Hang(1, step=step))
        assert_same(summary, undisturbed)
        wanted = steps + deadline + 2 * policy.step_deadline
        assert summary.seconds == pytest.approx(wanted, abs=2), step


def plain_values(value):
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain_values(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(plain_values, value))
    return value is None or type(value) in (bool, int, float, str)


@pytest.mark.parametrize("surfaces", ["read", "dispatch"])
def test_whoever_logs_gets_plain_values_and_never_those_of_a_step_that_was_lost(
    undisturbed, surfaces
):
    """A log call that formats an array would be the first to meet the error, and swallow it."""
    rows = []
    faults = [Lose(s, step=n, surfaces=surfaces) for s, n in ((0, 6), (1, 7), (3, 18))]
    summary = run(replace(NET, hooks=(rows.append,)), *faults)
    assert_same(summary, undisturbed)
    assert [row["step"] for row in rows] == list(range(1, NET.num_steps + 1))
    assert all(map(plain_values, rows))
    assert [row["loss"] for row in rows] == undisturbed.losses


# --- the state ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Misplaced(NetConfig):
    leaf: str = "second"
    axes: tuple = ("slice", None)

    def sharding_rules(self):
        return ((rf"\.{self.leaf}$", self.axes),)


@pytest.mark.parametrize(
    ("leaf", "axes", "named"),
    [
        ("second", ("slice", None), "slice"),
        ("first", (None, "slice"), "slice"),
        ("second", (("slice", "fsdp"), None), "slice"),
        ("first", (None, ("fsdp", "slice")), "slice"),
        ("bias", ("slice",), "slice"),
        ("second", ("data", None), "data"),
    ],
)
def test_a_leaf_that_would_die_with_its_slice_is_refused_at_the_start(leaf, axes, named, tmp_path):
    with pytest.raises(ValueError, match=rf"puts \.model\.{leaf} on the axis '{named}'"):
        run(replace(NET, model=Misplaced(leaf=leaf, axes=axes)), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_state_lies_whole_on_every_slice(undisturbed, tmp_path):
    """The first one, those copied, and those restored from every tier and moved in a regrow."""
    backend = Watching(saw=lambda leaves: seen.append(held(leaves)))

    def held(leaves):
        sizes = {
            (path, s): {str(x.index): x.data.size for x in shards if x.device in devices}
            for path, array in leaves.items()
            for shards in [array.addressable_shards]
            for s, devices in backend.devices.items()
            if any(x.device in devices for x in shards)
        }
        return {key: sum(parts.values()) for key, parts in sizes.items()} | {
            path: array.size for path, array in leaves.items()
        }

    seen = []
    summary = run_through_all_tiers(NET, tmp_path / "run", backend=backend)
    assert_same(summary, undisturbed)
    assert {len({key[1] for key in sizes if type(key) is tuple}) for sizes in seen} == {3, 4}
    for sizes in seen:
        for key, size in sizes.items():
            assert type(key) is str or size == sizes[key[0]], key


@pytest.mark.parametrize("lookback", ["live", "host"])
def test_what_a_step_consumed_is_never_used_again(undisturbed, lookback, tmp_path):
    """A donated buffer is gone: JAX raises if it is touched, and the bits say if it was poison."""
    policy = replace(NET.policy, lookback=lookback)
    states = []
    backend = Watching(saw=states.append)
    faults = [Lose(s, step=n, surfaces=how) for s, n, how in ((0, 8, "read"), (1, 17, "dispatch"))]
    summary = run(replace(NET, policy=policy), *faults, backend=backend, run_dir=tmp_path / "run")
    assert_same(summary, undisturbed)
    assert {r["source"] for r in summary.recoveries} == {lookback}
    gone = [all(x.is_deleted() for x in leaves.values()) for leaves in states[:-1]]
    assert all(gone) == (lookback == "host"), "with `live` the committed state is kept, not donated"


class Tied(eqx.Module):
    """The same array at two paths, and used alike."""

    one: jax.Array
    other: jax.Array
    shared: eqx.nn.Shared

    def __call__(self, x, key):
        left, right = self.shared()
        return x @ (self.one + self.other) @ (left + right)


@dataclass(frozen=True)
class TiedConfig:
    def build(self, key):
        one = jax.random.normal(key, (net.DIM, net.DIM)) * 0.3
        shared = eqx.nn.Shared([one.T, one.T], lambda pair: pair[1], lambda pair: pair[0])
        return Tied(one, one, shared)


def test_tied_leaves_stay_tied_through_every_restore(tmp_path):
    """Shared ones are one leaf. Two leaves are trained one by one, so that XLA may round them
    differently, and each has a buffer of its own: one for both would be donated twice."""

    def buffers(leaves):
        pairs = (leaves[path].addressable_shards for path in (".model.one", ".model.other"))
        seen.append([{s.data.unsafe_buffer_pointer() for s in shards} for shards in pairs])

    recipe, seen = replace(NET, model=TiedConfig()), []
    backend = Watching(saw=buffers, copied=buffers)
    summary = run_through_all_tiers(recipe, tmp_path / "run", backend=backend)
    assert_same(summary, run(recipe))
    assert len(seen) > 5 and not any(one & other for one, other in seen)
    leaves, _ = CheckpointStore(tmp_path / "run/checkpoints", keep=3).load(NET.num_steps)
    assert len([p for p in leaves if p.startswith(".model")]) == 3
    pairs = [p for p in leaves if p.endswith(".one")]
    assert len(pairs) == 3, "the weights and two moments"
    for path in pairs:
        assert leaves[path].any()
        np.testing.assert_allclose(leaves[path], leaves[path[:-3] + "other"], rtol=1e-4, atol=1e-6)


LARGE = replace(NET, model=NetConfig(hidden=4096))
STATE_BYTES = 3 * 4 * (2 * net.DIM * 4096 + net.DIM)
"""Weights and two moments, in float32."""


def bytes_on(devices):
    """Of all live arrays in the memory of devices, with every buffer counted once."""
    buffers = {}
    for array in jax.live_arrays():
        if array.sharding.memory_kind == HOST_MEMORY:
            continue
        if array.is_deleted() or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        for shard in array.addressable_shards:
            if shard.device in devices:
                buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


def test_a_restore_needs_little_more_than_the_state_and_a_restored_state_can_be_donated(tmp_path):
    """The state of the failed attempt is let go before the new one is built."""

    def measure(backend, into):
        into.append({s: (bytes_on(d) - before[s]) / STATE_BYTES for s, d in where.items()})

    backend = Watching(
        saw=lambda leaves: measure(backend, waited), after=lambda step: measure(backend, committed)
    )
    gc.collect()
    where = {s: set(devices) for s, devices in backend.devices.items()}
    before = {s: bytes_on(devices) for s, devices in where.items()}
    waited, committed = [], []
    summary = run_through_all_tiers(LARGE, tmp_path / "run", backend=backend)
    assert summary.outcome == "done", summary.reason
    assert 0.9 < max(max(each.values()) for each in waited) <= 1.1, waited
    most = LARGE.policy.inflight + 0.1
    assert max(max(each.values()) for each in committed) <= most
    after = [sum(each.values()) for each in committed]
    assert max(after[-5:]) <= 1.01 * max(after[:5]), "no more after the restore than before"


@pytest.mark.parametrize("lookback", ["live", "host"])
def test_one_compile_for_each_set_of_slices_whatever_the_state_came_from(
    undisturbed, lookback, tmp_path
):
    """Compiles and hits of the persistent cache together: programs that were asked for."""
    asked = []

    def programs(faults, recipe, **options):
        asked.clear()
        asked.append(sum(count_compiles()))
        backend = Watching(after=lambda step: asked.append(sum(count_compiles())))
        summary = run(recipe, *faults, backend=backend, **options)
        return summary, [b - a for a, b in pairwise(asked)]

    policy = replace(NET.policy, lookback=lookback)
    recipe, path = replace(NET, policy=policy), tmp_path / "run"
    faults = [
        *(Lose(1, step=7), Return(1, step=8), Lose(0, step=13), Return(0, step=14)),
        *(Lose(1, step=19), Return(1, step=20)),
    ]
    summary, fresh = programs(faults, recipe, run_dir=path)
    assert_same(summary, undisturbed)
    assert [r["kind"] for r in summary.recoveries] == ["loss", "regrow"] * 3
    again, two_sets = sum(fresh[1:]), {(0, 2, 3), (1, 2, 3)}
    assert {tuple(r["slices"]) for r in summary.recoveries if r["kind"] == "loss"} == two_sets
    assert again == 2 * len(two_sets), f"a step and a check of bits for each: {fresh}"
    longer = replace(recipe, num_steps=30)
    summary, loaded = programs([Lose(0, step=27)], longer, run_dir=path)
    assert summary.resumed_at == NET.num_steps
    assert loaded[0] <= fresh[0] and sum(loaded[1:]) == 2, loaded


def drawing_loss(model, batch, keys):
    total, weight, metrics = net.loss(model, batch, keys)
    draws = jax.vmap(lambda key: jax.random.randint(key, (), 0, 1000))(keys)
    return total, weight, {"drawn": jnp.sum(draws).astype(jnp.float32)}


@cache
def drawn(slices, devices, replicas):
    rows = []
    recipe = replace(NET, loss=drawing_loss, num_steps=3, num_replicas=replicas)
    recipe = replace(recipe, hooks=(rows.append,), model=NetConfig(dropout=0.0))
    run(recipe, backend=SteppingBackend(slices, devices))
    return [row["metrics"]["drawn"] for row in rows]


@pytest.mark.parametrize(
    ("slices", "devices", "replicas"),
    [(3, 2, 24), *(pytest.param(*n, marks=pytest.mark.soak) for n in ((1, 1, 12), (2, 4, 6)))],
)
def test_random_draws_depend_on_no_number_of_shards(slices, devices, replicas):
    """Whole numbers, whose sum is exact in any order, and so with any number of replicas."""

    found = drawn(slices, devices, replicas)
    assert len(set(found)) == 3, "each step has its own"
    assert found == drawn(4, 2, 12)


class Mixed(eqx.Module):
    """Half precision, a counter, and a typed key of an implementation that is not the default."""

    weights: jax.Array
    table: jax.Array
    key: jax.Array

    def __call__(self, x, key):
        noise = jax.random.normal(jax.random.fold_in(self.key, self.table[0]), (net.DIM,))
        return (x.astype(jnp.bfloat16) @ self.weights).astype(jnp.float32) + 0.1 * noise


@dataclass(frozen=True)
class MixedConfig:
    impl: str = "rbg"

    def build(self, key):
        weights = jax.random.normal(key, (net.DIM, net.DIM), jnp.bfloat16)
        return Mixed(weights, jnp.arange(3, dtype=jnp.int8), jax.random.key(7, impl=self.impl))


@dataclass(frozen=True)
class WideMoments:
    """Adam with a first moment in float32, whatever the parameters are."""

    def build(self):
        adam = optax.scale_by_adam(mu_dtype=jnp.float32)
        return optax.chain(adam, optax.scale(-1e-2))


# The default implementation is that of every run's own key: here, in the model, it is a soak test.
@pytest.mark.parametrize("impl", ["rbg", pytest.param("threefry2x32", marks=pytest.mark.soak)])
def test_every_dtype_and_key_survives_every_restore_exactly(impl, tmp_path):
    recipe = replace(NET, model=MixedConfig(impl), optimizer=WideMoments())
    dtypes = []
    backend = Watching(saw=lambda leaves: dtypes.append({k: v.dtype for k, v in leaves.items()}))
    summary = run_through_all_tiers(recipe, tmp_path / "run", backend=backend)
    assert_same(summary, run(recipe))
    first = dtypes[0]
    assert all(each == first for each in dtypes)
    mu = [dtype for path, dtype in first.items() if path.endswith(".mu.weights")]
    assert (first[".model.weights"], mu) == (jnp.bfloat16, [jnp.float32])
    assert (first[".model.table"], first[".model.key"]) == (jnp.int8, jnp.uint32)
    leaves, _ = CheckpointStore(tmp_path / "run/checkpoints", keep=3).load(NET.num_steps)
    assert {path: leaf.dtype for path, leaf in leaves.items()} == first
    shape = jax.random.key_data(jax.random.key(7, impl=impl)).shape
    assert leaves[".model.key"].shape == shape


# --- one meaning of a step ------------------------------------------------------------------------


def rates(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["learning_rate"] for row in rows]


@pytest.mark.parametrize("cuts", [(11,), (5, 20)])
def test_the_learning_rate_of_a_run_in_parts_is_that_of_the_whole(undisturbed, cuts, tmp_path):
    run(NET, run_dir=tmp_path / "whole")
    for num_steps in (*cuts, NET.num_steps):
        faults = [Lose(0, step=num_steps - 1)]
        parts = run(replace(NET, num_steps=num_steps), *faults, run_dir=tmp_path / "parts")
    assert parts.state_sha256 == undisturbed.state_sha256
    whole = rates(tmp_path / "whole")
    assert rates(tmp_path / "parts") == whole and len(set(whole)) > 15
    wanted = [float(NET.optimizer.learning_rate(np.int32(n))) for n in range(NET.num_steps)]
    assert whole == pytest.approx(wanted, rel=1e-6)


def test_a_step_means_the_same_in_a_checkpoint_its_name_its_state_and_its_data(tmp_path):
    """And in each state that was restored: the updates in it are those of the step it is named."""
    path, counted = tmp_path / "run", []

    def count(leaves):
        names = [p for p in leaves if p == ".step" or p.endswith(".count")]
        assert len(names) > 1
        counted.append({int(leaves[p]) for p in names})

    policy = replace(NET.policy, keep_checkpoints=30, checkpoint_every=3)
    recipe = replace(NET, policy=policy)
    run(replace(recipe, num_steps=7), backend=Watching(saw=count, copied=count), run_dir=path)
    run(replace(recipe, num_steps=10), backend=Watching(saw=count, copied=count), run_dir=path)
    run(recipe, *ALL_TIERS, backend=Watching(saw=count, copied=count), run_dir=path)
    lines = (path / "events.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    held = [{e["step"]} for e in events if e["type"] in ("Prepared", "Snapshotted")]
    assert counted == held and len({min(each) for each in held}) > 8
    store = CheckpointStore(path / "checkpoints", keep=30)
    assert {7, 10, NET.num_steps} < set(store.steps()), "a save takes its time: not all are due"
    for step in store.steps():
        leaves, metadata = store.load(step)
        assert {int(v) for p, v in leaves.items() if p == ".step" or p.endswith(".count")} == {step}
        assert metadata["progress"]["examples"] == step * NET.global_batch


def test_no_state_of_the_machine_is_kept_and_a_run_goes_on_whatever_it_was_doing(
    undisturbed, tmp_path
):
    """The log ends in the middle of a loss, a restore, a regrow or a save: nobody loads it."""
    path = tmp_path / "run"
    shorter = replace(NET, num_steps=22)
    run_through_all_tiers(shorter, path)
    store = CheckpointStore(path / "checkpoints", keep=3)
    _, metadata = store.load(22)
    told = {"recipe_sha256", "data", "seed", "global_batch", "versions", "progress", "mesh"}
    told |= {"leaf_hashes"}
    assert set(metadata) == told
    lines = (path / "events.jsonl").read_text().splitlines(keepends=True)
    states = [json.loads(line)["state"]["type"] for line in lines]
    assert {"Training", "Waiting", "Restoring", "Finishing"} <= set(states)
    for state in ("Waiting", "Restoring", "Finishing"):
        cut = states.index(state) + 1
        (path / "events.jsonl").write_text("".join(lines[:cut]))
        summary = run(replace(NET, num_steps=22), run_dir=path)
        assert (summary.outcome, summary.resumed_at) == ("done", 22)
    assert_same(run(run_dir=path), undisturbed)
