"""What must hold in every run, whatever dies: an observer of the machine that knows the truth.

The machine knows what it was told. The invariants also look at the world behind it: which slices
live, what each of them holds, and what is on disk.
"""

from __future__ import annotations

from elastix.driver import Driver
from elastix.machine import (
    Committed,
    Done,
    Effect,
    Event,
    Failed,
    Finishing,
    Live,
    Prepared,
    Probed,
    RestoreFailed,
    Restoring,
    Saved,
    Slices,
    SlicesLost,
    SnapshotMissing,
    Snapshotted,
    Source,
    Starting,
    State,
    Tier,
    Training,
    Waiting,
    is_stale,
)
from elastix.testing.ghosts import GhostArrays, GhostBackend, progress_after
from elastix.testing.schedules import LOSSES, Kind, Phase
from elastix.testing.world import POISON, Violation, World, expected

NOBODY: Slices = frozenset()


class Invariants:
    """Checks every transition of one process; raises `Violation` at the first that is wrong."""

    MOST_TRANSITIONS = 4000

    def __init__(self, world: World, backend: GhostBackend, arrays: GhostArrays):
        self.world, self.backend, self.arrays = world, backend, arrays
        self.policy = world.schedule.policy
        self.driver: Driver | None = None
        self.transitions = 0
        self.blamed_at: dict[int, int] = {}
        """The tick at which the machine last heard that a slice is gone."""
        self.lost: set[int] = set()
        """Slices the machine knows to hold nothing: blamed, and in no prepared mesh since."""
        self.published: tuple[int, Slices, int] | None = None
        """The step, holders and tick of the newest host snapshot."""
        self.left: tuple[int, Slices, int] | None = None
        """The committed step, mesh and tick at which the last loss ended training."""
        self.committed_at = 0
        self.struck_at_commit = len(world.struck)

    def __call__(
        self, before: State, event: Event, after: State, effects: tuple[Effect, ...]
    ) -> None:
        self.transitions += 1
        self.world.ticks += 1  # so that what is heard and what strikes are never at one tick
        self._require(self.transitions < self.MOST_TRANSITIONS, "the run ends", "it goes on")
        if is_stale(before, event):
            return
        self._hear(blamed(before, event, after))
        if not isinstance(before, Starting | Done | Failed):
            self._event(before, event, after)
        if not isinstance(after, Starting | Done | Failed):
            self._state(after)

    def _require(self, holds: object, rule: str, message: str) -> None:
        if not holds:
            raise Violation(rule, message)

    # --- what the machine was told ------------------------------------------------------------

    def _hear(self, gone: Slices) -> None:
        for slice_id in gone:
            self.blamed_at[slice_id] = self.world.ticks
        self.lost |= gone

    def survives(self, slice_id: int, tick: int) -> bool:
        """Whether the slice has held what it held at `tick`, in truth and to all knowledge."""
        never = -1
        return self.world.alive(slice_id) and (
            max(self.world.died_at.get(slice_id, never), self.blamed_at.get(slice_id, never))
            < tick
        )

    # --- transitions ------------------------------------------------------------------------

    def _event(self, before: Live, event: Event, after: State) -> None:
        match event:
            case Committed():
                self._committed(before, event.step)
            case Prepared():
                self._prepared(before, event.step)
            case Snapshotted():
                self._snapshotted(event)
            case Saved() if on_disk(after, event.step) and not on_disk(before, event.step):
                good = event.step in self.world.rotten or self.world.good_checkpoint(event.step)
                self._require(good, "saved is saved", f"step {event.step} is not on disk, or wrong")
            case SnapshotMissing():
                self._missing(event.source)
        if isinstance(after, Restoring) and after is not before and differs(before, after):
            self._restoring(before, event, after)
        elif isinstance(before, Training | Finishing) and isinstance(after, Waiting):
            self._leave(before, event)
        if not isinstance(after, Done | Failed) and before.ledger.sources != after.ledger.sources:
            self._sources(before, event, after)

    def _committed(self, before: Live, step: int) -> None:
        assert isinstance(before, Training) and self.driver
        self._require(self.driver.committed == step, "one meaning of step", f"committed {step}")
        self._require(
            self.driver.progress() == progress_after(step),
            "exactly once, in order",
            f"step {step} did not consume what an undisturbed run does",
        )
        dead = [s for s in sorted(before.mesh) if not self.world.alive(s)]
        self._require(not dead, "committed on live slices", f"step {step}, with {dead} dead")
        self._holds(before.mesh, before.ledger.epoch, step, "a committed state is right")
        self.committed_at, self.struck_at_commit = self.world.ticks, len(self.world.struck)

    def _prepared(self, before: Live, step: int) -> None:
        assert isinstance(before, Restoring) and self.driver
        self._holds(before.mesh, before.ledger.epoch, step, "a restored state is right")
        self._require(
            self.driver.committed == step and self.driver.progress() == progress_after(step),
            "model and data never part",
            f"restored step {step}, the data of {self.driver.committed}",
        )
        self.lost -= before.mesh
        self.committed_at = self.world.ticks
        if self.left is None:
            return
        committed, mesh, tick = self.left
        self.left = None
        if self.policy.lookback == "live" and any(self.survives(s, tick) for s in mesh):
            self._require(
                step == committed, "live redoes nothing", f"{committed} was done, now {step}"
            )
        if self.published and any(self.survives(s, self.published[2]) for s in self.published[1]):
            most = self.policy.snapshot_every
            self._require(
                step >= self.published[0] and committed - step <= most,
                "at most snapshot_every are redone",
                f"{committed} was done, back to {step}; every {most}, had {self.published[0]}",
            )

    def _holds(self, mesh: Slices, epoch: int, step: int, rule: str) -> None:
        held = self.arrays.held(epoch, step)
        if held is None:  # donated to the next step
            return
        for slice_id in sorted(mesh):
            if self.world.alive(slice_id):
                ghost = held.get(slice_id, POISON)
                self._require(ghost == expected(step), rule, f"{slice_id} has {ghost} at {step}")

    def _snapshotted(self, event: Snapshotted) -> None:
        for slice_id in sorted(event.holders):
            copy = self.backend.host_memory(slice_id).get(event.step)
            good = copy is not None and copy.ghost == expected(event.step)
            alive = self.world.alive(slice_id)
            self._require(
                good or not alive, "a snapshot is right", f"{slice_id} at step {event.step}"
            )
        self.published = event.step, event.holders, self.world.ticks

    def _missing(self, source: Source) -> None:
        published = self.published
        if source.tier is Tier.HOST and published and published[0] == source.step:
            held = [s for s in sorted(source.holders) if self.survives(s, published[2])]
            self._require(not held, "a named snapshot is kept", f"{held} should hold {source}")

    def _leave(self, before: Training | Finishing, event: Event) -> int:
        step = event.step if isinstance(event, Committed) else before.train_state.step
        self.left = step, before.mesh, self.committed_at
        return step

    def _restoring(self, before: Live, event: Event, after: Restoring) -> None:
        """The source is the newest good one; a regrow moves the committed state as it is."""
        best = max((s.step for s in after.ledger.sources if self.good(s)), default=0)
        self._require(
            after.source.step >= best, "the newest source", f"{after.source}, not step {best}"
        )
        regrows = isinstance(before, Training) and not (blamed(before, event, after) & before.mesh)
        self.world.restoring = Phase.REGROW if regrows else Phase.RESTORE
        if not isinstance(before, Training | Finishing):
            return
        step = self._leave(before, event)
        if regrows:
            live = after.source.tier is Tier.LIVE and after.source.step == step
            self._require(
                live and after.mesh > before.mesh and not self._ahead(before, step),
                "regrow loses no step",
                f"from {after.source} at step {step}",
            )

    def _ahead(self, before: Live, step: int) -> int:
        """Steps in flight, which a change of mesh abandons."""
        return before.dispatched - step if isinstance(before, Training) else 0

    def _sources(self, before: Live, event: Event, after: Live) -> None:
        """The newest good snapshot is not dropped before a newer exists."""
        gone = blamed(before, event, after)
        kept = max((s.step for s in after.ledger.sources if self.good(s)), default=-1)
        for source in before.ledger.sources:
            if source.tier is not Tier.LIVE and self.good(source, gone):
                self._require(
                    kept >= source.step, "the newest snapshot is kept", f"{source} was dropped"
                )

    def good(self, source: Source, gone: Slices = NOBODY) -> bool:
        """Whether a restore from the source would give the right state, in truth."""
        right = expected(source.step)
        holders = [s for s in sorted(source.holders - gone) if self.world.alive(s)]
        match source.tier:
            case Tier.SEED:
                return True
            case Tier.DISK:
                return self.world.good_checkpoint(source.step)
            case Tier.LIVE:
                held = self.arrays.held(source.epoch, source.step) or {}
                return any(held.get(s) == right for s in holders)
        copies = (self.backend.host_memory(s).get(source.step) for s in holders)
        return any(copy is not None and copy.ghost == right for copy in copies)

    # --- states -----------------------------------------------------------------------------

    def _state(self, state: Live) -> None:
        ledger = state.ledger
        self._require(
            ledger.losses <= self.policy.max_losses, "losses are bounded", f"{ledger.losses}"
        )
        if isinstance(state, Training):
            self._training(state)
        if isinstance(state, Finishing):
            step = state.train_state.step
            self._require(state.iterator_state == step, "one meaning of step", f"{state}")
            self._require(not state.mesh & self.lost, "ends on live slices", f"lost {self.lost}")
        most = 1 + (self.policy.inflight if self.policy.lookback == "live" else 0)
        moving = isinstance(state, Restoring | Training | Finishing)
        self._require(
            self.arrays.num_states <= most + moving, "memory", f"{self.arrays.num_states} states"
        )
        for slice_id in self.backend.devices:
            steps = sorted(self.backend.host_memory(slice_id))
            self._require(len(steps) <= 3, "memory", f"slice {slice_id} has snapshots {steps}")

    def _training(self, state: Training) -> None:
        steps = {state.committed, state.iterator_state, state.train_state.step}
        self._require(len(steps) == 1, "one meaning of step", f"{sorted(steps)}")
        ahead = state.dispatched - state.committed
        self._require(0 <= ahead <= self.policy.inflight, "steps in flight", f"{ahead}")
        mesh, known = state.mesh, self.lost
        self._require(not mesh & known, "trains on live slices", f"{mesh} with {known} lost")
        most = self.policy.max_slices or len(state.ledger.slices)
        self._require(
            self.policy.min_slices <= len(mesh) <= most, "enough slices", f"{sorted(mesh)}"
        )


def blamed(before: State, event: Event, after: State) -> Slices:
    """The slices of which the machine has just heard that their memory is gone."""
    gone = NOBODY
    match event:
        case SlicesLost():
            gone = event.slices
        case Probed():
            gone = event.down | event.emptied
    if isinstance(before, Starting | Done | Failed) or isinstance(after, Starting | Done | Failed):
        return gone
    return gone | (before.ledger.up - after.ledger.up)


def differs(before: Live, after: Restoring) -> bool:
    return not isinstance(before, Restoring) or before.ledger.epoch != after.ledger.epoch


def on_disk(state: State, step: int) -> bool:
    if isinstance(state, Starting | Done | Failed):
        return False
    return any(s.tier is Tier.DISK and s.step == step for s in state.ledger.sources)


def noticeable(kind: Kind) -> bool:
    """Whether a fault of this kind can be taken for the loss of a slice."""
    return kind in LOSSES or kind in (Kind.SILENT, Kind.DATA_LOSS)


__all__ = ["Invariants", "RestoreFailed", "noticeable"]
