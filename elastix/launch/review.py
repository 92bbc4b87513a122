"""PURE: what is wrong with a finished manifest: what the API server or JobSet's webhook would
refuse, and what they would take although it is not the launch that was asked for.

The first are rules that the schema of a JobSet does not hold (`pkg/webhooks/jobset_webhook.go`);
the second would be found out when the first slice is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from elastix.launch.checks import LABEL, POD_SUFFIX, coordinator_label
from elastix.launch.manifest import FINAL_STATUSES
from elastix.launch.spec import (
    CONTROLLER,
    HEAD,
    MOST_BACKOFF,
    MOUNT,
    PROXY,
    RESOURCE_MANAGER,
    WORKER,
    Launch,
)

_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_ONE_POOL_A_SLICE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
_ENVIRONMENT = {
    "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    "JAX_BACKEND_TARGET": "grpc://localhost:29000",
    "JAX_PLATFORMS": "proxy",
}


def review(manifest: Mapping[str, Any], launch: Launch) -> None:
    """Refuse a manifest that is not what was asked for.

    Raises:
        ValueError: the first reason, in one line. The launch was checked before, so this is not
            the user's mistake: another version of pathwaysutils is installed, say.
    """
    for problem in problems(manifest, launch):
        raise ValueError(
            f"the manifest is wrong: {problem}; install the versions in constraints.txt, or "
            "report it"
        )


def problems(manifest: Mapping[str, Any], launch: Launch) -> Iterator[str]:
    """All that is wrong, one line each."""
    spec = manifest["spec"]
    jobs = {job["name"]: job for job in spec["replicatedJobs"]}
    if list(jobs) != [HEAD, WORKER]:
        yield f"its jobs are {', '.join(jobs)}, not {HEAD} and {WORKER}"
        return
    yield from _names(manifest["metadata"]["name"], jobs)
    yield from _ends(spec)
    yield from _head(jobs[HEAD], launch)
    yield from _workers(jobs[WORKER], launch)


def _names(name: str, jobs: Mapping[str, Any]) -> Iterator[str]:
    if len(coordinator_label(name)) > LABEL:
        yield f"the head's address {coordinator_label(name)} is longer than {LABEL}"
    for job in jobs.values():
        last = f"{name}-{job['name']}-{job['replicas'] - 1}"
        pod = f"{last}-{job['template']['spec']['completions'] - 1}{POD_SUFFIX}"
        if len(pod) > LABEL or not _DNS_1035.fullmatch(pod):
            yield f"the pod name {pod} is no DNS-1035 label"


def _ends(spec: Mapping[str, Any]) -> Iterator[str]:
    """What the JobSet does when a job fails or is done."""
    if spec.get("coordinator") != {"replicatedJob": HEAD}:
        yield f"the coordinator is {spec.get('coordinator')}"
    if spec.get("successPolicy", {}).get("targetReplicatedJobs") != [HEAD]:
        yield "it is not done when its head is"
    policy = spec["failurePolicy"]
    if policy.get("maxRestarts", 0) < 1:
        yield "maxRestarts is 0: a lost controller would end the run"
    rules = policy.get("rules", [])
    for rule in rules:
        if not _RULE_NAME.fullmatch(rule["name"]):
            yield f"the failure rule may not be named {rule['name']}"
        if rule.get("targetReplicatedJobs") != [HEAD] or rule["action"] != "FailJobSet":
            yield f"the failure rule {rule['name']} is not about a head that failed for good"
    if [rule.get("onJobFailureReasons") for rule in rules] != [["PodFailurePolicy"]]:
        yield "a run that failed for good would be started again"


# --- the jobs -----------------------------------------------------------------------------------


def _head(job: Mapping[str, Any], launch: Launch) -> Iterator[str]:
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    if job["replicas"] != 1 or (spec["completionMode"], spec["completions"]) != ("Indexed", 1):
        yield "the coordinator is not one indexed pod"
    if pod["restartPolicy"] != "Never" or spec["backoffLimit"] != 0:
        yield "the head would be restarted in its pod, where podFailurePolicy is not allowed"
    (rule,) = spec["podFailurePolicy"]["rules"]
    codes = {"containerName": CONTROLLER, "operator": "In", "values": [*FINAL_STATUSES]}
    if rule != {"action": "FailJob", "onExitCodes": codes}:
        yield f"podFailurePolicy fails the head for {rule}"
    if pod.get("terminationGracePeriodSeconds", 30) < launch.policy.grace:
        yield f"the head is killed before policy.grace={launch.policy.grace:g} seconds are over"
    yield from _priority(pod, launch)
    yield from _controller(pod, launch)
    yield from _servers(pod, launch)


def _controller(pod: Mapping[str, Any], launch: Launch) -> Iterator[str]:
    (container,) = pod["containers"]
    if tuple(container["command"]) != launch.command or container["image"] != launch.image:
        yield f"the controller runs {' '.join(container['command'])} in {container['image']}"
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    for name, value in _ENVIRONMENT.items():
        if environment.get(name) != value:
            yield f"{name} is {environment.get(name)}, not {value}"
    mounted = [m["name"] for m in container.get("volumeMounts", ()) if m["mountPath"] == MOUNT]
    buckets = [
        f"gs://{volume['csi']['volumeAttributes']['bucketName']}"
        for volume in pod.get("volumes", ())
        if volume["name"] in mounted
    ]
    if buckets != ([launch.data_bucket.rstrip("/")] if launch.data_bucket else []):
        yield f"{MOUNT} holds {', '.join(buckets) or 'nothing'}, not {launch.data_bucket}"


def _servers(pod: Mapping[str, Any], launch: Launch) -> Iterator[str]:
    """The sidecars: they start before the controller, and outlive it."""
    sidecars = {container["name"]: container for container in pod["initContainers"]}
    if set(sidecars) != {RESOURCE_MANAGER, PROXY}:
        yield f"the head's sidecars are {', '.join(sidecars)}"
        return
    for name, container in sidecars.items():
        if container.get("restartPolicy") != "Always":
            yield f"{name} is no sidecar: the controller would wait for it to end"
        if not container["image"].endswith(f":{launch.pathways_tag}"):
            yield f"{name} runs {container['image']}"
    yield from _arguments(
        sidecars[RESOURCE_MANAGER],
        {
            "--instance_count": str(launch.hardware_slices),
            "--instance_type": launch.slice_type.instance_type,
            "--gcs_scratch_location": launch.scratch,
        },
    )
    yield from _arguments(
        sidecars[PROXY],
        {
            f"--{launch.elastic_flag}": str(launch.missing),
            "--virtual_slices": launch.virtual_slices,
            "--gcs_scratch_location": launch.scratch,
        },
    )


def _arguments(container: Mapping[str, Any], wanted: Mapping[str, str]) -> Iterator[str]:
    given = dict(argument.split("=", 1) for argument in container["args"])
    for flag, value in wanted.items():
        if given.get(flag) != value:
            yield f"{container['name']} has {flag}={given.get(flag)}, not {value}"


def _workers(job: Mapping[str, Any], launch: Launch) -> Iterator[str]:
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    slice_type = launch.slice_type
    if job["template"]["metadata"].get("annotations") != _ONE_POOL_A_SLICE:
        yield "a slice may be spread over node pools"
    if job["replicas"] != launch.hardware_slices:
        yield f"there are {job['replicas']} slices, not {launch.hardware_slices}"
    if {spec["completions"], spec["parallelism"]} != {slice_type.vms}:
        yield f"a slice has {spec['completions']} pods, {slice_type} has {slice_type.vms} VMs"
    if not launch.backoff_limit <= spec["backoffLimit"] <= MOST_BACKOFF:
        yield (
            f"backoffLimit is {spec['backoffLimit']}, not {launch.backoff_limit}: slices that are "
            "lost often would end the run"
        )
    selector = {
        "cloud.google.com/gke-tpu-accelerator": slice_type.tpu.accelerator,
        "cloud.google.com/gke-tpu-topology": slice_type.topology,
    }
    if pod.get("nodeSelector") != selector:
        yield f"the workers' nodes are {pod.get('nodeSelector')}"
    worker = next(c for c in pod["containers"] if c["name"] == "pathways-worker")
    chips = {"google.com/tpu": str(slice_type.tpu.chips_per_vm)}
    if worker["resources"]["limits"] != chips:
        yield f"a worker has {worker['resources']['limits']}, not {chips}"
    if not worker["image"].endswith(f":{launch.pathways_tag}"):
        yield f"the workers run {worker['image']}"
    beside = [c["name"] for c in pod.get("initContainers", ())]
    if launch.suspend_resume and beside:
        yield f"{', '.join(beside)} runs beside workers that are to be suspended and resumed"
    if pod.get("terminationGracePeriodSeconds", 30) < launch.worker_grace:
        yield f"a worker is killed before its {launch.worker_grace} seconds are over"
    yield from _priority(pod, launch)


def _priority(pod: Mapping[str, Any], launch: Launch) -> Iterator[str]:
    if pod.get("priorityClassName") != launch.priority:
        yield f"a pod has the priority {pod.get('priorityClassName')}, not {launch.priority}"
