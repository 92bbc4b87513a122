"""Run directories in a fake bucket: commits, crashes at each request, leases, refusals."""

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from elastix.checkpoints import (
    CheckpointError,
    CheckpointReader,
    CheckpointStore,
    UnreadableHereError,
)
from elastix.object_store.bucket import LOCK, Bucket, BucketError, bucket_url
from elastix.object_store.checkpoints import MARKER, BucketFolder
from elastix.object_store.lease import EXPIRY, Lease, LeaseLostError, Timing, is_held
from elastix.object_store.rows import BucketFile, Mirror
from elastix.testing import VirtualClock
from tests.fake_gcs import QUICK, URL, arrays_of, bucket, flip, gcs, images_of, lay, server
from tests.test_checkpoints import METADATA, REPO, assert_same, state

__all__ = ["bucket", "gcs", "server"]  # fixtures


@pytest.fixture
def store(bucket):
    return CheckpointStore(BucketFolder(bucket), keep=2)


# --- the bucket ---------------------------------------------------------------------------------


def test_objects_are_read_written_listed_and_deleted(gcs, bucket):
    gcs.page = 2
    for number in range(5):
        bucket.write(f"a/{number}", bytes([number]))
    bucket.write("b", b"")
    assert bucket.names("a/") == [f"a/{n}" for n in range(5)] and bucket.names("c") == []
    assert (bucket.read("a/3"), bucket.read("b"), bucket.read("c")) == (b"\3", b"", None)
    bucket.delete("a/3", "c")
    assert gcs.names() == [f"run/{n}" for n in ("a/0", "a/1", "a/2", "a/4", "b")]


def test_a_write_for_a_generation_replaces_no_other(bucket):
    absent = bucket.stamped("x")[1]
    first = bucket.write_if("x", b"1", absent)
    assert first and bucket.write_if("x", b"2", absent) is None
    second = bucket.write_if("x", b"3", first)
    assert second and bucket.write_if("x", b"4", first) is None
    assert bucket.stamped("x") == (b"3", second)


def test_what_another_process_wrote_is_not_uploaded_over(gcs, bucket, tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    gcs.put("run/a", b"mine")  # as a write whose answer was lost
    bucket.upload([("a", tmp_path / "mine")])
    gcs.put("run/b", b"theirs")
    with pytest.raises(BucketError, match="run/b is there already"):
        bucket.upload([("b", tmp_path / "mine")])
    assert bucket.read("b") == b"theirs"


def test_a_busy_bucket_is_asked_again_and_then_given_up(gcs, bucket):
    statuses = iter([503, 429, None])
    gcs.refuse = lambda request: next(statuses)
    bucket.write("x", b"1")
    gcs.refuse = lambda request: 503
    for ask in (lambda: bucket.write("x", b""), lambda: bucket.read("x"), bucket.names):
        with pytest.raises(BucketError, match="All 3 retry attempts failed") as caught:
            ask()
        assert "\n" not in str(caught.value) and "[" not in str(caught.value)


def test_a_listing_that_is_refused_is_no_empty_one(gcs, bucket):
    """TensorStore takes it for one: a run would begin anew over what is there."""
    bucket.write("recipe.json", b"{}")
    for witness in ("recipe.json", LOCK):
        gcs.refuse = lambda request: 403 if request.verb == "list" else None
        with pytest.raises(BucketError, match=f"{witness} can be read: storage.objects.list"):
            bucket.names("checkpoints/")
        gcs.refuse = lambda request: None
        bucket.write(LOCK, b"{}")
    seen = iter([None, 403])  # the second page, of names after the one asked for
    gcs.page, gcs.refuse = 1, lambda request: next(seen) if request.verb == "list" else None
    with pytest.raises(BucketError, match="cannot be listed"):
        bucket.names("checkpoints/")


def test_a_bucket_that_does_not_answer_is_given_up(server):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code = (
            "from elastix.object_store.bucket import *\n"
            f"Bucket({URL!r}, Patience(deadline=0.3)).read('x')"
        )
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"TENSORSTORE_GCS_HTTP_URL": url},
            capture_output=True, text=True, timeout=120, cwd=REPO, check=False,
        )  # fmt: skip
    assert child.stderr.splitlines()[-1].endswith("run/x cannot be read: no answer in 0 s")


@pytest.mark.parametrize(
    ("where", "remedy"),
    [
        ("s3://bucket/run", "s3:// is not known"),
        ("gs://bucket", "name a folder in a bucket"),
        ("gs://Bucket_/x", "name a folder in a bucket"),
        ("gs://bucket/a//b", "name a folder in a bucket"),
        (Path("gs://bucket/run"), "as text"),
    ],
)
def test_urls_that_are_refused(where, remedy):
    with pytest.raises(ValueError, match=remedy):
        bucket_url(where)


def test_urls_and_paths():
    assert bucket_url("gs://bucket/a/b/") == "gs://bucket/a/b"
    assert [bucket_url(p) for p in ("runs/x", "/a:b", Path("gs"), "")] == [None] * 4


# --- checkpoints --------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_and_orbax_and_a_disk_read_it_too(gcs, store, tmp_path):
    size = store.save(7, state(7), METADATA)
    leaves, metadata = store.load(7)
    assert_same(leaves, state(7))
    assert metadata == METADATA and store.size(7) == size > 20_000
    assert store.save(7, state(7), METADATA) == 0, "it is there already"
    for name in gcs.names():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gcs.objects[name][0])
    copied = tmp_path / "run" / "checkpoints"
    assert_same(CheckpointReader(copied).load(7)[0], state(7))
    assert ocp.load(copied / "7")["leaves"].nbytes > 20_000


def test_a_local_run_directory_that_was_copied_there_is_one(gcs, bucket, tmp_path):
    CheckpointStore(tmp_path, keep=1).save(3, state(3), METADATA)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            gcs.put(f"run/checkpoints/{path.relative_to(tmp_path)}", path.read_bytes())
    store = CheckpointStore(BucketFolder(bucket), keep=1)
    assert_same(store.newest()[0].leaves, state(3))
    assert store.size(3) > 20_000 and store.stamp(3).written_at is None


def test_the_oldest_go_and_an_unfinished_one_does_not_count(gcs, bucket, store):
    for step in (1, 2, 3):
        store.save(step, state(step), METADATA)
    gcs.objects.pop(f"run/checkpoints/3/{MARKER}")
    gcs.put("run/checkpoints/notes.txt", b"somebody's")
    assert (store.steps(), store.unfinished()) == ((2,), (3,))
    again = CheckpointStore(BucketFolder(bucket), keep=2)
    assert again.unfinished() == () and again.newest()[0].step == 2
    assert gcs.names("run/checkpoints/3/") == [] and "run/checkpoints/notes.txt" in gcs.objects


def save_2(store):
    store.save(2, state(2), METADATA)


def save_2_again(store):
    store.save(2, state(2), METADATA | {"again": True})


def save_3(store):
    store.save(3, state(3), METADATA)


CHANGES = [
    ((1,), save_2, {1, 2}),
    ((1, 2), save_3, {2, 3}),
    ((1, 2), lambda store: store.remove(2), {1, 2}),
    ((1, 2), lambda store: store.set_aside(2, "bad"), {1, 2}),
    ((1, 2), save_2_again, {1, 2}),
]


@pytest.mark.parametrize(
    ("before", "change", "expected"),
    CHANGES,
    ids=["a save", "one that retires a step", "a removal", "setting aside", "the same step again"],
)
def test_a_crash_after_each_request(gcs, bucket, store, before, change, expected):
    """Whatever is found then, the newest good checkpoint is loaded, and another one is saved."""
    for step in before:
        store.save(step, state(step), METADATA)
    images, seen = images_of(gcs, lambda: change(store)), []
    assert len(images) > 8
    for number, image in enumerate(images):
        lay(gcs, image)
        found = CheckpointStore(BucketFolder(bucket), keep=2)
        newest, bad = found.newest()
        assert newest and newest.step in expected and bad == (), number
        assert_same(newest.leaves, state(newest.step))
        assert newest.metadata in (METADATA, METADATA | {"again": True})
        seen.append((newest.step, newest.metadata.get("again", False)))
        if number % 8 == 0:
            found.save(9, state(9), METADATA)
            assert found.newest()[0].step == 9
    assert {step for step, _ in seen} == expected, "both sides of the commit were seen"
    assert sum(a != b for a, b in itertools.pairwise(seen)) <= 2


def test_the_marker_goes_last_and_is_the_first_to_go(gcs, store):
    store.save(1, state(1), METADATA)
    changed = []
    gcs.changed = lambda request, objects: changed.append(request)
    store.save(2, state(2), METADATA)
    store.remove(1)
    names = [(request.verb, request.name.removeprefix("run/checkpoints/")) for request in changed]
    marker = names.index(("write", f"2/{MARKER}"))
    assert all(verb == "write" for verb, _ in names[:marker]) and marker > 4
    assert names[marker + 1] == ("delete", f"1/{MARKER}")
    assert {verb for verb, _ in names[marker + 1 :]} == {"delete"}


def test_rows_are_published_before_the_marker_or_there_is_no_checkpoint(gcs, bucket):
    def publish():
        assert gcs.names("run/checkpoints/1/") and f"run/checkpoints/1/{MARKER}" not in gcs.objects
        bucket.write("metrics.jsonl", b"")
        raise BucketError("not now")

    store = CheckpointStore(BucketFolder(bucket, publish=publish), keep=1)
    with pytest.raises(CheckpointError, match="step 1 was not saved: BucketError: not now"):
        store.save(1, state(1), METADATA)
    assert gcs.names() == ["run/metrics.jsonl"], "what was written is removed"


def test_flipped_bits_and_missing_objects_are_found_and_set_aside(gcs, store):
    """Each byte of the array's file, in the soak of the local disk; here one an object."""
    store.save(1, state(1), METADATA)
    store.save(2, state(2), METADATA)
    image = dict(gcs.objects)
    condemned = 0
    for name in gcs.names("run/checkpoints/2/"):
        for damage in (flip, lambda gcs, name: gcs.objects.pop(name)):
            lay(gcs, image)
            if not gcs.objects[name][0] or name.endswith(MARKER):
                continue
            damage(gcs, name)
            newest, bad = store.newest()
            assert_same(newest.leaves, state(newest.step))
            condemned += len(bad)
            if bad:
                assert newest.step == 1 and store.steps() == (1,)
                assert store.set_aside_list() == bad and "set-aside-2-0" in bad[0].path
    assert condemned >= 6


@pytest.mark.parametrize("status", [403, 503])
def test_what_cannot_be_read_now_is_not_condemned(gcs, store, status):
    store.save(1, state(1), METADATA)
    store.save(2, state(2), METADATA)
    arrays = arrays_of(gcs, 2)
    for refused in (arrays, "run/checkpoints/2/_CHECKPOINT_METADATA"):
        gcs.refuse = lambda request, refused=refused: status if request.name == refused else None
        with pytest.raises(UnreadableHereError) as caught:
            store.newest()
        assert "\n" not in str(caught.value)
        with pytest.raises(UnreadableHereError):
            store.save(2, state(2), METADATA)
    gcs.refuse = lambda request: None
    assert store.newest()[0].step == 2 and store.set_aside_list() == ()


def test_another_is_set_aside_and_put_back_if_the_save_fails(gcs, store):
    store.save(2, state(2), METADATA)
    marker = f"run/checkpoints/2/{MARKER}"
    writes = []

    def refuse(request):
        writes.append(request.name) if request.verb == "write" else None
        return (
            403
            if request.verb == "write" and writes.count(marker) == 1 and request.name == marker
            else None
        )

    gcs.refuse = refuse
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        save_2_again(store)
    assert store.load(2)[1] == METADATA and store.set_aside_list() == ()
    assert_same(store.load(2)[0], state(2))


# --- the lease ----------------------------------------------------------------------------------


def lease_of(bucket, during=lambda: None):
    """A lease that waits in no time; `during` happens each time that it does."""
    clock = VirtualClock()

    def wait(seconds):
        clock.sleep(seconds)
        during()

    return Lease(bucket, Timing(clock.now, wait)), clock


def taken(bucket, **options):
    lease, clock = lease_of(bucket, **options)
    told = []
    lease.take(told.append)
    return lease, clock, told


def test_a_lease_that_is_renewed_is_not_taken_over(bucket):
    first, _, told = taken(bucket)
    assert told == []
    who = f"in use by process {os.getpid()} on {socket.gethostname()}: wait"
    with pytest.raises(ValueError, match=who):
        taken(bucket, during=first.renew)
    first.renew()


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 0.0])
def test_who_holds_a_lease_is_told_whatever_the_wall_clock_was_set_to(bucket, jump):
    """By looking for a renewal where two clocks differ, of one that lives and one that died."""
    first, _, _ = taken(bucket)
    looks = []

    def held(during):
        clock = VirtualClock()

        def wait(seconds):
            clock.sleep(seconds)
            looks.append(seconds)
            during()

        return is_held(bucket, Timing(clock.now, wait), lambda: time.time() + jump)

    assert held(first.renew)
    assert len(looks) == (1 if jump else 0)
    if jump:
        assert not held(lambda: None)
    first.release()
    assert not held(lambda: None)


def test_a_lease_that_was_given_back_is_taken_at_once(bucket):
    first, _, _ = taken(bucket)
    first.release()
    second, clock, told = taken(bucket)
    assert clock.now() == 0 and told == []
    first.release()  # again: it is not its own any more
    second.renew()


def test_a_lease_of_a_killed_process_expires_and_who_comes_back_has_lost_it(gcs, bucket):
    first, _, _ = taken(bucket)
    second, clock, told = taken(bucket)
    assert clock.now() >= EXPIRY and "taken over if its lease is not renewed" in told[0]
    with pytest.raises(LeaseLostError, match="was taken over by process"):
        first.renew()
    assert first.lost
    first.release()
    second.renew()
    gcs.objects.pop(f"run/{LOCK}")
    with pytest.raises(LeaseLostError, match="somebody who removed its lease"):
        second.renew()


def test_two_that_wait_for_the_same_lease_do_not_both_take_it(bucket):
    taken(bucket)
    other, clock = lease_of(bucket)

    def at_the_end():
        if mine.now() >= EXPIRY:  # between the last look and the write of the one
            other.take(lambda line: None)

    lease, mine = lease_of(bucket, at_the_end)
    with pytest.raises(ValueError, match="in use by process"):
        lease.take(lambda line: None)
    other.renew()


def test_a_lost_answer_is_no_lost_lease(gcs, bucket):
    """The bucket wrote it, and said that it was busy: asked again, it finds another generation."""
    lease, _, _ = taken(bucket)
    seen = []

    def changed(request, objects):
        seen.append(request)
        if len(seen) == 1:
            gcs.objects[f"run/{LOCK}"] = (objects[f"run/{LOCK}"][0], 10**9)

    gcs.changed = changed
    lease.renew()
    lease.renew()


@pytest.mark.parametrize("rubbish", [b"", b"[]", b"\xff", b'{"pid": 3}'])
def test_a_lease_that_is_rubbish_expires_too(gcs, bucket, rubbish):
    gcs.put(f"run/{LOCK}", rubbish)
    lease, clock, _ = taken(bucket)
    assert clock.now() >= EXPIRY
    lease.renew()


# --- rows ---------------------------------------------------------------------------------------


def downloaded(bucket, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    Mirror(bucket, folder).download()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


step_of_a_log = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 30)),
    st.tuples(st.just("retract"), st.integers(0, 30)),
    st.tuples(st.just("publish"), st.just(0)),
    st.tuples(st.just("resume"), st.just(0)),
)


@settings(max_examples=25)
@example(script=[("append", 12), ("publish", 0), ("retract", 4)])  # to the end of a part
@given(script=st.lists(step_of_a_log, max_size=12))
def test_any_history_of_a_file_is_published_and_each_image_is_a_beginning(
    server, tmp_path_factory, script
):
    server.reset()
    bucket, folder = Bucket(URL, QUICK), tmp_path_factory.mktemp("rows")
    path, lines, history, serial = folder / "metrics.jsonl", [], [b""], 0
    mirror = Mirror(bucket, folder, part=20)
    for what, number in [*script, ("publish", 0)]:
        if what == "append":
            lines += [f"{serial + n:04d}\n".encode() for n in range(number)]
            serial += number
        if what == "retract":
            lines = lines[:number]
        path.write_bytes(b"".join(lines) + b"torn")
        os.utime(path, ns=(serial * 997 + len(history), len(history)))
        history.append(b"".join(lines))
        if what == "publish":
            for image in images_of(server, mirror.publish):
                lay(server, image)
                got = downloaded(bucket, folder / "copy").get("metrics.jsonl", b"")
                assert any(whole.startswith(got) for whole in history)
            assert got == history[-1]
        if what == "resume":
            path.unlink()
            mirror = Mirror(bucket, folder, part=20)
            mirror.download()
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []


def test_a_part_that_is_missing_is_told(gcs, bucket, tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"0123456789\n" * 20)
    Mirror(bucket, tmp_path, part=50).publish()
    assert len(gcs.names("run/events.jsonl")) == 4
    assert BucketFile(bucket, "events.jsonl").open().read() == b"0123456789\n" * 20
    gcs.objects.pop("run/events.jsonl.part-000001")
    with pytest.raises(BucketError, match="part-000001 is missing: put it back"):
        downloaded(bucket, tmp_path / "copy")


def test_nothing_is_written_again_that_has_not_changed(gcs, bucket, tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"0123456789\n" * 20)
    (tmp_path / "recipe.json").write_bytes(b"{}")
    mirror = Mirror(bucket, tmp_path, part=50)
    mirror.publish()
    gcs.requests.clear()
    mirror.publish()
    os.utime(tmp_path / "events.jsonl", (1, 1))
    mirror.publish()
    assert gcs.requests == []
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b"0123456789\n")
    mirror.publish()
    assert [request.name for request in gcs.requests] == ["run/events.jsonl.part-000004"]
