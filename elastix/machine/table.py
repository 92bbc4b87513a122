"""The table of the machine: which rule follows an event in a state. It is the protocol."""

from __future__ import annotations

from collections.abc import Callable

from elastix.machine.leaving import preempt
from elastix.machine.ledger import (
    NONE,
)
from elastix.machine.messages import (
    Committed,
    Compiled,
    ControllerLost,
    DataFailed,
    Dispatched,
    Evaluated,
    Event,
    PreemptionNoticed,
    Prepared,
    Probed,
    ProgramFailed,
    RestoreFailed,
    Saved,
    SaveFailed,
    SlicesLost,
    SnapshotMissing,
    Snapshotted,
    Started,
    StepStuck,
    Tried,
    Woke,
)
from elastix.machine.policy import (
    Policy,
)
from elastix.machine.rules import (
    commit,
    compiled,
    controller_lost,
    data_failed,
    diagnosed,
    dispatch,
    evaluated,
    fall_back,
    finishing_probed,
    prepared,
    probed,
    program_failed,
    publish,
    slices_lost,
    start,
    stuck,
    stuck_alone,
    too_late,
    tried,
    waiting_probed,
    waiting_woke,
    woke,
)
from elastix.machine.saving import save_failed, saved
from elastix.machine.values import (
    Diagnosing,
    Done,
    Failed,
    Finishing,
    ProtocolError,
    Restoring,
    Starting,
    State,
    Stopping,
    Training,
    Waiting,
)
from elastix.machine.verbs import (
    Step,
)

Rule = Callable[..., Step]

TABLE: dict[tuple[type, type], Rule] = {
    (Starting, Started): start,
    (Training, Dispatched): dispatch,
    (Training, Committed): commit,
    (Training, Snapshotted): publish,
    (Training, Evaluated): evaluated,
    (Training, Probed): probed,
    (Training, Woke): woke,
    (Training, Compiled): compiled,
    (Training, DataFailed): data_failed,
    (Waiting, Probed): waiting_probed,
    (Waiting, Woke): waiting_woke,
    (Restoring, Prepared): prepared,
    (Restoring, SnapshotMissing): fall_back,
    (Restoring, RestoreFailed): fall_back,
    (Finishing, Snapshotted): publish,
    (Finishing, Evaluated): evaluated,
    (Finishing, DataFailed): too_late,
    (Finishing, Probed): finishing_probed,
    (Finishing, Woke): too_late,
    (Finishing, Compiled): too_late,
    (Diagnosing, Probed): diagnosed,
    (Diagnosing, Tried): tried,
    (Diagnosing, StepStuck): stuck_alone,
}
for _live in (Training, Waiting, Restoring, Diagnosing, Finishing, Stopping):
    TABLE[_live, Saved] = saved
    TABLE[_live, SaveFailed] = save_failed
    TABLE[_live, PreemptionNoticed] = preempt
for _active in (Training, Waiting, Restoring, Diagnosing, Finishing):
    TABLE[_active, SlicesLost] = slices_lost
    TABLE[_active, ControllerLost] = controller_lost
for _running in (Training, Restoring, Diagnosing, Finishing):
    TABLE[_running, ProgramFailed] = program_failed
for _working in (Training, Restoring, Finishing):
    TABLE[_working, StepStuck] = stuck

_WITHOUT_LEDGER = (Starting, Done, Failed)
"""Asked in each transition: to make the union of three types anew takes half a microsecond."""


def transition(state: State, event: Event, policy: Policy) -> Step:
    """The next state and what to do, for one event.

    An answer from an older epoch is dropped, a finished save excepted: it counts whatever epoch
    it began in.

    Raises:
        ProtocolError: the table has no row for this state and event.
    """
    if is_stale(state, event):
        return state, NONE
    if not isinstance(state, _WITHOUT_LEDGER) and event.epoch > state.ledger.epoch:
        raise ProtocolError(f"{event} answers an epoch that has not begun")
    rule = TABLE.get((type(state), type(event)))
    if rule is None:
        raise ProtocolError(f"no rule for {type(event).__name__} in {type(state).__name__}")
    return rule(state, event, policy)


def is_stale(state: State, event: Event) -> bool:
    """Whether `event` answers an effect of an epoch that has ended."""
    if isinstance(state, _WITHOUT_LEDGER):
        return False
    return event.epoch < state.ledger.epoch and not isinstance(event, Saved | SaveFailed)
