"""elastix.checkpoints_command: what lies on disk is told as it is, and nothing there is changed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from elastix import SimulatedBackend, train
from elastix.checkpoints import CheckpointReader, CheckpointStore
from elastix.checkpoints_command import VERIFIED, checkpoints_main, survey
from elastix.cli import main
from elastix.command import _ABOUT
from elastix.leaf_hash import hashes_of
from tests.recipes import tiny
from tests.test_checkpoints import METADATA, edit_metadata, flip_leaf, start_child, state


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep=9)


@pytest.fixture
def ask(capsys):
    """Runs `elastix checkpoints`; returns (status, out, err)."""

    def run(*arguments):
        status = main(["checkpoints", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def listed(ask, *arguments):
    """(status, the JSON object) of `elastix checkpoints --json`."""
    status, out, _ = ask(*arguments, "--json")
    return status, json.loads(out)


def everything(folder: Path) -> dict:
    return {p: (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in [folder, *folder.rglob("*")]}


def as_a_run(step):
    """Metadata as a run writes them."""
    return METADATA | {"leaf_hashes": hashes_of(state(step))}


def fill(store):
    """Good 1 and 2; 3 with a flipped bit; 4 with bad metadata; 5 set aside; 6 unfinished."""
    for step in (1, 2, 3, 4, 5):
        more = {"mesh": [0, step], "progress": {"examples": 8 * step, "sha256": ""}}
        store.save(step, state(step), as_a_run(step) | more)
    flip_leaf(store.root, 3, ".opt_state[0].count")
    edit_metadata(store, 4, lambda document: document["metadata"].update(loss=0), seal=False)
    store.set_aside(5, "a reason\nof two lines")
    (store.root / "6.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (store.root / "7").mkdir()  # empty: never committed


def test_a_table_tells_each_and_where_a_resume_would_start(ask, store):
    fill(store)
    status, out, err = ask(store.root.parent)
    assert (status, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split() == ["step", "size", "written", "slices", "examples"]
    assert [row.split()[0] for row in rows[:4]] == ["1", "2", "3", "4"]
    assert "0, 2" in rows[1] and rows[1].split()[-2:] == ["16", "complete"]
    assert rows[3].endswith("BAD: step 4: the metadata do not match their checksum")
    assert rows[4:] == [
        "step 6: unfinished; it does not count",
        "step 5: set aside as set-aside-5-0: a reason of two lines",
        "a resume would start from step 3 (its arrays were not read: --verify does)",
    ]


def test_verify_reads_every_byte_and_changes_nothing(ask, store):
    fill(store)
    before = everything(store.root)
    status, out, err = ask(store.root, "--verify")
    assert everything(store.root) == before
    rows = out.splitlines()
    assert status == 1
    assert rows[2].split()[-1] == "verified"
    assert rows[3].endswith("BAD: step 3: leaf .opt_state[0].count: wrong checksum")
    assert rows[-1] == "a resume would start from step 2"
    assert err.startswith("read 4 checkpoints; ")
    assert (store.newest()[0].step, ask(store.root, "--verify")[0]) == (2, 0), "3, 4 set aside"


def test_json_says_the_same(ask, store):
    fill(store)
    status, found = listed(ask, store.root, "--verify")
    assert (status, found["resume"], found["unfinished"]) == (1, 2, [6])
    assert [c["status"] for c in found["checkpoints"]] == ["verified", "verified", "BAD", "BAD"]
    second = found["checkpoints"][1]
    assert (second["mesh"], second["examples"]) == ([0, 2], 16)
    files = [p for p in (store.root / "2").rglob("*") if p.is_file()]
    assert second["num_bytes"] == sum(p.stat().st_size for p in files)
    assert abs(second["written_at"] - os.stat(store.root / "2").st_mtime) < 1e-3
    (aside,) = found["set_aside"]
    assert (aside["step"], aside["why"]) == (5, "a reason\nof two lines")


def test_one_that_this_process_cannot_read_is_not_passed_over(ask, store):
    store.save(1, state(1), as_a_run(1))
    store.save(2, state(2), as_a_run(2))
    edit_metadata(store, 2, lambda d: d["checkpoint"].update(format_version=99), seal=True)
    status, out, _ = ask(store.root, "--verify")
    assert status == 1
    assert "unreadable here: step 2: format 99 is newer" in out
    assert out.splitlines()[-1].startswith("a resume would stop at step 2")


def test_what_no_device_ever_held_is_not_verified(ask, store):
    """Its own checksums are right: what was written was wrong."""
    leaves = {path: leaf for path, leaf in state(1).items() if leaf.dtype == np.float32}
    store.save(1, leaves, {"leaf_hashes": hashes_of(leaves)})
    store.save(2, leaves, {"leaf_hashes": hashes_of({p: 2 * x for p, x in leaves.items()})})
    status, found = listed(ask, store.root, "--verify")
    assert [c["status"] for c in found["checkpoints"]] == ["verified", "BAD"] and status == 1
    assert "is not what the device held" in found["checkpoints"][1]["why"]


def test_a_run_that_has_saved_nothing_yet(ask, store):
    assert ask(store.root.parent)[:2] == (
        0, "a resume would start from step 0: there is no good checkpoint\n"
    )  # fmt: skip
    assert ask(store.root)[0] == 0


def test_it_says_what_a_resume_then_does(ask, tmp_path):
    train(tiny.recipe(), backend=SimulatedBackend(4, 2), run_dir=tmp_path / "run")
    status, found = listed(ask, tmp_path / "run", "--verify")
    newest = found["checkpoints"][-1]
    assert (status, newest["step"], newest["mesh"], newest["examples"]) == (
        0,
        40,
        [0, 1, 2, 3],
        320,
    )
    again = train(tiny.recipe(), backend=SimulatedBackend(4, 2), run_dir=tmp_path / "run")
    assert again.resumed_at == found["resume"]


WRITING = """
from elastix.leaf_hash import hashes_of
print("ready", flush=True)
for step in range(1, 2000):
    hashes = {"leaf_hashes": hashes_of(state(step))}
    store.save(step, state(step), METADATA | hashes)
    store.save(step, state(step), METADATA | hashes | {"again": step})
"""


def test_it_works_while_a_run_is_writing(tmp_path):
    """Steps come, go and are replaced while they are read: none is ever called bad."""
    writer, seen = start_child(tmp_path, WRITING), set()
    try:
        assert writer.stdout.readline() == "ready\n", writer.stderr.read()
        while len(seen) < 12 and writer.poll() is None:
            listing = survey(CheckpointReader(tmp_path), _Silent())
            assert {found.status for found in listing.checkpoints} <= {VERIFIED}, listing
            seen |= {found.step for found in listing.checkpoints}
        assert writer.poll() is None, writer.stderr.read()
    finally:
        writer.kill()
        writer.communicate()


class _Silent:
    def begin(self, number, total, step): ...

    def read(self, num_bytes): ...


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], ["nowhere does not exist", "runs/quickstart"]),
        (["file"], ["file holds no checkpoints"]),
        (["other"], ["other holds no checkpoints"]),
        ([], ["DIR", "elastix checkpoints --help"]),
        (["other", "--deep"], ["--deep"]),
        (["other", "more"], ["more"]),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(ask, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "other" / "notes").mkdir(parents=True)
    before = everything(tmp_path)
    status, out, err = ask(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert [text for text in told if text not in err] == []
    assert everything(tmp_path) == before


def test_help_and_the_overview_name_it(capsys):
    with pytest.raises(SystemExit) as left:
        checkpoints_main(["--help"])
    assert left.value.code == 0 and "--verify" in capsys.readouterr().out
    assert "elastix checkpoints" in _ABOUT
