"""The rules of notices: what is left before it is taken away."""

from __future__ import annotations

from dataclasses import replace

from elastix.machine.ledger import NONE
from elastix.machine.messages import PreemptionNoticed
from elastix.machine.policy import Policy
from elastix.machine.values import Leaving, Live, Training, Waiting
from elastix.machine.verbs import Step, advance, stop, without_evaluation


def preempt(state: Live, event: PreemptionNoticed, policy: Policy) -> Step:
    """Leave the slices that will be taken away; if none is named, end the run."""
    if not event.slices:
        return drain(state, event, policy)
    ledger = state.ledger
    named = event.slices & ledger.slices
    others = (n for n in ledger.leaving if n.slice_id not in named)
    leaving = (*others, *(Leaving(s, event.until) for s in sorted(named)))
    state = replace(state, ledger=replace(ledger, up=ledger.up - named, leaving=leaving))
    if not isinstance(state, Training):
        return state, NONE
    return advance(without_evaluation(state) if named & state.mesh else state, event, policy)


def drain(state: Live, event: PreemptionNoticed, policy: Policy) -> Step:
    """Dispatch nothing more; the last answer in flight ends the run."""
    state = replace(state, ledger=replace(state.ledger, draining=True))
    if isinstance(state, Waiting):
        return stop(state.ledger, None)
    if not isinstance(state, Training):
        return state, NONE
    return advance(without_evaluation(state), event, policy)
