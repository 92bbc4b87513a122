"""Whole runs in a fake bucket: the same bits, whatever request their process is killed after."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from elastix import SimulatedBackend, train
from elastix.checkpoints import CheckpointReader
from elastix.cli import main
from elastix.lineage import Origin
from elastix.machine import SaveFailed
from elastix.notices import Inbox, post
from elastix.object_store.bucket import LOCK, Bucket
from elastix.object_store.checkpoints import MARKER, BucketFolder
from elastix.object_store.home import BucketHome
from elastix.object_store.lease import Timing
from elastix.object_store.rows import BucketFile
from elastix.summary import NoDisplay
from elastix.testing import VirtualClock
from tests.fake_gcs import (
    QUICK,
    URL,
    arrays_of,
    bucket,
    flip,
    gcs,
    images_of,
    lay,
    markers,
    server,
)
from tests.recipes import tiny
from tests.test_checkpoints import REPO

__all__ = ["bucket", "gcs", "server"]  # fixtures
soak = pytest.mark.soak

# --- whole runs ---------------------------------------------------------------------------------

TINY = replace(tiny.recipe(), policy=replace(tiny.recipe().policy, probe_every=5.0))


class Watched(NoDisplay):
    """Keeps what happened."""

    def __init__(self):
        self.events = []

    def event(self, before, event, after):
        self.events.append(event)


def run(where, recipe=TINY, **options):
    backend = options.pop("backend", None) or SimulatedBackend(2, 1)
    return train(recipe, backend=backend, run_dir=where, stop=threading.Event(), **options)


def steps_of(bucket):
    rows = BucketFile(bucket, "metrics.jsonl").open().read().splitlines()
    return [json.loads(row)["step"] for row in rows]


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    return run(tmp_path_factory.mktemp("local") / "run")


@pytest.fixture(scope="module")
def images(server, on_disk):
    """What a bucket held after each change of a whole run."""
    server.reset()
    found = images_of(server, lambda: run(URL))
    assert found[-1]["run/summary.json"]
    return found


def assert_done(summary, on_disk, bucket):
    assert summary.outcome == "done", summary.reason
    assert (summary.state_sha256, summary.losses) == (on_disk.state_sha256, on_disk.losses)
    assert summary.consumed == on_disk.consumed
    assert steps_of(bucket) == list(range(1, 41))


def test_a_run_in_a_bucket_ends_with_the_same_bits(gcs, bucket, images, on_disk):
    lay(gcs, images[-1])
    stored = json.loads(bucket.read("summary.json"))
    assert (stored["state_sha256"], stored["losses"]) == (on_disk.state_sha256, on_disk.losses)
    assert stored["consumed"] == on_disk.consumed and steps_of(bucket) == list(range(1, 41))
    assert {"recipe.json", "events.jsonl"} <= set(bucket.names())
    assert json.loads(bucket.read(LOCK))["free"]
    assert CheckpointReader(BucketFolder(bucket)).steps()[-1] == 40
    longer = run(URL, replace(TINY, num_steps=50))
    assert (longer.outcome, longer.resumed_at, longer.steps) == ("done", 40, 50)
    assert steps_of(bucket) == list(range(1, 51))


def test_no_image_of_a_run_has_a_checkpoint_without_its_rows(gcs, bucket, images, tmp_path):
    """Whatever request a process is killed after: the newest commit, and all rows up to it."""
    newest = 0
    for image in images:
        lay(gcs, image)
        steps = CheckpointReader(BucketFolder(bucket)).steps()
        rows = steps_of(bucket) if "run/metrics.jsonl" in image else []
        assert rows == list(range(1, len(rows) + 1)) and len(rows) >= max(steps, default=0)
        assert max(steps, default=0) >= newest, "no commit is ever taken back"
        newest = max(steps, default=0)
    assert newest == 40


def resume(gcs, image, on_disk):
    """Run on from what a killed process left, once its lease has expired."""
    lay(gcs, image)
    gcs.objects.pop(f"run/{LOCK}", None)
    bucket = Bucket(URL, QUICK)
    newest = max(CheckpointReader(BucketFolder(bucket)).steps(), default=0)
    summary = run(URL)
    assert summary.resumed_at == newest
    assert_done(summary, on_disk, bucket)
    assert main(["replay", URL]) == 0


@pytest.mark.parametrize("share", [0.15, 0.55, 0.8])
def test_it_resumes_after_a_kill_at_any_request(gcs, images, on_disk, share, capsys):
    resume(gcs, images[int(share * len(images))], on_disk)


@soak
def test_it_resumes_after_a_kill_at_each_request(gcs, images, on_disk):
    for image in images:
        resume(gcs, image, on_disk)


CHILD = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # read only: it is killed
from tests.recovery.test_in_a_bucket import URL, run
run(URL)
"""


@pytest.mark.parametrize("more", [4, *(pytest.param(n, marks=soak) for n in (-6, -1, 0, 1, 9))])
def test_kill_9_in_the_middle_of_a_save(gcs, images, on_disk, more, tmp_path, capsys):
    """A process is killed, by the bucket, before it hears that so many more objects than those up
    to the first commit were written."""
    commit = next(n for n, image in enumerate(images) if markers(image))
    count = itertools.count(1)

    def changed(request, objects):
        if next(count) == commit + more:
            child.kill()

    gcs.changed = changed
    command = [sys.executable, "-c", CHILD, jax.config.jax_compilation_cache_dir]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=REPO, env=environment) as child:
        assert child.wait(120) == -signal.SIGKILL
    gcs.changed = lambda request, objects: None
    resume(gcs, gcs.objects.copy(), on_disk)


def test_a_second_process_is_refused_and_the_first_goes_on(gcs, bucket, on_disk):
    def second(row):
        if row["step"] == 15:
            clock = VirtualClock()
            lock = json.loads(bucket.read(LOCK))

            def wait(seconds):
                clock.sleep(seconds)
                gcs.put(f"run/{LOCK}", json.dumps(lock | {"renewed_at": clock.now()}).encode())

            with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
                BucketHome(URL, bucket, Timing(clock.now, wait)).claim()
            refused.append(row)
            gcs.put(f"run/{LOCK}", json.dumps(lock).encode())

    refused = []
    run(URL, replace(TINY, hooks=(second,)))
    assert refused


def test_who_lost_the_lease_saves_nothing_more_and_says_so(gcs, bucket, capfd):
    theirs = b'{"pid": 7, "host": "node-b", "token": "x"}'

    def take_over(row):
        if row["step"] == 15:
            gcs.put(f"run/{LOCK}", theirs)
            image.update(gcs.objects)

    image = {}
    summary = run(URL, replace(TINY, hooks=(take_over,)))
    assert summary.outcome == "failed" and "taken over by process 7 on node-b" in summary.reason
    assert image.items() <= gcs.objects.items(), "nothing was changed, and nothing removed"
    assert markers(image) == markers(gcs.objects), "nothing was committed"
    kept = capfd.readouterr().err.split("are kept in ")[1].split()[0]
    assert (Path(kept) / "metrics.jsonl").exists()
    shutil.rmtree(kept)


def test_a_bucket_that_fails_for_a_while_costs_saves_and_not_the_run(gcs, bucket, on_disk):
    watched = Watched()

    def fail_for_a_while(row):
        failing = 8 <= row["step"] < 23
        gcs.refuse = lambda request: 403 if failing and request.verb == "write" else None

    summary = run(URL, replace(TINY, hooks=(fail_for_a_while,)), display=watched)
    failed = [event for event in watched.events if isinstance(event, SaveFailed)]
    assert failed and "PERMISSION_DENIED" in failed[0].reason
    assert_done(summary, on_disk, bucket)


def test_a_busy_bucket_only_takes_longer(gcs, bucket, on_disk):
    busy = iter([503] * 3)

    def refuse(request):
        return next(busy, None) if "checkpoints/10/state" in request.name else None

    gcs.refuse = refuse
    assert_done(run(URL), on_disk, bucket)
    assert next(busy, None) is None


def test_a_bucket_that_fails_at_the_end_fails_the_run(gcs, bucket, capfd):
    def fail(row):
        if row["step"] == 38:
            gcs.refuse = lambda request: 403 if request.verb == "write" else None

    backend = SimulatedBackend(2, 1, clock=VirtualClock())
    summary = run(URL, replace(TINY, hooks=(fail,)), backend=backend)
    assert summary.outcome == "failed" and "PERMISSION_DENIED" in summary.reason
    kept = capfd.readouterr().err.split("are kept in ")[1].split()[0]
    assert json.loads((Path(kept) / "summary.json").read_text())["outcome"] == "failed"
    shutil.rmtree(kept)
    gcs.refuse = lambda request: None
    gcs.objects.pop(f"run/{LOCK}")  # it could not be given back: once it has expired
    assert run(URL).outcome == "done"


@pytest.mark.parametrize("notice", ["keep", "publish_rows"])
def test_the_run_is_told_that_it_lost_the_lease_and_it_is_said_once(gcs, bucket, notice, capfd):
    home, told = BucketHome(URL, bucket), []
    home.claim()
    home.when_lost(lambda: told.append("lost"))
    getattr(home, notice)()
    assert told == []
    gcs.put(f"run/{LOCK}", b'{"pid": 7, "host": "node-b", "token": "x"}')
    before = dict(gcs.objects)
    (home.path / "metrics.jsonl").write_text("{}\n")
    for _ in range(2):
        getattr(home, notice)()
    assert told == ["lost"] and gcs.objects == before
    assert capfd.readouterr().err.count("was taken over by process 7 on node-b") == 1
    home.give_up()
    assert gcs.objects == before and not home.path.exists()


def test_rows_that_cannot_be_published_are_told_once(gcs, bucket, capfd):
    home = BucketHome(URL, bucket)
    home.claim()
    for number in range(3):
        (home.path / "metrics.jsonl").write_text("{}\n" * (number + 1))
        gcs.refuse = lambda request: 403 if "metrics" in request.name else None
        home.publish_rows()
    gcs.refuse = lambda request: None
    home.publish_rows()
    home.close()
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("elastix")]
    assert len(told) == 2 and "PERMISSION_DENIED" in told[0]
    assert told[1] == f"elastix: the rows of {URL} are published again, and none is missing"
    assert bucket.read("metrics.jsonl") == b"{}\n" * 3 and not home.path.exists()


# --- commands -----------------------------------------------------------------------------------


def test_the_commands_work_on_a_bucket(gcs, images, capsys):
    lay(gcs, images[-1])
    before = dict(gcs.objects)
    assert main(["checkpoints", URL, "--verify", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["folder"] == f"{URL}/checkpoints" and listing["resume"] == 40
    last = listing["checkpoints"][-1]
    assert (last["status"], last["mesh"]) == ("verified", [0, 1]) and last["num_bytes"] > 0
    flip(gcs, arrays_of(gcs, 40))
    assert main(["checkpoints", URL, "--verify"]) == 1 and "BAD" in capsys.readouterr().out
    assert main(["checkpoints", f"{URL}/checkpoints"]) == 0
    assert main(["replay", URL]) == main(["replay", f"{URL}/events.jsonl"]) == 0
    assert "ended done at step 40" in capsys.readouterr().out
    assert set(gcs.objects) == set(before)


def test_a_run_forks_from_one_bucket_into_another_folder(gcs, images, on_disk, tmp_path):
    lay(gcs, images[-1])
    step = CheckpointReader(BucketFolder(Bucket(URL))).steps()[0]
    origin, fork = Origin.parse(f"{URL}@{step}"), Bucket("gs://bucket/fork", QUICK)
    found = images_of(gcs, lambda: assert_done(run(fork.url, fork_from=origin), on_disk, fork))
    assert json.loads(fork.read("lineage.json")) == {"forked_from": URL, "step": step}
    assert run(fork.url, fork_from=origin).resumed_at == 40, "the same fork is resumed"
    with pytest.raises(ValueError, match="was forked from"):
        run(fork.url, fork_from=Origin(URL, 40))
    with pytest.raises(ValueError, match="holds .* already"):
        run(URL, fork_from=origin)
    assert run(tmp_path / "down", fork_from=origin).state_sha256 == on_disk.state_sha256
    half = next(i for i in found if f"fork/checkpoints/{step}/{MARKER}" in i)
    lay(gcs, half)
    gcs.objects.pop(f"fork/{LOCK}")
    assert_done(run(fork.url, fork_from=origin), on_disk, fork)
    assert "fork/forking" not in gcs.objects


def test_a_notice_reaches_the_run(gcs, bucket):
    home = BucketHome(URL, bucket)
    with pytest.raises(ValueError, match="no process runs in gs://bucket/run"):
        post(URL, frozenset({1}), 30.0)
    gcs.put("run/notices/1-1.json", b'{"slices": [0], "until": 0, "seconds": 1}')
    home.claim()
    with pytest.raises(ValueError, match="has not started training yet"):
        post(URL, frozenset({1}), 30.0)
    event = {"event": {"type": "Started", "slices": [0, 1]}}
    (home.path / "events.jsonl").write_text(json.dumps(event) + "\n")
    home.publish()
    clock = VirtualClock()
    inbox = Inbox(home.path, clock.now)
    with pytest.raises(ValueError, match="slice 2 does not exist in gs://bucket/run: use 0 to 1"):
        post(URL, frozenset({2}), 30.0)
    assert main(["notify", URL, "--slices", "1", "--in", "60"]) == 0
    assert inbox.take() is None
    home.keep()
    clock.sleep(1.0)
    notice = inbox.take()
    assert notice and notice.slices == {1} and 50 < notice.seconds <= 60
    home.keep()
    clock.sleep(1.0)
    assert inbox.take() is None, "each comes once, and none that was meant for an older process"
    assert [name.rpartition(".")[2] for name in gcs.names("run/notices/")] == ["missed", "taken"]
    home.close()


def test_a_process_that_was_killed_is_not_notified(gcs):
    lock = {"pid": 1, "host": "a", "token": "b", "renewed_at": 1.5, "free": False}
    gcs.put(f"run/{LOCK}", json.dumps(lock).encode())
    clock = VirtualClock()
    with pytest.raises(ValueError, match="there is nobody to notify"):
        post(URL, frozenset(), 1.0, Timing(clock.now, clock.sleep))
    assert 0 < clock.now() <= 30, "it looked whether the lease is renewed"


# --- bad input ----------------------------------------------------------------------------------

RECIPE = str(REPO / "tests/recipes/tiny.py")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", RECIPE, "--run-dir", "s3://bucket/run"], "s3:// is not known"),
        (["run", RECIPE, "--run-dir", "gs://bucket"], "name a folder in a bucket"),
        (["verify", RECIPE, "--lose", "1@4", "--run-dir", URL], "verify works on a disk"),
        (["checkpoints", "gs://bucket/none"], "holds no checkpoints"),
        (["checkpoints", "gs://nobucket/run"], "holds no checkpoints"),
        (["replay", "gs://bucket/none"], "holds no events.jsonl"),
        (["notify", "gs://bucket/none"], "there is nobody to notify"),
    ],
)
def test_bad_input_is_one_line(gcs, capfd, arguments, told):
    assert main(arguments) == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("elastix: ")]
    assert told in line and gcs.objects == {}


@pytest.mark.parametrize("verb", ["read", "write", "list"])
def test_a_bucket_that_permits_too_little_is_refused(gcs, verb):
    gcs.refuse = lambda request: 403 if request.verb == verb else None
    with pytest.raises(ValueError, match="run directory gs://bucket/run cannot be ") as caught:
        run(URL)
    assert "\n" not in str(caught.value)
    assert set(gcs.objects) <= {f"run/{LOCK}"}


def test_a_bucket_that_does_not_exist_is_refused(gcs):
    with pytest.raises(ValueError, match="The specified bucket does not exist") as caught:
        run("gs://nobucket/run")
    assert "\n" not in str(caught.value)


def test_commands_that_may_not_read_say_so_in_one_line(gcs, images, capfd):
    lay(gcs, images[-1])
    gcs.refuse = lambda request: 403
    for command in ("checkpoints", "replay", "notify"):
        assert main([command, URL]) == 2
        assert "PERMISSION_DENIED" in capfd.readouterr().err


def test_what_is_no_run_directory_is_refused(gcs, bucket):
    gcs.put("run/data.bin", b"")
    with pytest.raises(ValueError, match="holds data.bin but no recipe.json"):
        run(URL)
    assert gcs.names() == ["run/data.bin"]
