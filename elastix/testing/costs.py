"""Long histories of a job in which everything costs what it was measured to: the pure machine
decides, and this world answers its effects on a virtual clock.

Slices fail and return by themselves, at random, by a seed. No step is done for itself: a stretch
of training to which nothing happens is one jump to its end, so that hours of a thousand slices
pass in a second. Checkpoints are not asked for: the world keeps which step is durable since when.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from elastix.goodput_model import Costs, Job
from elastix.machine import (
    Committed,
    Compile,
    Compiled,
    ControllerLost,
    Dispatched,
    Effect,
    Event,
    Failed,
    Growth,
    Live,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Restoring,
    RunStep,
    Slices,
    SlicesLost,
    Snapshot,
    Snapshotted,
    Source,
    Started,
    Starting,
    State,
    Tier,
    Training,
    Waiting,
    WakeAt,
    Woke,
    transition,
)
from elastix.machine.verbs import involved
from elastix.testing.jumps import ENDLESS, Strategy, elapsed, jump, newest, policy_of

LEAST_REPAIRS = 20
"""A history lasts so many mean repairs at least: it begins with every slice up."""


@dataclass(frozen=True)
class History:
    """How a job went: `steps` counted after `seconds`, while slices failed `failures` times."""

    goodput: float
    steps: int
    seconds: float
    failures: int
    interruptions: int
    """Of training or of a restore; a slice that fails while nothing runs interrupts nothing."""
    transitions: int


def run_history(
    costs: Costs, job: Job, strategy: Strategy, rng: random.Random, failures: int
) -> History:
    """A history up to so many failures of slices; the times until a slice fails and until it is
    back are drawn from `rng`, which decides everything."""
    return _World(costs, job, strategy, rng).run(failures)


class _World:
    def __init__(self, costs: Costs, job: Job, strategy: Strategy, rng: random.Random):
        self._costs, self._job, self._rng = costs, job, rng
        self._restarts, self._policy = strategy == "restart", policy_of(job, strategy)
        self._all = frozenset(range(job.num_slices))
        self._now, self._order = 0.0, itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._state: State = Starting()
        self._up: set[int] = set(self._all)
        self._holding: set[int] = set()
        """Slices whose memory has what they should."""
        self._back_at: dict[int, float] = {}
        self._compiled: Slices = frozenset()
        """The mesh that was last compiled for while training went on."""
        self._failed: set[int] = set()
        """Slices that failed under what runs now; nothing of it is answered any more."""
        self._running_since: float | None = None
        """When the step that runs now was begun, or will be, if jumps may be made from there."""
        self._saves: list[tuple[float, int]] = []
        """(durable at, step) of checkpoints, in order: the newest durable one and those after."""
        self._failures = self._interruptions = self._transitions = 0

    # --- time -------------------------------------------------------------------------------

    def run(self, failures: int) -> History:
        for slice_id in sorted(self._all):
            self._fail_later(slice_id)
        self._start()
        least = LEAST_REPAIRS * self._job.repair
        while self._failures < failures or self._now < least:
            at = self._due[0][0]
            self._train_until(at)
            self._now = at
            heapq.heappop(self._due)[2]()
        steps = self._progress()
        goodput = steps * self._costs.step / self._now
        counts = self._failures, self._interruptions, self._transitions
        return History(goodput, steps, self._now, *counts)

    def _at(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (seconds, next(self._order), do))

    def _train_until(self, at: float) -> None:
        """Jump over the steps that are done by then; the next one goes on."""
        state, since = self._state, self._running_since
        if since is None or not isinstance(state, Training):
            return
        slices, done = len(state.mesh), state.committed
        cost = partial(elapsed, self._costs, self._job, slices, done)
        low, high = 0, int((at - since) * self._job.speed(slices) / self._costs.step) + 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if cost(middle) <= at - since else (low, middle)
        if low:
            self._note_saves(done, done + low, lambda step: since + cost(step - done))
            self._state = jump(state, self._job, done + low)
            self._running_since = since + cost(low)

    def _note_saves(self, done: int, step: int, taken_at: Callable[[int], float]) -> None:
        """Note the newest checkpoint that is durable by the end of a jump, and those after it."""
        every, found = self._job.checkpoint_every, []
        last = newest(step, every)
        ends = taken_at(step)
        while every and last > done:
            found.append((taken_at(last) + self._costs.write, last))
            last = last - every if found[-1][0] > ends else 0
        self._saves += reversed(found)

    def _durable(self) -> int:
        """The newest checkpoint now; 0: none."""
        return max((step for at, step in self._saves if at <= self._now), default=0)

    def _progress(self) -> int:
        """The step that would be gone on from."""
        match self._state:
            case Training():
                return self._state.committed
            case Restoring():
                return self._state.source.step
            case Waiting():
                return max(s.step for s in self._state.ledger.sources)
        return self._durable()

    # --- slices -----------------------------------------------------------------------------

    def _fail_later(self, slice_id: int) -> None:
        at = self._now + self._rng.expovariate(1 / self._job.mtbf)
        self._at(at, partial(self._fail, slice_id))

    def _fail(self, slice_id: int) -> None:
        self._failures += 1
        self._up.discard(slice_id)
        self._holding.discard(slice_id)
        repair = self._job.repair
        away = self._rng.expovariate(1 / repair) if repair else 0.0
        self._back_at[slice_id] = self._now + away
        self._at(self._now + away, partial(self._return, slice_id))
        if slice_id in self._needed():
            self._break({slice_id})

    def _return(self, slice_id: int) -> None:
        self._up.add(slice_id)
        del self._back_at[slice_id]
        self._fail_later(slice_id)
        if isinstance(self._state, Failed) and self._up == self._all:
            self._begin_again(self._failures)

    def _needed(self) -> Slices:
        """The slices whose failure ends what is going on."""
        state = self._state
        return involved(state) if isinstance(state, Training | Restoring) else frozenset()

    def _break(self, slices: set[int]) -> None:
        """These fail now, under what runs: from here on nothing of it is answered."""
        if not self._failed:
            assert isinstance(self._state, Live)
            notice = partial(self._notice, self._state.ledger.epoch)
            self._at(self._now + self._costs.notice, notice)
        self._failed |= slices
        self._running_since = None

    def _notice(self, epoch: int) -> None:
        self._interruptions += 1
        if self._restarts:
            self._feed(ControllerLost(at=self._now, epoch=epoch, reason="a slice was lost"))
            self._saves = [(0.0, self._durable())]
            self._holding = set()
            if self._up == self._all:
                self._begin_again(self._failures)
            return
        self._learn_what_is_durable()
        lost = frozenset(self._failed)
        self._feed(SlicesLost(at=self._now, epoch=epoch, slices=lost))

    def _learn_what_is_durable(self) -> None:
        state, step = self._state, self._durable()
        assert isinstance(state, Live)
        self._saves = [save for save in self._saves if save[1] >= step]
        others = tuple(s for s in state.ledger.sources if s.tier is not Tier.DISK)
        disk = (Source(Tier.DISK, step),) if step else ()
        self._state = replace(state, ledger=replace(state.ledger, sources=(*disk, *others)))

    # --- processes --------------------------------------------------------------------------

    def _begin_again(self, failures: int) -> None:
        """Every slice is there; a new process comes up, unless one fails meanwhile."""
        self._at(self._now + self._costs.restart, partial(self._begun, failures))

    def _begun(self, failures: int) -> None:
        if failures == self._failures and isinstance(self._state, Failed):
            self._state = Starting()
            self._start()

    def _start(self) -> None:
        step = self._durable()
        disk = (Source(Tier.DISK, step),) if step else ()
        self._feed(
            Started(
                at=self._now,
                num_steps=ENDLESS,
                slices=self._all,
                up=frozenset(self._up),
                sources=(Source(Tier.SEED, 0), *disk),
                durable=False,
            )
        )

    # --- the machine ------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        before = _epoch(self._state)
        self._state, effects = transition(self._state, event, self._policy)
        self._transitions += 1
        if _epoch(self._state) != before:
            self._failed, self._running_since = set(), None
            gone = {s for s in self._needed() if s not in self._up}
            if gone:  # it was chosen, or asked, before its failure was known
                self._break(gone)
        for effect in effects:
            self._answer(effect)
        if isinstance(self._state, Training) and self._state.growth:
            self._grow(self._state, self._state.growth)

    def _answer(self, effect: Effect) -> None:
        now, costs = self._now, self._costs
        match effect:
            case RunStep():
                assert isinstance(self._state, Training)
                copies = self._state.copying is not None  # before the step, on the same devices
                since = now + copies * costs.snapshot
                self._running_since = None if self._failed else since
            case Prepare(mesh=mesh, source=source):
                disk = source.tier is Tier.DISK
                seconds = costs.disk if disk else costs.move
                seconds += self._compile_seconds(mesh) if mesh != self._compiled else 0.0
                self._at(now + seconds, partial(self._prepared, effect))
            case Compile(mesh=mesh):
                seconds = self._compile_seconds(mesh)
                self._at(now + seconds, partial(self._have_compiled, effect))
            case Snapshot():
                self._at(now + costs.snapshot, partial(self._snapshotted, effect))
            case Probe():
                self._feed(self._probed(effect))
            case WakeAt():
                self._at(self._worth_waking(effect.at), partial(self._woke, effect.epoch))

    def _compile_seconds(self, mesh: Slices) -> float:
        """Of all slices it was compiled at the start, and a restart starts there."""
        return self._costs.compile if mesh != self._all and not self._restarts else 0.0

    def _have_compiled(self, effect: Compile) -> None:
        if self._is_current(effect):
            self._compiled = effect.mesh
            self._feed(Compiled(at=self._now, epoch=effect.epoch, mesh=effect.mesh))

    def _is_current(self, effect: Effect) -> bool:
        return effect.epoch == _epoch(self._state) and not self._failed

    def _prepared(self, effect: Prepare) -> None:
        if self._is_current(effect):
            self._holding |= effect.mesh
            self._feed(Prepared(at=self._now, epoch=effect.epoch, step=effect.source.step))

    def _snapshotted(self, effect: Snapshot) -> None:
        if self._is_current(effect):
            assert isinstance(self._state, Training)
            mesh = self._state.mesh
            self._feed(
                Snapshotted(at=self._now, epoch=effect.epoch, step=effect.step, holders=mesh)
            )

    def _grow(self, state: Training, growth: Growth) -> None:
        """A mesh is changed between two steps: the one that runs is done for itself."""
        if not growth.ready or self._running_since is None or not isinstance(state.asked, RunStep):
            return
        ends = self._running_since + self._costs.step / self._job.speed(len(state.mesh))
        self._running_since = None
        self._at(max(ends, self._now), partial(self._stepped, state.asked))

    def _stepped(self, effect: RunStep) -> None:
        if self._is_current(effect):
            self._feed(Dispatched(at=self._now, epoch=effect.epoch, step=effect.step))
            self._feed(Committed(at=self._now, epoch=effect.epoch, step=effect.step))

    def _probed(self, effect: Probe) -> Probed:
        down = effect.slices - self._up
        emptied = effect.slices - down - self._holding
        up = effect.slices - down - emptied
        return Probed(at=self._now, epoch=effect.epoch, up=up, emptied=emptied, down=down)

    def _woke(self, epoch: int) -> None:
        if epoch == _epoch(self._state) and not self._failed:
            self._feed(Woke(at=self._now, epoch=epoch))

    def _worth_waking(self, at: float) -> float:
        """The first moment, of `at` and every `probe_every` seconds after it, at which a probe can
        find what it did not find now."""
        state = self._state
        if isinstance(state, Training):
            outside = self._all - state.mesh
            found = not self._back_at.keys() >= outside
            news = 0.0 if found else min(self._back_at[s] for s in outside)
        else:
            missing = self._policy.min_slices - len(self._up)
            news = sorted(self._back_at.values())[missing - 1] if missing > 0 else 0.0
        every = self._policy.probe_every
        return at + max(0, ceil((news - at) / every)) * every


def _epoch(state: State) -> int:
    return state.ledger.epoch if isinstance(state, Live) else -1
