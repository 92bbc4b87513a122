"""`elastix launch`: the manifests are those that were asked for, and bad input is one line."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from elastix import Policy
from elastix.cli import main
from elastix.launch.checks import CHECKS, MOST_NAME, check, coordinator_label, warnings
from elastix.launch.command import create
from elastix.launch.jobset import build_jobset
from elastix.launch.manifest import job_template, manifests
from elastix.launch.review import problems, review
from elastix.launch.spec import MOST_BACKOFF, Head, Launch
from elastix.launch.tpus import TPUS, SliceType, parse_slice_type
from elastix.launch.xpk import xpk_command, xpk_notes

pytest.importorskip("kubernetes", reason="the extra gke")

ROOT = Path(__file__).parents[1]
LAUNCH = Launch(
    recipe="recipes/quickstart.py",
    fields=("--policy.min-slices", "2"),
    num_steps=120,
    policy=Policy(min_slices=2),
    name="quick",
    slice_type=parse_slice_type("v5e:4x4"),
    slices=3,
    missing=3,
    image="europe-docker.pkg.dev/p/r/elastix:7",
    pathways_tag="20990101-jax_0.12.0",
    bucket="gs://some-bucket/team",
)
FULL = replace(
    LAUNCH,
    spares=2,
    namespace="team",
    queue="multislice-queue",
    priority="high",
    priority_value=750,
    suspend_resume=True,
    data_bucket="gs://texts/",
    elastic_flag="num_elastic_instances",
    head=Head("cpus", "trainer", "8", "50G"),
)
COLOCATED = replace(LAUNCH, colocated_python="r/python:1")
OPTIONS = [
    *("--tpu", "v5e:4x4", "--slices", "3", "--image", "r/elastix:7"),
    *("--pathways-tag", "20990101-jax", "--bucket", "gs://some-bucket"),
]
TINY = ["launch", "gke", "tests/recipes/tiny.py", *OPTIONS]


@pytest.fixture(scope="module")
def jobset():
    return build_jobset(LAUNCH)


def containers(jobset, job):
    pod = job_template(jobset, job)["spec"]["template"]["spec"]
    return {c["name"]: c for c in [*pod["containers"], *pod.get("initContainers", ())]}


# --- the TPUs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chips", "vms", "devices", "instance"),
    [
        ("v4:2x2x1", 4, 1, 4, "tpuv4:2x2x1"),
        ("v4:8x4x4", 128, 32, 128, "tpuv4:8x4x4"),
        ("v5e:4x4", 16, 4, 16, "tpuv5e:4x4"),
        ("v5e:2x4", 8, 2, 8, "tpuv5e:2x4"),
        ("v5e-8t:2x4", 8, 1, 8, "tpuv5e1t:2x4"),
        ("v5p:4x4x12", 192, 48, 192, "tpuv5:4x4x12"),
        ("v6e:16x16", 256, 64, 256, "tpuv6e:16x16"),
        ("7x:2x2x1", 4, 1, 8, "tpu7x:2x2x1"),
        ("7x:16x24x24", 9216, 2304, 18432, "tpu7x:16x24x24"),
    ],
)
def test_a_slice_has_the_chips_the_vms_and_the_devices(text, chips, vms, devices, instance):
    slice_type = parse_slice_type(text)
    assert (slice_type.chips, slice_type.vms, slice_type.devices) == (chips, vms, devices)
    assert slice_type.instance_type == instance and str(slice_type) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v5e", "write TYPE:TOPOLOGY"),
        ("v9:4x4", "one of the types v4, v5e"),
        ("v5e:4x5", "use one of 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        ("v5e-8t:4x4", "v5e-8t has no such topology, use one of 2x4"),
        ("v5p:8x4x4", "use one of 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4"),
        ("v5p:12x24x36", "no such topology"),
        ("7x:4x4", "no such topology"),
        ("v5e:", "no such topology"),
    ],
)
def test_a_slice_that_does_not_exist_is_refused(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_slice_type(text)


def test_every_slice_is_whole_machines():
    for tpu in TPUS.values():
        for topology in tpu.topologies:
            slice_type = SliceType(tpu, topology)
            assert slice_type.vms * tpu.chips_per_vm == slice_type.chips


# --- the numbers --------------------------------------------------------------------------------


def test_no_slice_is_given_up_by_kubernetes_before_the_policy_gives_up():
    assert LAUNCH.backoff_limit == 4 * 1_000_000
    long = replace(LAUNCH, num_steps=500_000, policy=Policy(max_losses=10))
    assert long.slice_restarts == 5_000_000 and long.backoff_limit == 20_000_000


def test_the_backoff_limit_is_a_number_that_kubernetes_can_hold():
    huge = replace(LAUNCH, slice_type=parse_slice_type("7x:16x24x24"))
    assert 2_000_000_000 < huge.backoff_limit <= MOST_BACKOFF
    most = replace(LAUNCH, num_steps=10**9)
    assert MOST_BACKOFF - 4 < most.backoff_limit <= MOST_BACKOFF


def test_a_run_has_a_directory_of_its_own_on_the_bucket():
    assert LAUNCH.run_dir == "gs://some-bucket/team/runs/quick"
    assert LAUNCH.scratch == "gs://some-bucket/team/scratch"
    bare = replace(LAUNCH, bucket="gs://some-bucket/")
    assert bare.run_dir == "gs://some-bucket/runs/quick"


def test_the_pods_have_the_time_that_the_policy_gives():
    patient = replace(LAUNCH, policy=Policy(grace=59.5, deadline=3600.0))
    assert (patient.head_grace, patient.worker_grace) == (65, 30)
    assert replace(patient, suspend_resume=True).worker_grace == 600


# --- the manifests ------------------------------------------------------------------------------


def test_the_head_runs_the_recipe_beside_its_two_sidecars(jobset):
    found = containers(jobset, "pathways-head")
    assert set(found) == {"elastix", "pathways-rm", "pathways-proxy"}
    assert found["elastix"]["command"] == [
        *("elastix", "run", "recipes/quickstart.py", "--backend", "pathways"),
        *("--run-dir", "gs://some-bucket/team/runs/quick", "--policy.min-slices", "2"),
    ]
    assert "restartPolicy" not in found["elastix"]
    environment = {e["name"]: e.get("value") for e in found["elastix"]["env"]}
    assert environment["JAX_PLATFORMS"] == "proxy" and environment["PYTHONUNBUFFERED"] == "1"
    assert environment["PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"] == "1800"


def test_all_slices_may_be_missing_unless_less_is_asked_for(jobset):
    arguments = containers(jobset, "pathways-head")["pathways-proxy"]["args"]
    assert "--num_elastic_slices=3" in arguments
    assert "--virtual_slices=tpuv5e:4x4,tpuv5e:4x4,tpuv5e:4x4" in arguments
    fewer = build_jobset(replace(LAUNCH, missing=1))
    arguments = containers(fewer, "pathways-head")["pathways-proxy"]["args"]
    assert "--num_elastic_slices=1" in arguments


def test_all_that_may_be_asked_for_is_there():
    jobset = build_jobset(FULL)
    head, workers = containers(jobset, "pathways-head"), job_template(jobset, "pathways-worker")
    proxy = head["pathways-proxy"]["args"]
    assert "--num_elastic_instances=3" in proxy
    assert not any(a.startswith("--num_elastic_slices") for a in proxy)
    assert "--instance_count=5" in head["pathways-rm"]["args"]
    assert jobset["spec"]["replicatedJobs"][1]["replicas"] == 5
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "multislice-queue"}
    assert workers["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 300
    for name in ("pathways-head", "pathways-worker"):
        assert job_template(jobset, name)["spec"]["template"]["spec"]["priorityClassName"] == "high"
    (mount,) = head["elastix"]["volumeMounts"]
    assert mount["mountPath"] == "/data" and mount["readOnly"]
    assert head["elastix"]["resources"] == {"limits": {"cpu": "8", "memory": "50G"}}
    made = manifests(jobset, FULL)
    assert [m["kind"] for m in made] == ["PriorityClass", "JobSet"] and made[0]["value"] == 750


def test_a_sidecar_of_python_is_told_to_the_proxy():
    jobset = build_jobset(COLOCATED)
    assert "colocated-python-sidecar" in containers(jobset, "pathways-worker")
    assert (
        "--sidecar_name=external" in containers(jobset, "pathways-head")["pathways-proxy"]["args"]
    )


def test_a_status_that_is_final_ends_the_jobset_and_another_begins_it_anew(jobset):
    """A model of Kubernetes and JobSet: which rule fires for a head that ends with a status."""

    def ends(status: int) -> str:
        if status == 0:
            return "done"
        rules = job_template(jobset, "pathways-head")["spec"]["podFailurePolicy"]["rules"]
        hit = [
            r["action"]
            for r in rules
            if r["onExitCodes"]["operator"] == "In" and status in r["onExitCodes"]["values"]
        ]
        reason = "PodFailurePolicy" if hit == ["FailJob"] else "BackoffLimitExceeded"
        policy = jobset["spec"]["failurePolicy"]
        actions = [r["action"] for r in policy["rules"] if reason in r["onJobFailureReasons"]]
        return actions[0] if actions else f"restart up to {policy['maxRestarts']}"

    assert {status: ends(status) for status in (0, 1, 2, 75, 130, 137)} == {
        0: "done",
        1: "FailJobSet",
        2: "FailJobSet",
        75: "restart up to 100",
        130: "restart up to 100",
        137: "restart up to 100",
    }


SLICES = ("v4:4x4x4", "v5e:4x4", "v5e-8t:2x4", "v5p:2x2x2", "v6e:8x8", "v6e-8t:2x4", "7x:4x4x8")


@pytest.mark.parametrize("text", SLICES)
def test_the_manifest_of_every_type_passes_its_own_review(text):
    launch = replace(LAUNCH, slice_type=parse_slice_type(text))
    check(launch)
    review(build_jobset(launch), launch)


@pytest.mark.parametrize("launch", [FULL, COLOCATED], ids=["full", "colocated"])
def test_the_manifest_of_every_option_passes_its_own_review(launch):
    check(launch)
    assert list(problems(build_jobset(launch), launch)) == []


HEAD_JOB = "spec.replicatedJobs.0.template.spec"
HEAD_POD = f"{HEAD_JOB}.template.spec"
WORKER_JOB = "spec.replicatedJobs.1.template.spec"
WORKER_POD = f"{WORKER_JOB}.template.spec"
PLANTED = [
    ("metadata.name", "a" * 23),
    ("metadata.name", "1st"),
    ("spec.coordinator.replicatedJob", "pathways-worker"),
    ("spec.successPolicy.targetReplicatedJobs", []),
    ("spec.failurePolicy.maxRestarts", 0),
    ("spec.failurePolicy.rules", []),
    ("spec.failurePolicy.rules.0.name", "fails-for-good"),
    ("spec.failurePolicy.rules.0.action", "RestartJobSet"),
    ("spec.failurePolicy.rules.0.targetReplicatedJobs", ["pathways-worker"]),
    ("spec.failurePolicy.rules.0.onJobFailureReasons", ["BackoffLimitExceeded"]),
    ("spec.replicatedJobs.0.name", "head"),
    ("spec.replicatedJobs.0.replicas", 2),
    (f"{HEAD_JOB}.completionMode", "NonIndexed"),
    (f"{HEAD_JOB}.backoffLimit", 3),
    (f"{HEAD_JOB}.podFailurePolicy.rules.0.action", "Count"),
    (f"{HEAD_JOB}.podFailurePolicy.rules.0.onExitCodes.values", [1, 2, 75]),
    (f"{HEAD_JOB}.podFailurePolicy.rules.0.onExitCodes.containerName", "user-workload"),
    (f"{HEAD_POD}.restartPolicy", "OnFailure"),
    (f"{HEAD_POD}.terminationGracePeriodSeconds", 10),
    (f"{HEAD_POD}.priorityClassName", "low"),
    (f"{HEAD_POD}.containers.0.image", "r/elastix:8"),
    (f"{HEAD_POD}.containers.0.command", ["elastix", "run", "recipes/quickstart.py"]),
    (f"{HEAD_POD}.containers.0.env", []),
    (f"{HEAD_POD}.initContainers.0.restartPolicy", None),
    (f"{HEAD_POD}.initContainers.1.image", "proxy:latest"),
    (f"{HEAD_POD}.initContainers.0.args.3", "--instance_count=1"),
    (f"{HEAD_POD}.initContainers.0.args.4", "--instance_type=tpuv5e:8x8"),
    (f"{HEAD_POD}.initContainers.0.args.1", "--gcs_scratch_location=gs://elsewhere"),
    (f"{HEAD_POD}.initContainers.1.args.3", "--num_elastic_slices=1"),
    (f"{HEAD_POD}.initContainers.1.args.4", "--virtual_slices=tpuv5e:4x4"),
    (f"{HEAD_POD}.initContainers.1.name", "proxy"),
    ("spec.replicatedJobs.1.replicas", 2),
    ("spec.replicatedJobs.1.template.metadata.annotations", {}),
    (f"{WORKER_JOB}.backoffLimit", 40),
    (f"{WORKER_JOB}.backoffLimit", 2**31),
    (f"{WORKER_JOB}.completions", 3),
    (f"{WORKER_JOB}.parallelism", 1),
    (f"{WORKER_POD}.nodeSelector", {}),
    (f"{WORKER_POD}.terminationGracePeriodSeconds", 1),
    (f"{WORKER_POD}.priorityClassName", "low"),
    (f"{WORKER_POD}.containers.0.image", "server:latest"),
    (f"{WORKER_POD}.containers.0.resources.limits", {"google.com/tpu": "8"}),
]


def planted(manifest, path, value):
    manifest = copy.deepcopy(manifest)
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    place = manifest
    for key in parents:
        place = place[key]
    assert isinstance(place, list) or last in place or last == "priorityClassName", path
    place[last] = value
    return manifest


@pytest.mark.parametrize(
    ("path", "value"), PLANTED, ids=[f"{path.rpartition('.')[2]}-{v}"[:60] for path, v in PLANTED]
)
def test_a_planted_fault_is_found(jobset, path, value):
    wrong = planted(jobset, path, value)
    assert list(problems(jobset, LAUNCH)) == [] and list(problems(wrong, LAUNCH))
    with pytest.raises(ValueError, match="the manifest is wrong: "):
        review(wrong, LAUNCH)


@pytest.mark.parametrize(
    ("path", "value"),
    [("volumes", []), ("containers.0.volumeMounts.0.mountPath", "/mnt")],
)
def test_data_that_are_not_mounted_are_found(path, value):
    wrong = planted(build_jobset(FULL), f"{HEAD_POD}.{path}", value)
    assert any("/data holds nothing" in problem for problem in problems(wrong, FULL))


def test_a_sidecar_beside_workers_that_are_suspended_is_found():
    jobset = build_jobset(COLOCATED)
    suspended = replace(COLOCATED, suspend_resume=True)
    assert any("suspended" in problem for problem in problems(jobset, suspended))


# --- what is refused ----------------------------------------------------------------------------

REFUSED = [
    (dict(name="Quick"), "--name Quick: use small letters"),
    (dict(name="1st"), "--name 1st: use small letters"),
    (dict(name="quick-"), "--name quick-"),
    (dict(name=""), "--name : use small letters"),
    (dict(name="a" * 23), f"23 characters, use at most {MOST_NAME}"),
    (dict(namespace="a.b"), "--namespace a.b"),
    (dict(queue="Q"), "--queue Q"),
    (dict(priority="High"), "--priority-class High"),
    (dict(priority="p" * 254), "at most 253"),
    (dict(priority="system-x", priority_value=9), "Kubernetes keeps system- for itself"),
    (dict(namespace="n" * 64), "at most 63"),
    (dict(queue="q" * 64), "at most 63"),
    (dict(head=Head(node_pool="n" * 64)), "at most 63"),
    (dict(head=Head(service_account="s" * 254)), "at most 253"),
    *((dict(head=Head(cpu=cpu)), f"--head-cpu {cpu}: use a number") for cpu in ("lots", "0", "-4")),
    *(
        (dict(head=Head(memory=memory)), f"--head-memory {memory}: use an amount of bytes")
        for memory in ("", "100", "100 G", "100GB", "500m")
    ),
    (dict(head=Head(service_account="a b")), "--service-account a b"),
    (dict(head=Head(node_pool="")), "--head-node-pool"),
    (dict(bucket="some-bucket"), "write gs://NAME"),
    (dict(data_bucket="gs://texts/folder"), "--data-bucket gs://texts/folder"),
    (dict(bucket="gs://b"), "write gs://NAME"),
    (dict(bucket="gs://Some_Bucket/x y"), "write gs://NAME"),
    (dict(image="r/elastix"), "give it a tag other than latest"),
    (dict(image="localhost:5000/elastix"), "give it a tag other than latest"),
    (dict(image="r/elastix:latest"), "give it a tag other than latest"),
    (dict(image=""), "name an image"),
    (dict(image="r/e:1 r/e:2"), "name an image"),
    *(
        (dict(image=image), f"--image {image!r}: name an image")
        for image in (":1", "Foo/Bar:1", "http://r/e:1", "r/e@sha256", "r/e:1@", "r//e:1")
    ),
    (dict(image="r/e:ü"), "give it a tag other than latest"),
    (dict(image="r/e:ü@sha256:" + "0" * 64), "give it a tag other than latest"),
    (dict(pathways_tag="jax-ü"), "--pathways-tag jax-ü"),
    (dict(bucket="gs://some-bucket/../x"), "write gs://NAME"),
    (dict(colocated_python="r/python"), "--colocated-python r/python: give it a tag"),
    (dict(pathways_tag="latest"), "latest moves under a run"),
    (dict(pathways_tag="a b"), "--pathways-tag a b"),
    (dict(recipe="/home/me/recipe.py"), "relative to the folder that the Dockerfile copies"),
    (dict(recipe="../recipe.py:recipe"), "relative to the folder that the Dockerfile copies"),
    (dict(slices=0, missing=0, policy=Policy()), "--slices 0: use 1 or more"),
    (dict(spares=-1), "--spares -1: use 0 or more"),
    (dict(missing=4), "--missing 4: use 1 to 3"),
    (dict(missing=0), "with 0 a lost slice ends the run"),
    (dict(slices=2**31), "Kubernetes cannot count"),
    (dict(spares=2**31), "--spares 2147483648: Kubernetes cannot count"),
    (dict(max_restarts=0), "with 0 a lost controller ends the run"),
    (dict(max_restarts=2**31), "use 1 to 2147483647"),
    (dict(policy=Policy(deadline=1e15)), "policy.deadline=1e+15: no pod waits so long"),
    (dict(policy=Policy(grace=1e30)), "policy.grace=1e+30: no pod waits so long"),
    (dict(priority_value=5), "say which class has it"),
    (dict(priority="high", priority_value=2 * 10**9), "use at most 1000000000"),
    (dict(policy=Policy(min_slices=4)), "policy.min_slices=4 but --slices 3"),
    (dict(missing=1, policy=Policy()), "goes on with 2 of 3 slices missing"),
    (dict(colocated_python="r/p:1", suspend_resume=True), "cannot be suspended and resumed"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[says[:50] for _, says in REFUSED])
def test_what_would_not_start_or_not_survive_is_refused(change, says):
    check(LAUNCH)
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        check(replace(LAUNCH, **change))
    assert "\n" not in str(refused.value)


def test_each_check_refuses_something():
    found = dict.fromkeys(CHECKS, 0)
    for change, _ in REFUSED:
        for find in CHECKS:
            found[find] += any(True for _ in find(replace(LAUNCH, **change)))
    assert all(found.values())


def test_the_longest_name_still_fits_the_label():
    check(replace(LAUNCH, name="a" * MOST_NAME))
    assert MOST_NAME == 22
    assert len(coordinator_label("a" * 22)) <= 63 < len(coordinator_label("a" * 23))


@pytest.mark.parametrize(
    "change",
    [
        dict(image="r/elastix@sha256:" + "0" * 64),
        dict(image="r/elastix:latest@sha256:" + "0" * 64),
        dict(image="localhost:5000/elastix:1"),
        dict(namespace="1st-team", queue="1st.queue"),
        dict(head=Head(cpu="500m", memory="1.5Gi")),
        dict(head=Head(cpu="1e1", memory="2000000000")),
        dict(bucket="gs://some-bucket/a/b/"),
        dict(recipe="recipes.quickstart:recipe"),
        dict(missing=1, policy=Policy(min_slices=2)),
    ],
)
def test_what_is_right_is_taken(change):
    launch = replace(LAUNCH, **change)
    check(launch)
    review(build_jobset(launch), launch)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(policy=Policy(patience=5.0)), "policy.patience=5 is less"),
        (dict(policy=Policy(deadline=20.0)), "policy.deadline=20 is less"),
        (dict(slices=1, missing=1, policy=Policy()), "a lost slice is a pause"),
        (dict(pathways_tag="20990101-jax_0.9.0"), "is for JAX 0.9.0 and here is 0.12.0"),
        (dict(pathways_tag="jax-0.1"), "is for JAX 0.1 and here is 0.12.0"),
    ],
)
def test_what_may_be_a_mistake_is_warned_of(change, says):
    assert warnings(LAUNCH, "0.12.0") == [] and warnings(LAUNCH, "0.12.0.1") == []
    (line,) = warnings(replace(LAUNCH, **change), "0.12.0")
    assert says in line


# --- the commands -------------------------------------------------------------------------------


def test_without_render_and_apply_it_only_tells(capsys):
    assert main(TINY) == 0
    told = capsys.readouterr().out
    assert "48 chips in 12 VMs (ct5lp-hightpu-4t)" in told
    assert "gs://some-bucket/runs/tiny" in told
    assert "3 of 3 at once: to lose all is a pause" in told and "nothing was made" in told


def test_a_rendered_file_is_never_overwritten(tmp_path, capsys):
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    assert main([*TINY, "--render", str(file)]) == 0
    text = file.read_text()
    (jobset,) = yaml.safe_load_all(text)
    assert jobset["metadata"]["name"] == "tiny"
    assert main([*TINY, "--render", str(file)]) == 0
    assert "holds it already" in capsys.readouterr().out
    assert main([*TINY, "--name", "other", "--render", str(file)]) == 2
    assert "name another file, or remove it" in capsys.readouterr().err
    assert file.read_text() == text
    assert main([*TINY, "--render", str(tmp_path)]) == 2
    assert "it is a folder): name another file" in capsys.readouterr().err
    assert main([*TINY, "--render", "a\0b"]) == 2
    assert "--render 'a\\x00b' cannot be written" in capsys.readouterr().err
    assert main([*TINY, "--render", str(tmp_path / "no" / "run.yaml")]) == 2
    assert main([*TINY, "--render", "-"]) == 0
    assert text in capsys.readouterr().out


def test_half_a_manifest_is_not_left(tmp_path):
    file = tmp_path / "run.yaml"
    with pytest.raises(UnicodeEncodeError):
        create(file, "kind: JobSet\n\ud800")
    assert not file.exists()


def test_fields_after_two_dashes_reach_the_policy_and_the_image(capsys):
    fields = ["--policy.min-slices", "2", "--num-steps", "9"]
    assert main([*TINY, "--render", "-", "--", *fields]) == 0
    printed = capsys.readouterr().out
    assert all(f"- {field}\n" in printed or f"- '{field}'\n" in printed for field in fields)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gke"], "the following arguments are required: RECIPE"),
        (["kube"], "invalid choice: 'kube'"),
        ([*TINY[1:], "--slices", "three"], "--slices three: use a whole number"),
        ([*TINY[1:], "--spares", "\u0663"], "--spares \u0663: use a whole number"),
        ([*TINY[1:], "--slices", "5"], "num_replicas=4 cannot keep 5 slices busy"),
        ([*TINY[1:], "--", "--policy.min-slices", "4"], "policy.min_slices=4 but there are 3"),
        ([*TINY[1:], "--", "--mesh.fsdp", "3"], "does not use the 16 devices of a slice"),
        ([*TINY[1:], "--", "--policy.patients", "4"], "no option and no field"),
        ([*TINY[1:], "--tpu", "v5e:3x3"], "no such topology"),
        ([*TINY[1:], "--image", "r/elastix"], "give it a tag"),
        ([*TINY[1:], "--elastic-flag", "elastic"], "invalid choice"),
        ([*TINY[1:], "--render", "x.yaml", "--apply"], "not allowed with"),
        (["xpk", *TINY[2:], "--apply"], "unrecognized arguments: --apply"),
        (["xpk", *TINY[2:], "--tpu", "v5e-8t:2x4"], "xpk has no machine ct5lp-hightpu-8t"),
        (["gke", "recipes/none.py", *OPTIONS], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments, says, capsys, tmp_path, monkeypatch
):
    assert main(["launch", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and len(captured.err.splitlines()) == 1 and not captured.out
    assert not Path("x.yaml").exists()


def test_help_is_worth_reading(capsys):
    assert main(["launch", "gke", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--render FILE" in told and "-- --policy.min-slices 2" in told


def fake_kubectl(folder: Path, status: int) -> None:
    """A program of that name, which keeps what it was told."""
    program = folder / "kubectl"
    script = f'echo "$@" > "{folder}/told"\ncat > "{folder}/in"\nexit {status}\n'
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)


@pytest.mark.parametrize(("status", "exit_status"), [(0, 0), (3, 1)])
def test_apply_hands_kubectl_what_render_prints(status, exit_status, tmp_path, monkeypatch, capsys):
    fake_kubectl(tmp_path, status)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main([*TINY, "--apply"]) == exit_status
    main([*TINY, "--render", "-"])
    assert (tmp_path / "told").read_text() == "apply -f -\n"
    assert (tmp_path / "in").read_text() == capsys.readouterr().out


def test_apply_without_kubectl_is_bad_input(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*TINY, "--apply"]) == 2
    assert "no kubectl on the PATH" in capsys.readouterr().err


def test_the_xpk_command_is_printed_with_what_it_lacks(capsys):
    assert (
        main(["launch", "xpk", *TINY[2:], "--priority-class", "mine", "--data-bucket", "gs://t-1"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    notes = [line for line in lines if line.startswith("# ")]
    assert any("xpk mounts no storage" in note for note in notes)
    assert any("xpk has no mine" in note for note in notes)
    assert lines[len(notes)] == "xpk workload create-pathways \\"


def test_the_xpk_command_says_the_same_numbers():
    command = xpk_command(FULL)
    for option in (
        "--tpu-type=v5litepod-4x4",
        "--num-slices=5",
        "--elastic-slices=3",
        "--max-slice-restarts=1000000",
        "--priority=high",
        "--namespace=team",
        "--termination-grace-period-seconds=300",
    ):
        assert f"{option} \\\n" in command
    assert any("--num_elastic_instances" in note for note in xpk_notes(FULL))
    assert any("--service-account" in note for note in xpk_notes(FULL))
    assert "no class high is made: its value is what the cluster says" in xpk_notes(FULL)
    assert not any("left out" in note and "head" in note for note in xpk_notes(LAUNCH))
    assert "--colocated-python-sidecar-image=r/python:1" in xpk_command(COLOCATED)


# --- the schemas --------------------------------------------------------------------------------

SCHEMA = ROOT.parent / "shared" / "data" / "jobset_v1alpha2.schema.json"
KINDS = {"plain": LAUNCH, "full": FULL, "colocated": COLOCATED}


@pytest.fixture(scope="module")
def validator():
    if not SCHEMA.exists():
        pytest.skip("the schema of a JobSet is not here")
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize("launch", KINDS.values(), ids=KINDS)
def test_the_jobset_is_valid(launch, validator):
    jobset = build_jobset(launch)
    assert [e.message for e in validator.iter_errors(jobset)] == []
    misspelled = planted(jobset, f"{WORKER_JOB}.backoffLimit", "many")
    assert list(validator.iter_errors(misspelled))


@pytest.mark.parametrize("launch", KINDS.values(), ids=KINDS)
def test_each_job_and_pod_is_valid(launch):
    kubernetes = pytest.importorskip("kubernetes_validate")
    for document in core_objects(build_jobset(launch), launch):
        kubernetes.validate(document, "1.31", strict=True)
        with pytest.raises(kubernetes.ValidationError):
            kubernetes.validate({**document, "misspelled": 1}, "1.31", strict=True)


def core_objects(jobset, launch):
    """The Job and the Pod of each replicated job, and what is applied beside the JobSet."""
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        names = {"metadata": {"name": job["name"]}}
        yield {"apiVersion": "batch/v1", "kind": "Job", **names, "spec": spec}
        yield {"apiVersion": "v1", "kind": "Pod", **names, "spec": spec["template"]["spec"]}
    yield from manifests(jobset, launch)[:-1]


# --- the image ----------------------------------------------------------------------------------

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_image_copies_what_exists_and_nothing_that_is_ignored():
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    copied = set()
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M):
        *sources, _ = line.split()
        copied.update(sources)
    assert copied == kept and all((ROOT / name).exists() for name in copied)


def test_the_image_installs_extras_that_exist():
    (extras,) = re.findall(r'"\.\[([\w,-]+)\]"', DOCKERFILE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert "-c constraints.txt" in DOCKERFILE


@pytest.mark.parametrize(
    ("version", "asked", "pins"),
    [("", [], {"jax", "jaxlib"}), ("0.10.2", ["jax==0.10.2", "jaxlib==0.10.2"], set())],
)
def test_the_image_is_built_by_what_a_shell_makes_of_its_lines(version, asked, pins, tmp_path):
    """The RUN of the Dockerfile, with a pip that keeps what it was told."""
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > told\n')
    pip.chmod(0o755)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    (run,) = re.findall(r"^RUN ((?:.*\\\n)*.*)$", DOCKERFILE, re.M)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JAX_VERSION": version}
    subprocess.run(["/bin/sh", "-c", run], cwd=tmp_path, env=path, check=True)
    told = (tmp_path / "told").read_text().splitlines()
    options = ["install", "--no-cache-dir", "-c", "constraints.txt", ".[pathways,text]"]
    assert told == [*options, *asked]
    left = (tmp_path / "constraints.txt").read_text().splitlines()
    assert {line.split("==")[0] for line in left} & {"jax", "jaxlib"} == pins
    assert any(line.startswith("jaxtyping==") for line in left)


def test_another_jax_is_taken_out_of_the_constraints():
    (pattern,) = re.findall(r"sed -i -E '/(.*?)/d'", DOCKERFILE)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    gone = {re.split("[=;]", line)[0] for line in pins if re.search(pattern, line)}
    assert gone == {"jax", "jaxlib"}
