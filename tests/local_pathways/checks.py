"""What a controller on a local Pathways checks; `test_local_pathways.py` asks it to."""

import gc
import time
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from pathwaysutils import reshard
from pathwaysutils.elastic import elastic, manager
from pathwaysutils.experimental import split_by_mesh_axis

kept = {}
"""What one call leaves for the next."""


def mesh(*slices):
    """A mesh over these slices (all, if none are named) and their devices."""
    devices = jax.devices()
    wanted = slices or sorted({device.slice_index for device in devices})
    rows = [[device for device in devices if device.slice_index == i] for i in wanted]
    return Mesh(np.array(rows), ("slice", "inner"))


def on(*slices, spec=P()):
    return NamedSharding(mesh(*slices), spec)


def same(array, expected):
    np.testing.assert_array_equal(np.asarray(array), expected)


def error_of(read):
    """The first line of the error that reading raises."""
    try:
        read()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return None


# What is there.


def devices():
    return [
        [
            d.id,
            d.slice_index,
            d.platform,
            d.device_kind,
            sorted(m.kind for m in d.addressable_memories()),
        ]
        for d in jax.devices()
    ]


# What runs.


def transformations():
    """jit, grad, scan, remat, vmap and random bits: as on a CPU alone."""

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(ws, x):
        y, _ = jax.lax.scan(layer, x, ws)
        return jnp.mean(y**2)

    key = jax.random.key(3)
    ws = jax.random.normal(key, (4, 8, 8)) / 3
    x = jax.vmap(lambda k: jax.random.normal(k, (8,)))(jax.random.split(key, 12))
    single, gradient = jax.jit(jax.value_and_grad(loss))(ws, x)
    everywhere = jax.device_put((ws, x), (on(), on(spec=P(("slice", "inner")))))
    spread, spread_gradient = jax.jit(jax.value_and_grad(loss))(*everywhere)
    np.testing.assert_allclose(single, spread, rtol=1e-5)
    np.testing.assert_allclose(gradient, spread_gradient, rtol=1e-4, atol=1e-6)
    step = 1e-2 * gradient / jnp.linalg.norm(gradient)
    change = loss(ws + step, x) - loss(ws - step, x)
    np.testing.assert_allclose(change, 2e-2 * jnp.linalg.norm(gradient), rtol=2e-2)
    assert jax.random.key_data(key).dtype == jnp.uint32


def collectives():
    """Over the axis of slices, on devices of different processes."""
    over = partial(jax.shard_map, mesh=mesh(), in_specs=P("slice"), check_vma=False)
    x = jax.device_put(np.arange(18, dtype=np.float32).reshape(3, 6), on(spec=P("slice")))
    host = np.arange(18, dtype=np.float32).reshape(3, 6)
    total = jax.jit(over(lambda x: jax.lax.psum(x, "slice"), out_specs=P()))(x)
    same(total, host.sum(0, keepdims=True))
    ring = [(i, (i + 1) % 3) for i in range(3)]
    moved = over(lambda x: jax.lax.ppermute(x, "slice", ring), out_specs=P("slice"))
    same(jax.jit(moved)(x), np.roll(host, 1, axis=0))
    gathered = over(lambda x: jax.lax.all_gather(x, "slice", tiled=True), out_specs=P())
    same(jax.jit(gathered)(x), host)
    scatter = partial(jax.lax.psum_scatter, axis_name="slice", scatter_dimension=1, tiled=True)
    same(jax.jit(over(scatter, out_specs=P(None, "slice")))(x), host.sum(0, keepdims=True))
    whole = x.astype(jnp.int32) * 1_000_003
    biggest = over(lambda x: (jax.lax.pmax(x, "slice"), jax.lax.psum(x, "slice")), out_specs=P())
    most, ints = jax.jit(biggest)(whole)
    same(most, np.asarray(whole).max(0, keepdims=True))
    same(ints, np.asarray(whole).sum(0, keepdims=True))


def training():
    """Optax, with donation: the loss falls, what was donated is gone."""
    optimizer = optax.adamw(1e-1)
    x = jax.device_put(np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32), on())
    w = jax.device_put(jnp.ones((8,)), on())
    state = jax.device_put((w, optimizer.init(w)), on())

    @partial(jax.jit, donate_argnums=0)
    def step(state, x):
        w, inner = state
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
        updates, inner = optimizer.update(gradient, inner, w)
        return (optax.apply_updates(w, updates), inner), loss

    losses = []
    for _ in range(20):
        before = jax.tree.leaves(state)
        state, loss = step(state, x)
        assert all(leaf.is_deleted() for leaf in before)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2, losses
    assert int(optax.tree_utils.tree_get(state[1], "count")) == 20
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(before[0])


def ahead_of_time():
    """Lowered and compiled before it runs; what is known of it; two shardings, two programs."""
    x = jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=on(spec=P("slice")))
    compiled = jax.jit(lambda x: (x * 2, x.sum())).lower(x).compile()
    doubled, total = compiled(jax.device_put(np.ones((6, 4), np.float32), x.sharding))
    same(doubled, np.full((6, 4), 2, np.float32))
    assert float(total) == 24
    assert compiled.output_shardings[0].is_equivalent_to(x.sharding, 2)
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert compiled.cost_analysis()["flops"] > 0
    assert compiled.input_formats[0][0].layout.major_to_minor == (0, 1)


# What is moved.


def placement():
    """Between meshes, memories and host; shards taken apart and put together; odd types."""
    host = np.arange(24, dtype=np.float32).reshape(6, 4)
    x = jax.device_put(host, on(spec=P(("slice", "inner"))))
    assert [shard.data.shape for shard in x.addressable_shards] == [(1, 4)] * 6
    same(x.addressable_shards[4].data, host[4:5])
    again = jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, [shard.data for shard in x.addressable_shards]
    )
    same(again, host)
    half = jax.device_put(host, on(0, spec=P("inner")))
    for target in (on(1, spec=P("inner")), on(2), on(0, 2, spec=P("slice", "inner")), on()):
        same(jax.device_put(half, target), host)
    replicated = jax.device_put(host, on())
    same(replicated.addressable_shards[5].data, host)
    for kind in ("pinned_host", "unpinned_host"):
        away = jax.device_put(x, x.sharding.with_memory_kind(kind))
        assert away.sharding.memory_kind == kind
        same(away, host)
        same(jax.device_put(away, x.sharding), host)
    same(jax.jit(lambda x: x + 1)(x), host + 1)  # the original is as it was
    device = jax.devices()[3]
    single = jax.device_put(host.T, SingleDeviceSharding(device))
    assert single.devices() == {device}
    same(single, host.T)
    for dtype in (jnp.bfloat16, jnp.int8, jnp.uint32, jnp.bool_, jnp.float16, jnp.complex64):
        same(jax.device_put(host.astype(dtype), on()), host.astype(dtype))
    for dtype in (ml_dtypes.float8_e4m3fn, jnp.int4):
        small = jax.device_put((host % 4).astype(dtype), on())
        same(small.astype(jnp.float32), host % 4)
    for empty in (np.zeros((0,), np.float32), np.zeros((3, 0), np.int32)):
        same(jax.device_put(empty, on()) * 2, empty)
    keys = jax.device_put(jax.random.split(jax.random.key(0), 6), on(spec=P("slice")))
    same(
        jax.random.key_data(keys),
        np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 6))),
    )


def host_program():
    """A program that reads and writes host memory."""
    x = jax.device_put(np.arange(6, dtype=np.float32), on(spec=P("slice")))
    host = x.sharding.with_memory_kind("pinned_host")
    away = jax.jit(lambda x: x * 2, out_shardings=host)(x)
    assert away.sharding.memory_kind == "pinned_host"
    same(away, np.arange(6) * 2)


def resharding():
    """pathwaysutils' own reshard, split and concatenate."""
    host = np.arange(24, dtype=np.float32).reshape(6, 4)
    x = jax.device_put(host, on(spec=P("slice", None)))
    for target in (
        on(spec=P("inner", None)),
        on(spec=P(None, "inner")),
        on(0),
        on(1, 2, spec=P("slice")),
    ):
        moved = reshard.reshard(x, target)
        assert moved.sharding.is_equivalent_to(target, 2)
        same(moved, host)
    parts = split_by_mesh_axis.split_by_mesh_axis({"x": x}, "slice")
    for index, part in enumerate(parts):
        same(part["x"], host[2 * index : 2 * index + 2])


def checkpoints(directory):
    """Orbax saves and restores, also onto fewer slices."""
    tree = {
        "w": jax.device_put(np.arange(12.0, dtype=np.float32).reshape(6, 2), on(spec=P("slice")))
    }
    ocp.save_pytree(directory, tree)
    like = {"w": jax.ShapeDtypeStruct((6, 2), jnp.float32, sharding=on(0, 1, spec=P("slice")))}
    back = ocp.load_pytree(directory, like)
    assert back["w"].sharding == like["w"].sharding
    same(back["w"], np.asarray(tree["w"]))


def callbacks():
    """Are refused in words."""
    return error_of(lambda: jax.block_until_ready(jax.jit(_prints)(1.0)))


def _prints(x):
    jax.debug.print("{}", x)
    return x


# What is lost.


@jax.jit
def _step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
    return w - 0.1 * gradient, loss


def begin():
    """Leave a small state everywhere, and an array on each slice."""
    kept["w"] = jax.device_put(np.zeros(8, np.float32), on())
    kept["x"] = jax.device_put(np.ones((6, 8), np.float32), on(spec=P("slice")))
    slices = {device.slice_index for device in jax.devices()}
    kept["own"] = {i: jax.device_put(np.full(4, i, np.float32), on(i)) for i in slices}
    kept["later"] = jax.device_put(np.ones(4, np.float32), on(1))
    kept["w"], loss = _step(kept["w"], kept["x"])
    return float(loss)


def steps(count):
    """Dispatch some, read none."""
    start = time.monotonic()
    for _ in range(count):
        kept["w"], kept["loss"] = _step(kept["w"], kept["x"])
    return time.monotonic() - start


def step_and_more(own):
    """A step, and a program on one slice alone that needs what the step makes."""
    kept["w"], kept["loss"] = _step(kept["w"], kept["x"])
    on_own = [of.data for of in kept["w"].addressable_shards if of.device.slice_index == own]
    kept["more"] = on_own[0] * 2


def read_loss():
    return error_of(lambda: float(kept["loss"]))


def read_own():
    return [error_of(lambda of=of: np.asarray(of)) for of in kept["own"].values()]


def read_later():
    """For the first time."""
    return error_of(lambda: np.asarray(kept["later"]))


def survivors(*slices):
    """The replicated state from the shards of the slices named, and a step on those."""
    shards = {s.device: s.data for s in kept["x2"].addressable_shards}
    target = on(*slices)
    devices = target.mesh.devices.ravel()
    w = jax.make_array_from_single_device_arrays((8,), target, [shards[d] for d in devices])
    x = jax.device_put(np.ones((6, 8), np.float32), target)
    w, loss = _step(w, x)
    return np.asarray(w).tolist(), float(loss)


def replicate():
    kept["x2"] = jax.device_put(np.arange(8, dtype=np.float32), on())
    jax.block_until_ready(kept["x2"])


def active():
    start = time.monotonic()
    found = sorted(elastic.get_active_slice_indices())
    return found, time.monotonic() - start


def unavailable():
    """The controller's connection is gone."""
    return error_of(lambda: np.asarray(jax.device_put(np.ones(2), jax.devices()[0])))


def probe(slice):
    """pathwaysutils' check of one slice, which runs a program, and a read of what lives there."""
    same(kept["own"][slice], np.full(4, slice))
    checker = elastic.DefaultSliceHealthChecker({slice: mesh(slice).devices.ravel().tolist()})
    checker.dispatch()
    return sorted(checker.validate())


def is_slice_down():
    try:
        float(kept["loss"])
    except jax.errors.JaxRuntimeError as error:
        return elastic.is_error_due_to_slice_down(error, log_traceback=False)
    return None


def manage():
    kept["manager"] = manager.Manager()
    return sorted(kept["manager"].active_slice_indices)


def wait_for_all(poll):
    return sorted(elastic.wait_for_slices(poll_interval=poll, timeout=60))


def retry(polls):
    """pathwaysutils' decorator: a function that fails with the loss is called again."""
    calls = []

    @kept["manager"].elastic_retry(max_retries=3, minimum_slice_count=1, poll_interval=polls)
    def work():
        calls.append(sorted(kept["manager"].active_slice_indices))
        if len(calls) == 1:
            float(kept["loss"])
        return float(jax.device_put(np.ones(2, np.float32), on(*calls[-1])).sum())

    assert work() == 2.0
    return calls


# What it costs.


def put(megabytes):
    """A state of one large leaf, on one slice; read back whole."""
    host = np.arange(megabytes << 18, dtype=np.float32)
    kept["big"] = jax.device_put(host, on(0))
    same(kept["big"], host)


def hold():
    """A state that nobody has read: jaxlib 0.10 keeps a shard of what it has read."""
    kept["old"] = jax.device_put(np.ones(1 << 18, np.float32), on(0))
    jax.block_until_ready(kept["old"])


def donate():
    """The old state is still held here, but not there."""
    kept["new"] = jax.jit(lambda x: x + 1, donate_argnums=0)(kept["old"])
    jax.block_until_ready(kept["new"])


def drop():
    kept.clear()
    gc.collect()
