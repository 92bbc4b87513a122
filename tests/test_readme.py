"""What the README shows is true: its commands run, its code runs, its pictures are of this code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import pytest

import elastix
from elastix.cli import main
from elastix.notices import notify_main
from elastix.recipe_loading import load_recipe
from elastix.recoveries import Recovery
from elastix.report import recovery_block
from tests.recipes import tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.M | re.S)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line]
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
TESTS = [text for text in PYTHON if "def test_" in text]
SCRIPTS = [text for text in PYTHON[1:] if text not in TESTS]


def long_recipe():
    """The tiny recipe, with as many steps as the README's faults need."""
    return replace(tiny.recipe(), num_steps=100)


def runs_make(words: list[str], tmp_path: Path) -> None:
    subprocess.run([*words, "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def runs_elastix(words: list[str], tmp_path: Path) -> None:
    """The command as it stands, on a recipe that compiles in a second instead of the one named."""
    if words[1] in ("simulate", "advise"):
        assert main(words[1:]) == 0
        return
    if words[1] == "bench":  # all of it takes minutes: one part, as its own help says
        load_recipe(words[2])
        out = ["--out", str(tmp_path / "bench"), "--quick", "--only", "memory"]
        assert main(["bench", tiny.__file__, *out]) == 0
        return
    if words[1] == "launch":
        named = {"$IMAGE": "here/elastix:1", "$PATHWAYS_TAG": "1", "gs://$BUCKET": "gs://runs"}
        assert main([named.get(word, word) for word in words[1:]]) == 0
        return
    if words[1] == "data":
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text('{"text": "to be or not to be"}\n' * 99)
        out = str(tmp_path / "packed")
        here = {corpus.name: str(corpus), "tokenizer.json": "bytes", "data/corpus": out}
        assert main([here.get(word, word) for word in words[1:]]) == 0
        return
    if words[1] == "checkpoints":
        elastix.train(tiny.recipe(), run_dir=tmp_path)
        assert main(["checkpoints", str(tmp_path), *words[3:]]) == 0
        return
    if words[1] == "replay":
        elastix.train(tiny.recipe(), run_dir=tmp_path)
        assert main(["replay", str(tmp_path), *words[3:]]) == 0
        return
    swapped = [
        "tests.test_readme:long_recipe" if w.startswith("recipes/") else w for w in words[1:]
    ]
    if words[1] == "notify":  # its options are right, only nobody runs there
        with pytest.raises(ValueError, match="is no run directory"):
            notify_main([str(tmp_path), *words[3:]])
        return
    if words[1] == "run":
        swapped += ["--run-dir", str(tmp_path / "run")]
    assert main(swapped) == 0


def runs_uv(words: list[str], tmp_path: Path) -> None:
    """uv may not be here: what it would start must be a command that the README gives plainly,
    or one that the Makefile runs, with extras that exist."""
    assert words[:2] == ["uv", "run"]
    project = (ROOT / "pyproject.toml").read_text()
    extras = [after for word, after in pairwise(words) if word == "--extra"]
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras)
    if "elastix" in words:
        runs_elastix(words[words.index("elastix") :], tmp_path)
    else:
        assert words[words.index("python") :] == ["python", "-m", "pytest"]


RUNNERS = {"make": runs_make, "elastix": runs_elastix, "uv": runs_uv}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs(command, tmp_path, monkeypatch):
    if "data pack" in command:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = shlex.split(command)
    RUNNERS[words[0]](words, tmp_path)


def test_the_recipe_is_the_one_of_the_quickstart():
    assert PYTHON[0] == (ROOT / "recipes/quickstart.py").read_text()


@pytest.mark.parametrize("code", SCRIPTS)
def test_each_block_of_python_runs(code, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    short = code.replace("from recipes.quickstart import recipe", "recipe = long_recipe")
    exec(short.replace("runs/on-pathways", str(tmp_path / "run")), globals())
    assert capsys.readouterr().out


def test_the_tests_pass_with_the_plugin(tmp_path):
    for n, code in enumerate(TESTS):
        short = code.replace("recipes.quickstart import", "tests.test_readme import long_recipe as")
        (tmp_path / f"test_{n}.py").write_text(short)
    options = ["-q", "-p", "elastix.testing.plugin", "-p", "no:cacheprovider", "--strict-markers"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    where = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    where["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
    where["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    ran = subprocess.run(
        command, cwd=tmp_path, env=os.environ | where, capture_output=True, text=True
    )
    assert ran.returncode == 0 and f"{len(TESTS) + 1} passed" in ran.stdout, ran.stdout


def test_the_diagram_is_the_one_that_the_machine_makes():
    drawn = subprocess.run(
        [sys.executable, ROOT / "tools/diagram.py"], check=True, capture_output=True, text=True
    )
    assert f"```mermaid\n{drawn.stdout}```" in README


def test_the_recovery_block_has_the_lines_that_a_run_prints():
    shown = re.search(r"^--- recovery.*?(?=^```)", README, re.M | re.S).group()
    recovery = Recovery(
        kind="loss",
        cause="DATA_LOSS: slice 1 is gone (reading a result)",
        step=38,
        lost=[1],
        resumed_at=30,
        steps_lost=8,
        steps_abandoned=2,
        source="host",
        slices=[0, 2, 3],
        compiles=1,
        seconds={"detect": 0.1, "wait": 0.0, "restore": 0.1, "compile": 3.0, "first_step": 0.1},
    )
    block = recovery_block(recovery, 4)
    made = "\n".join([f"--- {block.title} ---", *block.lines()])
    without_seconds = re.compile(r"\d+\.\d{3}")
    assert without_seconds.sub("#", made).strip() == without_seconds.sub("#", shown).strip()


def test_the_tree_names_files_that_exist():
    tree = next(text for kind, text in BLOCKS if kind == "text" and text.startswith("elastix/"))
    for name in re.findall(r"[\w/]+\.py", tree):
        assert list(ROOT.rglob(name)), name


def test_every_field_of_the_policy_that_is_named_exists():
    table = re.search(r"^\| you want .*?\n\n", README, re.M | re.S).group()
    for name in re.findall(r"`(\w+)", table):
        assert hasattr(elastix.Policy(), name) or name in ("inflight", "eval_data"), name
