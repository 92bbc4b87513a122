"""A crash after each file operation: of a save, a removal, a setting aside, and of whole runs.

The operations are seen below Python (crash_points.c), since TensorStore writes from C++. After
each one the folder is kept as an image, and once more as a power cut would leave it: files have
what they had when they were synced, or nothing. Whatever a process then finds, it opens, gives the
newest good checkpoint and no wrong value, and saves again.

So is a run that is killed, or whose machine is, while it begins or resumes: whatever is found then,
the run ends with the same bits and the same rows.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from elastix import SimulatedBackend, train
from elastix.checkpoints import CheckpointStore
from tests.recipes import tiny
from tests.test_checkpoints import METADATA, assert_same, files_of, start_child, state

SOURCE = Path(__file__).with_name("crash_points.c")
Tree = dict[str, bytes | None]
"""Relative paths below the root; None for a directory."""


@dataclass(frozen=True)
class Operation:
    """One file operation: its name and path, the folder after it, and after it with a power cut;
    `unsynced` are the paths whose content or entries a power cut may take."""

    name: str
    path: str
    tree: Tree
    cut: Tree
    unsynced: frozenset[str]

    def touches(self, step: int) -> bool:
        return self.path.split("/")[0].split(".")[0] == str(step)


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc): file operations cannot be seen below Python")
    built = tmp_path_factory.mktemp("shim") / "crash_points.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, "-o", built, SOURCE, "-ldl", "-lpthread"], check=True)
    return built


@pytest.fixture
def place(tmp_path):
    """Where images are laid out: in memory if that can be, since every save there waits for the
    disk several dozen times."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


# --- recording ----------------------------------------------------------------------------------

RECORD = """
import ctypes, os
shim = ctypes.CDLL(os.environ.pop("LD_PRELOAD"))
for step in sys.argv[2].split():
    store.save(int(step), state(int(step)), METADATA)
{before}
shim.crash_points_begin(str(store.root).encode(), int(sys.argv[3]), int(sys.argv[4]))
{during}
shim.crash_points_end()
"""


class Recorder:
    """Keeps an image of `root` after each operation that the child reports."""

    def __init__(self, root: Path):
        self._root = root
        self._unsynced: set[int] = set()
        """The inodes of what a power cut may take: a file's content, a directory's entries."""
        files = (path for path in root.rglob("*") if path.is_file())
        self._synced = {path.stat().st_ino: path.read_bytes() for path in files}
        """By inode, what a file had when it was synced."""

    def image(self, line: str) -> Operation:
        name, path = line.rstrip("\n").split("\t")
        self._note(name, Path(path))
        tree, cut, unsynced = {}, {}, set()
        for found in sorted(self._root.rglob("*")):
            key = str(found.relative_to(self._root))
            tree[key] = cut[key] = found.read_bytes() if found.is_file() else None
            if found.stat().st_ino in self._unsynced:
                unsynced.add(key)
                kept = self._synced.get(found.stat().st_ino, b"")
                cut[key] = kept if found.is_file() else None
        if self._root.stat().st_ino in self._unsynced:
            unsynced.add(".")
        relative = str(Path(path).relative_to(self._root))
        return Operation(name, relative, tree, cut, frozenset(unsynced))

    def _note(self, name: str, path: Path) -> None:
        if name in ("fsync", "fdatasync"):
            self._unsynced.discard(path.stat().st_ino)
            if path.is_file():
                self._synced[path.stat().st_ino] = path.read_bytes()
            return
        if "write" in name or "truncate" in name or "open" in name or "creat" in name:
            self._unsynced.add(path.stat().st_ino)
        if "write" not in name and "truncate" not in name:
            self._unsynced.add(path.parent.stat().st_ino)


def record(shim: Path, root: Path, steps: str, during: str, before: str = "") -> list[Operation]:
    """The operations of `during`, in a child that has saved `steps` before."""
    code = RECORD.format(before=before, during=during)

    def start(to: int, come_from: int) -> subprocess.Popen:
        pipes = (str(to), str(come_from))
        return start_child(root, code, steps, *pipes, **under(shim, to, come_from))

    return listen(root, start)


def under(shim: Path, *pipes: int) -> dict[str, Any]:
    """How a child is started whose file operations are to be seen."""
    return {"env": {**os.environ, "LD_PRELOAD": str(shim)}, "pass_fds": pipes}


def listen(root: Path, start: Callable[[int, int], subprocess.Popen]) -> list[Operation]:
    """The operations of a child, which is started with a pipe to tell and one to be let go on."""
    (line_from, line_to), (go_from, go_to) = os.pipe(), os.pipe()
    child = start(line_to, go_from)
    os.close(line_to), os.close(go_from)
    recorder, operations = Recorder(root), []
    with os.fdopen(line_from, encoding="utf-8") as lines, os.fdopen(go_to, "wb", 0) as go:
        for line in lines:
            operations.append(recorder.image(line))
            go.write(b"\n")
    out, err = child.communicate(timeout=300)
    assert (child.returncode, out, err) == (0, "", "")
    return operations


def assert_all_were_seen(operations: list[Operation]) -> None:
    """No change of the folder came from an operation that the shim does not know."""
    for before, after in pairwise(operations):
        changed = {k for k in {*before.tree, *after.tree} if _at(before, k) != _at(after, k)}
        if after.name.startswith("rename"):
            moved = {k for k in changed if k in before.tree and k not in after.tree}
            sources = {k for k in moved if str(Path(k).parent) not in moved}
            assert len(sources) <= 1, (after.name, after.path, sources)
            changed = {k for k in changed if not k.startswith((after.path, *sources))}
        assert changed <= {after.path}, (after.name, after.path, changed)


def _at(operation: Operation, key: str) -> object:
    return operation.tree.get(key, "absent")


# --- checking -----------------------------------------------------------------------------------


def images(operations: list[Operation]) -> Iterator[tuple[int, bool, Tree]]:
    """(operation, whether the power was cut, folder), each folder once."""
    seen = set()
    for number, operation in enumerate(operations):
        for cut, tree in ((False, operation.tree), (True, operation.cut)):
            key = frozenset(tree.items())
            if key not in seen:
                seen.add(key)
                yield number, cut, tree


def lay(tree: Tree, root: Path) -> None:
    root.mkdir()
    for name, content in tree.items():  # parents come first
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def check(
    operations: list[Operation], place: Path, expected: Callable[[int, bool], set[int]]
) -> None:
    """After a crash at each operation, the newest good checkpoint is one of those expected of
    (operation, power cut); it is what was saved, and the next save succeeds."""
    assert_all_were_seen(operations)
    count = 0
    for number, cut, tree in images(operations):
        root, count = place / "image", count + 1
        lay(tree, root)
        where = (number, operations[number].name, operations[number].path, cut)
        store = CheckpointStore(root, keep=2)
        newest, _ = store.newest()
        assert newest is not None and newest.step in expected(number, cut), (where, newest)
        assert_same(newest.leaves, state(newest.step))
        assert newest.metadata in (METADATA, METADATA | {"again": True}), where
        store.save(newest.step + 1, state(newest.step + 1), METADATA)
        after, bad = store.newest()
        assert after.step == newest.step + 1 and bad == (), where
        shutil.rmtree(root)
    print(f"{count} images of {len(operations)} operations")
    assert count >= 3


def position(operations: list[Operation], name: str, path: str) -> int:
    """Where the only such operation is."""
    (found,) = (n for n, o in enumerate(operations) if (o.name, o.path) == (name, path))
    return found


def assert_durable(operation: Operation, step: int) -> None:
    """At this operation no power cut can take anything of `step` any more, nor its name."""
    assert not {p for p in operation.unsynced if p == "." or p.split("/")[0] == str(step)}


# --- the images -----------------------------------------------------------------------------------


def test_a_save(shim, place, tmp_path):
    operations = record(shim, tmp_path / "root", "1", "store.save(2, state(2), METADATA)")
    writes = {o.path for o in operations if "write" in o.name}
    assert any("/d/" in path for path in writes), "TensorStore's writes are seen"
    commit = position(operations, "rename", "2")
    assert_durable(operations[-1], 2)

    def expected(number: int, cut: bool) -> set[int]:
        if number < commit:
            return {1}
        return {1, 2} if cut and number < len(operations) - 1 else {2}

    check(operations, place, expected)


def test_a_save_that_retires_an_older_step(shim, place, tmp_path):
    operations = record(shim, tmp_path / "root", "1 2", "store.save(3, state(3), METADATA)")
    commit = position(operations, "rename", "3")
    retire = position(operations, "rename", "1.orbax-checkpoint-tmp-removed")
    assert_durable(operations[retire - 1], 3)
    assert not any(o.touches(1) or o.touches(2) for o in operations[:retire])

    def expected(number: int, cut: bool) -> set[int]:
        if number < commit:
            return {2}
        return {2, 3} if cut and number < retire else {3}

    check(operations, place, expected)


def test_the_removal_of_an_abandoned_save(shim, place, tmp_path):
    operations = record(shim, tmp_path / "root", "1 2", "store.remove(2)")
    assert operations[0].path == "2.orbax-checkpoint-tmp-removed", "its name goes first"
    assert operations[1].name == "fsync" and operations[1].unsynced == set()
    check(operations, place, lambda number, cut: {1})


def test_setting_a_bad_one_aside(shim, place, tmp_path):
    bad = 'flip_leaf(store.root, 2, ".opt_state[0].count")'
    operations = record(shim, tmp_path / "root", "1 2", "store.newest()", before=bad)
    assert operations[0].path == "set-aside-2-0"
    check(operations, place, lambda number, cut: {1})


def test_a_save_in_place_of_another(shim, place, tmp_path):
    """The old one of the same step is set aside before; until the commit, an older one is used."""
    save = 'store.save(2, state(2), METADATA | {"again": True})'
    operations = record(shim, tmp_path / "root", "1 2", save)
    commit = position(operations, "rename", "2")

    def expected(number: int, cut: bool) -> set[int]:
        if number < commit:
            return {1}
        return {1, 2} if cut and number < len(operations) - 1 else {2}

    check(operations, place, expected)


# --- a run that is killed while it begins, or resumes ---------------------------------------------

KILLED_AT, NUM_STEPS = 8, 12


def short_run(run_dir: Path, num_steps: int = NUM_STEPS) -> Any:
    """One slice; a checkpoint and an evaluation every fourth step; two checkpoints are kept."""
    policy = replace(tiny.recipe().policy, snapshot_every=2, checkpoint_every=4, eval_every=4)
    recipe = replace(
        tiny.recipe(),
        num_steps=num_steps,
        eval_data=tiny.Points(size=16),
        policy=replace(policy, keep_checkpoints=2),
    )
    return train(recipe, backend=SimulatedBackend(1, 1), run_dir=run_dir)


def told(run_dir: Path, summary: Any) -> Any:
    """What a run must leave, however often it was killed."""
    assert summary.outcome == "done", summary.reason
    rows = {}
    for name in ("metrics", "evaluations"):
        lines = (run_dir / f"{name}.jsonl").read_text().splitlines()
        rows[name] = [{**json.loads(line), "seconds": None} for line in lines]
    return rows, summary.losses, summary.state_sha256


def leave_much_to_do(run_dir: Path) -> None:
    """A run that was killed at a bad moment: its newest checkpoint is bad, another is unfinished,
    and of each log the last line is torn."""
    short_run(run_dir, KILLED_AT)
    root = run_dir / "checkpoints"
    shutil.copytree(root / "4", root / "10.orbax-checkpoint-tmp")
    largest = max(files_of(root, KILLED_AT), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    for name in ("metrics", "evaluations", "events"):
        with (run_dir / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 9, "lo')
    (run_dir / "recipe.tmp").write_text('{"format')


RUN = """
import ctypes, os, sys
from pathlib import Path
shim = ctypes.CDLL(os.environ.pop("LD_PRELOAD"))
import jax
jax.config.update("jax_num_cpu_devices", 1)
from tests.test_crash_points import short_run
shim.crash_points_begin(sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3]))
short_run(Path(sys.argv[1]))
shim.crash_points_end()
os._exit(0)
"""


@pytest.fixture(scope="module")
def resume(shim, tmp_path_factory) -> list[Operation]:
    """The file operations of a whole run that resumes."""
    run_dir = tmp_path_factory.mktemp("resume") / "run"
    leave_much_to_do(run_dir)
    return recorded_run(shim, run_dir)


@pytest.fixture(scope="module")
def begin(shim, tmp_path_factory) -> list[Operation]:
    """The file operations of a whole run in an empty directory."""
    return recorded_run(shim, tmp_path_factory.mktemp("begin"))


def recorded_run(shim: Path, run_dir: Path) -> list[Operation]:
    def start(to: int, come_from: int) -> subprocess.Popen:
        command = [sys.executable, "-c", RUN, str(run_dir), str(to), str(come_from)]
        pipe, options = subprocess.PIPE, under(shim, to, come_from)
        options["env"] |= {"PYTHONPATH": str(SOURCE.parents[1]), "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)

    operations = listen(run_dir, start)
    assert_all_were_seen(operations)
    return operations


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory) -> Any:
    run_dir = tmp_path_factory.mktemp("unkilled") / "run"
    return told(run_dir, short_run(run_dir))


class Killed(NamedTuple):
    """What a run left that was killed after an operation, or whose machine lost its power then."""

    operation: str
    path: str
    cut: bool
    tree: Tree


def different(operations: list[Operation], cut: bool) -> list[Killed]:
    """Those in which a run would find something else. The log of events is only added to, and
    nobody reads more of it than its end."""
    seen: dict[Any, Killed] = {}
    for operation in operations:
        whole = operation.cut if cut else operation.tree
        tree = dict(whole)
        events = tree.pop("events.jsonl", b"") or b"\n"
        key = frozenset(tree.items()), events.endswith(b"\n")
        seen.setdefault(key, Killed(operation.name, operation.path, cut, whole))
    return list(seen.values())


def test_a_resume_does_all_that_a_kill_could_spoil(resume):
    done = {(o.name.rstrip("64"), o.path) for o in resume}
    paths = {path for _, path in done}
    assert {("ftruncate", f"{n}.jsonl") for n in ("metrics", "evaluations", "events")} <= done
    assert {("rename", "recipe.json"), ("ftruncate", "lock"), ("rename", "summary.json")} <= done
    assert "checkpoints/10.orbax-checkpoint-tmp" in paths, "the unfinished save is removed"
    assert "checkpoints/set-aside-8-0" in paths and "checkpoints/set-aside-8-0.txt" in paths
    assert ("rename", "checkpoints/8") in done, "the first new save"
    assert "checkpoints/4.orbax-checkpoint-tmp-removed" in paths, "the oldest goes"
    images = len(different(resume, False)), len(different(resume, True))
    print(f"{len(resume)} operations, {images} different images: killed, without power")


def check_ended(killed: Killed, root: Path, unkilled: Any, aside: set[str]) -> None:
    lay(killed.tree, root)
    where = killed[:3]
    assert told(root, short_run(root)) == unkilled, where
    store = root / "checkpoints"
    left = {p.name for p in store.iterdir() if p.suffix != ".txt"}  # why, if there was time
    steps = {name for name in left if name.isdecimal()}
    # Two are kept, and a third if there was no time to remove it and no save came after.
    assert "12" in steps and len(steps) <= 3, (where, left)
    # Without power what was just renamed may be bad: then it is set aside as well.
    others = left - steps
    assert aside <= others and (killed.cut or aside == others), (where, left)
    assert json.loads((root / "recipe.json").read_text())["num_steps"] == NUM_STEPS, where
    for line in (root / "events.jsonl").read_text().splitlines():
        json.loads(line)
    shutil.rmtree(root)


some_and_all = pytest.mark.parametrize(
    "count", [4, pytest.param(None, marks=pytest.mark.soak)], ids=["some", "all"]
)


@some_and_all
@pytest.mark.parametrize("cut", [False, True], ids=["killed", "without power"])
def test_killed_anywhere_in_a_resume_it_ends_with_the_same_bits(
    count, cut, resume, unkilled, place
):
    found = different(resume, cut)
    for killed in random.Random(3).sample(found, count) if count else found:
        check_ended(killed, place / "image", unkilled, {"set-aside-8-0"})
    assert len(found) > (40 if cut else 60)


@some_and_all
@pytest.mark.parametrize("cut", [False, True], ids=["killed", "without power"])
def test_killed_before_it_has_a_recipe_it_begins_again(count, cut, begin, unkilled, place):
    """The first operations are those of no resume: nothing says yet whose directory it is."""
    found = different(begin, cut)
    early = [killed for killed in found if not killed.tree.get("recipe.json")]
    for killed in random.Random(4).sample(early, count) if count else found:
        check_ended(killed, place / "image", unkilled, set())
    assert len(early) > 4 and len(found) > len(early)
