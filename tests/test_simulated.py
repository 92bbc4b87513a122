"""The simulated backend: what is lost is really gone, and says so where it would."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from elastix.backends import Health
from elastix.backends.simulated import SimulatedBackend, VirtualClock, overwrite, simulate_devices
from elastix.faults import Lose, Return, Script, parse, validate
from elastix.snapshots import HOST_MEMORY, LocalTransfers, move

VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)


def backend(*faults, **options) -> SimulatedBackend:
    return SimulatedBackend(4, 2, faults, clock=VirtualClock(), **options)


def sharding(backend: SimulatedBackend, slices, spec=P("fsdp")) -> NamedSharding:
    grid = np.array([backend.devices[s] for s in slices], dtype=object)
    return NamedSharding(Mesh(grid, ("slice", "fsdp")), spec)


def placed(whole, shardings):
    """Leaves of a train state, each device with a buffer of its own."""
    return {path: LocalTransfers().place(leaf, shardings[path]) for path, leaf in whole.items()}


def on_slice(array: jax.Array, backend: SimulatedBackend, slice_id: int) -> np.ndarray:
    shards = [s for s in array.addressable_shards if s.device in backend.devices[slice_id]]
    return np.concatenate([np.asarray(s.data).reshape(-1) for s in shards])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8])
def test_a_lost_slice_holds_nothing_but_poison_and_the_others_are_untouched(dtype):
    sim = backend()
    whole = {"x": VALUES.astype(dtype)}
    array = placed(whole, {"x": sharding(sim, [0, 1, 2, 3])})["x"]
    sim.lose(1)
    dead = on_slice(array, sim, 1).astype(np.float32)
    assert np.isnan(dead).all() or (dead == -1).all()
    assert np.isnan(dead).all() == jnp.issubdtype(dtype, jnp.floating)
    for slice_id in (0, 2, 3):
        np.testing.assert_array_equal(on_slice(array, sim, slice_id), whole["x"].reshape(-1))


def test_results_of_what_was_in_flight_die_too_and_random_keys():
    sim = backend()
    key = jax.device_put(jax.random.key(3), sim.devices[1][0])
    state = placed({"x": VALUES}, {"x": sharding(sim, [0, 1])})["x"]
    result = jax.jit(lambda x: jnp.cumsum(x @ x.T))(state)
    sim.lose(1)
    assert np.isnan(on_slice(result, sim, 1)).all()
    assert (np.asarray(jax.random.key_data(key)) == 0xFFFFFFFF).all()


def test_the_host_copies_of_a_lost_slice_die_with_it():
    sim = backend()
    leaves = placed({"x": VALUES}, {"x": sharding(sim, [0, 1])})
    in_host = jax.device_put(leaves, leaves["x"].sharding.with_memory_kind(HOST_MEMORY))
    for slice_id, copy in LocalTransfers().copy(in_host, sim.devices, 5).finish({}).items():
        sim.host_memory(slice_id)[5] = copy
    del in_host
    kept = sim.host_memory(1)[5]
    sim.lose(1)
    assert np.isnan(kept.whole({"x": (4, 4)})["x"]).all()
    np.testing.assert_array_equal(sim.host_memory(0)[5].whole({"x": (4, 4)})["x"], VALUES)
    sim.give_back(1)
    assert sim.host_memory(1) == {}, "it comes back with an empty memory"


def test_code_that_reads_dead_memory_gets_nan_and_code_that_reads_survivors_does_not():
    sim = backend()
    leaves = placed({"x": VALUES}, {"x": sharding(sim, [0, 1, 2])})
    sim.lose(0)
    target = {"x": sharding(sim, [1, 2, 3])}
    cheat = move(leaves, frozenset(sim.devices[0]), target)
    assert np.isnan(on_slice(cheat["x"], sim, 3)).all()
    honest = move(leaves, frozenset(sim.devices[1] + sim.devices[2]), target)
    for slice_id in (1, 2, 3):
        np.testing.assert_array_equal(on_slice(honest["x"], sim, slice_id), VALUES.reshape(-1))


def test_survivors_keep_their_buffers_and_only_new_devices_copy():
    sim = backend()
    leaves = placed({"x": VALUES}, {"x": sharding(sim, [0, 1, 2])})
    donors = frozenset(sim.devices[1] + sim.devices[2])
    moved = move(leaves, donors, {"x": sharding(sim, [1, 2, 3])})["x"]
    before = {s.device: s.data.unsafe_buffer_pointer() for s in leaves["x"].addressable_shards}
    after = {s.device: s.data.unsafe_buffer_pointer() for s in moved.addressable_shards}
    assert all(after[d] == before[d] for d in donors)
    assert len(set(after.values())) == 6 and not {after[d] for d in sim.devices[3]} & set(
        before.values()
    )


@pytest.mark.parametrize("spec", [P(), P("fsdp")])
@pytest.mark.parametrize("size", [4, 4096])
def test_each_device_has_a_buffer_of_its_own(spec, size):
    sim = backend()
    whole = {"x": np.ones((size, 16), np.float32)}
    array = placed(whole, {"x": sharding(sim, [0, 1, 2, 3], spec)})["x"]
    assert len({s.data.unsafe_buffer_pointer() for s in array.addressable_shards}) == 8


def test_an_array_whose_buffer_is_shared_between_slices_is_refused():
    sim = backend()
    aligned = np.zeros(4096, np.float32)
    start = (-aligned.ctypes.data % 64) // 4
    shared = jax.device_put(aligned[start : start + 1024], sharding(sim, [0, 1], P()))
    with pytest.raises(RuntimeError, match="shares one buffer between slices"):
        overwrite([shared], sim.devices[1])
    del shared


def test_a_read_raises_data_loss_and_a_dispatch_only_if_the_loss_surfaces_there():
    sim = backend()
    result = placed({"x": VALUES}, {"x": sharding(sim, [0, 1])})["x"]
    sim.lose(1, surfaces="read")
    sim.check([0, 1])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^DATA_LOSS: slice 1 is gone"):
        sim.read(result, [0, 1], 60.0)
    sim.lose(2, surfaces="dispatch")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^DATA_LOSS: slice 2 is gone"):
        sim.check([0, 2])
    np.testing.assert_array_equal(sim.read(result, [0], 60.0), np.asarray(result))


def test_a_slice_that_came_back_unseen_has_lost_what_was_in_flight():
    sim = backend()
    result = placed({"x": VALUES}, {"x": sharding(sim, [0, 1])})["x"]
    sim.lose(1)
    sim.give_back(1)
    for touch in (lambda: sim.read(result, [0, 1], 60.0), lambda: sim.check([0, 1])):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"^DATA_LOSS: slice 1 is gone"):
            touch()
    sim.admit([1])
    sim.check([0, 1])


def test_what_was_read_survives_the_loss_of_the_slice():
    sim = backend()
    result = placed({"x": VALUES}, {"x": sharding(sim, [0])})["x"]
    value = sim.read(result, [0], 60.0)
    sim.lose(0)
    np.testing.assert_array_equal(value, VALUES)


def test_canaries_tell_up_down_and_emptied():
    sim = backend()
    assert set(sim.probe([0, 1, 2, 3], 1.0).values()) == {Health.UP}
    sim.lose(1)
    sim.lose(2)
    sim.give_back(2)
    assert sim.probe([0, 1, 2], 1.0) == {0: Health.UP, 1: Health.DOWN, 2: Health.EMPTIED}
    sim.admit([2])
    assert sim.probe([2], 1.0) == {2: Health.UP}


def test_probes_compile_nothing():
    from elastix.compile_cache import count_compiles

    sim = backend()
    before = count_compiles()
    for _ in range(20):
        sim.probe([0, 1, 2, 3], 1.0)
    assert count_compiles() == before


def test_faults_strike_at_their_step_once():
    sim = backend(Lose(1, step=3), Return(1, step=5))
    for step in (1, 2):
        sim.dispatched(step, [0, 1])
        sim.committed(step)
    assert sim.probe([1], 1.0) == {1: Health.UP}
    sim.dispatched(3, [0, 1])
    assert sim.probe([1], 1.0) == {1: Health.DOWN}
    for step in (3, 4):
        sim.committed(step)
    assert sim.probe([1], 1.0) == {1: Health.DOWN}
    sim.committed(5)
    assert sim.probe([1], 1.0) == {1: Health.EMPTIED}
    sim.dispatched(3, [0, 1])
    assert sim.probe([1], 1.0) == {1: Health.EMPTIED}, "a step done again is not lost again"
    assert sim.script.pending == []


def test_a_fault_at_a_time_strikes_when_that_time_has_come():
    sim = backend(Lose(2, time=10.0), Return(2, time=12.0))
    sim.idle(9.0)
    assert sim.now() == 9.0 and sim.probe([2], 1.0) == {2: Health.UP}
    sim.idle(60.0)
    assert sim.now() == 10.0 and sim.probe([2], 1.0) == {2: Health.DOWN}
    sim.idle(60.0)
    assert sim.now() == 12.0 and sim.probe([2], 1.0) == {2: Health.EMPTIED}


def test_the_step_clock_goes_on_while_nothing_trains():
    script = Script([Lose(0, step=2), Return(0, step=12)])
    for step, now in ((1, 0.5), (2, 1.0), (3, 1.5)):
        script.committed(step, now)
    assert script.step_seconds == 0.5
    assert script.next_return_in(now=1.5) == pytest.approx(4.5), "9 steps of half a second"
    script.idled(4.0)
    assert script.returns_due() == []
    script.committed(3, 9.0)
    assert script.returns_due() == [], "the clock never goes back, nor jumps with a step redone"
    script.idled(0.5)
    assert script.returns_due() == [Return(0, step=12)]


def test_before_a_step_was_timed_it_counts_as_a_tenth_of_a_second():
    script = Script([Lose(0, step=1), Return(0, step=5)])
    assert script.next_return_in(now=0.0) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "fault"),
    [("1@40", Lose(1, step=40)), ("0@12.5s", Lose(0, time=12.5)), (" 3@7s ", Lose(3, time=7.0))],
)
def test_faults_are_read_from_the_command_line(text, fault):
    assert parse(Lose, text) == fault
    assert parse(Lose, str(fault).removeprefix("--lose ")) == fault


@pytest.mark.parametrize("text", ["", "1", "1@", "@4", "1@4x", "a@4", "1@-4", "1@4@5", "1@0"])
def test_a_fault_that_cannot_be_read_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match="--lose"):
        parse(Lose, text)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([Lose(4, step=3)], r"--lose 4@3: there are slices 0 to 3 only"),
        ([Lose(1, step=99)], r"--lose 1@99: the run has 40 steps only"),
        ([Return(1, step=3)], r"--return 1@3: slice 1 is not lost before that"),
        ([Lose(1, step=3), Lose(1, step=5)], r"--lose 1@5: slice 1 was lost before"),
        ([Lose(1, step=5), Return(1, step=3)], r"--return 1@3: slice 1 is not lost"),
    ],
)
def test_a_script_that_cannot_happen_is_refused(faults, message):
    with pytest.raises(ValueError, match=message):
        validate(faults, range(4), num_steps=40)


def test_a_slice_may_be_lost_and_returned_again_and_again():
    faults = [Lose(1, step=3), Return(1, step=3), Lose(1, step=9), Return(1, step=11)]
    validate(faults, range(4), num_steps=40)


def test_more_devices_than_there_are_is_one_line_with_the_remedy():
    with pytest.raises(ValueError, match=r"10 CPU devices are needed and JAX has 8: call"):
        SimulatedBackend(5, 2)


def test_more_devices_than_a_process_can_have_are_refused():
    with pytest.raises(ValueError, match="5000 simulated devices: use 4096 at most"):
        simulate_devices(5000)
