"""A small world around the machine: slices that die and return, and a driver that obeys.

Pure and hashable, so that every history can be explored. Arrays are ghosts: (slice, epoch, step).
What the real driver does is written here once more, in a dozen lines an effect, with every choice
that the real world has left open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from elastix.machine import (
    Abandon,
    Committed,
    DataFailed,
    Dispatched,
    Done,
    Effect,
    Event,
    Failed,
    Finishing,
    Policy,
    PreemptionNoticed,
    Prepare,
    Prepared,
    Probe,
    Probed,
    RestoreFailed,
    RunStep,
    Save,
    Saved,
    SaveFailed,
    Slices,
    SlicesLost,
    Snapshot,
    SnapshotMissing,
    Snapshotted,
    Source,
    Started,
    Starting,
    State,
    StepStuck,
    Tier,
    Training,
    Tried,
    Try,
    Waiting,
    WakeAt,
    Woke,
    named_snapshots,
    names_train_state,
    transition,
)

UP, EMPTIED, DOWN = "up", "emptied", "down"
_HAPPENINGS = ("lose", "return", "rot", "preempt", "notice", "hang")
LATE = 1e9
"""A second after every deadline."""


@dataclass(frozen=True)
class World:
    """Everything outside the machine, and the machine."""

    policy: Policy
    num_steps: int
    faults: int
    """Faults that may still happen."""
    health: tuple[str, ...]
    machine: State = Starting()
    todo: tuple[Effect, ...] = ()
    events: tuple[Event, ...] = ()
    inflight: tuple[int, ...] = ()
    saves: tuple[Save, ...] = ()
    wake: WakeAt | None = None
    epoch: int = 0
    mesh: Slices = frozenset()
    device: frozenset[tuple[int, int, int]] = frozenset()
    """(slice, epoch, step): train states that are whole on a slice."""
    memory: frozenset[tuple[int, int]] = frozenset()
    """(slice, step): host copies."""
    disk: frozenset[int] = frozenset()
    rotten: frozenset[int] = frozenset()
    """Checkpoints on disk that would not load."""
    unpublished: frozenset[int] = frozenset()
    hung: Slices = frozenset()
    """Slices that answer probes, and never finish a step."""
    rules: Callable[[State, Event, Policy], tuple[State, tuple[Effect, ...]]] = transition
    """The machine; a test of the search puts a defective one here."""

    def up(self, slice_id: int) -> bool:
        return self.health[slice_id] == UP

    def gone(self, slices: Slices) -> Slices:
        return frozenset(s for s in slices if not self.up(s))


def begin(policy: Policy, num_slices: int, num_steps: int, faults: int) -> World:
    world = World(policy, num_steps, faults, (UP,) * num_slices)
    started = Started(
        at=0.0,
        num_steps=num_steps,
        slices=frozenset(range(num_slices)),
        up=frozenset(range(num_slices)),
        sources=(Source(Tier.SEED, 0),),
        durable=True,
    )
    return replace(world, events=(started,))


Choice = tuple[str, World]


def successors(world: World) -> Iterator[Choice]:
    """Every next world, with the name of what happened."""
    if isinstance(world.machine, Done | Failed):
        return
    yield from happenings(world)
    if world.todo:
        effect, rest = world.todo[0], world.todo[1:]
        yield from obey(replace(world, todo=rest), effect)
    elif world.events:
        yield "event", feed(replace(world, events=world.events[1:]), world.events[0])
    else:
        yield from wait(world)


def happenings(world: World) -> Iterator[Choice]:
    """What the world does by itself: losses and rot cost a fault, returns are free."""
    for slice_id, state in enumerate(world.health):
        if state == DOWN:
            back = replace(world, hung=world.hung - {slice_id})
            yield f"return {slice_id}", with_health(back, slice_id, EMPTIED)
        elif world.faults:
            yield f"lose {slice_id}", lose(world, slice_id)
            if slice_id not in world.hung:
                hung = world.hung | {slice_id}
                yield f"hang {slice_id}", replace(world, hung=hung, faults=world.faults - 1)
    if world.faults and world.disk - world.rotten:
        rotten = world.rotten | {max(world.disk - world.rotten)}
        yield "rot", replace(world, rotten=rotten, faults=world.faults - 1)
    live = isinstance(world.machine, Training | Finishing | Waiting)
    if world.faults and live and not world.machine.ledger.draining and not world.events:
        event = PreemptionNoticed(at=0.0, epoch=world.epoch)
        yield "preempt", replace(world, events=(event,), faults=world.faults - 1)
    if world.faults and not world.events:
        yield from notice(world)


def notice(world: World) -> Iterator[Choice]:
    """A slice that is up will be taken away; whether it then is, is another matter."""
    if isinstance(world.machine, Starting | Done | Failed):
        return
    for slice_id in sorted(world.machine.ledger.up):
        for until in (0.0, 1.0):  # at the next probe it is over, or it is not
            event = PreemptionNoticed(
                at=0.0, epoch=world.epoch, slices=frozenset({slice_id}), until=until
            )
            yield f"notice {slice_id}", replace(world, events=(event,), faults=world.faults - 1)


def with_health(world: World, slice_id: int, health: str) -> World:
    changed = (*world.health[:slice_id], health, *world.health[slice_id + 1 :])
    return replace(world, health=changed)


def lose(world: World, slice_id: int) -> World:
    """The slice's memory is gone, on devices and on the host."""
    return wipe(replace(with_health(world, slice_id, DOWN), faults=world.faults - 1), slice_id)


def wipe(world: World, slice_id: int) -> World:
    return replace(
        world,
        device=frozenset(d for d in world.device if d[0] != slice_id),
        memory=frozenset(m for m in world.memory if m[0] != slice_id),
    )


def feed(world: World, event: Event) -> World:
    """One transition of the machine, and the freeing of what it does not name."""
    state, effects = world.rules(world.machine, event, world.policy)
    if isinstance(event, Snapshotted):
        world = replace(world, unpublished=world.unpublished - {event.step})
    world = replace(world, machine=state, todo=effects)
    if isinstance(state, Starting | Done | Failed):
        return world
    kept = named_snapshots(state) | world.unpublished
    return replace(
        world,
        device=frozenset(d for d in world.device if names_train_state(state, d[1], d[2])),
        memory=frozenset(m for m in world.memory if m[1] in kept),
    )


def answer(world: World, kind: type[Event], **fields) -> World:
    event = kind(at=0.0, epoch=world.epoch, **fields)
    return replace(world, events=(*world.events, event))


def lost(world: World, slices: Slices) -> World:
    return answer(replace(world, inflight=()), SlicesLost, slices=slices)


def wait(world: World) -> Iterator[Choice]:
    """The driver has nothing to start: it hears of a save or a wake-up, or reads a step."""
    if world.wake:
        woke = replace(world, wake=None)
        yield "wake", answer(woke, Woke)
    for save in world.saves:
        yield from finish_save(world, save)
    if world.inflight:
        gone = world.gone(world.mesh)
        if gone:
            yield "read fails", lost(world, gone)
        elif world.mesh & world.hung:
            yield "stuck", answer(replace(world, inflight=()), StepStuck, during="a step")
        else:
            step, rest = world.inflight[0], world.inflight[1:]
            yield "commit", answer(replace(world, inflight=rest), Committed, step=step)


def finish_save(world: World, save: Save) -> Iterator[Choice]:
    world = replace(world, saves=tuple(s for s in world.saves if s is not save))
    failed = SaveFailed(at=0.0, epoch=save.epoch, step=save.step, reason="x")
    if (save.holder, save.step) not in world.memory or not world.up(save.holder):
        yield "save fails", replace(world, events=(failed,))
        return
    saved = Saved(at=0.0, epoch=save.epoch, step=save.step)
    disk = frozenset(sorted({*world.disk, save.step})[-world.policy.keep_checkpoints :])
    yield "saved", replace(world, events=(saved,), disk=disk)
    if world.faults:
        yield "disk full", replace(world, events=(failed,), faults=world.faults - 1)


def obey(world: World, effect: Effect) -> Iterator[Choice]:
    if effect.epoch > world.epoch:
        world = replace(world, epoch=effect.epoch, inflight=(), wake=None)
    match effect:
        case Prepare():
            yield from prepare(replace(world, mesh=effect.mesh), effect)
        case RunStep():
            yield from run_step(world, effect.step)
        case Snapshot():
            yield from snapshot(world, effect.step)
        case Save():
            yield "save", replace(world, saves=(*world.saves, effect))
        case Abandon():
            kept = tuple(s for s in world.saves if (s.epoch, s.step) != (effect.epoch, effect.step))
            yield "abandon", replace(world, saves=kept, disk=world.disk - {effect.step})
        case Probe():
            yield from probe(world, effect.slices)
        case Try():
            yield "try", attempt(world, effect.slices)
        case WakeAt():
            yield "wake at", replace(world, wake=effect)


def probe(world: World, slices: Slices) -> Iterator[Choice]:
    found = {h: frozenset(s for s in slices if world.health[s] == h) for h in (UP, EMPTIED, DOWN)}
    world = answer(world, Probed, up=found[UP], emptied=found[EMPTIED], down=found[DOWN])
    yield "probe", world
    if isinstance(world.machine, Waiting):
        late = replace(world.events[-1], at=LATE)
        yield "probe after every deadline", replace(world, events=(*world.events[:-1], late))


def attempt(world: World, slices: Slices) -> World:
    """Each slice alone; what does not finish is out of use until it drains, which is a return."""
    gone = world.gone(slices)
    if gone:
        return lost(world, gone)
    stuck = slices & world.hung
    for slice_id in stuck:
        world = wipe(with_health(world, slice_id, DOWN), slice_id)
    return answer(world, Tried, stuck=stuck)


def prepare(world: World, effect: Prepare) -> Iterator[Choice]:
    source, mesh = effect.source, effect.mesh
    for slice_id in mesh - source.holders:
        if world.health[slice_id] == EMPTIED:
            world = with_health(world, slice_id, UP)
    if source.tier is Tier.LIVE:
        found = any((s, source.epoch, source.step) in world.device for s in source.holders)
    elif source.tier is Tier.HOST:
        found = any((s, source.step) in world.memory for s in source.holders)
    else:
        found = True
    if source.tier is Tier.DISK and (source.step in world.rotten or source.step not in world.disk):
        disk, rotten = world.disk - {source.step}, world.rotten - {source.step}
        failed = replace(world, disk=disk, rotten=rotten)
        yield "set aside", answer(failed, RestoreFailed, source=source, reason="rotten")
        return
    if not found:
        yield "missing", answer(world, SnapshotMissing, source=source)
        return
    gone = world.gone(mesh | source.holders)
    if gone:
        yield "lost in restore", lost(world, gone)
        return
    made = {(s, world.epoch, source.step) for s in mesh}
    yield "prepared", answer(replace(world, device=world.device | made), Prepared, step=source.step)


def run_step(world: World, step: int) -> Iterator[Choice]:
    if world.faults:
        yield (
            "data",
            answer(replace(world, faults=world.faults - 1), DataFailed, step=step, reason="x"),
        )
    gone = world.gone(world.mesh)
    if gone:
        yield "dispatch fails", lost(world, gone)
    before = {(s, world.epoch, step - 1) for s in world.mesh if world.up(s)}
    assert before <= world.device, f"step {step} runs on a train state that was freed"
    device = world.device
    if world.policy.lookback == "host":
        device = frozenset(d for d in device if d[1:] != (world.epoch, step - 1))
    device |= {(s, world.epoch, step) for s in world.mesh if world.up(s)}
    ran = replace(world, device=device, inflight=(*world.inflight, step))
    yield "dispatch", answer(ran, Dispatched, step=step)


def snapshot(world: World, step: int) -> Iterator[Choice]:
    gone = world.gone(world.mesh)
    if gone:
        yield "snapshot fails", lost(world, gone)
        return
    states = {(s, world.epoch, step) for s in world.mesh}
    assert states <= world.device, f"the snapshot of step {step} copies what was freed"
    copies = {(s, step) for s in world.mesh}
    copied = replace(world, memory=world.memory | copies, unpublished=world.unpublished | {step})
    yield "snapshot", answer(copied, Snapshotted, step=step, holders=world.mesh)


def newest(world: World) -> int:
    """The newest step that could be restored now, whatever dies: the best that is kept."""
    steps = {0, *(world.disk - world.rotten), *(m[1] for m in world.memory if world.up(m[0]))}
    return max(steps)


def check(before: World, name: str, after: World) -> None:
    """What must hold after every step of every history."""
    state = after.machine
    if isinstance(state, Training):
        assert state.committed == state.iterator_state == state.train_state.step
        assert 0 <= state.dispatched - state.committed <= after.policy.inflight
        answering = state.ledger.up | state.ledger.noticed
        assert state.mesh <= answering, "trains on a slice that is known to be gone"
        assert len(state.mesh) >= after.policy.min_slices
        assert not state.ledger.saving or state.ledger.saving.holder in answering
    if isinstance(state, Finishing):
        assert state.iterator_state == state.train_state.step
    if isinstance(state, Done) and state.outcome == "done":
        assert state.iterator_state == after.num_steps in after.disk, "done, and not on disk"
    foreground = len(after.inflight) + sum(isinstance(e, RunStep | Snapshot) for e in after.todo)
    assert foreground <= after.policy.inflight + 1
    if not isinstance(state, Done | Failed | Starting):
        steps = {s.step for s in state.ledger.sources if s.tier is Tier.DISK}
        pending = {e.step for e in after.events if isinstance(e, Saved | RestoreFailed)} | {
            e.source.step for e in after.events if isinstance(e, RestoreFailed)
        }
        assert steps - pending <= after.disk, "a source on disk is not there"
    if name in ("event", "commit", "saved", "snapshot", "prepared", "wake", "probe"):
        assert newest(after) >= newest(before), "a good snapshot was dropped before a newer one"


@dataclass
class Explored:
    """What a breadth-first search over all histories saw."""

    worlds: int = 0
    transitions: int = 0
    edges: set[tuple[str, str, str]] = field(default_factory=set)
    """(state, event, next state), by type."""
    ends: set[str] = field(default_factory=set)


def explore(first: World) -> Explored:
    """Visit every world that can be reached; each must be able to reach an end.

    Raises:
        AssertionError: an invariant does not hold; the message has the shortest history.
    """
    graph = Graph(first)
    result = Explored()
    for here, world in enumerate(graph.worlds):  # grows while it is walked: breadth first
        driven = False
        try:
            for name, nxt in successors(world):
                driven = driven or not name.startswith(_HAPPENINGS)
                result.transitions += 1
                note(result, world, name, nxt)
                check(world, name, nxt)
                graph.add(here, name, nxt)
        except Exception as error:
            raise AssertionError(f"{error!r}\n{graph.history(here)}") from error
        if isinstance(world.machine, Done | Failed):
            graph.ends.append(here)
            result.ends.add(getattr(world.machine, "outcome", "failed"))
        elif not driven:
            raise AssertionError(f"stalled\n{graph.history(here)}")
    result.worlds = len(graph.worlds)
    endless = graph.cannot_end()
    if endless:
        raise AssertionError(f"no end can be reached\n{graph.history(min(endless))}")
    return result


class Graph:
    """The worlds that were seen, by number, in breadth-first order."""

    def __init__(self, first: World):
        self.worlds = [first]
        self.ends: list[int] = []
        self._numbers = {first: 0}
        self._first: list[tuple[int, str]] = [(-1, "begin")]
        self._before: list[list[int]] = [[]]

    def add(self, here: int, name: str, nxt: World) -> None:
        number = self._numbers.setdefault(nxt, len(self.worlds))
        if number == len(self.worlds):
            self.worlds.append(nxt)
            self._first.append((here, name))
            self._before.append([])
        self._before[number].append(here)

    def cannot_end(self) -> set[int]:
        """The worlds from which no end can be reached."""
        reached, stack = set(self.ends), list(self.ends)
        while stack:
            for number in self._before[stack.pop()]:
                if number not in reached:
                    reached.add(number)
                    stack.append(number)
        return set(range(len(self.worlds))) - reached

    def history(self, number: int) -> str:
        """The shortest way to a world, and its machine."""
        lines, end = [], self.worlds[number].machine
        while number >= 0:
            before, name = self._first[number]
            event = self.worlds[before].events[0] if name == "event" else ""
            lines.append(f"{name} {event} -> {type(self.worlds[number].machine).__name__}")
            number = before
        return "\n".join(reversed(lines)) + f"\n{end}"


def note(result: Explored, world: World, name: str, nxt: World) -> None:
    if name == "event":
        kinds = (world.machine, world.events[0], nxt.machine)
        result.edges.add(tuple(type(k).__name__ for k in kinds))
