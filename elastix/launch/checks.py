"""PURE: what is refused, and what is warned of, before any manifest is made.

Each check looks at a `Launch` and yields lines that name a value and the remedy. A preflight that
knows whether each permitted number of slices fits into memory is one more entry of `CHECKS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from elastix.launch.spec import HEAD, MOST_BACKOFF, WORKER, Launch

LABEL = 63
"""Characters that a label and a DNS name may have."""
LEAST_MEMORY = 1e9
"""Bytes for the controller: below it, a unit was forgotten."""
POD_SUFFIX = "-abcde"
"""What Kubernetes appends to a pod's name."""
OBJECT_NAME = 253
"""Characters that the name of an object may have, which is no label."""
MOST_SECONDS = 10**9
"""About thirty years; what waits for longer counts in numbers that are too small for it."""
SLICE_RESTART = 40.0
"""Seconds for a killed slice to come back, as MaxText's guide to elastic training tells of its own
demonstration. The image was on the node then; a new machine takes minutes."""

Check = Callable[[Launch], Iterator[str]]

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_DNS_1123.pattern}(\.{_DNS_1123.pattern})*")
_BARE_BUCKET = re.compile(r"gs://[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9]/?")
_BUCKET = re.compile(rf"{_BARE_BUCKET.pattern.removesuffix('/?')}(/[-\w.]+)*/?")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_WORD = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9](?:[-.A-Za-z0-9]*[A-Za-z0-9])?(?::[0-9]+)?"
_REPOSITORY = re.compile(rf"(?:{_HOST}/)?{_WORD}(?:/{_WORD})*")
_DIGEST = re.compile(r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[0-9a-fA-F]{32,}")
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(m|k|[KMGTPE]i|[MGTPE]|[eE]\d{1,2})?", re.ASCII)
_POWERS = {"": 0, "m": -1, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_JAX_IN_TAG = re.compile(r"jax[-_](\d+(?:\.\d+)+)")


def check(launch: Launch) -> None:
    """Refuse a launch that would not start, or would not survive what it is meant to.

    Raises:
        ValueError: the first reason, in one line.
    """
    for find in CHECKS:
        for problem in find(launch):
            raise ValueError(problem)


def warnings(launch: Launch, jax_version: str) -> list[str]:
    """What may be meant, and is worth a line; `jax_version` is the one installed here."""
    return [line for find in _DOUBTS for line in find(launch)] + list(_jax(launch, jax_version))


# --- names --------------------------------------------------------------------------------------


def coordinator_label(name: str) -> str:
    """The value that JobSet gives the label `jobset.sigs.k8s.io/coordinator`: the head's address,
    with the JobSet's own name as the subdomain."""
    return f"{name}-{HEAD}-0-0.{name}"


MOST_NAME = (LABEL - len(coordinator_label(""))) // 2
"""Characters that the JobSet's name may have."""


def _names(launch: Launch) -> Iterator[str]:
    if not _NAME.fullmatch(launch.name):
        yield (
            f"--name {launch.name}: use small letters, digits and dashes, a letter first, "
            "as in DNS-1035"
        )
    if len(launch.name) > MOST_NAME:
        yield (
            f"--name {launch.name}: {len(launch.name)} characters, use at most {MOST_NAME}, for "
            f"the head's address {coordinator_label('NAME')} is a label of at most {LABEL}"
        )
    last = f"{launch.name}-{WORKER}-{launch.hardware_slices - 1}-{launch.slice_type.vms - 1}"
    if len(last + POD_SUFFIX) > LABEL:
        yield f"--name {launch.name}: the pod {last}{POD_SUFFIX} has more than {LABEL} characters"
    if not (_DNS_1123.fullmatch(launch.namespace) and len(launch.namespace) <= LABEL):
        yield (
            f"--namespace {launch.namespace}: use small letters, digits and dashes, at most {LABEL}"
        )
    for option, value, most in (
        ("--queue", launch.queue, LABEL),
        ("--priority-class", launch.priority, OBJECT_NAME),
        ("--service-account", launch.head.service_account, OBJECT_NAME),
        ("--head-node-pool", launch.head.node_pool, LABEL),
    ):
        if value is not None and not (_SUBDOMAIN.fullmatch(value) and len(value) <= most):
            yield f"{option} {value}: use small letters, digits, dashes and dots, at most {most}"
    if launch.priority_value is not None and (launch.priority or "").startswith("system-"):
        yield (
            f"--priority-class {launch.priority}: Kubernetes keeps system- for itself, use another "
            "name, or leave out --priority-value if the class exists"
        )


def _places(launch: Launch) -> Iterator[str]:
    if not _BUCKET.fullmatch(launch.bucket) or {".", ".."} & set(launch.bucket.split("/")):
        yield f"--bucket {launch.bucket}: write gs://NAME or gs://NAME/FOLDER"
    if launch.data_bucket is not None and not _BARE_BUCKET.fullmatch(launch.data_bucket):
        yield f"--data-bucket {launch.data_bucket}: write gs://NAME, all of it is mounted"
    yield from _image("--image", launch.image)
    if launch.colocated_python is not None:
        yield from _image("--colocated-python", launch.colocated_python)
    if not _TAG.fullmatch(launch.pathways_tag) or launch.pathways_tag == "latest":
        yield (
            f"--pathways-tag {launch.pathways_tag}: name the tag of Pathways' images that was "
            "built for the JAX of your image; latest moves under a run that restarts"
        )
    path = launch.recipe.partition(":")[0]
    if path.startswith("/") or ".." in path.split("/"):
        yield (
            f"recipe {launch.recipe}: name it as the image has it, relative to the folder that "
            "the Dockerfile copies, such as recipes/quickstart.py"
        )


def _image(option: str, image: str) -> Iterator[str]:
    """A restarted pod must get the very image that it had: the bits are promised for one version
    of JAX."""
    name, at, digest = image.partition("@")
    folder, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    is_named = _REPOSITORY.fullmatch(f"{folder}{slash}{last}")
    if not is_named or (at and not _DIGEST.fullmatch(digest)):
        yield f"{option} {image!r}: name an image, such as REGISTRY/elastix:2026-01-31"
    elif (tag or not at) and (not _TAG.fullmatch(tag) or (tag == "latest" and not at)):
        yield (
            f"{option} {image}: give it a tag other than latest, or a digest, so that a pod that "
            "is restarted runs what it ran before"
        )


# --- counts -------------------------------------------------------------------------------------


def _counts(launch: Launch) -> Iterator[str]:
    if launch.slices < 1:
        yield f"--slices {launch.slices}: use 1 or more"
    if launch.spares < 0:
        yield f"--spares {launch.spares}: use 0 or more"
    if not 1 <= launch.missing <= launch.slices:
        yield (
            f"--missing {launch.missing}: use 1 to {launch.slices}, the number of slices; with 0 "
            "a lost slice ends the run"
        )
    if launch.slice_type.vms * launch.hardware_slices > MOST_BACKOFF:
        yield (
            f"--slices {launch.slices} and --spares {launch.spares}: Kubernetes cannot count "
            f"{launch.slice_type.vms} VMs each, use fewer"
        )
    if not 1 <= launch.max_restarts <= MOST_BACKOFF:
        yield (
            f"--max-restarts {launch.max_restarts}: use 1 to {MOST_BACKOFF}; with 0 a lost "
            "controller ends the run, though its checkpoints could resume it"
        )
    if not amount(launch.head.cpu):
        yield f"--head-cpu {launch.head.cpu}: use a number of CPUs, such as 24 or 500m"
    if amount(launch.head.memory) < LEAST_MEMORY:
        yield (
            f"--head-memory {launch.head.memory}: use an amount of bytes that Python and JAX fit "
            "into, such as 100G or 64Gi"
        )
    if launch.priority_value is not None and launch.priority is None:
        yield (
            f"--priority-value {launch.priority_value}: say which class has it, with "
            "--priority-class NAME"
        )
    if launch.priority_value is not None and abs(launch.priority_value) > 1_000_000_000:
        yield f"--priority-value {launch.priority_value}: use at most 1000000000"


def amount(quantity: str) -> float:
    """A quantity as Kubernetes writes it (24, 500m, 100G, 64Gi); 0 if it is none."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        return 0.0
    number, suffix = match[1], match[2] or ""
    if suffix[1:].isdecimal():
        return float(number + suffix)
    base = 1024.0 if suffix.endswith("i") else 1000.0
    return float(number) * base ** _POWERS[suffix[:1]]


def _elasticity(launch: Launch) -> Iterator[str]:
    policy = launch.policy
    for field, seconds in (("deadline", policy.deadline), ("grace", policy.grace)):
        if seconds > MOST_SECONDS:
            yield f"policy.{field}={seconds:g}: no pod waits so long, use at most {MOST_SECONDS}"
    if policy.min_slices > launch.slices:
        yield (
            f"policy.min_slices={policy.min_slices} but --slices {launch.slices}: lower it or use "
            "more slices"
        )
    if launch.missing < launch.slices - policy.min_slices:
        yield (
            f"--missing {launch.missing}: policy.min_slices={policy.min_slices} goes on with "
            f"{launch.slices - policy.min_slices} of {launch.slices} slices missing, so use at "
            "least that, or leave it out"
        )
    if launch.suspend_resume and launch.colocated_python is not None:
        yield (
            f"--colocated-python {launch.colocated_python}: a worker with Python beside it cannot "
            "be suspended and resumed, leave out --suspend-resume or the sidecar"
        )


CHECKS: tuple[Check, ...] = (_names, _places, _counts, _elasticity)
"""Every check, in the order in which they are made."""


# --- doubts -------------------------------------------------------------------------------------


def _times(launch: Launch) -> Iterator[str]:
    policy, slow = launch.policy, f"about {SLICE_RESTART:.0f} s, and minutes on a new machine"
    if 0 < policy.patience < SLICE_RESTART:
        yield (
            f"policy.patience={policy.patience:g} is less than a slice takes to come back ({slow}):"
            " it waits in vain at each loss; use 0, or more"
        )
    if policy.deadline < SLICE_RESTART:
        yield (
            f"policy.deadline={policy.deadline:g} is less than a slice takes to come back ({slow}):"
            f" the run fails when fewer than {policy.min_slices} are left; use more"
        )


def _alone(launch: Launch) -> Iterator[str]:
    if launch.slices == 1 and not launch.spares:
        yield "--slices 1: a lost slice is a pause, for there is no other to go on with"


_DOUBTS: tuple[Check, ...] = (_times, _alone)


def _jax(launch: Launch, version: str) -> Iterator[str]:
    named = _JAX_IN_TAG.search(launch.pathways_tag)
    if named and version != named[1] and not version.startswith(f"{named[1]}."):
        yield (
            f"--pathways-tag {launch.pathways_tag} is for JAX {named[1]} and here is {version}: "
            f"build the image with JAX {named[1]}"
        )
