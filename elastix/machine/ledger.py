"""The ledger: health, sources, saves and budgets, and what follows from them alone."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from elastix.machine.messages import (
    Abandon,
    Effect,
    Probed,
    Save,
)
from elastix.machine.policy import Policy
from elastix.machine.values import (
    Flap,
    Ledger,
    Saving,
    Slices,
    Source,
    Stable,
    Tier,
)

Effects = tuple[Effect, ...]
NONE: Effects = ()


def forget(ledger: Ledger, slices: Slices) -> tuple[Ledger, Effects]:
    """Drop `slices` from health and holders; abandon the save that reads from one of them."""
    effects: Effects = ()
    kept = (replace(s, holders=s.holders - slices) for s in ledger.sources)
    sources = tuple(s for s in kept if s.holders or s.tier in (Tier.DISK, Tier.SEED))
    if ledger.saving and ledger.saving.holder in slices:
        effects = (Abandon(ledger.saving.epoch, ledger.saving.step),)
        ledger = replace(ledger, saving=None, save_owed=True)
    return replace(
        ledger,
        up=ledger.up - slices,
        sources=sources,
        stable=tuple(s for s in ledger.stable if s.slice_id not in slices),
        leaving=tuple(n for n in ledger.leaving if n.slice_id not in slices),
    ), effects


def mark_flaps(ledger: Ledger, slices: Slices) -> Ledger:
    """Count one more loss for each of these slices."""
    counts = {f.slice_id: f.losses for f in ledger.flaps}
    counts |= {s: counts.get(s, 0) + 1 for s in slices}
    return replace(ledger, flaps=tuple(Flap(s, n) for s, n in sorted(counts.items())))


def forgive(ledger: Ledger) -> Ledger:
    """A checkpoint was written: one loss less is held against each slice."""
    flaps = tuple(Flap(f.slice_id, f.losses - 1) for f in ledger.flaps if f.losses > 1)
    return replace(ledger, flaps=flaps)


def probes_needed(ledger: Ledger, slice_id: int, policy: Policy) -> int:
    """Good probes in a row before a slice is taken back: doubled with each loss but the first,
    up to 64 times."""
    losses = sum(f.losses for f in ledger.flaps if f.slice_id == slice_id)
    return policy.stable_probes * 2 ** min(max(losses - 1, 0), 6)


def below(ledger: Ledger, at: float, policy: Policy) -> Ledger:
    """Note the first moment with fewer than `min_slices`; a committed step forgets it."""
    if len(ledger.up) >= policy.min_slices or ledger.below_since is not None:
        return ledger
    return replace(ledger, below_since=at)


def distrust(ledger: Ledger, slices: Slices) -> Ledger:
    """These slices computed wrong bits, and what they added to is wrong on all of them: no live
    state is a source, and what was evaluated after the newest snapshot is so again."""
    sources = tuple(s for s in ledger.sources if s.tier is not Tier.LIVE)
    trusted = max((s.step for s in sources), default=0)
    return replace(
        ledger,
        sources=sources,
        corrupt=ledger.corrupt | slices,
        evaluated=min(ledger.evaluated, trusted),
    )


def most_slices(ledger: Ledger, policy: Policy) -> int:
    usable = len(ledger.slices - ledger.corrupt)
    return min(usable, policy.max_slices or usable)


def choose_mesh(ledger: Ledger, members: Slices, policy: Policy) -> Slices:
    """The slices to train on: members first, so that nothing moves without need, then those
    that have been up longest."""
    since = {s.slice_id: s.since for s in ledger.stable}
    ranked = sorted(ledger.up, key=lambda s: (s not in members, since.get(s, inf), s))
    return frozenset(ranked[: policy.max_slices])


def snapshot_due(
    step: int, at: float, ledger: Ledger, policy: Policy, copying: int | None = None
) -> bool:
    """Whether `step` must be copied. A save that is owed, or overdue, is made from the snapshot
    under way, of step `copying`, if there is one: it asks for no other beside it."""
    return (
        step == ledger.num_steps
        or _divides(policy.snapshot_every, step)
        or (ledger.durable and _divides(policy.checkpoint_every, step))
        or (copying is None and _save_wanted(at, ledger, policy))
    )


def _save_wanted(at: float, ledger: Ledger, policy: Policy) -> bool:
    owed = ledger.save_owed and ledger.saving is None
    return owed or (ledger.durable and save_overdue(at, ledger, policy))


def checkpoint_due(step: int, at: float, ledger: Ledger, policy: Policy) -> bool:
    return ledger.durable and (
        step == ledger.num_steps
        or ledger.save_owed
        or _divides(policy.checkpoint_every, step)
        or save_overdue(at, ledger, policy)
    )


def save_overdue(at: float, ledger: Ledger, policy: Policy) -> bool:
    """Whether `checkpoint_seconds` have passed since the last save was begun, and it has ended."""
    seconds = policy.checkpoint_seconds
    return seconds > 0 and ledger.saving is None and at - ledger.saved_at >= seconds


def evaluation_due(step: int, ledger: Ledger, policy: Policy) -> bool:
    """Whether the state after `step` must be evaluated: once, whatever was restored since."""
    if policy.eval_every == 0 or step <= ledger.evaluated:
        return False
    return step == ledger.num_steps or _divides(policy.eval_every, step)


def _divides(every: int, step: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def host_source(ledger: Ledger, step: int) -> Source | None:
    """The published host snapshot of `step`, if a slice that answers still holds it."""
    answering = ledger.up | ledger.noticed
    for source in ledger.sources:
        if source.tier is Tier.HOST and source.step == step and source.holders & answering:
            return source
    return None


def on_disk(ledger: Ledger, step: int) -> bool:
    return any(s.tier is Tier.DISK and s.step == step for s in ledger.sources)


def save(ledger: Ledger, source: Source) -> tuple[Ledger, Effects]:
    """Write `source` to disk, or owe it while another save is under way. Which holder writes
    depends on the step, so that no slice is special."""
    if on_disk(ledger, source.step) or (ledger.saving and ledger.saving.step == source.step):
        return replace(ledger, save_owed=False), NONE
    if ledger.saving:
        return replace(ledger, save_owed=True), NONE
    staying = source.holders & ledger.up
    holders = sorted(staying or source.holders & ledger.noticed)
    if not holders:
        return replace(ledger, save_owed=True), NONE
    holder = holders[source.step % len(holders)]
    saving = Saving(source.step, ledger.epoch, holder)
    ledger = replace(ledger, saving=saving, save_owed=False)
    return ledger, (Save(ledger.epoch, source.step, holder),)


def save_at(ledger: Ledger, source: Source, at: float, policy: Policy) -> tuple[Ledger, Effects]:
    """`save`, and note when it was begun, if the policy counts from there."""
    ledger, effects = save(ledger, source)
    if effects and policy.checkpoint_seconds:
        ledger = replace(ledger, saved_at=at)
    return ledger, effects


def newest_snapshot(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources, without host snapshots older than the newest."""
    steps = [s.step for s in sources if s.tier is Tier.HOST]
    if len(steps) < 2:
        return sources
    newest = max(steps)
    return tuple(s for s in sources if s.tier is not Tier.HOST or s.step == newest)


def progressed(ledger: Ledger) -> Ledger:
    """A step counts: nothing is held against the run, and snapshots older than the newest go."""
    sources = newest_snapshot(ledger.sources)
    held = ledger.losses or ledger.stuck or ledger.data_failures or ledger.below_since is not None
    if not held and len(sources) == len(ledger.sources):
        return ledger  # as nearly always; it has many fields
    return replace(ledger, sources=sources, losses=0, stuck=0, data_failures=0, below_since=None)


def health(ledger: Ledger, event: Probed) -> tuple[Ledger, Effects]:
    """What a probe says of who is up. A slice that was emptied answers, and holds nothing."""
    ledger, effects = forget(ledger, event.emptied | event.down)
    leaving = tuple(n for n in ledger.leaving if n.until > event.at)
    up = ledger.up | ledger.noticed | event.up | event.emptied  # an overdue notice was wrong
    ledger = replace(ledger, leaving=leaving)
    return replace(ledger, up=up - ledger.noticed - ledger.corrupt), effects


def steadier(ledger: Ledger, slice_id: int, at: float, policy: Policy) -> Stable:
    """One more probe in a row found this slice up."""
    before = ledger.stability(slice_id) or Stable(slice_id, 0, at)
    return replace(before, probes=min(before.probes + 1, probes_needed(ledger, slice_id, policy)))
