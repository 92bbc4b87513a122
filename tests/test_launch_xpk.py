"""The JobSet and the one that xpk makes of the command printed for it differ where it is said.

xpk is large and pins what elastix does not, so it is run from an environment of its own: `xpk` on
the PATH, or the program that XPK names. Nothing is sent anywhere (`--dry-run`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from elastix import Policy
from elastix.launch.jobset import build_jobset
from elastix.launch.spec import Launch
from elastix.launch.tpus import parse_slice_type
from elastix.launch.xpk import xpk_command

yaml = pytest.importorskip("yaml")
pytest.importorskip("kubernetes", reason="the extra gke")

XPK = os.environ.get("XPK") or shutil.which("xpk")
LAUNCH = Launch(
    recipe="recipes/quickstart.py",
    fields=(),
    num_steps=120,
    policy=Policy(),
    name="el",
    slice_type=parse_slice_type("v5e:4x4"),
    slices=3,
    missing=3,
    image="r/elastix:7",
    pathways_tag="20990101-jax",
    bucket="gs://some-bucket",
    queue="multislice-queue",
    priority="medium",
)
COMBINATIONS = [
    *(("v4:2x2x2", 2), ("v4:4x4x8", 3), ("v5e:2x4", 2), ("v5e:4x4", 3), ("v5e:16x16", 4)),
    *(("v5p:2x2x1", 2), ("v5p:4x4x12", 3), ("v6e:2x2", 4), ("v6e:4x8", 2), ("v6e:16x16", 6)),
    *(("7x:2x2x1", 2), ("7x:4x4x8", 3)),
]

# Paths that differ, and why. The replicated jobs are called head and worker, the controller main.
DIFFERENT = {
    r"metadata\.labels\.xpk\.|worker.*labels\.xpk\.": "xpk's own bookkeeping",
    r"metadata\.namespace": "xpk leaves it to kubectl",
    r"suspend": "false, which is the default",
    r"failurePolicy\.(maxRestarts|rules)": "xpk leaves --max-restarts out and has no rules",
    r"head.*\.podFailurePolicy": "xpk tells no exit status from another",
    r"head.*\.(hostNetwork|dnsPolicy)": "as in pathwaysutils: the pod's own service account",
    r"head.*\.(serviceAccountName|terminationGracePeriodSeconds|priorityClassName)": "ours to say",
    r"template\.spec\.template\.metadata\.annotations": "the Job's, on the pod too",
    r"worker\.name|main\.name": "the names of pathwaysutils, and ours",
    r"nodeSelector.*placement-policy-name": "7x: the policy that xpk made for its node pools",
    r"head.*\.main\.(command|securityContext)": "a shell around it, which is privileged",
    r"head.*\.(main\.volumeMounts|volumes)": "the host's temporary folder",
    r"head.*\.main\.env\.PATHWAYS_HEAD": "the proxy is in the same pod: localhost",
    r"head.*\.main\.env\.(JAX_BACKEND_TARGET)": "the same proxy, by localhost",
    r"head.*\.env\.IFRT_PROXY_USE_INSECURE": "new in pathwaysutils 0.1.13, in both containers",
    r"head.*\.main\.env\.(PATHWAYS_PROXY_|PYTHONUNBUFFERED|TPU_SKIP)": "more environment",
}


def flat(value, path=""):
    """Every value by its path; lists of named things by name, arguments by flag."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for n, inner in enumerate(value):
            yield from flat(inner, f"{path}.{_key(inner, n)}")
    elif value is not None:
        yield path, str(value).strip()


def _key(item, number):
    if isinstance(item, dict):
        name = item.get("name") or item.get("containerPort") or item.get("mountPath") or number
        return {"pathways-worker": "worker", "jax-tpu": "main", "elastix": "main"}.get(name, name)
    flag, equals, _ = str(item).partition("=")
    return flag if equals else number


def differences(ours, theirs):
    one, other = dict(flat(ours)), dict(flat(theirs))
    return {
        path: (one.get(path), other.get(path))
        for path in sorted({*one, *other})
        if one.get(path) != other.get(path)
    }


def from_xpk(launch, file):
    """The manifest that xpk makes of the command as it is printed."""
    file.unlink(missing_ok=True)
    dry = f"--dry-run --skip-validation --output-manifest-file={file} --project=p"
    command = f"{xpk_command(launch)} {dry} --zone=us-central1-a"
    command = command.replace("xpk ", f"{XPK} ", 1)
    environment = {**os.environ, "CLUSTER": "c", "HOME": str(file.parent)}
    ran = subprocess.run(
        ["sh", "-c", command], env=environment, cwd=file.parent, capture_output=True, text=True
    )
    assert file.exists(), ran.stdout + ran.stderr
    return yaml.safe_load(file.read_text())


@pytest.mark.skipif(XPK is None, reason="xpk is not here: name it with XPK")
def test_the_jobset_is_that_of_xpk_but_for_what_is_said(tmp_path):
    used, unexpected = set(), {}
    for text, slices in COMBINATIONS:
        launch = replace(LAUNCH, slice_type=parse_slice_type(text), slices=slices, missing=slices)
        found = differences(build_jobset(launch), from_xpk(launch, tmp_path / "a.yaml"))
        for path, values in found.items():
            reasons = [pattern for pattern in DIFFERENT if re.search(pattern, path)]
            used.update(reasons)
            if not reasons:
                unexpected[text, path] = values
    assert not unexpected and used == set(DIFFERENT)


def test_a_difference_is_seen():
    ours = build_jobset(LAUNCH)
    other = build_jobset(replace(LAUNCH, slices=2, missing=1))
    paths = {path.rpartition(".")[2] for path in differences(ours, other)}
    assert paths == {"replicas", "--instance_count", "--num_elastic_slices", "--virtual_slices"}
    assert differences(ours, ours) == {}
