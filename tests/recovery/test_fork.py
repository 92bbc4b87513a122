"""Runs that begin from a checkpoint of another run, and train states that do not fit a recipe."""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
from dataclasses import dataclass, replace

import pytest

from elastix import AdamW, SimulatedBackend, train
from elastix.backends.simulated import VirtualClock
from elastix.checkpoints import CheckpointReader
from elastix.cli import main
from elastix.lineage import Origin
from tests.recipes import net

NET = replace(
    net.recipe(),
    eval_data=net.WavesConfig(size=48),
    policy=replace(net.recipe().policy, eval_every=10),
)


def run(recipe=NET, **options):
    backend = SimulatedBackend(4, 2, clock=VirtualClock())
    return train(recipe, backend=backend, **options)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    path = tmp_path_factory.mktemp("origin") / "run"
    return path, run(run_dir=path)


def rows(path, name):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def test_a_fork_of_the_same_recipe_ends_with_the_same_bits(origin, tmp_path):
    path, whole = origin
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    summary = run(run_dir=tmp_path / "fork", fork_from=Origin(path, 20))
    assert summary.resumed_at == 20 and summary.state_sha256 == whole.state_sha256
    assert summary.consumed == whole.consumed and summary.losses == whole.losses
    assert [r["step"] for r in rows(tmp_path / "fork", "metrics.jsonl")] == list(range(1, 41))
    assert [r["step"] for r in rows(tmp_path / "fork", "evaluations.jsonl")] == [10, 20, 30, 40]
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before, "nothing there changed"


def test_a_fork_may_go_another_way_and_resumes_like_any_run(origin, tmp_path):
    path, whole = origin
    other = replace(NET, optimizer=AdamW(peak=3e-3, warmup=5, decay=60), num_steps=30)
    first = run(other, run_dir=tmp_path / "fork", fork_from=Origin(path, 20))
    assert first.losses[:20] == whole.losses[:20] and first.losses[25:] != whole.losses[25:30]
    longer = replace(other, num_steps=36)
    second = run(longer, run_dir=tmp_path / "fork", fork_from=Origin(path, 20))
    assert second.outcome == "done" and second.resumed_at == 30
    assert second.losses[:30] == first.losses


@dataclass(frozen=True)
class Wider(net.NetConfig):
    hidden: int = 32


@pytest.mark.parametrize(
    ("recipe", "step", "message"),
    [
        (NET, 15, r"there is no such checkpoint \(there are: 20, 30, 40\)"),
        (replace(NET, model=Wider()), 20, r"not that of the recipe: .*\.first is float32\[8, 16\]"),
        (replace(NET, num_steps=10), 20, "num_steps=10 is less than its step"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_and_makes_nothing(
    origin, tmp_path, recipe, step, message
):
    with pytest.raises(ValueError, match=message):
        run(recipe, run_dir=tmp_path / "fork", fork_from=Origin(origin[0], step))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_another_run_is_refused(origin, tmp_path):
    path, _ = origin
    run(run_dir=tmp_path / "fork", fork_from=Origin(path, 30))
    with pytest.raises(ValueError, match=r"was forked from .*@30: choose another"):
        run(run_dir=tmp_path / "fork", fork_from=Origin(path, 20))
    run(replace(NET, num_steps=2), run_dir=tmp_path / "plain")
    with pytest.raises(ValueError, match="already: choose an empty or a new directory"):
        run(run_dir=tmp_path / "plain", fork_from=Origin(path, 20))
    with pytest.raises(ValueError, match="name the run_dir"):
        run(fork_from=Origin(path, 20))


def test_a_damaged_origin_is_refused(origin, tmp_path):
    shutil.copytree(origin[0], tmp_path / "origin")
    for file in (tmp_path / "origin/checkpoints/20").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="--fork .*@20: "):
        run(run_dir=tmp_path / "fork", fork_from=Origin(tmp_path / "origin", 20))
    assert not (tmp_path / "fork").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda rows: [], "lacks rows of steps 1 to 20"),
        (lambda rows: rows[:15], "lacks rows of steps 1 to 20"),
        (lambda rows: [*rows[:2], "garbage", *rows[3:]], "line 3 is damaged"),
        (lambda rows: [*rows[:2], "[1]", *rows[3:]], "line 3 is damaged"),
        (lambda rows: [*rows[:2], "{}", *rows[3:]], "no row of a step"),
    ],
)
def test_an_origin_without_its_rows_is_refused_and_nothing_is_made(
    origin, tmp_path, damage, message
):
    shutil.copytree(origin[0], tmp_path / "origin")
    metrics = tmp_path / "origin/metrics.jsonl"
    metrics.write_text("".join(f"{row}\n" for row in damage(metrics.read_text().splitlines())))
    with pytest.raises(ValueError, match=f"--fork .*@20: .*{message}"):
        run(run_dir=tmp_path / "fork", fork_from=Origin(tmp_path / "origin", 20))
    assert [path.name for path in tmp_path.iterdir()] == ["origin"]


def test_a_place_that_cannot_be_is_refused(origin, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to("gone")
    for name in ("file", "file/below", "nowhere", "x" * 300):
        with pytest.raises(ValueError, match=f"--fork .*@20: run directory .*{name} cannot be"):
            run(run_dir=tmp_path / name, fork_from=Origin(origin[0], 20))
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_nothing_of_a_fork(origin, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "empty").mkdir()
    for limit, name in [(100, "new"), (1000, "new"), (1000, "empty")]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(ValueError, match="--fork|not saved"):
                run(run_dir=tmp_path / name, fork_from=Origin(origin[0], 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert {p.name for p in tmp_path.rglob("*")} <= {"empty", "lock"}


def test_what_lies_beside_a_fork_is_never_touched(origin, tmp_path):
    beside = tmp_path / "fork.forking"
    beside.mkdir()
    (beside / "thesis").write_text("mine")
    (tmp_path / "real").mkdir()
    (tmp_path / "fork").symlink_to("real")
    assert run(run_dir=tmp_path / "fork", fork_from=Origin(origin[0], 20)).resumed_at == 20
    assert (beside / "thesis").read_text() == "mine" and (tmp_path / "real/recipe.json").exists()


def test_a_fork_that_was_killed_is_made_anew(origin, tmp_path):
    path, whole = origin
    fork = tmp_path / "fork"
    (fork / "checkpoints/20.orbax-checkpoint-tmp/state").mkdir(parents=True)
    (fork / "metrics.jsonl").write_text('{"step": 1, "lo')
    (fork / "forking").write_text(json.dumps({"forked_from": str(path.resolve()), "step": 20}))
    with pytest.raises(ValueError, match="but no recipe.json"):
        run(run_dir=fork)
    with pytest.raises(ValueError, match="already: choose an empty"):
        run(run_dir=fork, fork_from=Origin(path, 30))
    summary = run(run_dir=fork, fork_from=Origin(path, 20))
    assert summary.resumed_at == 20 and summary.losses == whole.losses
    assert not (fork / "forking").exists()


def test_two_forks_into_one_directory(origin, tmp_path):
    (tmp_path / "fork").mkdir()
    with (tmp_path / "fork/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4321\n")
        lock.flush()
        with pytest.raises(ValueError, match="is in use by process 4321"):
            run(run_dir=tmp_path / "fork", fork_from=Origin(origin[0], 20))
    assert [path.name for path in (tmp_path / "fork").iterdir()] == ["lock"]


@pytest.mark.parametrize("lineage", ["{", "{}", "[]", "[" * 100_000])
def test_a_damaged_lineage_is_refused(origin, tmp_path, lineage):
    run(run_dir=tmp_path / "fork", fork_from=Origin(origin[0], 30))
    (tmp_path / "fork/lineage.json").write_text(lineage)
    with pytest.raises(ValueError, match="its lineage.json is damaged: choose another"):
        run(run_dir=tmp_path / "fork", fork_from=Origin(origin[0], 30))


def test_a_model_whose_code_changed_is_refused_with_the_leaves(origin, tmp_path):
    """Its identity is the same, since that is of values; the leaves are told apart by path."""
    run(replace(NET, num_steps=10), run_dir=tmp_path / "run")
    stored = json.loads((tmp_path / "run/recipe.json").read_text())
    stored["identity"]["model"]["type"] = "tests.recovery.test_fork.Wider"
    stored["identity"]["model"]["hidden"] = 32
    (tmp_path / "run/recipe.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"not that of the recipe: .*and the recipe has"):
        run(replace(NET, model=Wider()), run_dir=tmp_path / "run")


@pytest.fixture
def beside_another(origin, tmp_path):
    """A run of 20 steps whose older checkpoint was put there from the run of a wider model."""
    run(replace(NET, num_steps=20), run_dir=tmp_path / "run")
    run(replace(NET, model=Wider(), num_steps=10), run_dir=tmp_path / "wider")
    checkpoints = tmp_path / "run/checkpoints"
    shutil.rmtree(checkpoints / "10")
    shutil.copytree(tmp_path / "wider/checkpoints/10", checkpoints / "10")
    return checkpoints


def test_an_older_checkpoint_of_another_does_not_matter_while_the_newest_is_good(
    origin, beside_another
):
    summary = run(run_dir=beside_another.parent)
    assert summary.resumed_at == 20 and summary.state_sha256 == origin[1].state_sha256


def test_it_is_refused_if_the_newest_is_seen_to_be_bad(beside_another):
    (metadata,) = beside_another.glob("20/_CHECKPOINT_METADATA")
    metadata.write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"not that of the recipe: \.model\.first is float32\[8, 32"
    ):
        run(run_dir=beside_another.parent)
    assert {path.name for path in beside_another.iterdir()} == {"10", "20"}, "nothing was moved"


def test_it_is_set_aside_if_a_restore_finds_the_newest_bad(origin, beside_another):
    """And not restored: what is left is the seed."""
    leaf = CheckpointReader(beside_another).load(20)[0][".model.first"].tobytes()
    files = [path for path in (beside_another / "20").rglob("*") if path.is_file()]
    (file,) = [path for path in files if leaf in path.read_bytes()]
    file.write_bytes(file.read_bytes().replace(leaf, bytes(len(leaf))))
    summary = run(run_dir=beside_another.parent)
    assert summary.outcome == "done", summary.reason
    assert summary.resumed_at == 0 and summary.state_sha256 == origin[1].state_sha256
    found = CheckpointReader(beside_another).set_aside_list()
    why = {item.step: item.why for item in found}
    assert set(why) == {10, 20} and "leaf .model.first: wrong checksum" in why[20]
    assert "its train state is not that of the recipe: .model.first is float32[8, 32]" in why[10]


@pytest.mark.parametrize("text", ["", "runs/x", "runs/x@", "@3", "runs/x@two"])
def test_what_names_no_checkpoint_is_one_line_and_status_2(text, capsys, tmp_path):
    where = str(tmp_path / "run")
    assert main(["run", "tests/recipes/tiny.py", "--fork", text, "--run-dir", where]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "write DIR@STEP" in error
    assert not (tmp_path / "run").exists()
