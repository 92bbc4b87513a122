"""The verbs of the machine: lose, wait, restore, regrow, and advance, finish, conclude.

Each takes values and returns (state, effects); none looks at a clock or a device.
"""

from __future__ import annotations

from dataclasses import replace

from elastix.machine.ledger import (
    NONE,
    Effects,
    below,
    choose_mesh,
    distrust,
    evaluation_due,
    forget,
    host_source,
    mark_flaps,
    most_slices,
    on_disk,
    probes_needed,
    save,
    save_at,
)
from elastix.machine.messages import (
    Compile,
    Evaluate,
    Event,
    Prepare,
    Probe,
    RunStep,
    SlicesLost,
    Snapshot,
)
from elastix.machine.policy import Policy
from elastix.machine.values import (
    Diagnosing,
    Done,
    Failed,
    Finishing,
    Growth,
    Ledger,
    Live,
    Restoring,
    Slices,
    Source,
    State,
    Stopping,
    Tier,
    Training,
    Waiting,
)

Step = tuple[State, Effects]


# --- restore, wait, lose, regrow: the four verbs ---------------------------------------------


def restore(ledger: Ledger, mesh: Slices) -> Step:
    """Rebuild the train state on `mesh` from the newest source, in a new epoch."""
    if not ledger.sources:
        return Failed("no snapshot or checkpoint is left to restore from"), NONE
    source = max(ledger.sources, key=lambda s: s.preference)
    ledger = replace(ledger, epoch=ledger.epoch + 1, stable=())
    return Restoring(ledger, mesh, source), (Prepare(ledger.epoch, mesh, source),)


def wait(ledger: Ledger, mesh: Slices, event: Event, policy: Policy) -> Step:
    """Run nothing until all slices of before are up, or enough are and `patience` has passed.

    Below `min_slices` there is no patience: the first moment with enough ends the wait.
    """
    if ledger.draining:
        return stop(ledger, None)
    enough = len(ledger.up) >= policy.min_slices
    want = most_slices(ledger, policy)
    until = event.at + policy.patience if enough else event.at
    ledger = replace(below(ledger, event.at, policy), epoch=ledger.epoch + 1, stable=())
    return Waiting(ledger, mesh, want, until), (Probe(ledger.epoch, ledger.slices),)


def lose(state: Live, slices: Slices, event: Event, policy: Policy) -> Step:
    """Take slices whose memory is gone out of everything that names them, and go on."""
    ledger, effects = forget(state.ledger, slices)
    if isinstance(state, Waiting):
        return replace(state, ledger=below(ledger, event.at, policy)), effects
    if isinstance(state, Stopping):
        nxt, more = stop(ledger, state.reason)
        return nxt, effects + more
    if not slices & involved(state):
        nxt, more = go_on(replace(state, ledger=ledger))
        return nxt, effects + more
    if isinstance(event, SlicesLost) and event.corrupt:
        ledger = distrust(ledger, slices)
    else:
        ledger = keep_live(state, slices, ledger, policy)
    ledger = replace(mark_flaps(ledger, slices & state.mesh), losses=ledger.losses + 1)
    if ledger.losses > policy.max_losses:
        last = f"; the last: {event.cause}" if isinstance(event, SlicesLost) and event.cause else ""
        return Failed(f"{ledger.losses} losses in a row without a committed step{last}"), effects
    nxt, more = resume_or_wait(ledger, state.mesh, event, policy)
    return nxt, effects + more


def regrow(state: Training, mesh: Slices) -> Step:
    """Move the committed state, as it is, onto a mesh that takes the stable slices back."""
    return restore(with_live(state, state.mesh), mesh)


def leave(state: Training, event: Event, policy: Policy) -> Step:
    """Move the committed state off the slices that will be taken away. No step is lost: while
    they live, they are donors if nobody else is."""
    staying = state.mesh - state.ledger.noticed
    ledger = with_live(state, staying or state.mesh)
    if len(ledger.up) >= policy.min_slices:
        return restore(ledger, choose_mesh(ledger, staying, policy))
    # Nothing will run, and those that leave take their memory along: save before.
    snapshot, effects = host_source(ledger, state.committed), NONE
    if snapshot is None and state.committed:
        return advance(replace(state, owed=state.committed), event, policy)
    if snapshot and ledger.durable:
        ledger, effects = save_at(ledger, snapshot, event.at, policy)
    nxt, more = wait(ledger, staying, event, policy)
    return nxt, effects + more


# --- what the verbs are made of ---------------------------------------------------------------


def with_live(state: Training | Finishing, holders: Slices) -> Ledger:
    """The ledger in which the committed state, as `holders` have it, is a source."""
    name = state.train_state
    live = Source(Tier.LIVE, name.step, name.epoch, holders)
    return replace(state.ledger, sources=(*state.ledger.sources, live))


def keep_live(state: Live, lost: Slices, ledger: Ledger, policy: Policy) -> Ledger:
    """With lookback `live`, the survivors' copy of the last committed step is a source."""
    if policy.lookback != "live" or not isinstance(state, Training | Finishing):
        return ledger
    survivors = state.mesh - lost
    if not survivors:
        return ledger
    return with_live(replace(state, ledger=ledger), survivors)


def resume_or_wait(ledger: Ledger, mesh: Slices, event: Event, policy: Policy) -> Step:
    """After a loss: go on with those left, or wait for a return."""
    short = len(ledger.up) < policy.min_slices
    if short or (policy.patience > 0 and len(ledger.up) < most_slices(ledger, policy)):
        return wait(ledger, mesh, event, policy)
    return restore(ledger, choose_mesh(ledger, mesh, policy))


def involved(state: Training | Restoring | Diagnosing | Finishing) -> Slices:
    """The slices whose loss ends what is going on."""
    return state.mesh | state.source.holders if isinstance(state, Restoring) else state.mesh


def joinable(state: Training, policy: Policy) -> Slices:
    """Slices outside the mesh that were found up often enough to be taken back."""
    outside = state.ledger.slices - state.mesh
    ledger = state.ledger
    stable = (s for s in ledger.stable if s.probes >= probes_needed(ledger, s.slice_id, policy))
    return outside & {s.slice_id for s in stable} - ledger.noticed - ledger.corrupt


def wants_regrow(state: Training, policy: Policy) -> bool:
    if not state.ledger.stable:
        return False
    room = policy.max_slices is None or len(state.mesh) < policy.max_slices
    return room and bool(joinable(state, policy))


def grown(state: Training, policy: Policy) -> Slices:
    """The mesh that takes the stable slices back: what it is being made ready for, if it can."""
    able = replace(state.ledger, up=joinable(state, policy) | state.mesh)
    members = state.growth.mesh if state.growth else state.mesh
    return choose_mesh(able, members, policy)


def grow(state: Training, policy: Policy) -> tuple[Training, Effects]:
    """Have the mesh that takes the stable slices back made ready, if that was not asked for yet."""
    mesh = grown(state, policy)
    if state.growth and state.growth.mesh == mesh:
        return state, NONE
    return replace(state, growth=Growth(mesh)), (Compile(state.ledger.epoch, mesh),)


def watch(state: Training) -> Effects:
    """Ask for the slices outside the mesh, if there are any."""
    outside = state.ledger.slices - state.mesh
    return (Probe(state.ledger.epoch, outside),) if outside else NONE


def stop(ledger: Ledger, reason: str | None) -> Step:
    """End a run in which nothing runs, in a new epoch: of what was asked before, only a finished
    save counts, and what is written next is not taken for what was given up."""
    return settle(replace(ledger, epoch=ledger.epoch + 1), reason)


def settle(ledger: Ledger, reason: str | None) -> Step:
    """What a slice still holds is made durable; then the run has ended."""
    answering = ledger.up | ledger.noticed
    hosts = [s for s in ledger.sources if s.tier is Tier.HOST and s.holders & answering]
    best = max(hosts, key=lambda s: s.step, default=None)
    durable = max(s.step for s in ledger.sources if s.tier in (Tier.DISK, Tier.SEED))
    if ledger.saving:
        return Stopping(ledger, reason), NONE
    if best and ledger.durable and best.step > durable:
        ledger, effects = save(ledger, best)
        return Stopping(ledger, reason), effects
    return (Failed(reason) if reason else Done("preempted", None, durable)), NONE


def advance(state: Training, event: Event, policy: Policy) -> Step:
    """Whatever comes next: the owed snapshot, the end, an evaluation, a regrow, or the next step.

    A snapshot is begun before the next step, which may overwrite what it copies, and goes on
    beside it; whatever ends the epoch waits for it. May be called after any event: an effect in
    the foreground is never asked for twice. A run that is asked to stop, or to leave slices, does
    not evaluate before: it does so when it goes on.
    """
    if state.asked:
        return state, NONE
    if state.owed is not None:
        return begin_snapshot(state, event, policy) if has_room(state) else (state, NONE)
    drained = state.committed == state.dispatched and state.copying is None
    ledger = state.ledger
    due = evaluation_due(state.dispatched, ledger, policy)
    ended = state.dispatched >= ledger.num_steps and not due
    if ended or ledger.draining:
        why = "done" if ended else "preempted"
        return finish(state, why) if drained else (state, NONE)
    if ledger.noticed & state.mesh:
        return leave(state, event, policy) if drained else (state, NONE)
    if due:
        return ask(state, Evaluate(ledger.epoch, state.dispatched)) if drained else (state, NONE)
    if wants_regrow(state, policy):
        state, effects = grow(state, policy)
        if state.growth and state.growth.ready:
            return regrow(state, state.growth.mesh) if drained else (state, NONE)
        nxt, more = run_on(state, policy)
        return nxt, effects + more
    return run_on(state, policy)


def has_room(state: Training) -> bool:
    """Whether a snapshot may be begun: one is under way at a time, and while an older one is kept
    until a step is committed, the newest waits for that too, if there is one to wait for."""
    if state.copying is not None:
        return False
    held = sum(source.tier is Tier.HOST for source in state.ledger.sources)
    return held < 2 or state.committed == state.dispatched


def begin_snapshot(state: Training, event: Event, policy: Policy) -> Step:
    """Have the owed step copied, and go on beside that."""
    assert state.owed is not None
    copy = Snapshot(state.ledger.epoch, state.owed)
    nxt, more = advance(replace(state, copying=state.owed, owed=None), event, policy)
    return nxt, (copy, *more)


def run_on(state: Training, policy: Policy) -> Step:
    """The next step, unless as many as may be are in flight."""
    if state.dispatched - state.committed == policy.inflight:
        return state, NONE
    return ask(state, RunStep(state.ledger.epoch, state.dispatched + 1))


def ask(state: Training, effect: RunStep | Evaluate) -> Step:
    asking = Training(
        state.ledger,
        state.mesh,
        state.committed,
        state.dispatched,
        state.train_state,
        state.iterator_state,
        state.owed,
        effect,
        state.growth,
        state.copying,
    )
    return asking, (effect,)


def without_evaluation(state: Training) -> Training:
    """No evaluation is waited for: it is on record, or will be due again."""
    return replace(state, asked=None) if isinstance(state.asked, Evaluate) else state


def finish(state: Training, why: str) -> Step:
    """Nothing is in flight: see that the committed state is held and durable, then end."""
    done = Finishing(state.ledger, why, state.mesh, state.train_state, state.iterator_state)
    return conclude(done)


def go_on(state: Training | Restoring | Diagnosing | Finishing) -> Step:
    """A slice outside the mesh was lost, and with it perhaps the save that the end waited for."""
    if isinstance(state, Finishing) and host_source(state.ledger, state.train_state.step):
        return conclude(state)
    return state, NONE


def conclude(state: Finishing) -> Step:
    """Take the next thing that is missing for the end: the snapshot, the save, or nothing."""
    ledger, step = state.ledger, state.train_state.step
    if ledger.saving:
        return state, NONE
    snapshot = host_source(ledger, step)
    if snapshot is None:
        return state, (Snapshot(ledger.epoch, step),)
    if ledger.durable and not on_disk(ledger, step):
        ledger, effects = save(ledger, snapshot)
        return replace(state, ledger=ledger), effects
    return Done(state.why, state.train_state, state.iterator_state), NONE
