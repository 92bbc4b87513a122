"""What docs/cloud-tpu.md shows: its elastix commands run, and the others name what these make."""

from __future__ import annotations

import re
import shlex
import string
import tomllib
from pathlib import Path

import pytest

from elastix.cli import main
from elastix.launch.spec import CONTROLLER, HEAD, WORKER
from elastix.launch.tpus import parse_slice_type
from elastix.recoveries import Recovery
from elastix.report import recovery_block

pytest.importorskip("kubernetes", reason="the extra gke")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "cloud-tpu.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", DOC, re.M | re.S)
LINES = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
TEXTS = [text for kind, text in BLOCKS if kind == "text"]
SET = dict(
    word.split("=", 1)
    for line in LINES
    if line.startswith("export ")
    for word in shlex.split(line)[1:]
)
COMMANDS = [shlex.split(string.Template(line).substitute(SET)) for line in LINES]
LAUNCHES = [words for words in COMMANDS if words[:2] == ["elastix", "launch"]]
JOBSET_LABELS = {"jobset-name", "replicatedjob-name", "job-index"}


def launched(words, tmp_path):
    """The command as it stands, but for the folder that it writes to."""
    here = [str(tmp_path / word) if word.endswith(".yaml") else word for word in words]
    assert main(here[1:]) == 0


def option(words, name):
    """The value of `--name VALUE` or `--name=VALUE`; None: it is not there."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            return after
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def test_every_command_is_of_a_program_that_is_known():
    programs = {words[0] for words in COMMANDS}
    assert programs == {"elastix", "export", "gcloud", "kubectl", "docker", "pip"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (installed,) = [words[-1] for words in COMMANDS if words[0] == "pip"]
    assert re.fullmatch(r"elastix-jax\[(\w+)\]", installed)[1] in extras["optional-dependencies"]


def test_there_are_launches_of_both_kinds():
    assert {words[2] for words in LAUNCHES} == {"gke", "xpk"} and len(LAUNCHES) >= 4


def test_no_command_of_elastix_is_left_out():
    """All are launches, which run here; what is named in the text is parsed, too."""
    assert [words for words in COMMANDS if words[0] == "elastix"] == LAUNCHES
    named = set(re.findall(r"`(elastix [^`]+)`", DOC))
    asked = {words for words in named if words.endswith("--help")}
    assert asked and {main(shlex.split(words)[1:]) for words in asked} == {0}
    assert named - asked == {"elastix run", "elastix launch gke"}


@pytest.mark.parametrize("words", LAUNCHES, ids=[" ".join(w[2:3] + w[-2:]) for w in LAUNCHES])
def test_each_launch_runs(words, tmp_path):
    launched(words, tmp_path)
    written = [Path(tmp_path / word) for word in words if word.endswith(".yaml")]
    assert all(file.exists() for file in written)


def test_the_summary_is_the_one_that_is_printed(tmp_path, capsys):
    launched(LAUNCHES[0], tmp_path)
    printed = capsys.readouterr().out
    assert printed == next(text for text in TEXTS if text.startswith("run "))


def test_the_node_pools_are_those_of_the_slices():
    pools = [words for words in COMMANDS if option(words, "--tpu-topology")]
    for words in LAUNCHES[:2]:
        slice_type = parse_slice_type(option(words, "--tpu"))
        assert len(pools) == int(option(words, "--slices"))
        for pool in pools:
            assert option(pool, "--tpu-topology") == slice_type.topology
            assert option(pool, "--machine-type") == slice_type.tpu.machine
            assert int(option(pool, "--num-nodes")) == slice_type.vms


def test_kubectl_asks_for_what_the_manifest_has(tmp_path):
    launched(LAUNCHES[1], tmp_path)
    jobset = yaml.safe_load((tmp_path / "run.yaml").read_text())
    name, jobs = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    head = jobs[0]["template"]["spec"]["template"]["spec"]
    assert [job["name"] for job in jobs] == [HEAD, WORKER]
    assert f"kubectl get jobset {name} " in DOC and f"kubectl delete jobset {name}\n" in DOC
    assert option(LAUNCHES[1], "--render") == "run.yaml" and "kubectl apply -f run.yaml\n" in DOC
    selectors = [s for words in COMMANDS if (s := option(words, "--selector"))]
    assert len(selectors) >= 4
    for selector in selectors:
        labels = dict(part.split("=") for part in selector.split(","))
        keys = {key.removeprefix("jobset.sigs.k8s.io/") for key in labels}
        assert keys <= JOBSET_LABELS and labels["jobset.sigs.k8s.io/jobset-name"] == name
        assert labels.get("jobset.sigs.k8s.io/replicatedjob-name", HEAD) in (HEAD, WORKER)
    assert {option(words, "--container") for words in COMMANDS} == {None, CONTROLLER}
    pool = head["nodeSelector"]["cloud.google.com/gke-nodepool"]
    assert f"gcloud container node-pools create {pool} " in DOC


def test_the_options_that_are_named_exist(capsys):
    main(["launch", "gke", "--help"])
    known = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out))
    table = DOC[DOC.index("## 10.") : DOC.index("```bash", DOC.index("## 10."))]
    named = set(re.findall(r"`(--[a-z][\w-]+)", table))
    assert named and named <= known


@pytest.mark.parametrize("kind", ["loss", "regrow"])
def test_the_recovery_blocks_have_the_lines_that_a_run_prints(kind):
    seconds = dict.fromkeys(("detect", "wait", "restore", "compile", "first_step"), 0.1)
    lost = [1] if kind == "loss" else []
    recovery = Recovery(
        kind=kind,
        cause="DATA_LOSS: slice 1 is gone (reading a result)" if lost else "slice 1 is back",
        step=1,
        lost=lost,
        found=[] if lost else [1],
        resumed_at=1,
        steps_lost=0,
        steps_abandoned=0,
        source="host",
        slices=[0, 2] if lost else [0, 1, 2],
        compiles=1,
        seconds=seconds,
    )
    block = recovery_block(recovery, 3)
    made = "\n".join([f"--- {block.title} ---", *block.lines()])
    word = "lost" if lost else "came back"
    (shown,) = [text for text in TEXTS if re.match(rf"--- recovery: .*{word}", text)]
    assert shape(shown) == shape(made)


def shape(text):
    """A block without its numbers and causes, which differ from run to run."""
    text = re.sub(r"(noticed|state from) .*", r"\1", text.strip())
    return re.sub(r"\d+(\.\d+)?", "#", text).replace("steps", "step").replace("programs", "program")
