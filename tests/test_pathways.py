"""The Pathways backend without Pathways: what it refuses, whom it asks, how it moves arrays."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from elastix.backends import Health
from elastix.backends.canaries import Canaries, one_of_each_host
from elastix.backends.pathways import refuse_faults, slices_of_equal_size, stop_traces
from elastix.backends.proxy import (
    await_port,
    client_deadline,
    no_devices,
    proxy_address,
    proxy_timeout,
)
from elastix.backends.remote_memory import OneAtATime, RemoteTransfers
from elastix.classification import StuckError, controller_is_lost, failure_event
from elastix.cli import main
from elastix.faults import Lose
from elastix.machine import ControllerLost, ProgramFailed, SlicesLost

TINY = "tests/recipes/tiny.py"
VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)


def error(message):
    return jax.errors.JaxRuntimeError(message)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platforms", "target", "told"),
    [
        ("cpu", "grpc://127.0.0.1:29000", "JAX_PLATFORMS=cpu: "),
        (None, "grpc://127.0.0.1:29000", "set JAX_PLATFORMS=proxy, and JAX_BACKEND_TARGET=grpc://"),
        ("proxy", None, "JAX_BACKEND_TARGET=: give the address"),
        ("proxy", "127.0.0.1:29000", "JAX_BACKEND_TARGET=127.0.0.1:29000: give the address"),
        ("proxy", "grpc://127.0.0.1", "such as JAX_BACKEND_TARGET=grpc://127.0.0.1:29000"),
        ("proxy", "grpc://127.0.0.1:99999", "JAX_BACKEND_TARGET=grpc://127.0.0.1:99999: give"),
        ("proxy", "grpc://127.0.0.1:x", "JAX_BACKEND_TARGET=grpc://127.0.0.1:x: give"),
    ],
)
def test_an_environment_that_names_no_proxy_is_refused(platforms, target, told):
    environment = {} if target is None else {"JAX_BACKEND_TARGET": target}
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        proxy_address(environment, platforms)
    assert "\n" not in str(refused.value)


def test_the_address_is_taken_from_the_environment():
    target = "grpc://head-0-0.head:29000"
    assert proxy_address({"JAX_BACKEND_TARGET": target}, "proxy,cpu") == target


@pytest.mark.parametrize("text", ["0", "-1", "soon", "1.5", "2147483648", "9" * 30])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(text):
    with pytest.raises(ValueError, match=f"PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS={text}: use a"):
        proxy_timeout({"PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS": text})


def test_the_timeout_has_a_default():
    assert proxy_timeout({}) == 60.0
    assert proxy_timeout({"PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS": "7"}) == 7.0


def test_a_proxy_where_nobody_listens_is_given_up_at_the_deadline():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"grpc://127.0.0.1:{unused.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ValueError, match=f"{target}: the Pathways proxy does not answer"):
            await_port(target, began + 0.5)
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("host", ["..", "x" * 64])
def test_a_host_that_has_no_name_is_refused_at_once(host):
    began = time.monotonic()
    with pytest.raises(ValueError, match="is no host name: give the address") as refused:
        await_port(f"grpc://{host}:29000", began + 60.0)
    assert f"JAX_BACKEND_TARGET=grpc://{host}:29000: {host} is no host" in str(refused.value)
    assert time.monotonic() - began < 5.0


def told(code, reason):
    """What JAX says if it has no devices, as it was seen to."""
    return (
        f"Unable to initialize backend 'proxy': {code}: Unable to establish connection to "
        f"ifrt_proxy server, please check provided address 'h:1'; detailed error: {reason} (set "
        "JAX_PLATFORMS='' to automatically choose an available backend)"
    )


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (told("UNAVAILABLE", "refused"), "does not answer (refused): see whether it runs there"),
        (told("DEADLINE_EXCEEDED", "late"), "give it more than PATHWAYS_PROXY_CONNECTION_TIMEOUT_"),
        ("out of luck", "the Pathways proxy does not answer (out of luck)"),
        (
            told("FAILED_PRECONDITION", "failed to agree on the version"),
            f"JAX {jax.__version__} has no connection to the Pathways proxy (failed to agree on "
            "the version): install the JAX that its servers were built with",
        ),
        (
            told("INVALID_ARGUMENT", "grpc::ChannelCredentials argument is null."),
            "argument is null.): set IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true",
        ),
    ],
)
def test_who_has_no_devices_is_told_what_to_do(message, says):
    line = no_devices("grpc://h:1", message, 7.0)
    assert line.startswith("JAX_BACKEND_TARGET=grpc://h:1: ") and says in line


@pytest.mark.parametrize("before", ["60", None])
def test_the_client_gets_what_is_left_of_the_time(before, monkeypatch):
    name = "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with client_deadline(6.7):
        assert os.environ[name] == "7"
    assert os.environ.get(name) == before


@dataclass(frozen=True)
class Chip:
    """A device as far as it is asked for its place."""

    id: int
    slice_index: int | None = 0


def test_devices_are_grouped_by_slice_in_the_order_of_their_ids():
    chips = [Chip(3, 1), Chip(0, 0), Chip(2, 1), Chip(1, 0)]
    grouped = slices_of_equal_size(chips)
    assert {s: [c.id for c in own] for s, own in grouped.items()} == {0: [0, 1], 1: [2, 3]}


def test_a_device_that_tells_no_slice_is_refused():
    with pytest.raises(ValueError, match=r"Chip\(id=1, slice_index=None\) has no slice_index"):
        slices_of_equal_size([Chip(0), Chip(1, None)])


def test_slices_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match="slice 0 has 2, slice 1 has 1"):
        slices_of_equal_size([Chip(0), Chip(1), Chip(2, 1)])
    with pytest.raises(ValueError, match="there are none"):
        slices_of_equal_size([])


def test_scripted_faults_are_refused():
    refuse_faults(())
    with pytest.raises(ValueError, match="--lose 1@40: slices of Pathways die by themselves"):
        refuse_faults([Lose(1, step=40)])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--slices", "3"], "--slices 3: Pathways has the slices that its proxy shows"),
        (["--devices-per-slice", "2"], "--devices-per-slice 2: Pathways has the slices"),
        (["--lose", "1@4"], "--lose 1@4: slices of Pathways die by themselves"),
        (["--return", "1@4"], "--return 1@4: slices of Pathways die by themselves"),
        (["--hang", "1@4"], "--hang 1@4: slices of Pathways die by themselves"),
        (["--corrupt", "1@4"], "--corrupt 1@4: slices of Pathways die by themselves"),
        (["--compile-cache", "/tmp/x"], "--compile-cache /tmp/x: Pathways keeps compiled programs"),
        ([], "Pathways is reached through a proxy: set JAX_PLATFORMS=proxy"),
    ],
)
def test_what_pathways_cannot_use_is_refused_in_one_line(tmp_path, capsys, options, told):
    run_dir = tmp_path / "run"
    status = main(["run", TINY, "--backend", "pathways", "--run-dir", str(run_dir), *options])
    said = capsys.readouterr().err.splitlines()
    assert status == 2 and len(said) == 1 and told in said[0], said
    assert not run_dir.exists()


def test_verify_on_pathways_is_refused(capsys):
    assert main(["verify", TINY, "--backend", "pathways"]) == 2
    assert "--backend pathways: elastix verify compares" in capsys.readouterr().err


def run_child(target, **environment):
    return subprocess.run(
        [sys.executable, "-m", "elastix", "run", TINY, "--backend", "pathways"],
        env={
            **os.environ,
            "JAX_PLATFORMS": "proxy",
            "JAX_BACKEND_TARGET": target,
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_pathwaysutils_the_command_says_what_to_install(tmp_path):
    (tmp_path / "pathwaysutils.py").write_text("raise ImportError('absent')")
    child = run_child("grpc://127.0.0.1:1", PYTHONPATH=str(tmp_path))
    assert child.returncode == 2
    assert "pip install 'elastix-jax[pathways]'" in child.stderr.splitlines()[-1]


def test_a_proxy_that_accepts_and_says_nothing_is_given_up_at_the_deadline():
    pytest.importorskip("pathwaysutils")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        child = run_child(target, PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS="1")
    assert child.returncode == 2, child.stderr
    last = child.stderr.splitlines()[-1]
    assert f"JAX_BACKEND_TARGET={target}: the Pathways proxy does not answer" in last


def test_a_proxy_of_another_jax_is_named_with_its_own_words():
    """It answers, and refuses: more time would not help."""
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("pathwaysutils")

    def refuse(request, context):
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "spoken are versions 1 to 3")

    handlers = {"GetVersion": grpc.unary_unary_rpc_method_handler(refuse)}
    service = grpc.method_handlers_generic_handler("xla.ifrt.proxy.GrpcIfrtService", handlers)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    child = run_child(f"grpc://127.0.0.1:{port}", PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS="2")
    server.stop(None)
    assert child.returncode == 2, child.stderr
    last = child.stderr.splitlines()[-1]
    assert "(spoken are versions 1 to 3): install the JAX that its servers" in last


# --- what an error says -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("UNAVAILABLE: Connection to IFRT proxy server was terminated: x", True),
        ("FAILED_PRECONDITION: RpcHelper: writes no longer allowed", True),
        ("FAILED_PRECONDITION: the buffer is donated", False),
        ("DATA_LOSS: slice 1 is gone", False),
    ],
)
def test_the_controller_is_lost_with_the_connection_to_the_proxy(message, lost):
    assert controller_is_lost(error(message)) == lost
    kind, _ = failure_event(error(message), frozenset({0, 1}), lambda _: frozenset())
    assert (kind is ControllerLost) == lost


@pytest.mark.parametrize("code", ["DEADLINE_EXCEEDED", "NOT_FOUND", "INTERNAL"])
def test_an_error_that_may_be_a_loss_is_one_if_a_canary_is_gone(code):
    mesh = frozenset({0, 1})
    kind, fields = failure_event(error(f"{code}: x"), mesh, lambda _: frozenset({1}))
    assert kind is SlicesLost and fields["slices"] == {1}
    kind, _ = failure_event(error(f"{code}: x"), mesh, lambda _: frozenset())
    assert kind is ProgramFailed


# --- canaries ---------------------------------------------------------------------------------


@pytest.fixture
def devices():
    found = jax.devices("cpu")[:4]
    return {0: found[:2], 1: found[2:]}


class Put:
    """`jax.device_put`, which hangs on some devices until they are released."""

    def __init__(self):
        self.hung, self.released = set(), threading.Event()

    def __call__(self, values, places):
        if self.hung.intersection(places):
            self.released.wait()
        return jax.device_put(values, places)


def test_a_slice_without_a_canary_answers_and_is_empty(devices):
    canaries = Canaries(devices, Put())
    assert canaries.ask([0, 1], 5.0) == {0: Health.EMPTIED, 1: Health.EMPTIED}
    canaries.write([1])
    assert canaries.ask([0, 1], 5.0) == {0: Health.EMPTIED, 1: Health.UP}
    canaries.require([1])


def test_a_slice_that_hangs_is_down_and_holds_up_no_other(devices):
    put = Put()
    canaries = Canaries(devices, put)
    put.hung.update(devices[1])
    began = time.monotonic()
    assert canaries.ask([0, 1], 1.0) == {0: Health.EMPTIED, 1: Health.DOWN}
    assert time.monotonic() - began < 5.0
    began = time.monotonic()
    assert canaries.ask([0, 1], 30.0)[1] is Health.DOWN, "it is not waited for a second time"
    assert time.monotonic() - began < 5.0
    put.released.set()
    deadline = time.monotonic() + 30.0
    while canaries.ask([1], 5.0)[1] is not Health.EMPTIED:
        assert time.monotonic() < deadline


def test_a_canary_for_each_machine_of_a_slice():
    @dataclass(frozen=True)
    class Hosted:
        id: int
        task_id: int

    assert one_of_each_host([Hosted(0, 0), Hosted(1, 0), Hosted(2, 1)]) == [
        Hosted(1, 0),
        Hosted(2, 1),
    ]
    assert len(one_of_each_host([Chip(0), Chip(1)])) == 2


# --- transfers --------------------------------------------------------------------------------


def test_transfers_are_made_one_at_a_time():
    in_turn, inside, most = OneAtATime(30.0), [], []

    def transfer(number):
        inside.append(number)
        most.append(len(inside))
        time.monotonic()
        inside.remove(number)

    threads = [threading.Thread(target=in_turn, args=(transfer, n)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20


def test_a_transfer_that_hangs_is_left_behind():
    in_turn, forever = OneAtATime(0.2), threading.Event()
    with pytest.raises(StuckError):
        in_turn(forever.wait)
    assert in_turn(lambda: 7) == 7
    forever.set()


def test_what_a_transfer_raises_comes_out():
    def fail():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        OneAtATime(5.0)(fail)


def sharding(devices, slices, spec=P("x")):
    grid = np.array([devices[s] for s in slices])
    return NamedSharding(Mesh(grid, ("slice", "x")), spec)


@pytest.fixture(params=["pinned_host", "device"])
def transfers(request, devices):
    in_turn = OneAtATime(30.0)
    return RemoteTransfers(devices, in_turn, lambda do, arrays: do(arrays), request.param)


def pointers(leaves):
    return {s.data.unsafe_buffer_pointer() for a in leaves.values() for s in a.addressable_shards}


def test_a_host_snapshot_is_restored_on_any_slices(devices, transfers):
    leaves = transfers.put(
        {"x": VALUES, "n": np.array(3)},
        {
            "x": sharding(devices, [0, 1]),
            "n": sharding(devices, [0, 1], P()),
        },
    )
    copies = transfers.copy(leaves, devices, 5).finish({"x": "hash"})
    assert {c.step for c in copies.values()} == {5} and copies[1].hashes == {"x": "hash"}
    shapes = {"x": (4, 4), "n": ()}
    np.testing.assert_array_equal(copies[1].whole(shapes)["x"], VALUES)
    for slices in ([0], [1], [0, 1]):
        places = {"x": sharding(devices, slices), "n": sharding(devices, slices, P())}
        restored = transfers.restore([copies[1]], shapes, places)
        np.testing.assert_array_equal(np.asarray(restored["x"]), VALUES)
        assert int(restored["n"]) == 3
        assert restored["x"].sharding == places["x"]


def test_a_host_snapshot_outlives_what_was_donated(devices, transfers):
    place = {"x": sharding(devices, [0, 1])}
    leaves, shapes = transfers.put({"x": VALUES}, place), {"x": (4, 4)}
    copying = transfers.copy(leaves, devices, 5)
    donate = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=place["x"])
    donate(leaves["x"])
    copies = copying.finish({})
    for _ in range(2):
        restored = transfers.restore(list(copies.values()), shapes, place)
        np.testing.assert_array_equal(np.asarray(restored["x"]), VALUES)
        donate(restored["x"])
    assert restored["x"].is_deleted()
    np.testing.assert_array_equal(copies[0].whole(shapes)["x"], VALUES)


def test_a_slice_is_restored_from_its_own_copy(devices, transfers):
    place = {"x": sharding(devices, [0, 1], P())}
    ones = transfers.put({"x": np.ones(4, np.float32)}, place)
    twos = transfers.put({"x": np.full(4, 2, np.float32)}, place)
    copies = [transfers.copy(x, devices, 5).finish({})[s] for s, x in enumerate((ones, twos))]
    restored = transfers.restore(copies, {"x": (4,)}, place)["x"]
    held = {s.device: float(s.data[0]) for s in restored.addressable_shards}
    assert held == {d: float(s + 1) for s, own in devices.items() for d in own}


def test_live_leaves_move_without_a_copy_where_they_lie(devices, transfers):
    leaves = transfers.put({"x": VALUES}, {"x": sharding(devices, [0, 1])})
    moved = transfers.move(leaves, frozenset(devices[1]), {"x": sharding(devices, [1])})
    np.testing.assert_array_equal(np.asarray(moved["x"]), VALUES)
    assert pointers(moved) < pointers(leaves)
    grown = transfers.move(moved, frozenset(devices[1]), {"x": sharding(devices, [0, 1])})
    np.testing.assert_array_equal(np.asarray(grown["x"]), VALUES)
    assert pointers(moved) < pointers(grown)


# --- profiler traces ----------------------------------------------------------------------------


def test_a_trace_is_stopped_before_a_recovery_and_none_is_no_error(tmp_path):
    stop_traces(60.0)
    jax.profiler.start_trace(str(tmp_path))
    stop_traces(60.0)
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()
