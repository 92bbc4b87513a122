"""A local Pathways: the JAX client, unmodified, on slices that are processes and that die."""

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import jax
import numpy as np
import psutil
import pytest

from elastix import cli
from elastix.testing.local_pathways import LocalPathways, executables, launcher
from elastix.testing.local_pathways.membership import (
    BUSY,
    Asked,
    Decision,
    Exited,
    Heard,
    Joined,
    Member,
    Phase,
    Returned,
    Rules,
    Ticked,
    starting,
    transition,
)
from elastix.testing.local_pathways.messages import Compile
from elastix.testing.local_pathways.protocol import (
    NEEDED,
    NEWEST,
    OLDEST,
    Version,
    installed,
    negotiate,
    read,
)
from elastix.testing.local_pathways.shardings import Sharding, read_sharding, write_sharding
from tests.local_pathways.kept import COMPILE_CACHE

ROOT = Path(__file__).resolve().parent.parent
MEGABYTE = 1 << 20


class Controller:
    """A controller's process, and what it is asked to check."""

    def __init__(self, cluster):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.local_pathways.controller"],
            cwd=ROOT,
            env=os.environ | cluster.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self):
        return self

    @property
    def pid(self):
        return self._process.pid

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def send(self, name, *arguments):
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()

    def receive(self):
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["trace"]
        return answer["value"]

    def do(self, name, *arguments):
        self.send(name, *arguments)
        return self.receive()


@pytest.fixture(scope="module")
def events():
    return []


@pytest.fixture(scope="module")
def cluster(events):
    with LocalPathways(
        3, devices_per_slice=2, heartbeat=1.0, compile_cache=COMPILE_CACHE, on_event=events.append
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def controller(cluster):
    with Controller(cluster) as controller:
        yield controller


@pytest.fixture
def whole(cluster, controller):
    """All slices are there, before the test and after it."""
    yield
    controller.do("drop")
    give_back_all(cluster)


def give_back_all(cluster):
    for slice, pid in cluster.pids.items():
        if pid is None:
            cluster.give_back(slice)


def until(condition, seconds=30.0):
    """Poll what another process does; it is a deadline, not a time to wait."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return value


# What runs.


def test_the_client_sees_slices_of_tpus(controller):
    kinds = ["device", "pinned_host", "unpinned_host"]
    assert controller.do("devices") == [[i, i // 2, "tpu", "TPU v5 lite", kinds] for i in range(6)]


@pytest.mark.parametrize(
    "check",
    [
        "transformations",
        "collectives",
        "training",
        "ahead_of_time",
        "placement",
        "host_program",
        "resharding",
    ],
)
def test_what_jax_does_on_one_machine_it_does_here(controller, check):
    controller.do(check)


def test_orbax_saves_and_restores(controller, tmp_path):
    controller.do("checkpoints", str(tmp_path / "checkpoint"))


def test_host_callbacks_are_refused_in_words(controller):
    assert "UNIMPLEMENTED: host callbacks" in controller.do("callbacks")


# What is lost.


def test_a_killed_slice_loses_what_lived_there_and_nothing_else(cluster, controller, whole):
    controller.do("begin")
    controller.do("replicate")
    cluster.kill(1)
    first, second, third = controller.do("read_own")
    assert first is third is None
    assert second == "DATA_LOSS: slice 1 was lost, with all that was in its memory"
    assert controller.do("active")[0] == [0, 2]
    w, loss = controller.do("survivors", 0, 2)
    assert loss == (sum(range(8)) - 1) ** 2 and len(w) == 8
    cluster.give_back(1)
    assert controller.do("active")[0] == [0, 1, 2]
    assert "DATA_LOSS" in controller.do("read_later")  # it is back, with empty memory


def test_an_error_surfaces_when_a_result_is_read(cluster, controller, whole):
    controller.do("begin")
    cluster.stop(0)  # so that nothing of what follows is done before it dies
    assert controller.do("steps", 3) < 1.0
    cluster.kill(0)
    assert "DATA_LOSS: slice 0" in controller.do("read_loss")
    assert controller.do("steps", 1) < 1.0  # dispatched on a dead slice: an error to be read
    assert "DATA_LOSS: slice 0" in controller.do("read_loss")
    assert controller.do("is_slice_down") is True


def test_a_stopped_slice_is_waited_for_and_holds_up_no_other(cluster, controller, whole):
    controller.do("begin")
    controller.do("steps", 1)
    assert controller.do("read_loss") is None
    cluster.stop(2)
    controller.do("steps", 1)
    controller.send("read_loss")
    cluster.resume(2)  # before the heartbeat has noticed: it only took longer
    assert controller.receive() is None
    assert controller.do("active")[0] == [0, 1, 2]


def test_a_slice_that_is_stopped_for_long_is_lost(cluster, controller, events, whole):
    controller.do("begin")
    cluster.stop(2)
    controller.do("step_and_more", 0)  # slices 0 and 1 wait for 2, and so does a program of 0
    found, seconds = controller.do("active")
    assert found == [0, 1] and seconds < 20
    until(lambda: events[-1] == {"event": "lost", "slice": 2, "reason": "no heartbeat"})
    assert "DEADLINE_EXCEEDED: slice 2: no heartbeat for 1 s" in controller.do("read_loss")
    assert [error is None for error in controller.do("read_own")] == [True, True, False]
    before = cluster.pids[2]
    cluster.resume(2)  # it was given up: it is started again, with empty memory
    until(lambda: events[-1]["event"] == "joined")
    assert cluster.pids[2] != before
    assert controller.do("active")[0] == [0, 1, 2]
    assert "DATA_LOSS" in controller.do("read_own")[2]


def test_pathwaysutils_runs_unmodified_through_losses(cluster, controller, whole):
    assert controller.do("manage") == [0, 1, 2]
    controller.do("begin")
    cluster.kill(0)
    controller.do("steps", 1)
    assert controller.do("retry", 0.1) == [[1, 2], [1, 2]]
    controller.send("wait_for_all", 0.1)
    cluster.give_back(0)
    assert controller.receive() == [0, 1, 2]


def test_all_slices_die_and_come_back(cluster, controller, whole):
    controller.do("begin")
    for slice in range(3):
        cluster.kill(slice)
    assert controller.do("active")[0] == []
    give_back_all(cluster)
    assert controller.do("active")[0] == [0, 1, 2]
    assert controller.do("begin") > 0


def test_what_forks_dies_with_all_slices_and_they_come_back(cluster, controller, whole):
    (forks,) = psutil.Process(cluster.server_pid).children()
    assert forks.num_threads() == 1  # what there is of others would not be sound in a fork
    assert {child.pid for child in forks.children()} > set(cluster.pids.values())
    forks.kill()
    until(lambda: not any(cluster.pids.values()))
    until(lambda: len(below(cluster.server_pid)) > 2)  # what forks, and the compiler: both anew
    assert controller.do("active")[0] == []
    give_back_all(cluster)
    assert controller.do("active")[0] == [0, 1, 2]
    assert controller.do("begin") > 0  # compiled, too


# What it costs, and what it leaves behind.


def memory(pid):
    """Resident bytes of a process, and the most there were."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(told["VmRSS"]) * 1024, int(told["VmHWM"]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_state_lives_with_the_slices_and_passes_through_the_server(cluster, controller, whole):
    controller.do("put", 1)  # the server has what it needs of jaxlib
    _, before = memory(cluster.server_pid)
    slice_before, _ = memory(cluster.pids[0])
    controller.do("put", 120)
    _, most = memory(cluster.server_pid)
    assert most - before < 40 * MEGABYTE
    assert memory(cluster.pids[0])[0] - slice_before > 110 * MEGABYTE
    controller.do("drop")
    until(lambda: memory(cluster.pids[0])[0] - slice_before < 40 * MEGABYTE)


def test_what_is_donated_takes_no_memory(cluster, controller, whole):
    controller.do("hold")
    held = cluster.num_bytes[0]
    controller.do("donate")
    assert cluster.num_bytes[0] <= held


def listening(pid):
    found = psutil.Process(pid).net_connections()
    return {c.laddr.ip.removeprefix("::ffff:") for c in found if c.status == "LISTEN"}


def test_nothing_listens_beyond_this_machine(cluster, controller):
    controller.do("begin")  # the slices have met, each other and the server
    found = [listening(pid) for pid in (cluster.server_pid, *cluster.pids.values())]
    assert set().union(*found) == {"127.0.0.1"} and all(found)


def test_a_loss_leaves_no_thread_behind(cluster, controller, whole):
    """Slice 0 lives on, and was in a gang with each process that slice 1 had."""
    controller.do("begin")
    before = psutil.Process(cluster.server_pid).num_threads()
    for _ in range(3):
        cluster.kill(1)
        cluster.give_back(1)
        controller.do("begin")
    # A gang's service has six; of the requests' own, at most 256, some may have come meanwhile.
    until(lambda: psutil.Process(cluster.server_pid).num_threads() < before + 12)


# Whoever speaks the protocol.


@pytest.fixture
def channel(cluster):
    """A client of gRPC alone."""
    with grpc.insecure_channel(cluster.target.removeprefix("grpc://")) as channel:
        yield channel


def session(channel, requests):
    """The answers of a session to these requests, one after another."""
    call = channel.stream_stream(
        "/xla.ifrt.proxy.GrpcIfrtService/IfrtSession",
        lambda request: request.SerializeToString(),
        installed().message("xla.ifrt.proxy.IfrtResponse").FromString,
    )
    return call(iter(requests), timeout=60)


def init():
    request = installed().message("xla.ifrt.proxy.IfrtRequest")()
    request.init_request.SetInParent()
    return request


def test_a_client_that_goes_while_it_is_answered_leaves_nothing(channel, events):
    """It takes one answer of thousands: the next cannot be sent when it goes."""
    taken = threading.Event()

    def requests():
        yield from (init() for _ in range(5000))
        taken.set()

    answers = session(channel, requests())
    number = next(answers).init_response.session_id
    assert taken.wait(30.0)
    answers.cancel()
    until(lambda: {"event": "disconnected", "client": number} in events)


def test_a_request_of_no_known_kind_is_answered(channel):
    unknown = installed().message("xla.ifrt.proxy.IfrtRequest")()
    unknown.request_metadata.op_id = 7
    answers = session(channel, [unknown, init()])
    refused = next(answers).response_metadata
    assert (refused.op_id, refused.status.message) == (7, "requests of the kind unknown")
    assert next(answers).init_response.session_id


# How it ends. These have clusters of their own.


def is_there(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def below(pid):
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A cluster that is used up by the tests in order, what happened there, and its directory."""
    kept, events = tmp_path_factory.mktemp("kept") / "executables", []
    with LocalPathways(2, heartbeat=60, compile_cache=kept, on_event=events.append) as cluster:
        yield cluster, events, kept


@pytest.fixture(scope="module")
def second(small):
    """A controller there, started when one before it may have gone."""
    with Controller(small[0]) as controller:
        yield controller


def test_a_controller_is_killed_and_the_next_finds_empty_slices_and_kept_programs(small, request):
    cluster, _, kept = small
    before = cluster.num_bytes
    with Controller(cluster) as first:
        first.do("put", 1)
        first.do("begin")
        assert cluster.num_bytes[0] >= before[0] + MEGABYTE
        assert all(cluster.num_bytes[i] > before[i] for i in before)
        os.kill(first.pid, signal.SIGKILL)
    until(lambda: cluster.num_bytes == before)
    torn, *others = sorted(kept.iterdir())
    torn.write_bytes(torn.read_bytes()[:-1])
    written = [path.stat().st_mtime_ns for path in others]
    second = request.getfixturevalue("second")
    second.do("put", 1)
    assert second.do("begin") > 0
    assert sorted(kept.iterdir()) == [torn, *others]
    assert [path.stat().st_mtime_ns for path in others] == written
    digest, body = torn.read_bytes()[:32], torn.read_bytes()[32:]
    assert hashlib.sha256(body).digest() == digest


def test_a_stuck_slice_holds_up_no_other_and_the_server_takes_all_with_it(small, second):
    cluster, events, _ = small
    pids = below(cluster.server_pid)
    second.do("begin")
    cluster.stop(1)
    second.do("step_and_more", 0)  # slice 0 waits for 1, and a program of 0 for that
    assert second.do("probe", 0) == [0]
    assert "lost" not in [event["event"] for event in events]
    os.kill(cluster.server_pid, signal.SIGKILL)
    until(lambda: not any(is_there(pid) for pid in pids))
    assert second.do("unavailable").startswith("UNAVAILABLE")
    with pytest.raises(RuntimeError, match="does not answer"):
        cluster.kill(0)


def test_who_hears_of_a_loss_may_act_and_may_fail():
    """What it raises is printed, and the next event comes all the same."""
    heard = queue.SimpleQueue()

    def hear(event):
        if event["event"] == "lost":
            cluster.give_back(event["slice"])
        heard.put(event["event"])
        raise ValueError("of no interest")

    with LocalPathways(1, heartbeat=0.2, on_event=hear) as cluster:
        assert heard.get(timeout=60) == "joined"
        cluster.kill(0)
        assert [heard.get(timeout=60) for _ in range(2)] == ["lost", "joined"]
        os.kill(cluster.server_pid, signal.SIGKILL)
        assert heard.get(timeout=60) == "ended"


PARENT = """
import sys
from elastix.testing.local_pathways import LocalPathways
with LocalPathways(1) as cluster:
    cluster.stop(0)
    print(cluster.server_pid, flush=True)
    sys.stdin.read()
"""


def test_its_parent_dies_and_takes_everything_with_it():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        pids = below(int(parent.stdout.readline()))
        assert len(pids) == 4  # the server, what forks, the compiler, and the slice
        parent.kill()
    until(lambda: not any(is_there(pid) for pid in pids))


def test_the_command_line_tells_what_happens_and_does_what_is_typed():
    terminal, other_end = os.openpty()
    command = [sys.executable, "-m", "elastix", "local-pathways", "--slices", "1"]
    with subprocess.Popen(
        [*command, "--heartbeat", "0.2", "--restart-after", "0.5"],
        stdin=other_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    ) as process:
        lines = iter(process.stdout.readline, "")
        first = [next(lines) for _ in range(7)]
        assert first[1].startswith("export JAX_BACKEND_TARGET=grpc://127.0.0.1:")
        os.write(terminal, b"return 0\nfly 0\nkill 0\n")
        assert next(lines) == "elastix: slice 0: it is there: kill it first\n"
        assert next(lines).startswith("elastix: 'fly 0': use kill N")
        assert next(lines) == "slice 0 lost: its process ended\n"
        assert next(lines).startswith("slice 0 is there: pid ")  # restarted by itself
        os.write(terminal, b"kill 0\nreturn 0\n")
        assert next(lines) == "slice 0 lost: its process ended\n"
        assert next(lines).startswith("slice 0 is there: pid ")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    os.close(terminal)
    os.close(other_end)


# Bad input.


def test_bad_input_is_refused_in_a_line(cluster, capsys, tmp_path):
    file = str(tmp_path / "file")
    Path(file).touch()
    port = cluster.target.rpartition(":")[2]
    taken = f"elastix: port {port} is taken: use another, or 0 for any that is free"
    for arguments, line in [
        (["--slices", "0"], "elastix: slices=0: use 1 or more"),
        (["--devices-per-slice", "-1"], "elastix: devices_per_slice=-1: use 1 or more"),
        (
            ["--slices", "9", "--devices-per-slice", "999"],
            "elastix: slices=9 of devices_per_slice=9",
        ),
        (
            ["--slices", "1000000"],
            "elastix: slices=1000000 of devices_per_slice=1: use at most 1024",
        ),
        (["--heartbeat", "0"], "elastix: heartbeat=0: use more than 0 seconds"),
        (["--heartbeat", "nan"], "elastix: heartbeat=nan: use more than 0 seconds"),
        (["--restart-after", "nan"], "elastix: restart_after=nan: use 0 seconds or more, or None"),
        (["--log-dir", file], f"elastix: log_dir={file} cannot be written (File exists): name"),
        (
            ["--compile-cache", f"{file}/x"],
            f"elastix: compile_cache={file}/x cannot be written (Not",
        ),
        (["--restart-after", "-1"], "elastix: restart_after=-1: use 0 seconds or more, or None"),
        (["--port", "70000"], "elastix: port=70000: use 1 to 65535, or 0 for any that is free"),
        (["--port", port], taken),
        (["--sices", "3"], "elastix: unrecognized arguments: --sices 3 (elastix local-pathways"),
    ]:
        assert cli.main(["local-pathways", *arguments]) == 2
        assert capsys.readouterr().err.startswith(line)
    for refused, reason in [
        (lambda: cluster.kill(3), "slice 3: there are 0 to 2"),
        (lambda: cluster.give_back(0), "slice 0: it is there: kill it first"),
        (lambda: launcher.check_installed(["no_such"]), r"pip install 'elastix-jax\[local-path"),
    ]:
        with pytest.raises(ValueError, match=reason):
            refused()


def test_importing_it_costs_nothing():
    program = (
        "import elastix.testing.local_pathways as x, sys; x.LocalPathways; print(*sys.modules)"
    )
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"grpc", "google.protobuf", "jax", "numpy"} & set(loaded.stdout.split())


# What is kept.


def test_an_executable_is_kept_under_all_that_matters_to_it():
    program, options, assignment = b"program", b"options", ((0, 1),)
    system = executables.this_system()
    assert set(system) == {"jaxlib", "flags", "processor", "threads", "code"}
    names = {
        executables.name_of(Compile(options, assignment), program, 2, system),
        executables.name_of(Compile(options, assignment), b"another", 2, system),
        executables.name_of(Compile(b"optionsp", assignment), b"rogram", 2, system),
        executables.name_of(Compile(options, ((1, 0),)), program, 2, system),
        executables.name_of(Compile(options, assignment), program, 4, system),
        *(
            executables.name_of(Compile(options, assignment), program, 2, system | {name: "x"})
            for name in system
        ),
    }
    assert len(names) == 10


def test_what_cannot_be_kept_is_made(tmp_path):
    (tmp_path / "file").touch()
    kept = executables.Directory(tmp_path / "file")
    makes = iter([b"a", b"b"])
    assert [kept.get("x", lambda: next(makes)) for _ in "ab"] == [b"a", b"b"]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_what_was_used_last_is_kept(tmp_path):
    """Of three executables of which two have room; what is not ours is left alone."""
    (tmp_path / "notes").write_bytes(b"x" * 9000)
    half, *names = (tmp_path / f"tmp1{executables._HALF}", *("abc"[i] * 64 for i in range(3)))
    half.write_bytes(b"x" * 1000)
    os.utime(half, ns=(1, 1))
    kept = executables.Directory(tmp_path, most=2500)
    for name in (names[0], names[1], names[0], names[2]):
        assert kept.get(name, lambda: b"x" * 1000) == b"x" * 1000
    assert {path.name for path in tmp_path.iterdir()} == {"notes", names[0], names[2]}
    kept = executables.Directory(tmp_path, most=10)
    kept.get(names[1], lambda: b"x" * 1000)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", names[1]}


# The protocol.


def test_versions_are_negotiated():
    assert negotiate(Version(1, 1), Version(20, 3)) == (20, 3)
    assert negotiate(OLDEST, Version(99, 99)) == NEWEST
    for oldest, newest in [((1, 1), (15, 6)), ((26, 2), (30, 6)), ((16, 7), (25, 9))]:
        with pytest.raises(ValueError, match=r"IFRT proxy protocol.*use jaxlib 0\.10\.x to 0\.12"):
            negotiate(Version(*oldest), Version(*newest))


def test_a_jaxlib_with_another_protocol_is_refused():
    assert installed().missing(NEEDED) == []
    lacking = {"xla.ifrt.HloShardingProto": "devices colour", "xla.ifrt.Nothing": "x"}
    assert installed().missing(lacking) == ["xla.ifrt.HloShardingProto.colour", "xla.ifrt.Nothing"]
    with pytest.raises(ValueError, match=r"jaxlib 0\.99 .* lacks xla/.*: use jaxlib 0\.10\.x to"):
        read(b"\x00" * 1000, "0.99")


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((6, 4), ("a", "b")), ((6, 4), ("b", None)), ((4,), (("b", "a"),)), ((), ()), ((3, 5), ())],
)
def test_which_device_has_which_part(shape, spec):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    op = named._to_xla_hlo_sharding(len(shape)).to_proto().SerializeToString()
    written = write_sharding(installed(), Sharding((3, 1, 0, 2), "pinned_host", op))
    sharding = read_sharding(installed(), written)
    assert sharding == ((3, 1, 0, 2), "pinned_host", op, False)
    wanted = [named.devices_indices_map(shape)[d] for d in mesh.devices.ravel()]
    host = np.arange(np.prod(shape)).reshape(shape)
    for box, indices in zip(sharding.boxes(shape), wanted, strict=True):
        np.testing.assert_array_equal(host[box], host[indices])


# Membership, without a process.

RULES = Rules(heartbeat=1.0, restart_after=None)
LIVES = [
    ("killed in use", [(0, Joined()), (5, Exited(True))], "WELCOME LOSE_ENDED", Phase.DOWN),
    ("killed, unnoticed", [(0, Joined()), (5, Exited(False))], "WELCOME", Phase.ENDED),
    (
        "killed, then asked",
        [(0, Joined()), (5, Exited(False)), (5.1, Asked())],
        "WELCOME LOSE_ENDED",
        Phase.DOWN,
    ),
    (
        "killed, heartbeat",
        [(0, Joined()), (5, Exited(False)), (5.9, Ticked(False)), (6, Ticked(False))],
        "WELCOME LOSE_ENDED",
        Phase.DOWN,
    ),
    ("stopped, short", [(0, Joined()), (5, Heard()), (6, Ticked(True))], "WELCOME", Phase.UP),
    (
        "stopped, long",
        [(0, Joined()), (5, Heard()), (6.1, Ticked(True))],
        "WELCOME LOSE_SILENT",
        Phase.SILENT,
    ),
    ("busy", [(0, Joined()), (1 + BUSY, Ticked(False))], "WELCOME", Phase.UP),
    (
        "hung",
        [(0, Joined()), (1.1 + BUSY, Ticked(False))],
        "WELCOME LOSE_SILENT",
        Phase.SILENT,
    ),
    (
        "stopped and resumed",
        [(0, Joined()), (2, Ticked(True)), (3, Heard())],
        "WELCOME LOSE_SILENT KILL START",
        Phase.STARTING,
    ),
    (
        "stopped and killed",
        [(0, Joined()), (2, Ticked(True)), (3, Exited(False)), (4, Returned()), (5, Joined())],
        "WELCOME LOSE_SILENT START WELCOME",
        Phase.UP,
    ),
    (
        "given back before it was noticed",
        [(0, Joined()), (5, Exited(False)), (5.1, Returned())],
        "WELCOME LOSE_ENDED START",
        Phase.STARTING,
    ),
    ("nobody gives it back", [(0, Exited(False)), (99, Ticked(False))], "", Phase.DOWN),
]


@pytest.mark.parametrize(
    ("life", "decided", "phase"), [of[1:] for of in LIVES], ids=[of[0] for of in LIVES]
)
def test_the_life_of_a_slice(life, decided, phase):
    member, decisions = starting(0.0), []
    for now, event in life:
        member, decision = transition(member, event, now, RULES)
        decisions += decision
    assert [decision.name for decision in decisions] == decided.split()
    assert member.phase is phase
    assert member.generation == decisions.count(Decision.START)


def test_a_slice_is_started_again_when_it_is_due():
    down = Member(Phase.DOWN, since=10.0, heard=9.0)
    rules = Rules(heartbeat=1.0, restart_after=5.0)
    assert transition(down, Ticked(False), 14.9, rules) == (down, ())
    assert transition(down, Ticked(False), 15.0, rules)[1] == (Decision.START,)


def test_a_slice_that_is_there_cannot_be_given_back():
    with pytest.raises(ValueError, match="it is there: kill it first"):
        transition(Member(Phase.UP, 0.0, 0.0), Returned(), 1.0, RULES)
