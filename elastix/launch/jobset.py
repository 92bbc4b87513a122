"""From a `Launch` to a JobSet, built by pathwaysutils; the only importer of it here.

`PathwaysJobSet` makes the two jobs, their containers, ports, environment and selectors. What it
lacks is given to it where it takes it (host network and the toleration of the workers, priority,
grace, the controller's resources, mounted data), and added afterwards by `completed` where
it does not.
"""

from __future__ import annotations

import math
from typing import Any

from elastix.launch.manifest import completed
from elastix.launch.spec import CONTROLLER, MOUNT, Launch

_SERVERS = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways"


def build_jobset(launch: Launch) -> dict[str, Any]:
    """The JobSet, as the values that YAML and JSON know.

    Raises:
        ValueError: pathwaysutils is not installed, with its Kubernetes client.
    """
    try:
        from pathwaysutils.experimental.gke.jobset import PathwaysJobSet
    except ImportError as error:
        raise ValueError(
            f"elastix launch gke needs {error.name or 'pathwaysutils'}: pip install "
            "'elastix-jax[gke]'"
        ) from error
    tpu, spelled = launch.slice_type.tpu, launch.elastic_flag == "num_elastic_slices"
    jobset = PathwaysJobSet(
        name=launch.name,
        namespace=launch.namespace,
        pathways_dir=launch.scratch,
        tpu_type=tpu.machine,
        topology=launch.slice_type.topology,
        num_slices=launch.hardware_slices,
        max_restarts=launch.max_restarts,
        max_slice_restarts=launch.slice_restarts,
        termination_grace_period_seconds=launch.worker_grace,
        elastic_slices=launch.missing if spelled else 0,
        labels={"kueue.x-k8s.io/queue-name": launch.queue} if launch.queue else None,
        pathways_rm_and_worker_image=f"{_SERVERS}/server:{launch.pathways_tag}",
        pathways_proxy_image=f"{_SERVERS}/proxy_server:{launch.pathways_tag}",
        head_pod_spec_kwargs=_head_pod(launch),
        worker_pod_spec_kwargs=_worker_pod(launch),
        proxy_container_kwargs={"args": _proxy_arguments(launch)},
    )
    _add_controller(jobset, launch)
    return completed(jobset.to_dict())


def _add_controller(jobset: Any, launch: Launch) -> None:
    jobset.add_user_workload(
        launch.image,
        launch.command,
        name=CONTROLLER,
        env=controller_environment(launch),
        resources={"limits": {"cpu": launch.head.cpu, "memory": launch.head.memory}},
    )
    if launch.data_bucket is not None:
        name = launch.data_bucket.removeprefix("gs://").strip("/")
        jobset.add_gcsfuse(CONTROLLER, MOUNT, name, read_only=True)
    if launch.colocated_python is not None:
        jobset.add_colocated_python(launch.colocated_python)


def controller_environment(launch: Launch) -> dict[str, str]:
    """What the controller's environment holds beside how to reach the proxy.

    The last lines of a log are lost with a crash unless Python writes them at once. A proxy that
    does not answer ends `elastix run` as bad input, and with that the JobSet; so it has as long as
    the policy waits for slices, and a minute at least.
    """
    return {
        "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS": f"{max(60, math.ceil(launch.policy.deadline))}",
        "PYTHONUNBUFFERED": "1",
        "TPU_SKIP_MDS_QUERY": "true",
        "XCLOUD_ENVIRONMENT": "GCP",
    }


def _proxy_arguments(launch: Launch) -> list[str]:
    arguments = [f"--virtual_slices={launch.virtual_slices}"]
    if launch.elastic_flag != "num_elastic_slices":
        arguments.append(f"--{launch.elastic_flag}={launch.missing}")
    if launch.colocated_python is not None:
        arguments.append("--sidecar_name=external")
    return arguments


def _head_pod(launch: Launch) -> dict[str, Any]:
    """On the pod's own network: on the host's it would have the node's service account."""
    return {
        "node_selector": {"cloud.google.com/gke-nodepool": launch.head.node_pool},
        "service_account_name": launch.head.service_account,
        "termination_grace_period_seconds": launch.head_grace,
        **_priority(launch),
    }


def _worker_pod(launch: Launch) -> dict[str, Any]:
    """On the host's network, as in xpk: what slices send each other is what training waits for."""
    return {
        "dns_policy": "ClusterFirstWithHostNet",
        "host_network": True,
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
        **_priority(launch),
    }


def _priority(launch: Launch) -> dict[str, Any]:
    return {"priority_class_name": launch.priority} if launch.priority is not None else {}
