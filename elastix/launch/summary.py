"""PURE: what would be launched, for a person to read before anything is."""

from __future__ import annotations

from elastix.launch.spec import Launch
from elastix.wording import duration, plural


def summary(launch: Launch) -> str:
    """A line a fact, with the numbers in the words of the recipe's policy."""
    facts = [
        ("run", f"{launch.recipe} as {launch.name} in namespace {launch.namespace}"),
        ("slices", _slices(launch)),
        ("hardware", _hardware(launch)),
        ("may be missing", _missing(launch)),
        ("trains on", _least(launch)),
        ("run directory", launch.run_dir),
        ("images", f"{launch.image}; Pathways {launch.pathways_tag}"),
        ("on a lost slice", f"the process goes on; each may restart {launch.slice_restarts} times"),
        ("on exit 0", "done: all pods end"),
        ("on exit 1 or 2", "failed, or bad input: all pods end and nothing is started again"),
        ("on exit 75", f"preempted: {_again(launch)}"),
        ("otherwise", f"a lost head, a crash: {_again(launch)}"),
        ("on SIGTERM", f"the head has {launch.head_grace} s, a worker {launch.worker_grace} s"),
    ]
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in facts)


def _slices(launch: Launch) -> str:
    spares = f", and {plural(launch.spares, 'spare')} to take over" if launch.spares else ""
    return f"{launch.slices} x {launch.slice_type}{spares}"


def _hardware(launch: Launch) -> str:
    slices, each = launch.hardware_slices, launch.slice_type
    return (
        f"{plural(slices * each.chips, 'chip')} in {plural(slices * each.vms, 'VM')} "
        f"({each.tpu.machine}), and one node of {launch.head.node_pool} for the head"
    )


def _missing(launch: Launch) -> str:
    what = "to lose all is a pause" if launch.missing == launch.slices else "one more ends the run"
    return f"{launch.missing} of {launch.slices} at once: {what}"


def _least(launch: Launch) -> str:
    policy = launch.policy
    return (
        f"{policy.min_slices} or more; below that it waits up to {duration(policy.deadline)} and "
        "fails"
    )


def _again(launch: Launch) -> str:
    return f"all pods begin anew and the run resumes from disk, at most {launch.max_restarts} times"
