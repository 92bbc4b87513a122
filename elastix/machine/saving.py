"""The rules for what becomes of a checkpoint that was being written."""

from __future__ import annotations

from dataclasses import replace

from elastix.machine.ledger import (
    NONE,
    forgive,
    save_at,
    save_overdue,
)
from elastix.machine.messages import (
    Saved,
    SaveFailed,
)
from elastix.machine.policy import Policy
from elastix.machine.values import (
    Failed,
    Finishing,
    Live,
    Saving,
    Source,
    Stopping,
    Tier,
)
from elastix.machine.verbs import (
    Step,
    conclude,
    lose,
    settle,
)


def saved(state: Live, event: Saved, policy: Policy) -> Step:
    """The checkpoint is durable: it is a source from now on, and the oldest are let go."""
    ledger = state.ledger
    if not _answers(ledger.saving, event):
        return state, NONE
    disk = [s for s in ledger.sources if s.tier is Tier.DISK and s.step != event.step]
    disk = sorted([*disk, Source(Tier.DISK, event.step)], key=lambda s: s.step)
    others = [s for s in ledger.sources if s.tier is not Tier.DISK]
    kept = disk[-policy.keep_checkpoints :]
    ledger = forgive(replace(ledger, saving=None, sources=(*others, *kept)))
    overdue = save_overdue(event.at, ledger, policy)
    return _after_save(replace(state, ledger=ledger), event, policy, overdue)


def save_failed(state: Live, event: SaveFailed, policy: Policy) -> Step:
    """A failed save never stops training; only the last one decides how the run ends."""
    if not _answers(state.ledger.saving, event):
        return state, NONE
    if event.lost:
        return lose(state, event.lost, event, policy)
    if isinstance(state, Stopping):
        unsaved = f"the last checkpoint could not be written: {event.reason}"
        return Failed(state.reason or unsaved), NONE
    if isinstance(state, Finishing) and event.step == state.train_state.step:
        return Failed(f"the last checkpoint could not be written: {event.reason}"), NONE
    return _after_save(replace(state, ledger=replace(state.ledger, saving=None)), event, policy)


def _answers(saving: Saving | None, event: Saved | SaveFailed) -> bool:
    return saving is not None and (saving.step, saving.epoch) == (event.step, event.epoch)


def _after_save(
    state: Live, event: Saved | SaveFailed, policy: Policy, overdue: bool = False
) -> Step:
    """A save that had to wait for this one begins now, from the newest snapshot. One that time
    alone asks for does not after a failure: a full disk would be tried without a pause."""
    if isinstance(state, Finishing):
        return conclude(state)
    if isinstance(state, Stopping):
        return settle(state.ledger, state.reason)
    ledger = state.ledger
    newest = max((s for s in ledger.sources if s.tier is Tier.HOST), default=None, key=_step)
    wanted = ledger.save_owed or overdue
    if not (wanted and newest and newest.holders & (ledger.up | ledger.noticed)):
        return state, NONE
    ledger, effects = save_at(ledger, newest, event.at, policy)
    return replace(state, ledger=ledger), effects


def _step(source: Source) -> int:
    return source.step
