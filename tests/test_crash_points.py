"""A crash after each file operation of a save, a removal and a setting aside, then a resume.

The operations are seen below Python (crash_points.c), since TensorStore writes from C++. After
each one the folder is kept as an image, and once more as a power cut would leave it: files that
were not synced yet are empty. Whatever a process then finds, it opens, gives the newest good
checkpoint and no wrong value, and saves again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from elastix.checkpoints import CheckpointStore
from tests.test_checkpoints import METADATA, assert_same, start_child, state

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

    def image(self, line: str) -> Operation:
        name, path = line.rstrip("\n").split("\t")
        self._note(name, Path(path))
        tree, cut, unsynced = {}, {}, set()
        for found in sorted(self._root.rglob("*")):
            key = str(found.relative_to(self._root))
            tree[key] = cut[key] = found.read_bytes() if found.is_file() else None
            if found.stat().st_ino in self._unsynced:
                unsynced.add(key)
                cut[key] = b"" if found.is_file() else None
        if self._root.stat().st_ino in self._unsynced:
            unsynced.add(".")
        relative = str(Path(path).relative_to(self._root))
        return Operation(name, relative, tree, cut, frozenset(unsynced))

    def _note(self, name: str, path: Path) -> None:
        if name in ("fsync", "fdatasync"):
            self._unsynced.discard(path.stat().st_ino)
            return
        if "write" in name or "truncate" in name or "open" in name or "creat" in name:
            self._unsynced.add(path.stat().st_ino)
        if "write" not in name and "truncate" not in name:
            self._unsynced.add(path.parent.stat().st_ino)


def record(shim: Path, root: Path, steps: str, during: str, before: str = "") -> list[Operation]:
    """The operations of `during`, in a child that has saved `steps` before."""
    (line_from, line_to), (go_from, go_to) = os.pipe(), os.pipe()
    code = RECORD.format(before=before, during=during)
    child = start_child(
        root, code, steps, str(line_to), str(go_from),
        env={**os.environ, "LD_PRELOAD": str(shim)}, pass_fds=(line_to, go_from),
    )  # fmt: skip
    os.close(line_to), os.close(go_from)
    recorder, operations = Recorder(root), []
    with os.fdopen(line_from, encoding="utf-8") as lines, os.fdopen(go_to, "wb", 0) as go:
        for line in lines:
            operations.append(recorder.image(line))
            go.write(b"\n")
    out, err = child.communicate(timeout=60)
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
