"""Which sets of slices may be trained on next: they are compiled for before they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice

from elastix.machine.ledger import NONE, Effects, choose_mesh, most_slices
from elastix.machine.messages import Warm
from elastix.machine.policy import Policy
from elastix.machine.values import Ledger, Slices, Training

_MOST = 64


def warm(state: Training, policy: Policy) -> Effects:
    """Ask for the sets that the policy wants warmed, the likeliest first."""
    if policy.warm == "off":
        return NONE
    find = next_sets if policy.warm == "next" else all_sets
    sets = tuple(find(state.ledger, state.mesh, policy))
    return (Warm(state.ledger.epoch, sets),) if sets else NONE


def next_sets(ledger: Ledger, mesh: Slices, policy: Policy) -> Iterator[Slices]:
    """The sets that one return leads to, and those that one loss does, as many as are likely to be
    compiled for before the mesh changes. A slice that is missing is expected back, so returns come
    first; then the loss of those that were lost before."""
    yield from islice(dict.fromkeys(_neighbours(ledger, mesh, policy)), _MOST)


def _neighbours(ledger: Ledger, mesh: Slices, policy: Policy) -> Iterator[Slices]:
    for s in sorted(usable(ledger) - mesh):
        grown = choose_mesh(replace(ledger, up=mesh | {s}), mesh, policy)
        if grown != mesh:
            yield grown
    losses = {f.slice_id: f.losses for f in ledger.flaps}
    for s in sorted(mesh, key=lambda s: (-losses.get(s, 0), s)):
        up = ledger.up - {s}
        if len(up) >= policy.min_slices:
            yield choose_mesh(replace(ledger, up=up), mesh - {s}, policy)


def all_sets(ledger: Ledger, mesh: Slices, policy: Policy) -> Iterator[Slices]:
    """Every other set that can be trained on, the fewest losses and returns away first."""
    slices = sorted(usable(ledger))
    sizes = range(policy.min_slices, most_slices(ledger, policy) + 1)
    sets = (frozenset(s) for size in sizes for s in combinations(slices, size))
    yield from sorted((s for s in sets if s != mesh), key=lambda s: (len(s ^ mesh), sorted(s)))


def usable(ledger: Ledger) -> Slices:
    """The slices that may be trained on again."""
    return ledger.slices - ledger.corrupt
