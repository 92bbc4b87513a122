"""What the policy promises a user: what is redone, how long a run waits, what a move costs."""

from __future__ import annotations

from math import inf

from elastix.machine import (
    Committed,
    Diagnosing,
    Done,
    Effect,
    Event,
    Failed,
    Finishing,
    Live,
    Prepared,
    Probed,
    Restoring,
    RunStep,
    Starting,
    State,
    Tier,
    Training,
    Tried,
    Try,
    Waiting,
)
from elastix.machine.ledger import probes_needed
from elastix.testing.compiles import COMPILE_SECONDS
from elastix.testing.ghost_backend import STEP_SECONDS
from elastix.testing.knowledge import Knowledge, blamed, committed_after, lost_holder, violated
from elastix.testing.schedules import Kind, Phase
from elastix.testing.world import World

ROUND_SECONDS = 2 * STEP_SECONDS
"""The longest time, beside `probe_every`, from one probe of a training run to the next."""


class Promises:
    """Checks the transitions of one process against the policy."""

    def __init__(self, world: World, knowledge: Knowledge):
        self._world, self._knowledge = world, knowledge
        self._policy = world.schedule.policy
        slow = (Kind.SILENT, Kind.HANG, Kind.STALL)
        self._prompt = all(fault.kind not in slow for fault in world.schedule.faults)
        """Whether nothing takes longer than it does by itself."""
        self._tried_at = 0
        self._draining = False
        self._below_since: float | None = None
        self._waiting_since = 0.0
        self._outside_since: dict[int, float] = {}
        """From when on a slice outside the mesh could have been taken back."""

    def check(self, before: State, event: Event, after: State, effects: tuple[Effect, ...]) -> None:
        """One transition that was not stale."""
        if self._draining and any(isinstance(e, RunStep) for e in effects):
            violated("a run that drains starts nothing", f"{effects} after {event}")
        if isinstance(event, Committed):
            self._below_since = None
        if any(isinstance(e, Try) for e in effects):
            self._tried_at = self._world.ticks
        if isinstance(after, Starting | Done | Failed):
            return self._ended(before, event, after)
        self._draining = after.ledger.draining
        below = isinstance(after, Waiting) and len(after.ledger.up) < self._policy.min_slices
        if below and self._below_since is None:
            self._below_since = event.at
        if isinstance(after, Waiting):
            self._waiting(before, event, after)
        if isinstance(before, Starting | Done | Failed):
            return
        self._moved(before, event, after)
        self._saving(before, event, after)
        if isinstance(after, Training):
            self._growing(event, after)

    def _ended(self, before: State, event: Event, end: State) -> None:
        if isinstance(end, Failed) and "were up after" in end.reason:
            since = event.at if self._below_since is None else self._below_since
            if event.at < since + self._policy.deadline:
                violated("the deadline is waited for", f"below since {since}, now {event.at}")
        if isinstance(before, Diagnosing) and isinstance(event, Tried):
            hung_at = self._world.hung
            hung = [s for s in sorted(before.mesh) if hung_at.get(s, inf) < self._tried_at]
            if hung and isinstance(end, Failed) and end.reason.startswith("stuck:"):
                violated("a slice that hangs is found", f"{hung} hang, and {end}")

    # --- what is redone ---------------------------------------------------------------------

    def _moved(self, before: Live, event: Event, after: Live) -> None:
        if isinstance(event, Prepared):
            self._redone(event.step)
        if not isinstance(after, Restoring) or before.ledger.epoch == after.ledger.epoch:
            return
        if not isinstance(before, Training | Finishing):
            if not self._knowledge.moving:
                self._world.restoring = Phase.RESTORE
            return
        moves = self._knowledge.moving
        self._world.restoring = Phase.REGROW if moves else Phase.RESTORE
        if moves:
            self._moves(before, committed_after(before, event), after)

    def _moves(self, before: Training | Finishing, step: int, after: Restoring) -> None:
        source = after.source
        ahead = before.dispatched - step if isinstance(before, Training) else 0
        as_it_is = source.tier is Tier.LIVE and source.step == step
        # What was behind a checkpoint, after a restore of an older source, may jump ahead to it.
        whole = (as_it_is or source.step > step) and not ahead
        if not whole or not (after.mesh > before.mesh or before.mesh & after.ledger.noticed):
            violated("a move loses no step", f"{source} at step {step}, {ahead} in flight")

    def _redone(self, step: int) -> None:
        """A restore is compared with the best that those who survived still hold."""
        if self._knowledge.left is None:
            return
        committed, mesh, tick = self._knowledge.left
        self._knowledge.left = None
        live = self._policy.lookback == "live" or self._knowledge.moving
        if live and step < committed and any(self._knowledge.survives(s, tick) for s in mesh):
            violated("live redoes nothing", f"{committed} steps were done, now {step}")
        if self._knowledge.published is None:
            return
        newest, holders, tick = self._knowledge.published
        redone, most = committed - step, self._policy.snapshot_every
        bad = step < newest or redone > most
        if bad and any(self._knowledge.survives(s, tick) for s in holders):
            violated("at most snapshot_every are redone", f"{redone}, of at most {most}")

    def _saving(self, before: Live, event: Event, after: Live) -> None:
        """A save that lost its slice is made up for, from another holder."""
        saving = before.ledger.saving
        if saving is None or after.ledger.saving == saving:
            return
        gone, alive = blamed(before, event, after), self._world.alive(saving.holder)
        owed = after.ledger.save_owed or after.ledger.saving is not None
        if lost_holder(before, event, gone, alive) and not owed:
            violated("an abandoned save is owed", f"the save of step {saving.step}")

    # --- waits ------------------------------------------------------------------------------

    def _waiting(self, before: State, event: Event, after: Waiting) -> None:
        if not isinstance(before, Waiting):
            self._waiting_since = event.at
            return
        if not isinstance(event, Probed):
            return
        if len(after.ledger.up) >= self._policy.min_slices:
            since, most = self._waiting_since, self._policy.patience
        else:
            assert self._below_since is not None
            since, most = self._below_since, self._policy.deadline
        if event.at >= since + most:
            violated("no wait is too long", f"since {since}, {most} s, now {event.at}")

    def _growing(self, event: Event, state: Training) -> None:
        """A slice that is back and stays up is taken back in time, where there is room."""
        policy = self._policy
        if isinstance(event, Prepared):
            self._outside_since = {}
        if isinstance(event, Probed):
            for slice_id in event.down:
                self._outside_since.pop(slice_id, None)
        full = policy.max_slices is not None and len(state.mesh) >= policy.max_slices
        if full or not self._prompt or not isinstance(event, Committed):
            return
        for slice_id in sorted(state.ledger.slices - state.mesh - state.ledger.noticed):
            probes = 1 + probes_needed(state.ledger, slice_id, policy)
            most = probes * (policy.probe_every + ROUND_SECONDS)
            most += (policy.inflight + 2) * STEP_SECONDS + COMPILE_SECONDS
            back = slice_id not in self._world.dead
            since = self._outside_since.setdefault(slice_id, event.at) if back else event.at
            if not back:
                self._outside_since.pop(slice_id, None)
            if event.at - since > most:
                violated("a slice is taken back", f"slice {slice_id}, back since {since}")
