"""elastix.cli: what is typed, what is refused and with which words, and how a run ends."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from elastix import SimulatedBackend, train
from elastix.cli import main
from elastix.command import parse
from elastix.overrides import override
from elastix.recipe_loading import load_recipe, module_name
from tests.children import environment, reading_the_cache
from tests.recipes import tiny

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "tests/recipes/tiny.py")


@pytest.fixture
def elastix(capsys, monkeypatch, tmp_path):
    """Runs a command line in this process, in an empty folder; returns (status, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # undone with what the command line adds

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(a) for a in arguments])
        return status, *capsys.readouterr()

    return run


def quiet_run(*arguments: object) -> list[object]:
    """`elastix run tiny` with JAX's cache as the tests have set it up."""
    return ["run", TINY, "--compile-cache", "off", *arguments]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    """The summary of a whole run of the tiny recipe, which nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main([str(a) for a in quiet_run("--run-dir", run_dir)]) == 0
    return summary(run_dir)


# --- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], ["elastix run", "elastix verify", "examples"]),
        (["--help"], ["elastix run", "elastix verify", "examples"]),
        (["run", "--help"], ["--lose S@STEP", "exit status", "75", "summary.json", "examples"]),
        (["verify", "-h"], ["--keep", "state_sha256"]),
        (["run", TINY, "--help"], ["--lose S@STEP", "--model.width", "units of the hidden layer"]),
    ],
)
def test_help_tells(elastix, arguments, told):
    status, out, err = elastix(*arguments)
    assert (status, err) == (0, "")
    assert [text for text in told if text not in out] == []


# --- recipes and their fields -------------------------------------------------------------------


def test_one_recipe_has_one_identity_from_wherever_it_is_named(monkeypatch):
    ways = [(ROOT, "tests/recipes/tiny.py"), (ROOT, "tests.recipes.tiny:recipe")]
    ways += [(ROOT / "tests", "recipes/tiny.py:recipe"), (ROOT / "tests/recipes", "tiny")]
    identities = set()
    for folder, given in ways:
        with monkeypatch.context() as context:
            context.chdir(folder)
            context.setattr(sys, "path", list(sys.path))
            loaded = load_recipe(given)
        assert loaded.name == "tiny"
        identities.add(loaded.recipe.identity_sha256())
    assert identities == {tiny.recipe().identity_sha256()}


def test_a_module_is_named_from_its_project(tmp_path):
    (tmp_path / "src/pack").mkdir(parents=True)
    assert module_name(tmp_path / "src/pack/a.py") == (tmp_path / "src", "pack.a")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "sub/recipes").mkdir(parents=True)
    assert module_name(tmp_path / "sub/recipes/a.py") == (tmp_path, "sub.recipes.a")
    assert module_name(tmp_path / "src/pack/a.py") == (tmp_path / "src", "pack.a")
    (tmp_path / "not-a-name").mkdir()
    assert module_name(tmp_path / "not-a-name/a.py") == (tmp_path / "not-a-name", "a")


def test_a_recipe_imports_what_lies_beside_its_folder(elastix, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/sizes.py").write_text("STEPS = 7")
    (tmp_path / "mine").mkdir()
    text = (
        "from dataclasses import replace\nfrom beside.sizes import STEPS\n"
        "from tests.recipes import tiny\n"
        "def recipe():\n    return replace(tiny.recipe(), num_steps=STEPS)\n"
    )
    (tmp_path / "mine/seven.py").write_text(text)
    assert load_recipe("mine/seven.py").recipe.num_steps == 7
    assert load_recipe("mine.seven").name == "seven"


def test_fields_replace_values_anywhere_in_the_tree():
    arguments = ["--policy.min-slices", "2", "--optimizer.peak=1e-3", "--model.width", "5"]
    recipe = override(tiny.recipe(), [*arguments, "--num_steps", "9", "--optimizer.decay", "None"])
    assert (recipe.policy.min_slices, recipe.optimizer.peak, recipe.model.width) == (2, 1e-3, 5)
    assert (recipe.num_steps, recipe.optimizer.decay) == (9, None)
    assert type(recipe.model) is tiny.MLPConfig
    assert override(recipe, ["--model.width", "8", "--reduction", "fast"]).loss is recipe.loss


def test_overrides_that_change_nothing_leave_the_identity():
    same = override(tiny.recipe(), ["--model.width", "8"])
    assert same == tiny.recipe()
    assert same.identity_sha256() == tiny.recipe().identity_sha256()


def test_options_and_fields_are_told_apart():
    command = parse(
        ["run", "--slices", "3", "r.py", "--data.files", "a", "b", "--lose=1@4", "--steps", "5"]
    )
    assert (command.recipe, command.slices, str(command.faults[0])) == ("r.py", 3, "--lose 1@4")
    assert command.fields == ("--num-steps", "5", "--data.files", "a", "b")


# --- bad input ----------------------------------------------------------------------------------

RECIPES = {
    "missing_import.py": "import no_such_module_at_all",
    "syntax.py": "def recipe(:",
    "raises.py": "1 / 0",
    "none.py": "def recipe():\n    return None",
    "other.py": "def pretrain():\n    pass",
    "fails.py": "def recipe():\n    return [][1]",
}
HERE = {
    "empty.txt": b"",
    "binary.txt": b"a\0b",
    "latin.txt": b"caf\xe9",
    "words.txt": b"word " * 400,
}
QUICK = str(ROOT / "recipes/quickstart.py")

BAD_INPUT = [
    # A recipe that cannot be imported.
    (["run", "nope.py"], ["nope.py", "does not exist"]),
    (["run", "nope.module"], ["nope.module", "no module"]),
    (["run", "no such"], ["'no such'", "file.py"]),
    (["run", "missing_import.py"], ["missing_import.py", "no_such_module_at_all", "line 1"]),
    (["run", "syntax.py"], ["syntax.py", "SyntaxError", "line 1"]),
    (["run", "raises.py"], ["raises.py", "ZeroDivisionError", "line 1"]),
    (["run", "none.py"], ["none.py", "NoneType", "return an elastix.Recipe"]),
    (["run", "other.py"], ["other.py", "'recipe'", "name one of pretrain"]),
    (["run", "fails.py"], ["fails.py", "IndexError", "line 2"]),
    (["run", f"{TINY}:nope"], ["'nope'", "idle"]),
    # An unknown field, or a value that will not do.
    (["run", TINY, "--policy.min-slice", 2], ["--policy.min-slice ", "--policy.min-slices"]),
    (["run", TINY, "--width", 2], ["--width", "--model.width"]),
    (["run", TINY, "--loss", "mine"], ["--loss", "no field"]),
    (["run", TINY, "--seed", "x"], ["--seed", "'x'"]),
    (["run", TINY, "--seed"], ["--seed", "Missing value"]),
    (["run", TINY, "--reduction", "slow"], ["'slow'", "ordered"]),
    (["run", TINY, "--policy.inflight", 0], ["policy.inflight=0", "use 1 or more"]),
    (["run", TINY, "--optimizer.peak", -1], ["optimizer.peak=-1", "above 0"]),
    (["run", TINY, "--optimizer.peak", "1e300"], ["optimizer.peak=1e+300", "finite in float32"]),
    (["run", TINY, "--optimizer.decay", 10**20], ["optimizer.decay=1000", "2147483647 or less"]),
    (["run", TINY, "--num-steps", 10**20], ["num_steps=1000", "2147483647 or less"]),
    # Sizes that no model has, and token ids that this one does not.
    (["run", QUICK, "--model.vocab-size", 256], ["model.vocab_size=256", "data.vocab_size=257"]),
    (["run", QUICK, "--model.vocab-size", 10**20], ["vocab_size=1000", "1 to 2147483647"]),
    (["run", QUICK, "--model.num-layers", 0], ["num_layers=0", "1 to 2147483647"]),
    (["run", QUICK, "--model.num-kv-heads", 3], ["num_kv_heads=3", "a divisor of num_heads=4"]),
    (["run", TINY, "--model.width", -1], ["model MLPConfig(width=-1)", ".hidden", "(4, -1)"]),
    (["run", TINY, "--model.width", 10**20], ["model MLPConfig(width=1000", "tiny.py line 41"]),
    (["run", QUICK, "--model.vocab-size", 2 * 10**9], ["the train state is", "a smaller model"]),
    # A batch or replicas that cannot be split.
    (["run", TINY, "--num-replicas", 2**15, "--global-batch", 2**15], ["at most 16384"]),
    (["run", QUICK, "--global-batch", 24 * 10**7, "--data.seq-len", 50_000], ["use fewer"]),
    (["run", f"{TINY}:unsplittable"], ["global_batch=9", "num_replicas=4", "multiple of 4"]),
    (["run", TINY, "--global-batch", 13], ["global_batch=13", "multiple of 4"]),
    (["run", TINY, "--num-replicas", 2], ["num_replicas=2", "at least 4"]),
    (["run", TINY, "--policy.min-slices", 9], ["policy.min_slices=9", "4 slices"]),
    (["run", TINY, "--mesh.fsdp", 3], ["mesh.fsdp=3", "factors of 2"]),
    # Faults that cannot happen.
    (["run", TINY, "--lose", "9@4"], ["--lose 9@4", "slices 0 to 3"]),
    (["run", TINY, "--lose", "1@400"], ["--lose 1@400", "40 steps"]),
    (["run", TINY, "--lose", "one"], ["'one'", "SLICE@STEP"]),
    (["run", TINY, "--return", "1@4"], ["--return 1@4", "lose it first"]),
    # A corpus that is missing, empty or not text.
    (["run", QUICK, "--data.files", "no.txt"], ["'no.txt'", "does not exist"]),
    (["run", QUICK, "--data.files", "empty.txt"], ["'empty.txt'", "is empty"]),
    (["run", QUICK, "--data.files", "binary.txt"], ["'binary.txt'", "not text"]),
    (["run", QUICK, "--data.files", "latin.txt"], ["'latin.txt'", "UTF-8"]),
    (["run", QUICK, "--data.files", "words.csv"], ["'words.csv'", ".txt"]),
    (["run", TINY, "--data.size", 0], ["data.size=0", "use 1 point or more"]),
    # A run directory or cache that cannot be written.
    (["run", TINY, "--run-dir", "words.txt/run"], ["words.txt/run", "cannot be written"]),
    (["run", TINY, "--compile-cache", "words.txt/c"], ["words.txt/c", "or off"]),
    # Usage.
    (["walk", TINY], ["'walk'", "elastix --help lists them"]),
    (["run"], ["no RECIPE"]),
    (["run", TINY, "other.py"], ["2 RECIPEs", "other.py"]),
    (["run", "--seed", 3, TINY], ["no RECIPE", "after it"]),
    (["run", TINY, "--slices", 0], ["--slices 0", "1 or more"]),
    (["run", TINY, "--slices", "two"], ["--slices", "'two'"]),
    (["run", TINY, "--backend", "pathways"], ["JAX_PLATFORMS=proxy", "JAX_BACKEND_TARGET=grpc:"]),
    (["run", TINY, "--backend", "gpu"], ["gpu", "simulated"]),
    (["verify", TINY], ["verify", "--lose S@STEP"]),
    (["verify", TINY, "--lose", "9@4"], ["--lose 9@4", "slices 0 to 3"]),
    (["verify", TINY, "--lose", "1@4", "--run-dir", "."], ["--run-dir .", "new directory"]),
]


@pytest.mark.parametrize(("arguments", "told"), BAD_INPUT, ids=lambda x: " ".join(map(str, x)))
def test_bad_input_is_one_line_and_changes_nothing(elastix, tmp_path, arguments, told):
    for name, text in RECIPES.items():
        (tmp_path / name).write_text(text)
    for name, data in HERE.items():
        (tmp_path / name).write_bytes(data)
    before = sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in str(p))
    status, out, err = elastix(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("elastix: ")
    assert [text for text in told if text not in err] == []
    assert sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in str(p)) == before


def test_a_recipe_that_touches_devices_when_imported_is_refused(tmp_path):
    # In a process of its own: in this one they were touched long ago.
    recipe = tmp_path / "touching.py"
    recipe.write_text(f"import jax.numpy as jnp\nx = jnp.zeros(3)\n{(ROOT / TINY).read_text()}")
    command = [sys.executable, "-m", "elastix", "run", str(recipe)]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "touching.py touches JAX's devices" in result.stderr
    assert "inside the model's build or the loss" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_of_another_recipe_is_left_as_it_is(elastix, tmp_path):
    assert elastix(*quiet_run("--steps", 4))[0] == 0
    files = [p for p in (tmp_path / "runs/tiny").rglob("*") if p.is_file() and p.name != "lock"]
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in files}
    for field in (["--seed", 3], ["--model.width", 9]):
        status, out, err = elastix(*quiet_run("--steps", 4, *field))
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"is {field[1]}" in err and "choose another --run-dir" in err
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in files} == before


def test_a_directory_that_holds_something_else_is_left_alone(elastix, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("")
    status, out, err = elastix(*quiet_run("--run-dir", "mine"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "thesis.tex" in err and "empty or a new directory" in err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_checkpoints_that_cannot_be_written_are_refused_before_training(elastix, tmp_path):
    assert elastix(*quiet_run("--steps", 4))[0] == 0
    run_dir = tmp_path / "runs/tiny"
    (run_dir / "checkpoints").rename(run_dir / "elsewhere")
    (run_dir / "checkpoints").write_text("a file")
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    status, out, err = elastix(*quiet_run("--steps", 8))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "checkpoints" in err
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics


# --- how a run ends -----------------------------------------------------------------------------


def test_a_program_error_ends_with_its_traceback_and_one_line(elastix):
    status, out, err = elastix("run", f"{TINY}:broken", "--compile-cache", "off")
    assert status == 1
    assert err.splitlines()[-1] == "elastix: failed: TypeError: no such column"
    assert "in broken_loss" in err
    assert "failed: 0 of 40 steps" in out


def test_an_error_before_training_ends_with_its_traceback_too(elastix, tmp_path):
    text = (
        "from dataclasses import dataclass, replace\nfrom tests.recipes import tiny\n"
        "@dataclass(frozen=True)\nclass Broken:\n"
        "    def build(self, key):\n        raise TypeError('no such layer')\n"
        "def recipe():\n    return replace(tiny.recipe(), model=Broken())\n"
    )
    (tmp_path / "broken_model.py").write_text(text)
    status, out, err = elastix("run", "broken_model.py", "--compile-cache", "off")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "elastix: failed: TypeError: no such layer"
    assert "broken_model.py" in err and "line 6, in build" in err
    assert not (tmp_path / "runs").exists()


def test_the_start_tells_when_checkpoints_are_written_and_which_are_kept(elastix):
    by_time = ["--policy.checkpoint-seconds", 90, "--policy.checkpoint-every", 0]
    status, out, _ = elastix(*quiet_run("--steps", 2, *by_time))
    assert status == 0 and "; a checkpoint every 90 s; patience" in out
    status, out, _ = elastix(*quiet_run("--steps", 4, *by_time[:2]))
    assert status == 0 and "; a checkpoint every 10 steps and every 90 s; patience" in out
    status, out, err = elastix(*quiet_run("--steps", 6, "--policy.keep-best", 2))
    assert (status, out, err.count("\n")) == (2, "", 1) and "set eval_every" in err


def test_a_complete_run_is_not_trained_again(elastix, undisturbed, tmp_path):
    status, out, _ = elastix(*quiet_run())
    assert status == 0
    assert "runs/tiny; starts anew from step 0" in out
    status, out, _ = elastix(*quiet_run())
    assert status == 0
    assert "complete already: its checkpoint of step 40 is the end" in out
    assert summary(tmp_path / "runs/tiny")["state_sha256"] == undisturbed["state_sha256"]


def test_a_preempted_run_is_resumed_by_the_same_command(elastix, monkeypatch, undisturbed):
    command = ["run", f"{TINY}:interrupted", "--compile-cache", "off", "--run-dir", "here"]
    monkeypatch.setenv("INTERRUPTS", "SIGTERM")
    status, out, err = elastix(*command)
    assert status == 75
    assert "stopping: " in out
    assert "run the same command again" in err.splitlines()[-1]
    monkeypatch.setenv("INTERRUPTS", "")
    status, out, _ = elastix(*command)
    assert status == 0
    assert "resumes from its checkpoint of step 2" in out
    assert summary(Path("here"))["state_sha256"] == undisturbed["state_sha256"]
    assert summary(Path("here"))["losses"] == undisturbed["losses"]


@pytest.fixture(params=["disk", pytest.param("memory", marks=pytest.mark.soak)])
def folder(request, tmp_path):
    """Where a run lies: on a disk, and where nothing is durable and a sync does nothing."""
    memory = Path("/dev/shm")
    if request.param == "disk" or not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


def in_a_process(tmp_path, *arguments: object, **env: str) -> subprocess.CompletedProcess:
    options = ["--compile-cache", "off", "--run-dir", tmp_path / "run"]
    command = [sys.executable, "-m", "elastix", *arguments, *options]
    return subprocess.run(
        list(map(str, command)), env=reading_the_cache(**env), capture_output=True, text=True
    )


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    env = {"INTERRUPTS": "SIGINT SIGINT"}
    result = in_a_process(tmp_path, "run", f"{TINY}:interrupted", **env)
    assert result.returncode == 130
    assert result.stderr.startswith("elastix: interrupted")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run/summary.json").exists()


def test_a_killed_run_ends_with_the_same_bits_when_it_is_run_again(
    elastix, monkeypatch, folder, undisturbed
):
    kill_at = random.randrange(1, 40)
    print("killed at step", kill_at)
    command = ["run", f"{TINY}:killed", "--lose", "1@5"]
    killed = in_a_process(folder, *command, KILL_AT=str(kill_at))
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, "")
    checkpoints = [int(p.name) for p in (folder / "run/checkpoints").iterdir() if p.name.isdigit()]
    monkeypatch.setenv("KILL_AT", "0")
    options = ["--compile-cache", "off", "--run-dir", folder / "run"]
    status, _, err = elastix(*command[:2], *options)
    assert (status, err) == (0, "")
    end = summary(folder / "run")
    assert end["resumed_at"] >= max(checkpoints, default=0)
    for key in ("state_sha256", "consumed", "losses"):
        assert end[key] == undisturbed[key], key
    rows = [json.loads(r) for r in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))


# --- a disk that takes nothing more ---------------------------------------------------------------

TROUBLE = """
import os, resource, shutil, time
from dataclasses import replace
from pathlib import Path
from tests.recipes import tiny

RUN, SOFT = Path(os.environ["RUN"]), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
STORE = RUN / "checkpoints"

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

def full():  # in the middle of the next row, and of any checkpoint
    limit((RUN / "metrics.jsonl").stat().st_size + 20)

def denied():
    STORE.chmod(0o500)

def vanished():
    shutil.move(STORE, RUN / "elsewhere")

BEGIN = {"full": full, "denied": denied, "vanished": vanished}
END = {
    "full": lambda: limit(SOFT),
    "denied": lambda: STORE.chmod(0o700),
    "vanished": lambda: shutil.move(RUN / "elsewhere", STORE),
}

def trouble(row):
    time.sleep(0.02)  # a save takes less than ten steps, as it does where steps are of use
    if row["step"] == 12 and os.environ["TROUBLE"]:
        while [path.name for path in STORE.iterdir()] != ["10"]:  # the first one is durable
            os.sched_yield()
        BEGIN[os.environ["TROUBLE"]]()

def recipe():
    return replace(tiny.recipe(), hooks=(trouble,))
"""

UNPRIVILEGED = """
import ctypes, os, sys
for capability in (1, 2):  # of root, to write and to read what is not permitted
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def troubled(tmp_path, trouble: str, *arguments: object) -> subprocess.CompletedProcess:
    """Python with these arguments, whose run has this trouble from step 12 on."""
    (tmp_path / "troubled.py").write_text(TROUBLE)
    env = reading_the_cache(TROUBLE=trouble, RUN=str(tmp_path / "run"))
    command = [sys.executable, "-c", UNPRIVILEGED, *map(str, arguments)]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("trouble", ["full", "denied", "vanished"])
def test_a_run_whose_last_checkpoint_cannot_be_written_has_failed(
    elastix, tmp_path, undisturbed, trouble
):
    options = ["--compile-cache", "off", "--run-dir", tmp_path / "run"]
    ended = troubled(tmp_path, trouble, "-m", "elastix", "run", "troubled.py", *options)
    why = {"full": "metrics.jsonl lacks rows: File too large", "denied": "Permission denied"}
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1, ended.stderr
    assert last.startswith("elastix: failed: the last checkpoint could not be written: step 40 ")
    assert why.get(trouble, "is gone") in last
    assert re.search(r"the checkpoint of step [12]\d was not written: ", ended.stdout)
    store = tmp_path / "run" / ("elsewhere" if trouble == "vanished" else "checkpoints")
    assert [p.name for p in store.iterdir()] == ["10"], "no temporary files are left"
    rows = (tmp_path / "run/metrics.jsonl").read_text()
    assert rows.endswith("\n") and rows.count("\n") == (12 if trouble == "full" else 40)
    assert ended.stderr.count("metrics.jsonl cannot be written") == (trouble == "full")
    # When the disk is well again, the same command ends with the same bits. (The recipe's trouble,
    # a hook, is no part of its identity.)
    if trouble == "denied":
        store.chmod(0o700)
    status, _, err = elastix("run", TINY, *options)
    assert (status, err) == (0, "")
    assert summary(tmp_path / "run")["state_sha256"] == undisturbed["state_sha256"]
    rows = [json.loads(r) for r in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))


OVERCOME = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 8)
from elastix import SimulatedBackend, train
from elastix.machine import SaveFailed
from elastix.summary import NoDisplay
from troubled import END, RUN, recipe, os

class Until(NoDisplay):
    failed = 0

    def event(self, before, event, after):
        if isinstance(event, SaveFailed) and not self.failed:
            self.failed = event.step
            END[os.environ["TROUBLE"]]()

until = Until()
summary = train(recipe(), backend=SimulatedBackend(4, 2), run_dir=RUN, display=until)
assert 10 <= until.failed < 40, until.failed
print(summary.exit_status, summary.state_sha256, *sorted(os.listdir(RUN / "checkpoints"))[-1:])
"""


@pytest.mark.parametrize("trouble", ["full", "denied", "vanished"])
def test_a_run_outlives_a_disk_that_is_well_again(tmp_path, undisturbed, trouble):
    """The trouble ends with the first save that failed."""
    ended = troubled(tmp_path, trouble, "-c", OVERCOME)
    assert ended.stdout.split() == ["0", undisturbed["state_sha256"], "40"], ended.stderr
    assert all(p.name.isdigit() for p in (tmp_path / "run/checkpoints").iterdir())
    rows = [json.loads(r) for r in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["loss"] for row in rows] == undisturbed["losses"]
    told = [line for line in ended.stderr.splitlines() if "metrics.jsonl" in line]
    assert [line.split(" ")[2:4] for line in told] == (
        [["cannot", "be"], ["is", "written"]] if trouble == "full" else []
    )


def test_a_run_that_lacks_the_row_of_its_last_evaluation_has_failed(tmp_path):
    """The same command evaluates the last step again."""
    run_dir = tmp_path / "run"

    def hook(row):
        if row["step"] == 12:
            (run_dir / "evaluations.jsonl").unlink()

    recipe = replace(
        tiny.recipe(), num_steps=12, eval_data=tiny.Points(16), hooks=(hook,),
        policy=replace(tiny.recipe().policy, eval_every=6),
    )  # fmt: skip
    ended = train(recipe, backend=SimulatedBackend(4, 2), run_dir=run_dir)
    assert (ended.outcome, ended.exit_status) == ("failed", 1)
    assert ended.reason.endswith("evaluations.jsonl lacks rows: the file was removed")
    again = train(recipe, backend=SimulatedBackend(4, 2), run_dir=run_dir)
    assert again.outcome == "done" and again.evaluations[-1]["step"] == 12
