"""What must hold in every history, on every edge: the machine's words against the ghosts.

That a step, a snapshot and a restore are right is asserted where the ghosts make them, in
`world_play`: a step consumes its own batch, on a state that all slices of the mesh really hold.
"""

from __future__ import annotations

from typing import Any

from elastix.machine import (
    Abandon,
    Committed,
    Diagnosing,
    Dispatched,
    Done,
    Event,
    Failed,
    Finishing,
    Prepared,
    Probed,
    RestoreFailed,
    Restoring,
    RunStep,
    Save,
    Saved,
    SaveFailed,
    SlicesLost,
    Snapshot,
    SnapshotMissing,
    Snapshotted,
    Starting,
    State,
    StepStuck,
    Stopping,
    Tier,
    Training,
    Tried,
    Waiting,
    is_stale,
)
from tests.world_names import anonymous, mask_of
from tests.world_play import Play
from tests.world_values import GOOD, WRONG, World

Running = Training | Restoring | Diagnosing | Finishing


class Checks:
    """The invariants, for one play. What depends on the machine alone is checked once for each of
    its states, or of its transitions; what the world is needed for, on every edge."""

    def __init__(self, play: Play):
        self._play, self._policy = play, play.policy
        self._states: set[int] = set()
        self._pairs: set[tuple[int, int, int]] = set()
        self._asked: set[tuple[int, int]] = set()
        self._sources: dict[int, tuple[tuple[int, int, int, int], ...]] = {}
        self._used: dict[int, int] = {}

    def edge(self, before: World, name: str, after: World) -> None:
        values = self._play.values
        state = values[after.machine]
        if after.machine not in self._states:
            self._state(state)
            self._states.add(after.machine)
        waits = sum(isinstance(values[e], RunStep) for e in after.todo) + len(after.inflight)
        assert waits <= self._policy.inflight, "too many steps in flight"
        copies = sum(isinstance(values[e], Snapshot) for e in after.todo) + bool(after.copying)
        assert copies <= 1, "two snapshots at once"
        if before.machine == after.machine and name not in ("event", "answer"):
            return
        event = self._event(before, name)
        if event is not None:
            self._machine(before.machine, event, after.machine)
        self._health(state, after)
        if event is not None and after.condemned:
            self._bits(before, values[event], after)
        if isinstance(state, Done | Failed):
            self._ended(before, name, after)
        else:
            self._snapshots(before, event, after)

    def _event(self, before: World, name: str) -> int | None:
        queue = {"event": before.events, "answer": before.answers}.get(name)
        return queue[0] if queue else None

    # --- the machine alone --------------------------------------------------------------------

    def _state(self, state: State) -> None:
        if isinstance(state, Training):
            assert state.committed == state.iterator_state == state.train_state.step, "one step"
            ahead = state.dispatched - state.committed
            assert 0 <= ahead <= self._policy.inflight, f"{ahead} steps in flight"
        if isinstance(state, Finishing):
            assert state.iterator_state == state.train_state.step, "one step"
        if isinstance(state, Training | Restoring | Finishing):
            count, policy = len(state.mesh), self._policy
            assert count >= policy.min_slices, "fewer than min_slices"
            assert count <= (policy.max_slices or count), "more than max_slices"
        if not isinstance(state, Starting | Done | Failed):
            assert state.ledger.losses <= self._policy.max_losses, "budgets fall: losses"
            assert state.ledger.data_failures <= 1, "budgets fall: data"

    def _machine(self, before: int, event: int, after: int) -> None:
        """What an event may do, whatever the world is like."""
        values = self._play.values
        if (before, event) not in self._asked:
            self._asked.add((before, event))
            self._nobody_is_special(before, event)
            if self._policy.checkpoint_seconds:
                self._in_time(before, event)
        key = (before, event, after)
        if key in self._pairs:
            return
        self._pairs.add(key)
        was, said, now = values[before], values[event], values[after]
        if isinstance(was, Running) and not is_stale(was, said):
            self._budgets(was, said, now, self._play.heard(before, event)[0])

    def _budgets(self, was: Any, said: Event, now: Any, lost: int) -> None:
        """Whatever starts again without a committed step has spent something that is bounded."""
        mesh = mask_of(was.mesh)
        gone = lost | (mask_of(said.emptied) if isinstance(said, Probed) else 0)
        goes_on = isinstance(now, type(was)) and getattr(now, "mesh", None) == was.mesh
        if gone & mesh and isinstance(was, Training | Finishing):
            assert not goes_on, "trains on a slice that is known to be gone"
        if isinstance(said, Tried) and not said.stuck:
            assert isinstance(now, Failed), "budgets fall: nobody is to blame for what is stuck"
        if isinstance(now, Done | Failed) or isinstance(said, Committed):
            return
        left, right = was.ledger, now.ledger
        assert right.losses >= left.losses and right.stuck >= left.stuck, "budgets fall: given back"
        if gone & mesh:
            assert right.losses == left.losses + 1, "budgets fall: a loss that is not counted"
        elif isinstance(said, StepStuck):
            assert right.stuck == left.stuck + 1, "budgets fall: a hang that is not counted"
        elif isinstance(said, SnapshotMissing | RestoreFailed):
            fewer = len(right.sources) < len(left.sources)
            assert fewer, "budgets fall: a source that failed is tried again"

    def _nobody_is_special(self, before: int, event: int) -> None:
        """Under another numbering the machine does the same; only which of several equal slices
        it picks, to write a checkpoint or to stand by, may differ."""
        outcomes = self._play.outcomes[before, event]
        if len(outcomes) == 1:
            return
        values, spares = self._play.values, self._policy.max_slices is not None
        done = [(values[o.machine], *(values[t] for t in o.todo)) for o in outcomes]
        assert len({anonymous(d, spares) for d in done}) == 1, "a slice is special"

    def _in_time(self, before: int, event: int) -> None:
        """By time, a save is begun when it is due and not before, and that is noted."""
        values = self._play.values
        was, said = values[before], values[event]
        stale = isinstance(was, Starting) or is_stale(was, said)
        if stale or self._play.given_up(before, said):
            return
        for machine, todo in self._play.outcomes[before, event]:
            now = values[machine]
            if not isinstance(now, Done | Failed | Finishing | Stopping):
                self._save_in_time(was, said, now, [values[n] for n in todo])

    def _save_in_time(self, was: Any, said: Event, now: Any, todo: list[Any]) -> None:
        left, right, seconds = was.ledger, now.ledger, self._policy.checkpoint_seconds
        begun = any(isinstance(effect, Save) for effect in todo)
        over = isinstance(said, Saved | SaveFailed) or any(isinstance(e, Abandon) for e in todo)
        assert not (begun and left.saving) or over, "two saves at once"
        assert right.saved_at == (said.at if begun else left.saved_at), "when it was begun is wrong"
        due, free = said.at - left.saved_at >= seconds, left.saving is None or over
        asked = left.save_owed or self._due_by_steps(getattr(said, "step", 0))
        leaves = isinstance(now, Waiting)  # and takes its memory along
        assert due or asked or leaves or not begun, "a save before its time"
        if not (due and free and left.durable and isinstance(now, Training)):
            return
        if isinstance(said, Dispatched):
            assert now.copying is not None or now.owed, "a save is due, and no snapshot"
        if isinstance(said, Snapshotted | Saved):
            disk = max((s.step for s in right.sources if s.tier is Tier.DISK), default=0)
            newer = (s for s in right.sources if s.tier is Tier.HOST and s.step > disk)
            can = any(s.holders & (right.up | right.noticed) for s in newer)
            assert begun or not can, "a save is due, and is not begun"

    def _due_by_steps(self, step: int) -> bool:
        every = self._policy.checkpoint_every
        return step == self._play.setting.num_steps or (every > 0 and step % every == 0)

    # --- the machine and the world ------------------------------------------------------------

    def _health(self, state: State, after: World) -> None:
        if isinstance(state, Training | Restoring | Finishing):
            dead = after.told & mask_of(state.mesh)
            assert not dead, "trains on a slice that is known to be gone"
        if after.condemned:
            assert not after.condemned & self._uses(after.machine), "a corrupt slice is used again"

    def _uses(self, machine: int) -> int:
        """The slices that a machine runs on, would run on, reads from or counts on."""
        found = self._used.get(machine)
        if found is None:
            state, ids = self._play.values[machine], set()
            if not isinstance(state, Starting | Done | Failed):
                ledger = state.ledger
                ids |= ledger.up | getattr(state, "mesh", frozenset())
                ids = ids.union(*(s.holders for s in ledger.sources))
                ids |= {ledger.saving.holder} if ledger.saving else set()
            found = self._used[machine] = mask_of(frozenset(ids))
        return found

    def _bits(self, before: World, said: Event, after: World) -> None:
        """What was computed since a slice held other bits is not used, once that is known."""
        was, now = (self._play.values[w.machine] for w in (before, after))
        if not isinstance(said, SlicesLost) or not said.corrupt or is_stale(was, said):
            return
        kept = [d for d in after.device if d[4] or d[2] & WRONG]
        assert not kept, f"wrong bits are kept: {kept}"
        if isinstance(now, Done | Failed):
            return
        assert all(s.tier is not Tier.LIVE for s in now.ledger.sources), "wrong bits are a source"
        if isinstance(now, Restoring):
            assert now.source.step <= after.rows, "goes on after rows that were taken back"
        last = after.evaluations.bit_length() - 1
        assert now.ledger.evaluated <= max(last, 0), "what was taken back counts as evaluated"

    def _ended(self, before: World, name: str, after: World) -> None:
        setting, values = self._play.setting, self._play.values
        was, end = values[before.machine], values[after.machine]
        if isinstance(end, Failed):
            assert end.reason.strip() and "\n" not in end.reason, "failed, and says not why"
            assert after.faults < setting.faults, f"failed, and nothing had happened: {end.reason}"
            return
        step = end.iterator_state
        assert end.train_state is None or end.train_state.step == step, "one step"
        if end.outcome == "done":
            assert step == setting.num_steps, "done, before the last step"
            if setting.recording:
                self._on_record(after)
        else:
            asked = name == "preempt" or was.ledger.draining
            assert asked, "stopped, and nobody had asked for it"
        if setting.durable:
            on_disk = step == 0 or after.disk >> step & 1
            assert on_disk, f"{end.outcome}, and not on disk"

    def _on_record(self, after: World) -> None:
        """Every step and every evaluation that was due, and nothing that wrong bits gave."""
        steps, every = range(1, self._play.setting.num_steps + 1), self._policy.eval_every
        due = sum(1 << s for s in steps if every and (s % every == 0 or s == steps[-1]))
        assert (after.rows, after.untrue) == (steps[-1], 0), "done, and the rows are not right"
        assert (after.evaluations, after.misjudged) == (due, 0), "done, and not evaluated"

    def _snapshots(self, before: World, event: int | None, after: World) -> None:
        values = self._play.values
        was, state = values[before.machine], values[after.machine]
        if isinstance(was, Starting):
            return
        best = self._best(after, after.machine)
        if isinstance(state, Restoring) and state != was:
            assert state.source.step >= best, f"{state.source}, and step {best} could be restored"
            self._promises(was, state, event, before)
        lost, said = 0, None
        if event is not None:
            lost = self._play.heard(before.machine, event)[0]
            said = values[event]
        # What was moved is the train state now, and its own snapshot is owed.
        moved = isinstance(said, Prepared)
        kept = self._best(before, before.machine, lost, but=3 if moved else -1)
        published = isinstance(said, Snapshotted) and not is_stale(was, said)
        if published and after.memory[said.step] & after.up:
            kept = max(kept, said.step)
        if isinstance(said, Saved) and before.disk >> said.step & 1:
            kept = max(kept, said.step)
        if isinstance(said, Committed) and not is_stale(
            was, said
        ):  # its slices were alive when it was read, if not now
            steps = (s.step for s in state.ledger.sources if s.holders & was.mesh)
            best = max(best, *steps, 0)
        assert best >= kept, "a good snapshot was dropped before a newer one"

    def _promises(self, was: Any, now: Restoring, event: int | None, before: World) -> None:
        """A move loses no step, nor does a loss with lookback `live`; but for wrong bits."""
        if not isinstance(was, Training):
            return
        said = self._play.values[event] if event is not None else None
        if isinstance(said, SlicesLost) and said.corrupt:
            return
        lost = self._play.heard(before.machine, event)[0] if event is not None else 0
        if isinstance(said, Probed):
            lost |= mask_of(said.emptied)
        lost &= mask_of(was.mesh)
        if not lost or (self._policy.lookback == "live" and mask_of(was.mesh) & ~lost):
            reached = said.step if isinstance(said, Committed) else was.committed
            assert now.source.step >= reached, "a move that loses steps"

    def _best(self, w: World, machine: int, lost: int = 0, but: int = -1) -> int:
        """The newest step that the machine names and that could be restored, in truth."""
        named = self._sources.get(machine)
        if named is None:
            sources = self._play.values[machine].ledger.sources
            named = tuple((s.step, _RANK[s.tier], s.epoch, mask_of(s.holders)) for s in sources)
            self._sources[machine] = named
        best = 0
        for step, tier, epoch, holders in named:
            if step > best and tier != but and _restorable(w, step, tier, epoch, holders & ~lost):
                best = step
        return best


_RANK = {Tier.SEED: 0, Tier.DISK: 1, Tier.HOST: 2, Tier.LIVE: 3}


def _restorable(w: World, step: int, tier: int, epoch: int, holders: int) -> bool:
    if tier == 3:
        found = (d for d in w.device if d[:2] == (epoch, step))
        return any(d[2] & GOOD and d[3] & holders & w.up for d in found)
    if tier == 2:
        return bool(w.memory[step] & holders & w.up)
    return tier == 0 or bool(w.disk >> step & 1)
