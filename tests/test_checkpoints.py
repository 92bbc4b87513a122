"""The durable tier: round trips bit for bit, damage of every kind, full disks, kill -9."""

import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from elastix import checkpoint_format
from elastix.checkpoint_folder import LocalFolder
from elastix.checkpoint_format import CHUNK
from elastix.checkpoints import CheckpointError, CheckpointStore, UnreadableHereError

DTYPES = [np.dtype(code).name for code in "?bhiqBHIQefdFD"]  # bool to complex128
DTYPES += ["int2", "int4", "uint2", "uint4", "bfloat16", "float4_e2m1fn", "float8_e3m4"]
DTYPES += ["float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"]
DTYPES += ["float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
METADATA = {"step": 7, "iterator": {"consumed": 84, "hash": "c0ffee"}, "mesh": [4, 2], "loss": 0.1}
REPO = Path(__file__).parent.parent


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def state(step, size=1000):
    """A state that is a function of the step, with leaves of several kinds."""
    rng = np.random.default_rng(step)
    return {
        ".model.layers.attention.q.weight": rng.standard_normal((size, 7)).astype(np.float32),
        ".opt_state[0].mu['w/\\n é']": rng.standard_normal(size).astype(ml_dtypes.bfloat16),
        ".opt_state[0].count": np.array(0x5EED0000 + step, np.int32),
        ".empty": np.zeros((0, 3), np.float16),
    }


def assert_same(found, expected):
    """Equal as bits: paths, dtypes, shapes and bytes."""
    assert sorted(found) == sorted(expected)
    for path, leaf in expected.items():
        assert (found[path].dtype, found[path].shape) == (leaf.dtype, leaf.shape), path
        assert found[path].tobytes() == leaf.tobytes(), path


def files_of(root, step):
    return sorted(path for path in (root / str(step)).rglob("*") if path.is_file())


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    yield store
    store.close()


# Round trips


def test_every_dtype_and_bit_pattern(store):
    leaves = {}
    for name in DTYPES:
        dtype = dtype_of(name)
        # All byte patterns: NaN payloads, -0.0, denormals, and a bool that is neither 0 nor 1.
        leaves[f".all.{name}"] = np.frombuffer(bytes(range(256)), dtype).reshape(-1, 2)
        leaves[f".scalar.{name}"] = np.frombuffer(bytes([128] * 16), dtype)[0].reshape(())
        leaves[f".empty.{name}"] = np.zeros((2, 0), dtype)
    store.save(7, leaves, METADATA)
    found, metadata = store.load(7)
    assert_same(found, leaves)
    assert metadata == METADATA
    assert all(leaf.flags.writeable and leaf.flags.aligned for leaf in found.values())


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_paths_shapes_and_metadata(data):
    leaf = st.tuples(
        st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**32 - 1)
    )
    drawn = data.draw(st.dictionaries(st.text(max_size=12), leaf, max_size=5))
    leaves = {}
    for path, (name, shape, seed) in drawn.items():
        raw = np.random.default_rng(seed).bytes(math.prod(shape) * dtype_of(name).itemsize)
        leaves[path] = np.frombuffer(raw, dtype_of(name)).reshape(shape)
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    )  # fmt: skip
    keys = st.text().filter(lambda key: key != "checkpoint")
    metadata = data.draw(st.dictionaries(keys, values, max_size=4))
    with tempfile.TemporaryDirectory() as root:
        store = CheckpointStore(Path(root), keep=1)
        store.save(0, leaves, metadata)
        found, back = store.load(0)
    assert_same(found, leaves)
    assert back == metadata


def test_strided_transposed_and_frozen_arrays(store):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    frozen = whole.copy()
    frozen.flags.writeable = False
    views = {".t": whole.T, ".s": whole[::2, 1::3], ".b": np.broadcast_to(whole[0], (3, 6))}
    leaves = views | {".f": frozen, ".g": np.float32(3)}
    store.save(1, leaves, {})
    assert_same(store.load(1)[0], {path: np.asarray(leaf) for path, leaf in leaves.items()})


def test_leaves_that_cross_chunks(store):
    sizes = {".a": CHUNK // 2 + 5, ".b": 2 * CHUNK + 13, ".c": 0, ".d": 1, ".e": CHUNK}
    draw = np.random.default_rng(0)
    leaves = {path: draw.integers(0, 256, size, dtype=np.uint8) for path, size in sizes.items()}
    store.save(1, leaves, {})
    assert_same(store.load(1)[0], leaves)
    (chunk,) = ocp.metadata(store.root / "1").metadata["leaves"].storage_metadata.chunk_shape
    assert CHUNK // 2 <= chunk <= CHUNK


@given(size=st.integers(0, 2**45))
def test_any_size_divides_into_chunks(size):
    length = checkpoint_format.padded(size)
    chunks = max(1, -(-size // CHUNK))
    assert max(size, 1) <= length < size + max(chunks, 2)
    assert length % chunks == 0 and length // chunks <= CHUNK


def test_metadata_lists_what_is_there(store):
    leaves = state(7)
    size = store.save(7, leaves, METADATA)
    assert size == sum(path.stat().st_size for path in files_of(store.root, 7))
    metadata = store.metadata(7)
    own = metadata.pop("checkpoint")
    assert metadata == METADATA
    assert (own["format_version"], own["step"]) == (1, 7)
    rows = {row["path"]: (row["dtype"], tuple(row["shape"]), row["bytes"]) for row in own["leaves"]}
    expected = {p: (str(leaf.dtype), leaf.shape, leaf.nbytes) for p, leaf in leaves.items()}
    assert rows == expected


def test_another_thread_and_process_read_it(store):
    """No device, sharding, thread or process that saved is needed to load."""
    thread = threading.Thread(target=store.save, args=(3, state(3), METADATA))
    thread.start()
    thread.join()
    again = CheckpointStore(store.root, keep=1)
    assert_same(again.load(3)[0], state(3))


def test_nothing_runs_between_calls(store):
    before = set(threading.enumerate())
    store.save(3, state(3), {})
    store.load(3)
    store.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize(
    ("leaves", "metadata", "says"),
    [
        ({".w": [1.0]}, {}, ".w"),
        ({".w": np.array(["a"])}, {}, ".w"),
        ({".w": np.array([None])}, {}, ".w"),
        ({".w": np.zeros(2, ">f4")}, {}, ".w"),
        ({".w": np.zeros(2, np.longdouble)}, {}, ".w"),
        ({3: np.zeros(2)}, {}, "leaf 3"),
        ({}, {"loss": math.nan}, "JSON"),
        ({}, {"path": Path()}, "JSON"),
        ({}, {"checkpoint": 1}, "reserved"),
    ],
)
def test_refuses_what_it_cannot_keep(store, leaves, metadata, says):
    with pytest.raises(CheckpointError, match=says) as caught:
        store.save(5, leaves, metadata)
    assert "\n" not in str(caught.value) and "step 5" in str(caught.value)
    assert store.steps() == () and list(store.root.iterdir()) == []


# What counts as a step


def test_steps_skips_what_was_never_committed(store):
    for step in (10, 2):
        store.save(step, state(step), {})
    store.save(4, state(4), {})
    store.set_aside(4, "test")
    for name in ("3", "5.orbax-checkpoint-tmp/state", "notes", "007", "6x"):
        (store.root / name).mkdir(parents=True)
        (store.root / name / "x").touch() if name in ("notes", "007", "6x") else None
    (store.root / "8").write_text("a file")
    assert store.steps() == (2, 10)
    assert CheckpointStore(store.root, keep=1).steps() == (2, 10)


def test_opening_removes_temporaries_only(store):
    store.save(2, state(2), {})
    store.set_aside(2, "kept")
    store.save(1, state(1), {})
    gone = ["5.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp-removed", "0.orbax-checkpoint-tmp-17"]
    stay = ["x.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmpx", "9", "set-aside-5-0", "notes"]
    for name in gone + stay:
        (store.root / name / "deep").mkdir(parents=True)
    (store.root / "6.orbax-checkpoint-tmp").write_text("a file is not Orbax's")
    expected = {*stay, "1", "set-aside-2-0", "set-aside-2-0.txt", "6.orbax-checkpoint-tmp"}
    CheckpointStore(store.root, keep=1)
    assert {path.name for path in store.root.iterdir()} == expected


def test_retention_keeps_the_newest(store):
    for step in (1, 2, 3, 4, 5):
        store.save(step, state(step), {})
        assert store.steps() == tuple(range(max(1, step - 2), step + 1))
    # A step older than all that are kept stays: it was asked for, and it was not superseded.
    store.save(0, state(0), {})
    assert store.steps() == (0, 3, 4, 5)
    store.save(6, state(6), {})
    assert store.steps() == (4, 5, 6)


def save_all(store, losses):
    """Save steps 10, 20, ...; each is evaluated, with its loss or not at all, before the next."""
    known = {}
    store.keep_best(2, known.get)
    for step, loss in zip(range(10, 1000, 10), losses, strict=False):
        store.save(step, state(step), METADATA)
        if loss is not None:
            known[step] = loss
    return known


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (10, 20, 40, 50, 60)),  # the best are the oldest
        ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], (40, 50, 60)),  # the best are among the newest
        ([3.0, 1.0, 1.0, 1.0, 9.0, 9.0], (30, 40, 50, 60)),  # of equals, the newer ones
        ([None, 2.0, None, 3.0, 4.0, 5.0], (20, 40, 50, 60)),  # not evaluated: never a best one
        ([math.nan, 7.0, math.inf, 8.0, 9.0, 9.0], (20, 40, 50, 60)),
        ([None] * 6, (40, 50, 60)),
    ],
)
def test_the_best_are_kept_apart_from_the_newest(store, losses, kept):
    save_all(store, losses)
    assert store.steps() == kept
    for step in kept:
        assert_same(store.load(step)[0], state(step))
    assert store.newest()[0].step == 60, "the best never take the place of the newest"


def test_another_process_knows_the_best_and_its_wish_decides(store):
    known = save_all(store, [1.0, 2.0, 3.0, 4.0, 5.0])
    again = CheckpointStore(store.root, keep=1)
    assert again.steps() == (10, 20, 30, 40, 50), "opening removes none"
    again.keep_best(1, known.get)
    again.save(60, state(60), METADATA)
    assert again.steps() == (10, 60)
    again.keep_best(0, known.get)
    again.save(70, state(70), METADATA)
    assert again.steps() == (70,)


def test_remove(store):
    for step in (1, 2):
        store.save(step, state(step), {})
    (store.root / "2.orbax-checkpoint-tmp").mkdir()
    (store.root / "22.orbax-checkpoint-tmp").mkdir()
    store.remove(2)
    store.remove(2)
    assert {path.name for path in store.root.iterdir()} == {"1", "22.orbax-checkpoint-tmp"}
    assert_same(store.load(1)[0], state(1))


def test_set_aside_never_overwrites(store):
    for why in ("first\nline", "second"):
        store.save(3, state(3), {})
        store.set_aside(3, why)
    (store.root / "set-aside-3-2.txt").write_text("somebody's")
    store.save(3, state(3), {})
    assert store.set_aside(3, "third").name == "set-aside-3-3"
    found = store.set_aside_list()
    assert [(item.step, item.path.name) for item in found] == [
        (3, "set-aside-3-0"), (3, "set-aside-3-1"), (3, "set-aside-3-3")
    ]  # fmt: skip
    assert [item.why for item in found] == ["first\nline", "second", "third"]
    for item in found:  # intact: renamed back, it loads
        os.rename(item.path, store.root / "3")
        assert_same(store.load(3)[0], state(3))
        os.rename(store.root / "3", item.path)
    with pytest.raises(CheckpointError, match="step 3 cannot be set aside"):
        store.set_aside(3, "gone")


# The same step again


def test_same_content_again_is_kept(store):
    store.save(3, state(3), METADATA)
    before = {path: path.stat().st_mtime_ns for path in files_of(store.root, 3)}
    reordered = dict(reversed(state(3).items()))
    assert store.save(3, reordered, METADATA) == 0
    assert {path: path.stat().st_mtime_ns for path in files_of(store.root, 3)} == before
    assert store.set_aside_list() == ()


@pytest.mark.parametrize("other", [(state(4), METADATA), (state(3), METADATA | {"mesh": [3, 2]})])
def test_other_content_sets_the_old_aside(store, other):
    store.save(3, state(3), METADATA)
    assert store.save(3, *other) > 0
    assert_same(store.load(3)[0], other[0])
    assert store.load(3)[1] == other[1]
    (old,) = store.set_aside_list()
    assert "a new save of step 3" in old.why
    store.remove(3)
    os.rename(old.path, store.root / "3")
    assert_same(store.load(3)[0], state(3))


def test_a_bad_one_of_the_same_step_is_replaced(store):
    store.save(3, state(3), METADATA)
    flip_leaf(store.root, 3, ".model.layers.attention.q.weight")
    assert store.save(3, state(3), METADATA) > 0
    assert_same(store.load(3)[0], state(3))
    assert ".model.layers.attention.q.weight" in store.set_aside_list()[0].why
    (store.root / "4").mkdir()  # an empty directory, and a file, in the way of a save
    (store.root / "5").write_text("a file")
    for step in (4, 5):
        store.save(step, state(step), {})
        assert_same(store.load(step)[0], state(step))
    assert (store.root / "set-aside-5-0").read_text() == "a file"


# Damage


def flip(path, offset, bit=0):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def flip_leaf(root, step, leaf, position=0.5):
    """Flip one bit inside the bytes of `leaf`, wherever Orbax put them."""
    needle = state(step)[leaf].tobytes()
    (path,) = (p for p in files_of(root, step) if needle in p.read_bytes())
    start = path.read_bytes().index(needle)
    flip(path, start + int(position * (len(needle) - 1)), bit=random.Random(step).randrange(8))


def never_wrong(store, step):
    """Whether a damaged checkpoint was caught; if not, all of it must be right."""
    try:
        found, metadata = store.load(step)
    except CheckpointError as error:
        said = str(error)
    else:
        assert_same(found, state(step))
        assert metadata == METADATA
        return False
    assert "\n" not in said and f"step {step}" in said
    return True


def damages(path, content, rng):
    """One file damaged in many ways, one after the other."""
    for _ in range(6 if content else 0):
        flip(path, rng.randrange(len(content)), rng.randrange(8))
        yield "flip"
    for keep in {0, len(content) // 2, max(0, len(content) - 1)}:
        path.write_bytes(content[:keep])
        yield "truncate"
    path.write_bytes(bytes(len(content)))
    yield "zero"
    path.write_bytes(content + b"\0")
    yield "extend"
    path.unlink()
    yield "delete"


def test_damage_anywhere_is_caught_or_harmless(store):
    store.save(7, state(7), METADATA)
    rng, caught, flips = random.Random(7), 0, 0
    for path in files_of(store.root, 7):
        content = path.read_bytes()
        for kind in damages(path, content, rng):
            flips += kind == "flip"
            caught += never_wrong(store, 7)
            path.write_bytes(content)
        assert not never_wrong(store, 7)
    assert flips >= 30 and caught >= 30


@pytest.mark.parametrize("leaf", [path for path, leaf in state(7).items() if leaf.size])
def test_every_flip_in_a_leaf_is_caught_and_named(store, leaf):
    store.save(7, state(7), METADATA)
    for position in (0, 0.3, 0.7, 1):
        flip_leaf(store.root, 7, leaf, position)
        with pytest.raises(CheckpointError) as caught:
            store.load(7)
        assert str(caught.value) == f"step 7: leaf {leaf}: wrong checksum"
        store.remove(7)
        store.save(7, state(7), METADATA)


def test_a_block_of_zeros_is_caught(store):
    store.save(7, state(7), METADATA)
    path = max(files_of(store.root, 7), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:8192] + bytes(4096) + content[12288:])
    with pytest.raises(CheckpointError, match="wrong checksum"):
        store.load(7)


def test_flips_in_the_metadata_are_caught(store):
    store.save(7, state(7), METADATA)
    path = store.root / "7" / "_CHECKPOINT_METADATA"
    content, good = path.read_bytes(), store.metadata(7)
    rng, caught = random.Random(1), 0
    for offset in rng.sample(range(len(content)), 150):
        flip(path, offset, rng.randrange(8))
        try:
            assert store.metadata(7) == good
        except CheckpointError:
            caught += 1
        path.write_bytes(content)
    assert caught > 75


def edit_metadata(store, step, change, *, seal):
    """Change our document on disk as a program would, resealed or not."""
    path = store.root / str(step) / "_CHECKPOINT_METADATA"
    outer = json.loads(path.read_text())
    document = outer["custom_metadata"]
    change(document)
    if seal:
        document["seal"] = checkpoint_format.seal(document)
    path.write_text(json.dumps(outer))


def test_metadata_are_protected(store):
    changes = [
        lambda document: document["metadata"].update(mesh=[3, 2]),
        lambda document: document["metadata"]["iterator"].update(consumed=85),
        lambda document: document["checkpoint"]["leaves"].pop(),
        lambda document: document["checkpoint"]["leaves"][0].update(shape=[0, 4]),
        lambda document: document.pop("seal"),
        lambda document: document.clear(),
    ]
    for change in changes:
        store.save(7, state(7), METADATA)
        edit_metadata(store, 7, change, seal=False)
        for read in (store.metadata, store.load):
            with pytest.raises(CheckpointError, match="step 7: the metadata do not match"):
                read(7)
        store.remove(7)


def test_a_renamed_step_is_refused(store):
    store.save(7, state(7), METADATA)
    os.rename(store.root / "7", store.root / "8")
    with pytest.raises(CheckpointError, match="step 8: the directory holds step 7"):
        store.load(8)


def test_a_newer_format_is_refused_not_passed_over(store):
    store.save(6, state(6), METADATA)
    store.save(7, state(7), METADATA)
    edit_metadata(store, 7, lambda d: d["checkpoint"].update(format_version=2), seal=True)
    for call in (lambda: store.load(7), lambda: store.metadata(7), store.newest):
        with pytest.raises(UnreadableHereError, match="step 7: format 2 is newer than 1"):
            call()
    assert store.steps() == (6, 7) and store.set_aside_list() == ()


def test_newest_falls_back(store):
    assert store.newest() == (None, ())
    for step in (1, 2, 3):
        store.save(step, state(step), METADATA | {"step": step})
    (store.root / "9").mkdir()
    flip_leaf(store.root, 3, ".opt_state[0].mu['w/\\n é']")
    (store.root / "2" / "state" / "manifest.ocdbt").unlink()
    best, bad = store.newest()
    assert best.step == 1 and best.metadata["step"] == 1
    assert_same(best.leaves, state(1))
    assert [item.step for item in bad] == [3, 2]
    assert ".opt_state[0].mu['w/\\n é']" in bad[0].why and "step 2 cannot be read" in bad[1].why
    assert store.set_aside_list() == (bad[1], bad[0])
    assert all(item.path.is_dir() for item in bad)
    assert store.steps() == (1,)
    assert store.newest()[1] == ()


class LyingDisk(LocalFolder):
    """A disk that keeps other bytes than it was given."""

    def write(self, step, document, packed):
        super().write(step, document, packed)
        flip_leaf(self.root, step, ".model.layers.attention.q.weight")


def test_nothing_goes_before_the_new_one_reads_back(tmp_path):
    CheckpointStore(tmp_path, keep=1).save(1, state(1), {})
    with pytest.raises(CheckpointError, match="step 2 was not saved: .* wrong checksum"):
        CheckpointStore(LyingDisk(tmp_path), keep=1).save(2, state(2), {})
    with pytest.raises(CheckpointError, match="step 1 was not saved: .* wrong checksum"):
        CheckpointStore(LyingDisk(tmp_path), keep=1).save(1, state(1), {"other": "content"})
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert_same(CheckpointStore(tmp_path, keep=1).load(1)[0], state(1))


def test_what_a_failed_save_had_to_leave_goes_with_the_next(store):
    """A disk that could not be written once may be well again."""
    (store.root / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (store.root / "1.orbax-checkpoint-tmp-removed").mkdir()
    store.save(4, state(4), {})
    assert [path.name for path in store.root.iterdir()] == ["4"]


def test_a_rotten_step_does_not_stop_saves(store):
    store.save(1, state(1), {})
    for rot in (b"", b"[1]", b'{"metrics": 3}', b"\xff"):
        (store.root / "1" / "_CHECKPOINT_METADATA").write_bytes(rot)
        store.save(2, state(2), {})
        store.remove(2)
    store.save(2, state(2), {})
    assert store.newest()[0].step == 2


# A world that does not let us write


@pytest.mark.parametrize("below", ["file/checkpoints", "file"])
def test_impossible_root(tmp_path, below):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot be written") as caught:
        CheckpointStore(tmp_path / below, keep=1)
    assert "\n" not in str(caught.value) and str(tmp_path / below) in str(caught.value)


@contextlib.contextmanager
def as_nobody():
    """Root reads everything: meanwhile we are somebody else."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    "name", ["state", "_CHECKPOINT_METADATA", "state/manifest.ocdbt", "state/d"]
)
def test_what_this_process_may_not_open_is_not_passed_over(name):
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        store = CheckpointStore(Path(place, "checkpoints"), keep=3)
        store.save(1, state(1), {})
        store.save(2, state(2), {})
        closed = store.root / "2" / name
        mode = closed.stat().st_mode
        closed.chmod(0)
        with as_nobody(), pytest.raises(UnreadableHereError, match="Permission denied"):
            store.newest()
        closed.chmod(mode)
        assert_same(store.newest()[0].leaves, state(2))


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointStore(tmp_path / "new", keep=0)
    assert not (tmp_path / "new").exists()


def test_vanished_root(store):
    store.save(1, state(1), {})
    shutil.rmtree(store.root)
    with pytest.raises(CheckpointError, match="step 2 was not saved: .* is gone"):
        store.save(2, state(2), {})
    assert not store.root.exists()
    for call in (store.steps, store.newest, lambda: store.load(1), lambda: store.remove(1)):
        with pytest.raises(CheckpointError):
            call()


CHILD = """
import resource, sys
from pathlib import Path
sys.path[:0] = [{repo!r}, {repo!r} + "/tests"]
from test_checkpoints import METADATA, CheckpointError, CheckpointStore, UnreadableHereError
from test_checkpoints import assert_same, flip_leaf, state
store = CheckpointStore(Path(sys.argv[1]), keep=2)

def limit(what, value):
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))

def fails(error, call, *args):
    try:
        call(*args)
    except error as caught:
        assert "\\n" not in str(caught), caught
        return str(caught)
    raise AssertionError("did not fail")
"""


def start_child(root, body, *arguments, **options):
    code = CHILD.format(repo=str(REPO)) + body
    command = [sys.executable, "-W", "error", "-c", code, str(root), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)


FULL_DISK = """
store.save(1, state(1), METADATA)
store.save(2, state(2), METADATA)
flip_leaf(store.root, 2, ".opt_state[0].count")
free = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
# Not even the metadata fit; then the metadata do, the arrays do not; then all but the last bytes.
for size in (0, 300, 4000, 100_000, 299_000):
    limit(resource.RLIMIT_FSIZE, size)
    for step, leaves in ((3, state(3, 10_000)), (1, state(9, 10_000))):  # a new one, an old one
        text = fails(CheckpointError, store.save, step, leaves, METADATA)
        assert text.startswith(f"step {step} was not saved: "), text
        if size:
            assert "File too large" in text, text
    if size == 4000:  # only the metadata do not fit
        fails(CheckpointError, store.save, 3, {}, METADATA | {"note": "x" * 5000})
    limit(resource.RLIMIT_FSIZE, free)
    assert sorted(p.name for p in store.root.iterdir()) == ["1", "2"], list(store.root.iterdir())
    assert_same(store.load(1)[0], state(1))
store.save(3, state(3, 10_000), METADATA)
assert store.steps() == (2, 3)
print("no descriptors from here", file=sys.stderr)
# Without file descriptors nothing is condemned; with them, the bad one is.
store.save(4, state(4), METADATA)
flip_leaf(store.root, 4, ".opt_state[0].count")
some = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
refused = []
for number in (4, 6, 8, 16, 32, 64, 128, 256, 512):
    limit(resource.RLIMIT_NOFILE, number)
    try:
        best, bad = store.newest()
        break
    except CheckpointError as error:
        refused.append(str(error))
    finally:
        limit(resource.RLIMIT_NOFILE, some)
    assert "Too many open files" in refused[-1], refused
    assert store.set_aside_list() == ()
assert len(refused) > 2
assert (best.step, [item.step for item in bad]) == (3, [4])
assert_same(best.leaves, state(3, 10_000))
"""


def test_full_disk_and_no_descriptors(tmp_path):
    """Through RLIMIT_FSIZE and RLIMIT_NOFILE; a failed save prints nothing, on no thread."""
    child = start_child(tmp_path / "full", FULL_DISK)
    out, err = child.communicate(timeout=60)
    # Without descriptors asyncio itself prints, when it cannot make an event loop.
    said = err.partition("no descriptors from here\n")
    assert (child.returncode, out, said[0]) == (0, "", ""), err


ENDLESS = """
for step in range(1, 3):
    store.save(step, state(step, 300_000), METADATA)
print("ready", flush=True)
input()
for step in range(3, 100):
    print(step, flush=True)  # this save begins, the one before is committed
    store.save(step, state(step, 300_000), METADATA)
"""


def temporary_directory(root, step):
    return (root / f"{step}.orbax-checkpoint-tmp").exists()


def first_bytes(root, step):
    return any((root / f"{step}.orbax-checkpoint-tmp").rglob("d/*"))


def committed(root, step):
    return (root / str(step)).exists()


def retiring(root, step):
    return (root / f"{step - 2}.orbax-checkpoint-tmp-removed").exists()


MOMENTS = (temporary_directory, first_bytes, committed, retiring)


def is_past(root, step, child):
    numbers = [name.split(".")[0] for name in os.listdir(root)]
    return child.poll() is not None or any(int(n) > step for n in numbers if n.isdigit())


def kill_at(moment, child, root):
    """Kill -9 when `moment` is seen, in whichever save that is; returns the step of that save."""
    for line in child.stdout:
        step = int(line)
        # Watched without a pause. A moment may pass unseen; then the next save has one too.
        while not (seen := moment(root, step)) and not is_past(root, step, child):
            pass
        if seen:
            child.kill()
            return int(([line] + child.stdout.read().split())[-1])
    raise AssertionError("the child ended by itself")


def test_kill_at_any_moment(tmp_path):
    roots = [tmp_path / moment.__name__ for moment in MOMENTS]
    children = [start_child(root, ENDLESS) for root in roots]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n", child.stderr.read()
        for moment, child, root in zip(MOMENTS, children, roots, strict=True):
            child.stdin.write("\n")
            child.stdin.flush()
            check_killed(root, kill_at(moment, child, root), child)
    finally:
        for child in children:
            child.kill()
            child.communicate()


def check_killed(root, step, child):
    assert child.wait(timeout=60) == -signal.SIGKILL
    store = CheckpointStore(root, keep=2)
    assert all(path.name.isdigit() for path in root.iterdir())
    not_committed, done = (step - 2, step - 1), (step - 1, step)
    assert store.steps() in (not_committed, (*not_committed, step), done)
    for good in store.steps():
        assert_same(store.load(good)[0], state(good, 300_000))
    assert store.newest()[1] == ()
    store.save(step, state(step, 300_000), METADATA)
    assert store.newest()[0].step == step
    shutil.rmtree(root)
