"""A small world around the machine: slices that die and return, and a driver that obeys.

What the real driver does is written here once more, in a dozen lines an effect, with every choice
that the real world has left open. Arrays are ghosts: what is held is tracked as it really is, and
not as the machine says. A world is a tuple of small integers, so that millions can be told apart:
sets of slices and of steps are bits, events and effects are their numbers in a `Book`.

A fault may strike wherever somebody looks at a slice afterwards: before each operation of the
driver and before each answer of the saver. Hearing an event looks at no slice, and so commutes with
what happens to slices: a loss before it, and the same loss after it, lead to the same world.

Wrong bits are told from right ones by nobody but a snapshot, which compares the slices. Once a
slice that held others than the rest is gone, or was copied to all, no one can tell: what the slices
that are left agree on counts as right from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastix.machine import (
    Abandon,
    Committed,
    Compile,
    Compiled,
    ControllerLost,
    DataFailed,
    Dispatched,
    Done,
    Evaluate,
    Evaluated,
    Event,
    Failed,
    PreemptionNoticed,
    Prepare,
    Prepared,
    Probe,
    Probed,
    ProgramFailed,
    RestoreFailed,
    RunStep,
    Save,
    Saved,
    SaveFailed,
    SlicesLost,
    Snapshot,
    SnapshotMissing,
    Snapshotted,
    Source,
    Started,
    Starting,
    StepStuck,
    Tier,
    Tried,
    Try,
    Waiting,
    WakeAt,
    Woke,
    trusted_step,
)
from tests.world_names import mask_of
from tests.world_record import evaluated, forgiven, recorded, retracted, states, unjudged
from tests.world_values import GOOD, POISON, STAMPED, WRONG, Asking, Setting, World

LATE = 1e9
"""A second after every deadline."""

Choice = tuple[str, World]


class Play(Asking):
    """Every history of a setting, one choice at a time."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.everyone = (1 << setting.num_slices) - 1
        self._alike = 0
        self._obey = {
            Prepare: self.prepare,
            RunStep: self.run_step,
            Snapshot: self.snapshot,
            Probe: self.probe,
            Try: self.attempt,
        }

    def begin(self) -> World:
        setting, everyone = self.setting, self.book.sets[self.everyone]
        disk = tuple(Source(Tier.DISK, step) for step in setting.on_disk)
        started = Started(
            at=0.0,
            num_steps=setting.num_steps,
            slices=everyone,
            up=everyone,
            sources=(Source(Tier.SEED, 0), *disk),
            durable=setting.durable,
        )
        return World(
            machine=self.book.number(Starting()),
            up=self.everyone,
            faults=setting.faults,
            events=(self.book.number(started),),
            memory=(0,) * (setting.num_steps + 1),
            disk=sum(1 << step for step in setting.on_disk),
            rows=max(setting.on_disk, default=0) if setting.recording else 0,
        )

    # --- choices ----------------------------------------------------------------------------

    def choices(self, w: World) -> Iterator[Choice]:
        """Every next world, with the name of what happened; none if the machine has ended."""
        if isinstance(self.values[w.machine], Done | Failed):
            return
        self._alike = self.find_alike(w) if self.setting.reduced else 0
        copied = bool(w.copying) and bool(w.copying[2] & GOOD)
        if w.todo or w.saves or copied or not (w.answers or w.events):
            yield from self.happenings(w)
        if w.saves and len(w.answers) == 0:
            yield from self.finish_save(w)
        if w.todo:
            effect = self.values[w.todo[0]]
            w = w._replace(todo=w.todo[1:])
            if effect.epoch > w.epoch:
                w = _new_epoch(w, effect.epoch)
            yield from self._obey[type(effect)](w, effect)
            return
        yield from self.notices(w)
        if w.answers:
            yield from self.feed("answer", w._replace(answers=w.answers[1:]), w.answers[0])
        elif copied:
            yield from self.guarded(w, self.copy(w), "snapshot")
        elif w.events:
            yield from self.feed("event", w._replace(events=w.events[1:]), w.events[0])
        else:
            yield from self.wait(w)

    def happenings(self, w: World) -> Iterator[Choice]:
        """What the world does by itself to slices: losses cost a fault, returns are free."""
        down = self.everyone & ~(w.up | w.emptied)
        for s, bit in self.one_of(down | w.hung):
            back = _lose(w, bit) if bit & w.hung else w
            yield f"return {s}", back._replace(emptied=w.emptied | bit)
        if self.may(w, "lose"):
            for s, bit in self.one_of(w.up | w.emptied):
                yield f"lose {s}", _lose(_spend(w), bit)
        if self.policy.checkpoint_seconds and w.clock == 0:
            yield "tick", w._replace(clock=1)
        if self.may(w, "lose all") and w.up | w.emptied:
            yield "lose all", _lose(_spend(w), w.up | w.emptied)

    def notices(self, w: World) -> Iterator[Choice]:
        """The driver hears of preemptions before it looks for anything else."""
        ledger = getattr(self.values[w.machine], "ledger", None)
        if ledger is None:
            return
        if self.may(w, "preempt") and not ledger.draining:
            event = self.told(w, PreemptionNoticed)
            yield from self.feed("preempt", _spend(w), event)
        if self.may(w, "notice"):
            for s, bit in self.one_of(mask_of(ledger.up | ledger.corrupt)):
                for until in (0.0, 1.0):  # at the next probe it is over, or it is not
                    event = self.told(w, PreemptionNoticed, slices=self.sets[bit], until=until)
                    yield from self.feed(f"notice {s}", _spend(w), event)

    def wait(self, w: World) -> Iterator[Choice]:
        """The driver has nothing to start: it is woken, reads a step, or evaluates."""
        if w.wake:
            yield "wake", self.answer(w._replace(wake=False), Woke)
        if w.compiling:
            ready = self.sets[w.compiling]
            yield "compiled", self.answer(w._replace(compiling=0), Compiled, mesh=ready)
        if w.inflight:
            yield from self.guarded(w, self.commit(w), "read")
        elif w.evaluating >= 0:
            yield from self.guarded(w, self.evaluate(w), "evaluation")
            if self.may(w, "data"):
                broken = _spend(w)._replace(evaluating=-1)
                yield "data", self.answer(broken, DataFailed, step=w.evaluating, reason="x")

    # --- faults -----------------------------------------------------------------------------

    def may(self, w: World, kind: str) -> bool:
        return w.faults > 0 and kind in self.setting.kinds

    def one_of(self, mask: int) -> Iterator[tuple[int, int]]:
        """(slice, its bit): of slices that nothing tells apart, one."""
        mask &= ~self._alike
        for s in range(self.setting.num_slices):
            if mask >> s & 1:
                yield s, 1 << s

    def guarded(self, w: World, does: Iterator[Choice], what: str) -> Iterator[Choice]:
        """What an operation on the mesh does, and everything else that may come of it."""
        if not w.connected:
            yield "disconnected", self.give_up(w, ControllerLost, reason="x")
            return
        yield from does
        if self.may(w, "hang"):
            for s, bit in self.one_of(w.mesh & w.up & ~w.hung):
                hung = _spend(w)._replace(hung=w.hung | bit)
                yield f"{what}: {s} hangs", self.give_up(hung, StepStuck, during=what)
        if self.may(w, "blame"):
            named = self.sets[w.mesh]
            yield f"{what}: blame", self.give_up(_spend(w), SlicesLost, slices=named)
        if self.may(w, "error"):
            yield f"{what}: error", self.give_up(_spend(w), ProgramFailed, reason="x")
        if self.may(w, "controller"):
            lost = _spend(w)._replace(connected=False)
            yield f"{what}: controller", self.give_up(lost, ControllerLost, reason="x")

    def checked(self, w: World, slices: int, what: str) -> Iterator[World]:
        """Go on if these slices answer that they hold what they should, and are not hung."""
        gone = slices & ~w.up
        if gone:
            yield self.lost(w, gone)
        elif slices & w.hung:
            yield self.give_up(w, StepStuck, during=what)
        else:
            if self.may(w, "silent"):
                for _, bit in self.one_of(slices):
                    yield self.lost(_spend(w), bit)
            yield w

    # --- answers ----------------------------------------------------------------------------

    def answer(self, w: World, kind: type[Event], **said: Any) -> World:
        return w._replace(events=(*w.events, self.told(w, kind, **said)))

    def told(self, w: World, kind: type[Event], epoch: int | None = None, **said: Any) -> int:
        """The number of an event that is told now; `epoch` is the driver's if none is given."""
        if self.policy.checkpoint_seconds and kind in STAMPED:
            said["at"] = float(w.clock)
        return self.event(kind, w.epoch if epoch is None else epoch, **said)

    def give_up(self, w: World, kind: type[Event], **said: Any) -> World:
        """Nobody waits any more for what is in the foreground."""
        return self.answer(w._replace(inflight=(), evaluating=-1, copying=()), kind, **said)

    def lost(self, w: World, gone: int) -> World:
        return self.give_up(w, SlicesLost, slices=self.sets[gone])

    # --- the machine ------------------------------------------------------------------------

    def feed(self, name: str, w: World, event: int) -> Iterator[Choice]:
        """One transition of the machine, and the freeing of what it does not name."""
        lost, found = self.heard(w.machine, event)
        told = (w.told | lost) & ~found
        said = self.values[event]
        unpublished = w.unpublished
        if isinstance(said, Snapshotted):
            unpublished &= ~(1 << said.step)
        if isinstance(said, Saved) and not self.given_up(w.machine, said):
            w = self.retired(w, said.step)
        if lost and getattr(said, "corrupt", False):
            w = w._replace(condemned=w.condemned | lost)
            w = retracted(w, trusted_step(self.values[w.machine]))
        for machine, todo in self.outcome(w.machine, event):
            after = w._replace(machine=machine, todo=todo, told=told, unpublished=unpublished)
            after = unjudged(self.freed(after))
            yield name, self.recounted(self.reset_clock(self.started(after)))

    def started(self, w: World) -> World:
        """Effects that look at no slice are started at once, up to the first that does."""
        while w.todo:
            effect = self.values[w.todo[0]]
            if type(effect) in self._obey:
                return w
            w = w._replace(todo=w.todo[1:])
            if effect.epoch > w.epoch:
                w = _new_epoch(w, effect.epoch)
            match effect:
                case Save():
                    assert all(gone for _, gone in w.saves), "two saves at once"
                    w = w._replace(saves=(*w.saves, (self.book.number(effect), False)))
                case Abandon():
                    w = self.abandon(w, effect)
                case WakeAt():
                    w = w._replace(wake=True)
                case Compile():
                    w = w._replace(compiling=mask_of(effect.mesh))
                case Evaluate():
                    w = w._replace(evaluating=effect.step)
                case _:
                    raise AssertionError(f"the driver of this world does not know {effect}")
        return w

    # --- steps ------------------------------------------------------------------------------

    def prepare(self, w: World, effect: Prepare) -> Iterator[Choice]:
        mesh, holders = mask_of(effect.mesh), mask_of(effect.source.holders)
        admitted = w.emptied & mesh & ~holders
        w = w._replace(mesh=mesh, up=w.up | admitted, emptied=w.emptied & ~admitted)
        yield from self.guarded(w, self.restore(w, effect, mesh, holders), "restore")

    def restore(self, w: World, effect: Prepare, mesh: int, holders: int) -> Iterator[Choice]:
        source, how, odd = effect.source, GOOD, 0
        match source.tier:
            case Tier.LIVE:
                found = [d for d in w.device if d[:2] == (source.epoch, source.step)]
                right = bool(found) and found[0][2] & GOOD and not holders & ~found[0][3]
                how, odd = (found[0][2], found[0][4] & holders) if found else (GOOD, 0)
            case Tier.HOST:
                down = holders & ~(w.up | w.emptied)
                found = down | holders & w.memory[source.step]
                right = not holders & w.up & ~w.memory[source.step]
            case Tier.DISK:
                found = right = w.disk >> source.step & 1
                if found and not self.may(w, "rot"):
                    pass
                else:
                    aside = w._replace(disk=w.disk & ~(1 << source.step))
                    aside = _spend(aside) if found else aside
                    yield "set aside", self.answer(aside, RestoreFailed, source=source, reason="x")
            case _:
                found = right = True
        if not found:
            if source.tier is not Tier.DISK:
                yield "missing", self.answer(w, SnapshotMissing, source=source)
            return
        for after in self.checked(w, mesh | holders, "restore"):
            if after is not w:
                yield "restore", after
                continue
            assert right, f"{source} was restored, and a holder has lost it"
            for others in copied(odd, holders, mesh):
                made = (w.epoch, source.step, how, mesh, others)
                after = w._replace(device=tuple(sorted({*w.device, made})), batch=-1)
                yield "restore", self.answer(after, Prepared, step=source.step)

    def run_step(self, w: World, effect: RunStep) -> Iterator[Choice]:
        if self.may(w, "data"):
            broken = _spend(w)._replace(batch=-1)
            yield "data", self.answer(broken, DataFailed, step=effect.step, reason="x")
        yield from self.guarded(w, self.dispatch(w, effect.step), "dispatch")

    def dispatch(self, w: World, step: int) -> Iterator[Choice]:
        """A slice that is dead may be noticed here, or when the result is read."""
        gone = w.mesh & ~w.up
        if gone:
            yield "dispatch fails", self.lost(w, gone)
        before = [d for d in w.device if d[:2] == (w.epoch, step - 1)]
        assert before, f"step {step} runs on a train state that was freed"
        batch = step if w.batch < 0 else w.batch + 1
        assert batch == step, f"step {step} consumes batch {batch}"
        _, _, how, held, odd = before[0]
        spoilt = POISON if how & POISON or gone or held != w.mesh else 0
        wrong = WRONG if how & WRONG or odd else 0
        kept = set(w.device) if self.policy.lookback == "live" else set(w.device) - {before[0]}
        w = w._replace(inflight=(*w.inflight, step), batch=batch)
        for name, then, flipped in self.flips(w):
            made = (w.epoch, step, spoilt | wrong, w.mesh & w.up, odd | flipped)
            ran = then._replace(device=tuple(sorted({*kept, made})))
            yield name, self.answer(ran, Dispatched, step=step)

    def flips(self, w: World) -> Iterator[tuple[str, World, int]]:
        """A step that is dispatched, and whether the bits of a slice change while it runs: of one
        slice at a time, since what two of them hold would be two other things."""
        yield "dispatch", w, 0
        copied_wrong = bool(w.copying) and bool(w.copying[2] & WRONG)
        if self.may(w, "corrupt") and not copied_wrong and not any(d[4] for d in states(w)):
            for s, bit in self.one_of(w.mesh & w.up):
                yield f"corrupt {s}", _spend(w), bit

    def commit(self, w: World) -> Iterator[Choice]:
        for after in self.read(w):
            if after is w:
                step, rest = w.inflight[0], w.inflight[1:]
                states = [d for d in w.device if d[:2] == (w.epoch, step)]
                assert not any(d[2] & POISON for d in states), (
                    f"step {step} was computed by the dead"
                )
                known = ((*d[:2], d[2] | GOOD, *d[3:]) if d in states else d for d in w.device)
                copy = w.copying
                if copy and copy[1] == step:
                    assert not copy[2] & POISON, f"the copy of step {step} is of the dead"
                    copy = (*copy[:2], copy[2] | GOOD, *copy[3:])
                after = w._replace(inflight=rest, device=tuple(known), copying=copy)
                after = self.written(after, step, states)
            yield "read", after

    def written(self, w: World, step: int, states: list[Any]) -> World:
        """The row is written before the step is told, and held against the one on record."""
        if self.setting.recording:
            after = recorded(w, step, bool(states[0][2] & WRONG))
            if after is None:
                return self.answer(w, ProgramFailed, reason="done again, and another loss")
            w = after
        return self.answer(w, Committed, step=step, finite=True)

    def read(self, w: World) -> Iterator[World]:
        """What a step says comes from every slice of the mesh, or not at all."""
        gone = w.mesh & ~w.up
        if gone:
            yield self.lost(w, gone)
        elif w.mesh & w.hung:
            yield self.give_up(w, StepStuck, during="read")
        else:
            yield w

    def evaluate(self, w: World) -> Iterator[Choice]:
        for after in self.read(w):
            if after is w:
                states = [d for d in w.device if d[:2] == (w.epoch, w.evaluating)]
                assert states and states[0][2] & GOOD, "evaluates what was freed or is not right"
                after = self.answer(w._replace(evaluating=-1), Evaluated, step=w.evaluating)
                if self.setting.recording:
                    wrong = bool(states[0][2] & WRONG or states[0][4])
                    after = evaluated(after, w.evaluating, wrong)
            yield "evaluation", after

    def snapshot(self, w: World, effect: Snapshot) -> Iterator[Choice]:
        w = w._replace(evaluating=-1)
        yield from self.guarded(w, self.begin_copy(w, effect.step), "snapshot")

    def begin_copy(self, w: World, step: int) -> Iterator[Choice]:
        gone = w.mesh & ~w.up
        if gone:
            yield "snapshot fails", self.lost(w, gone)
        states = [d for d in w.device if d[:2] == (w.epoch, step)]
        assert states, f"the snapshot of step {step} copies what was freed"
        assert not w.copying, "two snapshots at once"
        yield "snapshot", w._replace(copying=states[0])

    def copy(self, w: World) -> Iterator[Choice]:
        """A snapshot is finished when its step was read, before that is told."""
        _, step, how, whose, odd = w.copying
        w = w._replace(copying=())
        for after in self.checked(w, w.mesh, "snapshot"):
            if after is w:
                assert whose == w.mesh, f"the snapshot of step {step} is not right"
                after = self.compared(w, odd) or self.copied(forgiven(w, how, odd), step)
            yield "snapshot", after

    def copied(self, w: World, step: int) -> World:
        memory = (*w.memory[:step], w.memory[step] | w.mesh, *w.memory[step + 1 :])
        after = w._replace(memory=memory, unpublished=w.unpublished | 1 << step)
        return self.answer(after, Snapshotted, step=step, holders=self.sets[w.mesh])

    def compared(self, w: World, odd: int) -> World | None:
        """What a snapshot finds, if not all slices of the mesh hold the same."""
        rest = w.mesh & ~odd
        if not odd or not rest:
            return None
        if odd.bit_count() == rest.bit_count():
            return self.give_up(w, ProgramFailed, reason="no majority")
        fewer = min(odd, rest, key=int.bit_count)
        return self.give_up(w, SlicesLost, slices=self.sets[fewer], corrupt=True)

    # --- asking -----------------------------------------------------------------------------

    def probe(self, w: World, effect: Probe) -> Iterator[Choice]:
        if not w.connected:
            yield "disconnected", self.give_up(w, ControllerLost, reason="x")
            return
        asked = mask_of(effect.slices)
        late = isinstance(self.values[w.machine], Waiting)
        for at in (0.0, LATE) if late else (0.0,):
            yield "probe", self.probed(w, asked, 0, at)
        if self.may(w, "silent"):
            for s, bit in self.one_of(asked & w.up):
                yield f"probe: {s} is silent", self.probed(_spend(w), asked, bit, 0.0)
        if self.may(w, "probe"):
            named = self.sets[w.mesh or asked]
            yield "probe: blame", self.give_up(_spend(w), SlicesLost, slices=named)
        if self.may(w, "controller"):
            lost = _spend(w)._replace(connected=False)
            yield "probe: controller", self.give_up(lost, ControllerLost, reason="x")

    def probed(self, w: World, asked: int, silent: int, at: float) -> World:
        up, emptied = asked & w.up & ~silent, asked & w.emptied
        down = asked & ~(up | emptied)
        sets = {"up": self.sets[up], "emptied": self.sets[emptied], "down": self.sets[down]}
        return self.answer(w, Probed, **sets, at=at)

    def attempt(self, w: World, effect: Try) -> Iterator[Choice]:
        yield from self.guarded(w, self.alone(w, mask_of(effect.slices)), "trial")
        if self.may(w, "hang"):  # the compiler, say
            yield "trial: stuck", self.give_up(_spend(w), StepStuck, during="trial")

    def alone(self, w: World, slices: int) -> Iterator[Choice]:
        """What does not finish alone is out of use until it drains, which is a return."""
        gone = w.mesh & ~w.up
        if gone:
            yield "trial", self.lost(w, gone)
        else:
            stuck = slices & w.hung
            yield "trial", self.answer(_lose(w, stuck), Tried, stuck=self.sets[stuck])

    # --- saves ------------------------------------------------------------------------------

    def finish_save(self, w: World) -> Iterator[Choice]:
        """The saver answers, in order. It looks at the holder after it has read the copy."""
        (number, abandoned), rest = w.saves[0], w.saves[1:]
        save, w = self.values[number], w._replace(saves=rest)
        if abandoned and any(self._of_one_step(save, self.values[n]) for n, _ in rest):
            yield "save is replaced", w  # nobody waits for its answer, but for the other's
            return
        holder = 1 << save.holder
        if not w.connected or not w.up & holder:
            yield "save fails", self.unsaved(w, save, holder if w.connected else 0)
            return
        if not w.memory[save.step] & holder:
            yield "save fails", self.unsaved(w, save, 0)
            return
        done = self.told(w, Saved, save.epoch, step=save.step)
        # What an abandoned save writes is removed behind it.
        disk = w.disk if abandoned else w.disk | 1 << save.step
        yield "save", w._replace(answers=(*w.answers, done), disk=disk)
        if abandoned:
            yield "save fails", self.unsaved(w, save, 0)
        if self.may(w, "disk full"):
            yield "disk full", self.unsaved(_spend(w), save, 0)
        if self.may(w, "silent"):
            yield "save: silent", self.unsaved(_spend(w), save, holder)

    @staticmethod
    def _of_one_step(one: Save, other: Save) -> bool:
        return (one.epoch, one.step) == (other.epoch, other.step)

    def retired(self, w: World, step: int) -> World:
        """The oldest go when it is known that `step` counts."""
        steps = [s for s in range(len(w.memory)) if w.disk >> s & 1]
        kept = {*steps[-self.policy.keep_checkpoints :], *range(step, len(w.memory))}
        return w._replace(disk=w.disk & sum(1 << s for s in kept))

    def unsaved(self, w: World, save: Save, lost: int) -> World:
        said = {"step": save.step, "reason": "x", "lost": self.sets[lost]}
        return w._replace(answers=(*w.answers, self.told(w, SaveFailed, save.epoch, **said)))

    def abandon(self, w: World, effect: Abandon) -> World:
        """Whatever there is of it is removed, even if it was answered and nobody has heard."""
        which = (effect.epoch, effect.step)
        saves = tuple(
            (n, gone or (self.values[n].epoch, self.values[n].step) == which) for n, gone in w.saves
        )
        return w._replace(saves=saves, disk=w.disk & ~(1 << effect.step))


def copied(odd: int, holders: int, mesh: int) -> Iterator[int]:
    """The slices that hold other bits when `holders` have given what they hold to the rest of the
    mesh: whether those that hold others are copied from, nobody says."""
    kept, new = odd & mesh, mesh & ~holders
    if not odd or not new:
        yield kept
        return
    if holders & ~odd:
        yield kept
    yield kept | new


def _spend(w: World) -> World:
    return w._replace(faults=w.faults - 1)


def _new_epoch(w: World, epoch: int) -> World:
    w = w._replace(epoch=epoch, inflight=(), copying=(), batch=-1)
    return w._replace(evaluating=-1, wake=False, compiling=0)


def _lose(w: World, slices: int) -> World:
    """What these slices held is gone, and what they took part in and nobody has read is spoilt."""
    if not slices:
        return w
    keep = ~slices
    copying = _without(w.copying, slices) if w.copying else ()
    return w._replace(
        device=tuple(_without(d, slices) for d in w.device),
        copying=copying,
        memory=tuple(m & keep for m in w.memory),
        up=w.up & keep,
        emptied=w.emptied & keep,
        hung=w.hung & keep,
    )


def _without(state: tuple[int, int, int, int, int], slices: int) -> tuple[int, int, int, int, int]:
    """A train state, when these slices are gone."""
    epoch, step, how, held, odd = state
    spoilt = 0 if how & GOOD or not held & slices else POISON
    return epoch, step, how | spoilt, held & ~slices, odd & ~slices
