"""PURE: what a JobSet of pathwaysutils lacks, and the PriorityClass beside it.

How the run ends decides what Kubernetes does, and takes two rules that only work together. The
head's Job has `backoffLimit` 0, so any failure of its pod fails it, and the JobSet begins anew, at
most `maxRestarts` times: right for 75 (preempted), for a crash and for a lost node, since the same
command resumes from disk. But 1 (failed) and 2 (bad input) would only fail again. For these the
Job's `podFailurePolicy` has `FailJob`, which alone would change nothing, for the Job failed before
too; it gives the failure the reason `PodFailurePolicy`, and by that reason, on that job, a rule of
the JobSet's `failurePolicy` has `FailJobSet`, which does not look at `maxRestarts`
(`executeFailurePolicy` in JobSet's `pkg/controllers/failure_policy.go`).
"""

from __future__ import annotations

import copy
from typing import Any

from elastix.launch.spec import CONTROLLER, HEAD, WORKER, Launch

FINAL_STATUSES = (1, 2)
"""Exit statuses of `elastix run` after which the same command would end the same way."""
FAIL_RULE = "elastixFailed"
"""The name of the JobSet's rule; it must be unique and may hold no dash."""


def completed(jobset: dict[str, Any]) -> dict[str, Any]:
    """The JobSet with how it ends, and with a node pool for each slice, said of the Job too: for
    the workers pathwaysutils says it of the pods alone."""
    manifest = copy.deepcopy(jobset)
    manifest["spec"]["failurePolicy"]["rules"] = [
        {
            "name": FAIL_RULE,
            "action": "FailJobSet",
            "targetReplicatedJobs": [HEAD],
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    job_template(manifest, HEAD)["spec"]["podFailurePolicy"] = {"rules": [_fails_for_good()]}
    worker = job_template(manifest, WORKER)
    worker["metadata"]["annotations"] = dict(worker["spec"]["template"]["metadata"]["annotations"])
    return manifest


def job_template(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """The Job template of the replicated job `name`."""
    jobs = manifest["spec"]["replicatedJobs"]
    return next(job["template"] for job in jobs if job["name"] == name)


def priority_class(name: str, value: int) -> dict[str, Any]:
    """The PriorityClass `name`; higher values are served first, and may take others' slices."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
        "globalDefault": False,
        "description": "elastix: training runs that may take slices of less important ones",
    }


def manifests(jobset: dict[str, Any], launch: Launch) -> list[dict[str, Any]]:
    """Everything that is applied, in order."""
    if launch.priority is None or launch.priority_value is None:
        return [jobset]
    return [priority_class(launch.priority, launch.priority_value), jobset]


def _fails_for_good() -> dict[str, Any]:
    codes = {"containerName": CONTROLLER, "operator": "In", "values": [*FINAL_STATUSES]}
    return {"action": "FailJob", "onExitCodes": codes}
