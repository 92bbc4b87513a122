"""Shrinking: the smallest schedule that still fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from elastix.machine import Policy
from elastix.testing.schedules import Fault, Schedule

Change = Callable[[], Schedule]


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Drop faults and lower numbers as long as the schedule `fails`, greedily."""
    while (smaller := next(filter(fails, _smaller(schedule)), None)) is not None:
        schedule = smaller
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Simpler schedules, the boldest first; those that make no sense are passed over."""
    for change in _changes(schedule):
        try:
            yield change()
        except ValueError:
            continue


def _changes(schedule: Schedule) -> Iterator[Change]:
    faults = schedule.faults
    for n in range(len(faults)):
        yield partial(replace, schedule, faults=faults[:n] + faults[n + 1 :])
    for _, steps in _lower(schedule, "num_steps"):
        on_disk = tuple(sorted({min(s, steps) for s in schedule.on_disk}))
        yield partial(replace, schedule, num_steps=steps, on_disk=on_disk)
    for field, value in (*_lower(schedule, "num_slices"), *_plainer(schedule)):
        yield partial(replace, schedule, **{field: value})
    for field, value in _lower_policy(schedule.policy):
        yield partial(_with_policy, schedule, field, value)
    for n, fault in enumerate(faults):
        for field, value in _lower_fault(fault):
            yield partial(_with_fault, schedule, n, field, value)


def _with_policy(schedule: Schedule, field: str, value: Any) -> Schedule:
    return replace(schedule, policy=replace(schedule.policy, **{field: value}))


def _with_fault(schedule: Schedule, n: int, field: str, value: Any) -> Schedule:
    faults = list(schedule.faults)
    faults[n] = replace(faults[n], **{field: value})
    return replace(schedule, faults=tuple(faults))


def _plainer(schedule: Schedule) -> Iterator[tuple[str, Any]]:
    for n in range(len(schedule.on_disk)):
        yield "on_disk", schedule.on_disk[:n] + schedule.on_disk[n + 1 :]
        yield "on_disk", tuple(s - (m == n) for m, s in enumerate(schedule.on_disk))
    if schedule.save_seconds != 1.0:
        yield "save_seconds", 1.0
    if schedule.durable:
        yield "durable", False


def _lower(value: Any, *fields: str) -> Iterator[tuple[str, int]]:
    """Half, and one less, of each of these counts."""
    for field in fields:
        now = getattr(value, field)
        for lower in sorted({now // 2, now - 1}):
            if lower >= 1:
                yield field, lower


def _lower_policy(policy: Policy) -> Iterator[tuple[str, Any]]:
    """The default first; then one less."""
    for field in dataclasses.fields(Policy):
        if getattr(policy, field.name) != field.default:
            yield field.name, field.default
    default = Policy()
    counts = ("min_slices", "inflight", "snapshot_every", "checkpoint_every", "stable_probes")
    for name in (*counts, "max_slices", "keep_checkpoints"):
        now = getattr(policy, name)
        if now != getattr(default, name) and now and now > 1:
            yield name, now - 1


def _lower_fault(fault: Fault) -> Iterator[tuple[str, Any]]:
    for n, slice_id in enumerate(fault.slices):
        if len(fault.slices) > 1:
            yield "slices", fault.slices[:n] + fault.slices[n + 1 :]
        if slice_id > 0 and slice_id - 1 not in fault.slices:
            yield "slices", (*fault.slices[:n], slice_id - 1, *fault.slices[n + 1 :])
    yield from _lower(fault, "visit")
    yield from (("after", lower) for lower in sorted({0, fault.after // 2}) if lower < fault.after)
    for field, plain in (("surfaces", "read"), ("returns", 1.0), ("warning", 1.0)):
        if getattr(fault, field) != plain:
            yield field, plain
