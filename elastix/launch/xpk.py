"""PURE: the xpk command that launches the same, as far as xpk 1.16 can."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from elastix.launch.checks import Check
from elastix.launch.spec import Head, Launch

PRIORITIES = ("very-low", "low", "medium", "high", "very-high")
"""The priority classes of a cluster that xpk made."""

_SERVERS = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways"


def xpk_command(launch: Launch) -> str:
    """The command for a shell, one option a line; CLUSTER is left to the shell's variable.

    Raises:
        ValueError: xpk does not know the machine type.
    """
    head, *options = _words(launch)
    quoted = [shlex.quote(option) for option in options]
    return " \\\n  ".join([head, *quoted, '--cluster="$CLUSTER"'])


def xpk_notes(launch: Launch) -> list[str]:
    """What that command does otherwise than `elastix launch gke`, one line each."""
    return [line for find in _DIFFERENCES for line in find(launch)]


def _words(launch: Launch) -> Iterator[str]:
    tpu = launch.slice_type.tpu
    if not tpu.xpk:
        raise ValueError(
            f"--tpu {launch.slice_type}: xpk has no machine {tpu.machine}; use "
            f"{tpu.name.removesuffix('-8t')}:{launch.slice_type.topology}, or elastix launch gke"
        )
    yield "xpk workload create-pathways"
    yield f"--workload={launch.name}"
    yield f"--tpu-type={tpu.xpk}-{launch.slice_type.topology}"
    yield f"--num-slices={launch.hardware_slices}"
    yield f"--max-slice-restarts={launch.slice_restarts}"
    yield f"--max-restarts={launch.max_restarts}"
    yield f"--termination-grace-period-seconds={launch.worker_grace}"
    yield f"--pathways-gcs-location={launch.scratch}"
    yield f"--server-image={_SERVERS}/server:{launch.pathways_tag}"
    yield f"--proxy-server-image={_SERVERS}/proxy_server:{launch.pathways_tag}"
    yield f"--docker-image={launch.image}"
    if launch.namespace != "default":
        yield f"--namespace={launch.namespace}"
    if launch.priority in PRIORITIES:
        yield f"--priority={launch.priority}"
    if launch.colocated_python is not None:
        yield f"--colocated-python-sidecar-image={launch.colocated_python}"
    yield from _elastic(launch)
    yield f"--command={shlex.join(launch.command)}"


def _elastic(launch: Launch) -> Iterator[str]:
    arguments = [f"--virtual_slices={launch.virtual_slices}"]
    if launch.elastic_flag != "num_elastic_slices":
        arguments.append(f"--{launch.elastic_flag}={launch.missing}")
    yield f"--custom-pathways-proxy-server-args={' '.join(arguments)}"
    # Without it xpk gives the worker Job a small backoffLimit.
    yield f"--elastic-slices={launch.missing}"


# --- what is not the same -----------------------------------------------------------------------


def _data(launch: Launch) -> Iterator[str]:
    if launch.data_bucket is not None:
        yield f"{launch.data_bucket} is not mounted: xpk mounts no storage for Pathways"


def _restarts(launch: Launch) -> Iterator[str]:
    yield (
        f"the JobSet is not started again: xpk reads --max-restarts={launch.max_restarts} and "
        "leaves it out for Pathways, so a lost controller ends the run"
    )
    yield "no exit status is told from another: 75 ends the JobSet as 1 does"


def _priority(launch: Launch) -> Iterator[str]:
    if launch.priority is not None and launch.priority not in PRIORITIES:
        yield f"the priority is medium: xpk has no {launch.priority}, only {', '.join(PRIORITIES)}"
    if launch.priority_value is not None:
        yield f"no class {launch.priority} is made: its value is what the cluster says"
    if launch.queue is not None and launch.queue != "multislice-queue":
        yield f"the queue is multislice-queue, not {launch.queue}"


def _head(launch: Launch) -> Iterator[str]:
    if launch.head != Head():
        yield (
            "the head is xpk's own: --head-node-pool, --service-account, --head-cpu and "
            "--head-memory are left out"
        )


def _both_flags(launch: Launch) -> Iterator[str]:
    if launch.elastic_flag != "num_elastic_slices":
        yield f"the proxy gets --num_elastic_slices beside --{launch.elastic_flag}"


_DIFFERENCES: tuple[Check, ...] = (_data, _restarts, _priority, _head, _both_flags)
