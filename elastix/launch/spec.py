"""PURE: what is to be launched, as one frozen value, and the numbers that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from elastix.launch.tpus import SliceType
from elastix.machine import Policy

HEAD, WORKER = "pathways-head", "pathways-worker"
"""The replicated jobs of the JobSet, as pathwaysutils names them."""
CONTROLLER, PROXY, RESOURCE_MANAGER = "elastix", "pathways-proxy", "pathways-rm"
"""The containers of the head: `elastix run`, and the two sidecars that it cannot do without."""
MOUNT = "/data"
"""Where the bucket of the recipe's data is mounted in the controller."""
MOST_BACKOFF = 2**31 - 1
"""`backoffLimit` is a signed 32-bit number."""
LEAST_RESTARTS = 1_000_000
"""Restarts of a slice that are permitted at least: the default of pathwaysutils."""

ElasticFlag = Literal["num_elastic_slices", "num_elastic_instances"]


@dataclass(frozen=True)
class Head:
    """The pod that decides: its node pool, its service account, its share of the node.

    `cpu` and `memory` are limits of the controller alone, in Kubernetes' units; the two sidecars
    take 24 CPUs and 132 GB beside it.
    """

    node_pool: str = "cpu-np"
    service_account: str = "default"
    cpu: str = "24"
    memory: str = "100G"


@dataclass(frozen=True)
class Launch:
    """One run on Cloud TPU: what `elastix launch` was told, and what the recipe says.

    Args:
        recipe: RECIPE as the image has it; `fields` are the fields of it that are replaced.
        num_steps: of the recipe, as is `policy`.
        slices: slices that the run sees; `spares` more are kept warm and take over for them.
        missing: slices that may be missing at once before Pathways gives the whole run up.
        image: the controller's image, with a tag or a digest.
        pathways_tag: tag of the images of Pathways' own servers.
        bucket: gs://NAME or gs://NAME/FOLDER, for the run directory and Pathways' scratch.
        data_bucket: gs://NAME, mounted read-only at /data; None: the recipe's data are in the
            image.
        priority: name of the PriorityClass of all pods; None: the cluster's default.
        priority_value: if it is to be made too, its value.
        suspend_resume: leave a slice that is announced to go the time to write out its memory.
        colocated_python: image of a sidecar that runs Python beside the workers; None: there is
            none.
        max_restarts: how often Kubernetes may start the whole JobSet again.
    """

    recipe: str
    fields: tuple[str, ...]
    num_steps: int
    policy: Policy
    name: str
    slice_type: SliceType
    slices: int
    missing: int
    image: str
    pathways_tag: str
    bucket: str
    data_bucket: str | None = None
    spares: int = 0
    namespace: str = "default"
    queue: str | None = None
    priority: str | None = None
    priority_value: int | None = None
    suspend_resume: bool = False
    colocated_python: str | None = None
    elastic_flag: ElasticFlag = "num_elastic_slices"
    max_restarts: int = 100
    head: Head = field(default_factory=Head)

    @property
    def hardware_slices(self) -> int:
        """Slices that are paid for: those that the run sees, and the spares."""
        return self.slices + self.spares

    @property
    def slice_restarts(self) -> int:
        """Restarts of every VM of a slice that Kubernetes permits.

        To give up is for the policy alone, which does after `max_losses` losses without a step in
        between. So a slice may be lost that often before each of the recipe's steps, and never
        less than a million times: Kubernetes also counts deaths that the run does not see.
        """
        most = MOST_BACKOFF // self.slice_type.vms
        return min(max(LEAST_RESTARTS, self.num_steps * self.policy.max_losses), most)

    @property
    def backoff_limit(self) -> int:
        """The worker Job's: VMs of a slice x restarts, since each VM that restarts counts."""
        return self.slice_type.vms * self.slice_restarts

    @property
    def head_grace(self) -> int:
        """Seconds from SIGTERM to SIGKILL for the head: the policy's, and 5 to leave."""
        return math.ceil(self.policy.grace) + 5

    @property
    def worker_grace(self) -> int:
        """Seconds from SIGTERM to SIGKILL for a worker: 30 as in xpk, or, if it is to write out
        its memory first, as many as the policy gives a save."""
        return max(30, math.ceil(self.policy.save_deadline)) if self.suspend_resume else 30

    @property
    def scratch(self) -> str:
        """Where Pathways keeps what it likes."""
        return f"{self.bucket.rstrip('/')}/scratch"

    @property
    def run_dir(self) -> str:
        """The run directory, in the bucket: the same name resumes the same run."""
        return f"{self.bucket.rstrip('/')}/runs/{self.name}"

    @property
    def command(self) -> tuple[str, ...]:
        """What the controller runs."""
        where = ("--backend", "pathways", "--run-dir", self.run_dir)
        return ("elastix", "run", self.recipe, *where, *self.fields)

    @property
    def virtual_slices(self) -> str:
        """One entry for each slice that the run sees, whatever hardware stands behind it."""
        return ",".join([self.slice_type.instance_type] * self.slices)
