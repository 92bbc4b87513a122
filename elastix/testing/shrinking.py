"""Shrinking: the smallest schedule that still fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from elastix.machine import Policy
from elastix.testing.schedules import Fault, Schedule


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Drop faults and lower numbers as long as the schedule `fails`, greedily."""
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(schedule):
            if fails(smaller):
                schedule, shrunk = smaller, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Simpler schedules, the boldest first; those that make no sense are passed over."""
    for build in _changes(schedule):
        try:
            yield build()
        except ValueError:
            continue


def _changes(schedule: Schedule) -> Iterator[Callable[[], Schedule]]:
    faults = schedule.faults
    for n in range(len(faults)):
        yield lambda n=n: replace(schedule, faults=faults[:n] + faults[n + 1 :])
    for field, value in _lower(schedule, ("num_steps", "num_slices"), Schedule):
        yield lambda f=field, v=value: replace(schedule, **{f: v})
    for field, value in _plainer(schedule):
        yield lambda f=field, v=value: replace(schedule, **{f: v})
    for field, value in _lower_policy(schedule.policy):
        yield lambda f=field, v=value: replace(schedule, policy=replace(schedule.policy, **{f: v}))
    for n, fault in enumerate(faults):
        for field, value in _lower_fault(fault):
            yield lambda n=n, f=field, v=value: replace(
                schedule, faults=(*faults[:n], replace(faults[n], **{f: v}), *faults[n + 1 :])
            )


def _plainer(schedule: Schedule) -> Iterator[tuple[str, Any]]:
    for n in range(len(schedule.on_disk)):
        yield "on_disk", schedule.on_disk[:n] + schedule.on_disk[n + 1 :]
    if schedule.save_seconds != 1.0:
        yield "save_seconds", 1.0
    if schedule.durable:
        yield "durable", False


def _lower(value: Any, fields: tuple[str, ...], kind: Any) -> Iterator[tuple[str, int]]:
    """Half, and one less, of each of these counts."""
    for field in fields:
        now = getattr(value, field)
        for lower in sorted({now // 2, now - 1} - {now}):
            if lower >= 1:
                yield field, lower


def _lower_policy(policy: Policy) -> Iterator[tuple[str, Any]]:
    """The default first; then the least that is allowed, or a little less."""
    for field in dataclasses.fields(Policy):
        if getattr(policy, field.name) != field.default:
            yield field.name, field.default
    counts = ("min_slices", "inflight", "snapshot_every", "checkpoint_every", "stable_probes")
    for field_name, default in ((c, getattr(Policy(), c)) for c in counts):
        now = getattr(policy, field_name)
        if now != default and now > 1:
            yield field_name, now - 1
    if policy.max_slices and policy.max_slices > 1:
        yield "max_slices", policy.max_slices - 1


def _lower_fault(fault: Fault) -> Iterator[tuple[str, Any]]:
    for n in range(len(fault.slices)):
        if len(fault.slices) > 1:
            yield "slices", fault.slices[:n] + fault.slices[n + 1 :]
        if fault.slices[n] > 0 and fault.slices[n] - 1 not in fault.slices:
            yield "slices", (*fault.slices[:n], fault.slices[n] - 1, *fault.slices[n + 1 :])
    yield from _lower(fault, ("visit",), Fault)
    if fault.surfaces != "read":
        yield "surfaces", "read"
    if fault.returns != 1.0:
        yield "returns", 1.0
