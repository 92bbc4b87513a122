"""What the machine has been told, as an observer hears it: the ground of both kinds of check."""

from __future__ import annotations

from typing import NoReturn

from elastix.machine import (
    Committed,
    Done,
    Event,
    Failed,
    Finishing,
    Live,
    PreemptionNoticed,
    Prepared,
    Probed,
    Restoring,
    SaveFailed,
    Slices,
    SlicesLost,
    Snapshotted,
    Starting,
    State,
    StepStuck,
    Training,
)
from elastix.testing.world import PLANTED, Violation, World

NOBODY: Slices = frozenset()
TOO_LATE = "it was not written in"
"""In the reason of a save that was given up at its deadline: whatever became of its slice
meanwhile, that is not why it failed, and nobody asked."""


def violated(rule: str, message: str) -> NoReturn:
    """Stop the run: the rule does not hold."""
    raise Violation(rule, message)


def blamed(before: State, event: Event, after: State) -> Slices:
    """The slices of which the machine has just heard that their memory is gone."""
    gone = NOBODY
    match event:
        case SlicesLost():
            gone = event.slices
        case Probed():
            gone = event.down | event.emptied
        case SaveFailed() if is_awaited(before, event):
            gone = event.lost
        case PreemptionNoticed():
            return NOBODY  # they still live, and hold what they hold
    if isinstance(before, Starting | Done | Failed) or isinstance(after, Starting | Done | Failed):
        return gone
    return gone | (before.ledger.up - after.ledger.up)


def is_awaited(before: State, event: SaveFailed) -> bool:
    """Whether it answers the save under way; the answer to one that was given up says nothing."""
    if isinstance(before, Starting | Done | Failed):
        return False
    saving = before.ledger.saving
    return saving is not None and (saving.step, saving.epoch) == (event.step, event.epoch)


def committed_after(before: Training | Finishing, event: Event) -> int:
    """The last committed step once `event` is known."""
    return event.step if isinstance(event, Committed) else before.train_state.step


class Knowledge:
    """Follows one process: who was blamed and when, what was published, what training was left."""

    def __init__(self, world: World):
        self._world = world
        self._blamed_at: dict[int, int] = {}
        """The tick at which the machine last heard that a slice is gone."""
        self.lost: set[int] = set()
        """Slices the machine knows to hold nothing: blamed, and in no prepared mesh since."""
        self.published: tuple[int, Slices, int] | None = None
        """The step and holders of the newest host snapshot, and the tick at which its step was
        committed: who died since may have died after the copy, and before it was told of."""
        self.left: tuple[int, Slices, int] | None = None
        """The committed step, mesh and tick of the training that was last left."""
        self.moving = False
        """Whether training was left for a regrow or on notice, not for a loss."""
        self.harm_at_commit = world.harm - world.unnoticed()
        self._committed_at = 0

    def hear(self, before: State, event: Event, after: State) -> None:
        """One transition that was not stale."""
        self._world.ticks += 1  # so that what is heard and what strikes are never at one tick
        gone = blamed(before, event, after)
        self._blamed_at.update(dict.fromkeys(gone, self._world.ticks))
        self.lost |= gone
        match event:
            case Prepared() if isinstance(before, Restoring):
                self.lost -= before.mesh
                self._committed_at = self._world.ticks
            case Committed():
                # It is heard later than it is read: its snapshot is finished in between.
                self._committed_at = self._world.read_at
                self.harm_at_commit = self._world.harm_at_read
            case Snapshotted():
                self.published = event.step, event.holders, self._committed_at
        if isinstance(after, Training | Finishing | Starting | Done | Failed):
            return
        if isinstance(before, Training | Finishing):
            staying = before.mesh - after.ledger.noticed
            mesh = staying or before.mesh
            self.left = committed_after(before, event), mesh, self._committed_at
            forced = gone & before.mesh or isinstance(event, StepStuck)
            self.moving = isinstance(before, Training) and not forced

    def survives(self, slice_id: int, tick: int) -> bool:
        """Whether the slice has held what it held at `tick`, in truth and to all knowledge."""
        never = -1
        died = self._world.died_at.get(slice_id, never)
        heard = self._blamed_at.get(slice_id, never)
        return self._world.alive(slice_id) and max(died, heard) < tick


def lost_holder(before: Live, event: Event, gone: Slices, alive: bool) -> bool:
    """Whether the save under way has just lost the slice that it is written from."""
    saving = before.ledger.saving
    if saving is None:
        return False
    failed = isinstance(event, SaveFailed) and not _of_the_disk(event) and not alive
    return failed or saving.holder in gone


def _of_the_disk(event: SaveFailed) -> bool:
    """Whether a save failed for what the disk did, and no slice is to blame."""
    return PLANTED in event.reason or TOO_LATE in event.reason
