"""A world as a value, and the machine in it: asked about each event once, under every name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from elastix.machine import (
    Committed,
    DataFailed,
    Dispatched,
    Done,
    Effect,
    Evaluated,
    Event,
    Failed,
    Policy,
    PreemptionNoticed,
    Prepared,
    Save,
    Saved,
    SaveFailed,
    SlicesLost,
    Snapshotted,
    Starting,
    State,
    Warm,
    is_stale,
    named_snapshots,
    names_train_state,
    transition,
)
from tests.world_names import Book, inverse, mask_of

FAULTS = frozenset(
    {
        "lose",  # a slice dies, with all it holds
        "lose all",  # all at once
        "hang",  # a slice answers probes, and finishes nothing
        "silent",  # a slice that is alive does not answer one probe
        "blame",  # DATA_LOSS that names the whole mesh, with nobody gone
        "error",  # the program raises
        "controller",  # every connection is gone, for good
        "data",
        "rot",  # a checkpoint does not load
        "disk full",
        "preempt",  # the job is asked to stop
        "notice",  # a slice will be taken away; whether it then is, is another matter
    }
)

OUTSIDE_THE_CONTRACT = frozenset({"probe"})
"""A probe raises DATA_LOSS. A backend says of a slice that it is down, and does not raise that."""

BIT_FLIPS = frozenset({"corrupt"})
"""The bits of one slice change in silence, while a step runs."""

PENDING, GOOD, POISON, WRONG = 0, 1, 2, 4
"""Of a train state: dispatched and not read, read, or computed with a slice that was dead; and,
besides, computed from what a slice with other bits had added."""

STAMPED = (
    *(Dispatched, Committed, Evaluated, DataFailed, Snapshotted, Prepared),
    *(Saved, SaveFailed, PreemptionNoticed),
)
"""The events of which it matters how long after the last save they came."""

Rules = Callable[[State, Event, Policy], tuple[State, tuple[Effect, ...]]]


@dataclass(frozen=True)
class Setting:
    """What a world is made of, and what may go wrong in it."""

    policy: Policy
    num_slices: int
    num_steps: int
    faults: int
    """Faults that may happen in one history; slices return for nothing."""
    kinds: frozenset[str] = FAULTS
    on_disk: tuple[int, ...] = ()
    durable: bool = True
    rules: Rules = transition
    """The machine; a test of the search puts a defective one here."""
    reduced: bool = True
    """Take worlds that differ only in the numbering of the slices for one."""
    thorough: bool = False
    """Ask the machine everything under every numbering of the slices."""

    @property
    def recording(self) -> bool:
        """Whether rows may have to be taken back, so that the world must know them."""
        return "corrupt" in self.kinds


class World(NamedTuple):
    """Everything outside the machine, and the machine. Epochs are counted from the machine's: the
    one before is -1."""

    machine: int
    up: int
    """The slices that live, and hold what they should."""
    faults: int
    todo: tuple[int, ...] = ()
    events: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()
    """The saver's; they are heard before other events."""
    saves: tuple[tuple[int, bool], ...] = ()
    """What the saver has to do, in this order, and whether it was abandoned."""
    inflight: tuple[int, ...] = ()
    device: tuple[tuple[int, int, int, int, int], ...] = ()
    """(epoch, step, how it is, slices that hold it, those of them that hold other bits than the
    rest): the train states that were not freed."""
    copying: tuple[int, int, int, int, int] | tuple[()] = ()
    """The same of the train state that a host snapshot is being made of, as it was begun."""
    memory: tuple[int, ...] = ()
    """For each step the slices with a host copy."""
    unpublished: int = 0
    disk: int = 0
    emptied: int = 0
    """The slices that died and came back."""
    hung: int = 0
    mesh: int = 0
    told: int = 0
    """The slices that the machine was told are gone, and not that they answer."""
    epoch: int = 0
    """The driver's."""
    batch: int = -1
    """The last batch that was read, -1 if the stream is to be opened anew."""
    evaluating: int = -1
    wake: bool = False
    compiling: int = 0
    """The mesh that executables are made for in the background; 0 if none is."""
    connected: bool = True
    condemned: int = 0
    """The slices that the machine was told hold wrong bits."""
    rows: int = 0
    """The last step on record; only kept where rows may have to be taken back."""
    untrue: int = 0
    """The steps whose row tells what a wrong state gave."""
    evaluations: int = 0
    misjudged: int = 0
    """The steps whose evaluation is on record, and those of them that were of a wrong state."""
    clock: int = 0
    """Seconds since the last save was begun: 0, or 1 and more; only told where the policy asks."""


class Outcome(NamedTuple):
    """What the machine makes of an event."""

    machine: int
    todo: tuple[int, ...]


class Asking:
    """The machine of a setting, and the names under which worlds are one."""

    def __init__(self, setting: Setting):
        self.setting, self.policy = setting, setting.policy
        self.book = Book(setting.num_slices)
        self.sets, self.event, self.values = self.book.sets, self.book.event, self.book.values
        self.outcomes: dict[tuple[int, int], tuple[Outcome, ...]] = {}
        """What was asked of the machine, by the numbers of (state, event)."""
        self._heard: dict[tuple[int, int], tuple[int, int]] = {}
        self._kept: dict[int, tuple[int, dict[tuple[int, int], bool]]] = {}
        self._bits: dict[Any, tuple[int, ...]] = {}
        self._words: dict[Any, tuple[tuple[int, ...], ...]] = {}

    def heard(self, machine: int, event: int) -> tuple[int, int]:
        """The slices that an event says are gone, and that it says answer."""
        key = (machine, event)
        if key not in self._heard:
            said = self.values[event]
            gone = ("slices",) if isinstance(said, SlicesLost) else ("down", "stuck", "lost")
            lost = frozenset().union(*(getattr(said, n, ()) for n in gone))
            found = frozenset().union(*(getattr(said, n, ()) for n in ("up", "emptied")))
            stale = is_stale(self.values[machine], said) or self.given_up(machine, said)
            self._heard[key] = (0, 0) if stale else (mask_of(lost), mask_of(found))
        return self._heard[key]

    def given_up(self, machine: int, said: Event) -> bool:
        """Whether this is the answer to a save that nobody waits for any more."""
        if not isinstance(said, Saved | SaveFailed):
            return False
        saving = self.values[machine].ledger.saving
        return saving is None or (saving.step, saving.epoch) != (said.step, said.epoch)

    def outcome(self, machine: int, event: int) -> tuple[Outcome, ...]:
        """What the machine makes of an event, however the slices are numbered.

        Where it picks one of several equal slices, it takes their ids to break the tie. So if two
        numberings are one world, then what it picks must be left open: where it picks, the machine
        is asked under each numbering, and all answers are explored. Every history of numbered
        slices is then explored under other names. What is explored beside them makes what must
        never happen stronger; that an end can be reached is shown for some pick, not for each.
        """
        found = self.outcomes.get((machine, event))
        if found is None:
            ids = tuple(range(self.setting.num_slices))
            answers = {self._ask(machine, event, ids): None}
            if self._must_ask_again(answers):
                perms = self.book.arrangements(machine, event)
                answers |= dict.fromkeys(self._ask(machine, event, perm) for perm in perms)
            found = self.outcomes[machine, event] = tuple(answers)
        return found

    def _must_ask_again(self, answers: Iterable[Outcome]) -> bool:
        """Whether the machine may do something else under another numbering: it picks a slice to
        write a checkpoint, and those that stand by. That it picks nothing else is what a thorough
        search finds out."""
        if not self.setting.reduced:
            return False
        picks = any(isinstance(self.values[t], Save) for answer in answers for t in answer.todo)
        return picks or self.policy.max_slices is not None or self.setting.thorough

    def _ask(self, machine: int, event: int, perm: tuple[int, ...]) -> Outcome:
        book, back = self.book, inverse(perm)
        state, said = (self.values[book.renumbered(n, perm)] for n in (machine, event))
        after, effects = self.setting.rules(state, said, self.policy)
        asked = (e for e in effects if not isinstance(e, Warm))  # which changes nothing here
        todo = tuple(book.renumbered(book.number(e), back) for e in asked)
        return Outcome(book.renumbered(book.number(after), back), todo)

    def freed(self, w: World) -> World:
        state = self.values[w.machine]
        if isinstance(state, Starting | Done | Failed):
            return w
        kept = self._kept.get(w.machine)
        if kept is None:
            kept = (sum(1 << step for step in named_snapshots(state)), {})
            self._kept[w.machine] = kept
        snapshots, named = kept[0] | w.unpublished, kept[1]
        for d in w.device:
            if d[:2] not in named:
                named[d[:2]] = names_train_state(state, *d[:2])
        return w._replace(
            device=tuple(d for d in w.device if named[d[:2]]),
            memory=tuple(m if snapshots >> i & 1 else 0 for i, m in enumerate(w.memory)),
        )

    # --- one world under many names -----------------------------------------------------------

    def canonical(self, w: World) -> World:
        """The one of all worlds that differ in the numbering of the slices that stands for them:
        slices are in the order of what is said of them."""
        if not self.setting.reduced:
            return w
        lanes = self.lanes(w)
        if lanes == sorted(lanes):
            return w
        perm = inverse(tuple(sorted(range(len(lanes)), key=lanes.__getitem__)))
        masks, renumbered = self.book.masks(perm), self.book.renumbered
        return w._replace(
            machine=renumbered(w.machine, perm),
            todo=tuple(renumbered(n, perm) for n in w.todo),
            events=tuple(renumbered(n, perm) for n in w.events),
            answers=tuple(renumbered(n, perm) for n in w.answers),
            saves=tuple((renumbered(n, perm), gone) for n, gone in w.saves),
            device=tuple((*d[:3], masks[d[3]], masks[d[4]]) for d in w.device),
            copying=(*w.copying[:3], *(masks[m] for m in w.copying[3:])),
            memory=tuple(masks[m] for m in w.memory),
            up=masks[w.up],
            emptied=masks[w.emptied],
            hung=masks[w.hung],
            mesh=masks[w.mesh],
            told=masks[w.told],
            condemned=masks[w.condemned],
            compiling=masks[w.compiling],
        )

    def lanes(self, w: World) -> list[tuple[Any, Any]]:
        """All that is said of each slice: by the world, and by the machine and the messages."""
        masks = (w.up, w.emptied, w.hung, w.mesh, w.told, w.condemned, w.compiling)
        key = (*masks, w.memory, w.device, w.copying)
        bits = self._bits.get(key)
        if bits is None:
            sets = (*masks, *w.memory, *(m for d in w.device for m in d[3:]), *w.copying[3:])
            each = range(self.setting.num_slices)
            bits = tuple(sum((m >> s & 1) << i for i, m in enumerate(sets)) for s in each)
            self._bits[key] = bits
        key = (w.machine, w.todo, w.events, w.answers, w.saves)
        words = self._words.get(key)
        if words is None:
            numbers = (w.machine, *w.todo, *w.events, *w.answers, *(n for n, _ in w.saves))
            words = tuple(zip(*map(self.book.said, numbers), strict=True))
            self._words[key] = words
        return list(zip(bits, words, strict=True))

    def find_alike(self, w: World) -> int:
        """The slices of a canonical world that nothing tells from the one before them."""
        lanes = self.lanes(w)
        return sum(1 << s for s in range(1, len(lanes)) if lanes[s] == lanes[s - 1])

    def recounted(self, w: World) -> World:
        """The machine's epoch is 0, whatever it was, and those before it follow each other."""
        ledger = getattr(self.values[w.machine], "ledger", None)
        if ledger is None or ledger.epoch == 0:
            return w
        epochs = self.book.epochs
        numbers = (w.machine, *w.todo, *w.events, *w.answers, *(n for n, _ in w.saves))
        named = {w.epoch, *(d[0] for d in w.device), *w.copying[:1]}.union(*map(epochs, numbers))
        old = tuple(sorted(named))
        new = dict(zip(old, range(1 - len(old), 1), strict=True))
        recounted = self.book.recounted
        return w._replace(
            machine=recounted(w.machine, old),
            todo=tuple(recounted(n, old) for n in w.todo),
            events=tuple(recounted(n, old) for n in w.events),
            answers=tuple(recounted(n, old) for n in w.answers),
            saves=tuple((recounted(n, old), gone) for n, gone in w.saves),
            device=tuple((new[d[0]], *d[1:]) for d in w.device),
            copying=(new[w.copying[0]], *w.copying[1:]) if w.copying else (),
            epoch=new[w.epoch],
        )

    def reset_clock(self, w: World) -> World:
        """The last save was begun at second 0, and other times are counted from there."""
        ledger = getattr(self.values[w.machine], "ledger", None)
        if ledger is None or ledger.saved_at == 0:
            return w
        state, by = self.values[w.machine], ledger.saved_at
        begun = replace(state, ledger=replace(ledger, saved_at=0.0))
        return w._replace(
            machine=self.book.number(begun),
            events=tuple(self._stamp(n, by) for n in w.events),
            answers=tuple(self._stamp(n, by) for n in w.answers),
            clock=int(min(max(w.clock - by, 0), 1)),
        )

    def _stamp(self, number: int, by: float) -> int:
        """The event, of `by` seconds earlier; more than a second either way is no news."""
        event = self.values[number]
        if not isinstance(event, STAMPED):
            return number
        return self.book.number(replace(event, at=min(max(event.at - by, -1.0), 1.0)))
