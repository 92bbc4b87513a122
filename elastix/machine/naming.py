"""What a state names: the arrays and host copies that must be kept. The rest is freed."""

from __future__ import annotations

from elastix.machine.values import Finishing, Live, Restoring, Tier, Training


def names_train_state(state: Live, epoch: int, step: int) -> bool:
    """Whether the train state made in `epoch` after `step` updates may still be needed."""
    live = ((s.epoch, s.step) for s in state.ledger.sources if s.tier is Tier.LIVE)
    if (epoch, step) in live:
        return True
    match state:
        case Training() | Finishing():
            return epoch == state.ledger.epoch and step >= state.train_state.step
        case Restoring():
            return epoch == state.ledger.epoch
    return False


def trusted_step(state: Live) -> int:
    """The last step known to be right on every slice: what was done since may have come from a
    slice with wrong bits."""
    return max((s.step for s in state.ledger.sources if s.tier is not Tier.LIVE), default=0)


def named_snapshots(state: Live) -> frozenset[int]:
    """The steps whose host copies may still be needed: to restore from, or being written."""
    steps = {s.step for s in state.ledger.sources if s.tier is Tier.HOST}
    if state.ledger.saving:
        steps.add(state.ledger.saving.step)
    return frozenset(steps)
