"""The rules of the machine, one for each thing that can happen in a state.

A rule takes (state, event, policy) and returns (state, effects). Rules are total functions of
values: no clock, no device, no randomness, so every history can be enumerated and replayed.
"""

from __future__ import annotations

from dataclasses import replace

from elastix.machine.ledger import (
    NONE,
    Effects,
    below,
    checkpoint_due,
    choose_mesh,
    health,
    host_source,
    progressed,
    save_at,
    snapshot_due,
    steadier,
)
from elastix.machine.messages import (
    Committed,
    Compiled,
    ControllerLost,
    DataFailed,
    Dispatched,
    Evaluate,
    Evaluated,
    Event,
    Prepared,
    Probe,
    Probed,
    ProgramFailed,
    RestoreFailed,
    RunStep,
    SlicesLost,
    SnapshotMissing,
    Snapshotted,
    Started,
    StepStuck,
    Tried,
    Try,
    WakeAt,
    Woke,
)
from elastix.machine.policy import (
    Policy,
)
from elastix.machine.values import (
    Diagnosing,
    Failed,
    Finishing,
    Growth,
    Ledger,
    Live,
    ProtocolError,
    Restoring,
    Source,
    Starting,
    Tier,
    Training,
    TrainStateName,
    Waiting,
)
from elastix.machine.verbs import (
    Step,
    advance,
    conclude,
    grow,
    keep_live,
    lose,
    restore,
    resume_or_wait,
    stop,
    wants_regrow,
    watch,
    without_evaluation,
)
from elastix.machine.warming import warm

# --- rules, one for each (state, event) that can happen -----------------------------------------


def start(state: Starting, event: Started, policy: Policy) -> Step:
    """What exists is known: begin on the slices that are up, or wait for them."""
    ledger = Ledger(
        num_steps=event.num_steps,
        slices=event.slices,
        up=event.up,
        durable=event.durable,
        sources=event.sources,
        evaluated=event.evaluated,
        saved_at=event.at if policy.checkpoint_seconds else 0.0,
    )
    return resume_or_wait(ledger, frozenset(), event, policy)


def prepared(state: Restoring, event: Prepared, policy: Policy) -> Step:
    """The mesh is ready: train from the source's step, of which a snapshot is made meanwhile."""
    ledger, step = state.ledger, state.source.step
    if event.step != step:
        raise ProtocolError(f"step {event.step} was prepared, and {step} was asked for")
    sources = tuple(s for s in ledger.sources if s.tier is not Tier.LIVE)
    ledger = replace(ledger, sources=sources)
    name = TrainStateName(step, ledger.epoch, state.mesh)
    snapshot = host_source(ledger, step)
    covered = state.source.tier is Tier.SEED or (snapshot and state.mesh <= snapshot.holders)
    effects: Effects = ()
    if snapshot and ledger.save_owed:
        ledger, effects = save_at(ledger, snapshot, event.at, policy)
    owed = None if covered else step
    training = Training(ledger, state.mesh, step, step, name, step, owed)
    nxt, more = advance(training, event, policy)
    if isinstance(nxt, Training):
        more = (*more, *watch(nxt), *warm(nxt, policy))
    return nxt, effects + more


def fall_back(state: Restoring, event: SnapshotMissing | RestoreFailed, policy: Policy) -> Step:
    """Never try this source again; take the next."""
    if event.source != state.source:
        raise ProtocolError(f"{event.source} failed, and {state.source} was asked for")
    sources = tuple(s for s in state.ledger.sources if s != event.source)
    ledger = replace(state.ledger, sources=sources)
    if event.source.tier is Tier.SEED and isinstance(event, RestoreFailed):
        return Failed(f"the initial state cannot be built: {event.reason}"), NONE
    return restore(ledger, state.mesh)


def dispatch(state: Training, event: Dispatched, policy: Policy) -> Step:
    """The step is in flight; the next may follow, once its snapshot is begun if one is due."""
    if state.asked != RunStep(state.ledger.epoch, event.step):
        raise ProtocolError(f"step {event.step} was dispatched, and {state.asked} was asked for")
    due = snapshot_due(event.step, event.at, state.ledger, policy, state.copying)
    owed = event.step if due else None
    state = Training(
        state.ledger,
        state.mesh,
        state.committed,
        event.step,
        state.train_state,
        state.iterator_state,
        owed,
        None,
        state.growth,
        state.copying,
    )
    return advance(state, event, policy)


def commit(state: Training, event: Committed, policy: Policy) -> Step:
    """The step counts: its results came from every slice, so all were alive after it."""
    if event.step != state.committed + 1 or event.step > state.dispatched:
        raise ProtocolError(
            f"step {event.step} committed after {state.committed}, dispatched {state.dispatched}"
        )
    if not event.finite and policy.on_nonfinite == "fail":
        return Failed(f"the loss or gradient of step {event.step} is not finite"), NONE
    if state.copying is not None and event.step > state.copying:
        raise ProtocolError(f"{event} came before the snapshot of step {state.copying}")
    old, step = state.train_state, event.step
    name = TrainStateName(step, old.epoch, old.holders)
    ledger = progressed(state.ledger)
    # Written out: `replace` takes twice as long, and this is the most frequent rule.
    state = Training(
        ledger,
        state.mesh,
        step,
        state.dispatched,
        name,
        step,
        state.owed,
        state.asked,
        state.growth,
        state.copying,
    )
    return advance(state, event, policy)


def publish(state: Training | Finishing, event: Snapshotted, policy: Policy) -> Step:
    """A newer snapshot exists. An older one that others hold too is let go when a step commits
    after it: until then nothing says that the holders of the newer one outlived its publication."""
    ledger = state.ledger
    step = state.copying if isinstance(state, Training) else state.train_state.step
    if event.step != step or event.holders != state.mesh:
        raise ProtocolError(f"{event} is no snapshot of step {step}")
    if event.step > state.train_state.step:
        raise ProtocolError(f"{event} came before the step was committed")
    new = Source(Tier.HOST, event.step, ledger.epoch, event.holders)
    others = lambda s: s.step != event.step and s.holders - event.holders  # noqa: E731
    kept = (s for s in ledger.sources if s.tier is not Tier.HOST or others(s))
    ledger = replace(ledger, sources=(*kept, new))
    if isinstance(state, Finishing):
        return conclude(replace(state, ledger=ledger))
    effects: Effects = ()
    if checkpoint_due(event.step, event.at, ledger, policy):
        ledger, effects = save_at(ledger, new, event.at, policy)
    nxt, more = advance(replace(state, ledger=ledger, copying=None), event, policy)
    return nxt, effects + more


def evaluated(state: Training | Finishing, event: Evaluated, policy: Policy) -> Step:
    """The evaluation is on record, and never due again; a run that stops may not wait for it."""
    if event.step != state.train_state.step:
        raise ProtocolError(f"step {event.step} was evaluated, at step {state.train_state.step}")
    state = replace(state, ledger=replace(state.ledger, evaluated=event.step))
    if isinstance(state, Finishing):
        return state, NONE
    return advance(without_evaluation(state), event, policy)


def slices_lost(state: Live, event: SlicesLost, policy: Policy) -> Step:
    """The memory of these slices is gone. A wait that was told so asks again after a while."""
    nxt, effects = lose(state, event.slices, event, policy)
    if isinstance(state, Waiting):
        effects = (*effects, WakeAt(state.ledger.epoch, event.at + policy.probe_every))
    return nxt, effects


def probed(state: Training, event: Probed, policy: Policy) -> Step:
    """Count good probes of the slices outside; a slice of the mesh without its memory is lost."""
    gone = (event.emptied | event.down) & state.mesh
    if gone:
        return lose(state, gone, event, policy)
    ledger, effects = health(state.ledger, event)
    outside = (event.up | event.emptied) - state.mesh
    stable = tuple(steadier(state.ledger, s, event.at, policy) for s in sorted(outside))
    state = replace(state, ledger=replace(ledger, stable=stable))
    wake = WakeAt(ledger.epoch, event.at + policy.probe_every)
    if wants_regrow(state, policy):
        state, asked = grow(state, policy)
        nxt, more = advance(state, event, policy)
        # Those to be taken back may be lost again before they are.
        more = (wake, *asked, *more) if isinstance(nxt, Training) else more
        return nxt, effects + more
    return replace(state, growth=None), (*effects, wake)


def compiled(state: Training, event: Compiled, policy: Policy) -> Step:
    """The mesh to grow onto can be trained on; the steps in flight are read before."""
    if state.growth is None or state.growth.mesh != event.mesh:
        return state, NONE  # the slices it was made for are not there any more
    return advance(replace(state, growth=Growth(event.mesh, True)), event, policy)


def woke(state: Training, event: Woke, policy: Policy) -> Step:
    """Time to look for the slices outside the mesh again."""
    return state, watch(state)


def waiting_probed(state: Waiting, event: Probed, policy: Policy) -> Step:
    """Go on as soon as the slices allow it, fail when the deadline has passed, or look again."""
    ledger, effects = health(state.ledger, event)
    ledger = below(ledger, event.at, policy)
    count = len(ledger.up)
    if count >= policy.min_slices and (count >= state.want or event.at >= state.until):
        nxt, more = restore(ledger, choose_mesh(ledger, state.mesh, policy))
        return nxt, effects + more
    limit = state.until
    if count < policy.min_slices:
        assert ledger.below_since is not None
        limit = ledger.below_since + policy.deadline
        if event.at >= limit:
            nxt, more = stop(ledger, _too_few(ledger, policy))
            return nxt, effects + more
    wake = WakeAt(ledger.epoch, min(event.at + policy.probe_every, limit))
    return replace(state, ledger=ledger), (*effects, wake)


def _too_few(ledger: Ledger, policy: Policy) -> str:
    up = f"{len(ledger.up)} of {len(ledger.slices)} slices"
    return f"{up} were up after {policy.deadline:g} s, and min_slices is {policy.min_slices}"


def waiting_woke(state: Waiting, event: Woke, policy: Policy) -> Step:
    """Time to look for slices again."""
    return state, (Probe(state.ledger.epoch, state.ledger.slices),)


def finishing_probed(state: Finishing, event: Probed, policy: Policy) -> Step:
    """Only a loss inside the mesh matters now."""
    gone = (event.emptied | event.down) & state.mesh
    return lose(state, gone, event, policy) if gone else (state, NONE)


def too_late(state: Finishing, event: Event, policy: Policy) -> Step:
    """The end is near: no slice is taken back any more, and nothing is evaluated."""
    return state, NONE


def stuck(state: Training | Restoring | Finishing, event: StepStuck, policy: Policy) -> Step:
    """Something did not finish in its time, and nobody reported a loss: ask everyone."""
    ledger = keep_live(state, frozenset(), state.ledger, policy)
    ledger = replace(ledger, stuck=ledger.stuck + 1, epoch=ledger.epoch + 1, stable=())
    return Diagnosing(ledger, state.mesh, event.during), (Probe(ledger.epoch, state.mesh),)


def diagnosed(state: Diagnosing, event: Probed, policy: Policy) -> Step:
    """A culprit is lost. If there is none: once more from the lookback, then each slice alone."""
    gone = (event.emptied | event.down) & state.mesh
    if gone:
        return lose(state, gone, event, policy)
    if state.ledger.stuck == 1:
        return restore(state.ledger, state.mesh)
    return state, (Try(state.ledger.epoch, state.mesh),)


def tried(state: Diagnosing, event: Tried, policy: Policy) -> Step:
    """Slices that do not finish a step alone are lost; if all do, nobody knows what is wrong."""
    if event.stuck:
        return lose(state, event.stuck, event, policy)
    each = "though every slice answers and finishes a step alone"
    return Failed(f"stuck: {state.during} did not finish twice, {each}"), NONE


def stuck_alone(state: Diagnosing, event: StepStuck, policy: Policy) -> Step:
    """What nobody but this process does, such as a compile, does not finish: no slice can help."""
    both = f"{state.during} did not finish, and neither did {event.during}"
    return Failed(f"stuck: {both}, though every slice answers"), NONE


def program_failed(state: Live, event: ProgramFailed, policy: Policy) -> Step:
    """An error that no slice is to blame for ends the run, and is never retried."""
    return Failed(event.reason), NONE


def data_failed(state: Training, event: DataFailed, policy: Policy) -> Step:
    """Once, the stream is rebuilt at the committed position; twice in a row is a broken source."""
    evaluating = state.asked == Evaluate(state.ledger.epoch, event.step)
    if event.step == state.committed and not evaluating:
        return state, NONE  # of an evaluation that nobody waits for any more
    if not evaluating and state.asked != RunStep(state.ledger.epoch, event.step):
        raise ProtocolError(f"data for step {event.step} failed, {state.asked} was asked for")
    if state.ledger.data_failures and not state.ledger.draining:
        what = "evaluation data failed twice after" if evaluating else "data stream failed twice at"
        return Failed(f"the {what} step {event.step}: {event.reason}"), NONE
    ledger = replace(state.ledger, data_failures=1)
    return advance(replace(state, ledger=ledger, asked=None), event, policy)


def controller_lost(state: Live, event: ControllerLost, policy: Policy) -> Step:
    """Without its devices the process can only end; the durable tier stays."""
    reason = f"the controller lost its devices ({event.reason})"
    return Failed(reason, resumable=True), NONE
