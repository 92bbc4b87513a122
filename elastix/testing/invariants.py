"""What must hold in every run, whatever dies: the machine's words against the truth.

The machine knows what it was told. The invariants also look at the world behind it: which slices
live, what each of them holds, and what is on disk.
"""

from __future__ import annotations

from elastix.arrays import Arrays
from elastix.backends import Backend
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
    Restoring,
    Saved,
    Slices,
    SnapshotMissing,
    Snapshotted,
    Source,
    Starting,
    State,
    Tier,
    Training,
    is_stale,
)
from elastix.testing.ghost_backend import GhostBackend
from elastix.testing.ghosts import GhostArrays, progress_after
from elastix.testing.knowledge import NOBODY, Knowledge, blamed, violated
from elastix.testing.promises import Promises
from elastix.testing.world import POISON, World, expected


class Rules:
    """What is checked at every transition of one process, on arrays as on ghosts: what the policy
    promises, and what the machine says of itself. Raises `Violation` at the first that is wrong."""

    def __init__(self, world: World, backend: Backend, arrays: Arrays):
        self.driver: Driver | None = None
        """The driver under test, once it is made."""
        self.knowledge = Knowledge(world)
        self._world, self._backend, self._held_arrays = world, backend, arrays
        self._promises = Promises(world, self.knowledge)
        self._policy = world.schedule.policy
        live = self._policy.lookback == "live"
        # Two: while a mesh is made, what it is made from is there as well.
        self._most_states = 2 + (self._policy.inflight if live else 0)
        self._transitions = 0

    def __call__(
        self, before: State, event: Event, after: State, effects: tuple[Effect, ...]
    ) -> None:
        self._transitions += 1
        if self._transitions > 4000 + 20 * self._world.schedule.num_steps:
            violated("the run ends", f"it goes on after {self._transitions} events")
        if is_stale(before, event):
            return
        self.knowledge.hear(before, event, after)
        self._promises.check(before, event, after, effects)
        if not isinstance(before, Starting | Done | Failed):
            self._event(before, event, after)
        if not isinstance(after, Starting | Done | Failed):
            self._state(after)

    def _event(self, before: Live, event: Event, after: State) -> None:
        """What an event says, against the truth."""

    def _state(self, state: Live) -> None:
        policy = self._policy
        if state.ledger.losses > policy.max_losses:
            violated("losses are bounded", f"{state.ledger.losses}")
        if isinstance(state, Training | Finishing):
            self._running(state)
        if self._held_arrays.num_states > self._most_states:
            violated("memory is bounded", f"{self._held_arrays.num_states} train states")
        for slice_id in self._backend.devices:
            if len(self._backend.host_memory(slice_id)) > 3:
                steps = sorted(self._backend.host_memory(slice_id))
                violated("memory is bounded", f"slice {slice_id} has snapshots {steps}")

    def _running(self, state: Training | Finishing) -> None:
        mesh, policy, step = state.mesh, self._policy, state.train_state.step
        if state.iterator_state != step:
            violated("one meaning of step", f"{step}, with data of {state.iterator_state}")
        if not mesh.isdisjoint(self.knowledge.lost):
            violated("runs on live slices", f"{sorted(mesh)}, with {self.knowledge.lost} lost")
        if not policy.min_slices <= len(mesh) <= (policy.max_slices or len(mesh)):
            violated("enough slices", f"{sorted(mesh)}")
        if isinstance(state, Training):
            ahead = state.dispatched - state.committed
            if state.committed != step or not 0 <= ahead <= policy.inflight:
                violated("one meaning of step", f"{state}")


class Invariants(Rules):
    """What is checked on ghosts: each word of the machine against what the slices hold."""

    def __init__(self, world: World, backend: GhostBackend, arrays: GhostArrays):
        super().__init__(world, backend, arrays)
        self._arrays, self._memory = arrays, backend.host_memory

    # --- events -----------------------------------------------------------------------------

    def _event(self, before: Live, event: Event, after: State) -> None:
        match event:
            case Committed():
                self._committed(before, event.step)
            case Prepared():
                self._prepared(before, event.step)
            case Snapshotted():
                self._snapshotted(event)
            case Saved() if on_disk(after, event.step) and not on_disk(before, event.step):
                rotten = event.step in self._world.rotten
                if not rotten and not self._world.good_checkpoint(event.step):
                    violated("saved is saved", f"step {event.step} is not on disk, or wrong")
            case SnapshotMissing():
                self._missing(event.source)
        if isinstance(after, Done | Failed | Starting):
            return
        if isinstance(after, Restoring) and before.ledger.epoch != after.ledger.epoch:
            self._restoring(after)
        if before.ledger.sources != after.ledger.sources:
            newer = event.step if isinstance(event, Saved) else 0
            self._sources(before, after, blamed(before, event, after), newer)

    def _committed(self, before: Live, step: int) -> None:
        assert isinstance(before, Training) and self.driver
        if self.driver.committed != step:
            violated("one meaning of step", f"{step} committed, at {self.driver.committed}")
        if self.driver.progress(step) != progress_after(step):
            violated("exactly once, in order", f"{step} steps: {self.driver.progress(step)}")
        # The driver may do what another event asks for before this one is heard.
        died_at, read_at = self._world.died_at, self._world.read_at
        dead = [s for s in sorted(before.mesh) if not self._world.alive(s)]
        dead = [s for s in dead if died_at.get(s, 0) <= read_at]
        if dead:
            violated("committed on live slices", f"step {step}, with {dead} dead")
        self._holds(before.mesh, before.ledger.epoch, step, "a committed state is right")

    def _prepared(self, before: Live, step: int) -> None:
        assert isinstance(before, Restoring) and self.driver
        self._holds(before.mesh, before.ledger.epoch, step, "a restored state is right")
        if self.driver.committed != step or self.driver.progress(step) != progress_after(step):
            violated("model and data never part", f"step {step}, data of {self.driver.committed}")

    def _holds(self, mesh: Slices, epoch: int, step: int, rule: str) -> None:
        held = self._arrays.held(epoch, step)
        if held is None:  # donated to the next step
            return
        for slice_id in sorted(mesh):
            ghost = held.get(slice_id, POISON)
            if ghost != expected(step) and self._world.alive(slice_id):
                violated(rule, f"slice {slice_id} holds {ghost} as step {step}")

    def _snapshotted(self, event: Snapshotted) -> None:
        for slice_id in sorted(event.holders):
            copy = self._memory(slice_id).get(event.step)
            good = copy is not None and copy.ghost == expected(event.step)
            if not good and self._world.alive(slice_id):
                violated("a snapshot is right", f"slice {slice_id} at step {event.step}")

    def _missing(self, source: Source) -> None:
        published = self.knowledge.published
        if source.tier is Tier.HOST and published and published[0] == source.step:
            held = [s for s in sorted(source.holders) if self.knowledge.survives(s, published[2])]
            if held:
                violated("a named snapshot is kept", f"{held} should hold {source}")

    # --- sources ----------------------------------------------------------------------------

    def _restoring(self, after: Restoring) -> None:
        best = max((s.step for s in after.ledger.sources if self.good(s)), default=0)
        if after.source.step < best:
            violated("the newest good source", f"{after.source}, not step {best}")

    def _sources(self, before: Live, after: Live, gone: Slices, newer: int) -> None:
        """The newest good snapshot is not dropped before a newer exists. An older checkpoint goes
        for one that was saved, after it was read back: that it rots later, nobody can know."""
        kept = max((s.step for s in after.ledger.sources if self.good(s)), default=-1)
        for source in before.ledger.sources:
            retired = source.tier is Tier.DISK and source.step < newer
            if source.tier is Tier.LIVE or source.step <= kept or retired:
                continue
            if self.good(source, gone):
                violated("the newest snapshot is kept", f"{source} was dropped")

    def good(self, source: Source, gone: Slices = NOBODY) -> bool:
        """Whether a restore from the source would give the right state, in truth."""
        if source.tier is Tier.SEED:
            return True
        if source.tier is Tier.DISK:
            return self._world.good_checkpoint(source.step)
        right = expected(source.step)
        holders = [s for s in sorted(source.holders - gone) if self._world.alive(s)]
        if source.tier is Tier.LIVE:
            held = self._arrays.held(source.epoch, source.step) or {}
            return any(held.get(s) == right for s in holders)
        copies = (self._memory(s).get(source.step) for s in holders)
        return any(copy is not None and copy.ghost == right for copy in copies)


def on_disk(state: State, step: int) -> bool:
    if isinstance(state, Starting | Done | Failed):
        return False
    return any(s.tier is Tier.DISK and s.step == step for s in state.ledger.sources)
