"""The world outside a simulated run: time, slices that die and return, a disk, and the faults."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import jax

from elastix.backends import Health
from elastix.backends.simulated import VirtualClock
from elastix.checkpoints import CheckpointError
from elastix.classification import StuckError
from elastix.notices import Notice
from elastix.testing.schedules import ERRORS, FOREVER, QUIET, Fault, Kind, Phase, Schedule

Ghost = tuple[int, ...]
"""What stands for a train state: the numbers of the batches it consumed, in order."""

POISON: Ghost = (-1,)
"""What is read from memory that is gone. It stays poison whatever is computed from it."""

PLANTED = "planted by the schedule"
"""In the message of every error that a fault raises."""

_NO_ERRORS: frozenset[Kind] = frozenset()


class Violation(BaseException):
    """An invariant does not hold. Not an `Exception`: no handler of the driver may catch it."""

    def __init__(self, rule: str, message: str):
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class World:
    """Outlives the processes of a run: the slices' health, the disk, and what is left to go wrong.

    Everything is decided by the schedule. Time passes only in `pass_time`, and faults strike only
    in `point`, which the ghosts call before, after and in the middle of what they do.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.clock = VirtualClock()
        self.most_points = 50_000 + 500 * schedule.num_steps
        """Points in one run; with more it is taken to stand still."""
        self.pending: list[Fault] = [f for f in schedule.faults if f.after == 0]
        self._later: list[Fault] = [f for f in schedule.faults if f.after > 0]
        self.hits: Counter[tuple[Phase, Kind]] = Counter()
        self.struck: list[Fault] = []
        self.harm = 0
        """How often a slice was harmed so far that it may be taken for lost."""
        self.ticks = 0
        """Points passed: a finer clock, which tells what came before what."""
        self.dead: dict[int, str] = {}
        """Lost slices, and where the loss surfaces."""
        self.disconnected = False
        """The controller's connection is gone, until its process ends."""
        self.hung: dict[int, int] = {}
        """Slices that finish no step, and the tick since when."""
        self.suspended: set[int] = set()
        """Hung slices that the driver takes for down."""
        self.emptied: set[int] = set()
        """Slices that came back, and hold nothing until they are admitted."""
        self.died_at: dict[int, int] = {}
        """The tick of each slice's last death."""
        self.read_at = 0
        """The tick at which the results of the last committed step had been read."""
        self.harm_at_read = 0
        """The harm that was noticed by then."""
        self.disk: dict[int, tuple[Ghost, dict[str, object]]] = {
            step: (expected(step), {}) for step in schedule.on_disk
        }
        self.rotten: set[int] = set()
        self.on_loss: list[Callable[[int], None]] = []
        """Called with each slice that dies: wipe what it held."""
        self.on_return: list[Callable[[int], None]] = []
        self.notices: list[Notice] = []
        """Announced, and not heard yet."""
        self.preempt: Callable[[], None] = lambda: None
        self.restoring = Phase.RESTORE
        """What the next restore is for: set by who watches the machine."""
        self._context: tuple[Phase, ...] = ()
        self._silent: set[int] = set()
        self._stalled: dict[Phase, float] = {}
        """Until when what this process does in a phase hangs."""
        self._visits: dict[Phase, int] = {}
        self._visits_at: dict[int, dict[Phase, int]] = {}
        self._timed: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    # --- time -------------------------------------------------------------------------------

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something in so many seconds."""
        heapq.heappush(self._timed, (self.clock.now() + seconds, next(self._order), do))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and happen what is due in it."""
        self._tick()
        end = self.clock.now() + seconds
        while self._timed and self._timed[0][0] <= end:
            due, _, do = heapq.heappop(self._timed)
            if due > self.clock.now():
                self.clock.sleep(due - self.clock.now())
            do()
        self.clock.sleep(end - self.clock.now())

    def idle(self, seconds: float) -> None:
        """Let up to `seconds` pass: no longer than until something happens by itself."""
        due = self.next_due()
        self.pass_time(seconds if due is None else min(seconds, due))

    def next_due(self) -> float | None:
        """Seconds until something happens by itself; None if nothing will."""
        return max(0.0, self._timed[0][0] - self.clock.now()) if self._timed else None

    def _tick(self) -> None:
        self.ticks += 1
        if self.ticks > self.most_points:
            raise Violation("the run ends", f"it still goes on after {self.ticks} points")

    # --- faults -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def within(self, *phases: Phase) -> Iterator[None]:
        """Points passed inside belong to these phases too."""
        before, self._context = self._context, phases
        try:
            yield
        finally:
            self._context = before

    @property
    def saving(self) -> bool:
        """Whether the thread of the saver runs, for which no time passes."""
        return Phase.SAVE in self._context

    def point(self, *phases: Phase, raises: frozenset[Kind] = _NO_ERRORS) -> None:
        """A point at which faults may strike; only kinds in `raises` may raise here."""
        self._tick()
        if self.disconnected and Kind.UNAVAILABLE in raises:
            raise _status(Kind.UNAVAILABLE)
        if not self.pending:
            return
        here = phases + self._context
        visits = self._visits
        for phase in here:
            visits[phase] = visits.get(phase, 0) + 1
        for fault in tuple(self.pending):
            due = fault.phase in here and visits[fault.phase] >= fault.visit + self._base(fault)
            possible = fault.kind in QUIET or fault.kind in raises
            if due and possible and self._can_strike(fault):
                self.pending.remove(fault)
                self.hits[fault.phase, fault.kind] += 1
                self.struck.append(fault)
                self._strike(fault)

    def _base(self, fault: Fault) -> int:
        """The points of its phase that were passed when the fault began to count."""
        return self._visits_at[fault.after].get(fault.phase, 0) if fault.after else 0

    def committed(self, step: int) -> None:
        """A step was committed: faults that were to come after it may."""
        self.read_at, self.harm_at_read = self.ticks, self.harm - self.unnoticed()
        due = [f for f in self._later if f.after <= step]
        if due:
            self._visits_at |= {f.after: dict(self._visits) for f in due}
            self._later = [f for f in self._later if f.after > step]
            self.pending += due

    def step_phases(self, step: int, first: bool) -> tuple[Phase, ...]:
        """The phases that a step belongs to by its place in the run."""
        last = step == self.schedule.num_steps
        return (Phase.FIRST_STEP,) * first + (Phase.LAST_STEP,) * last

    def _can_strike(self, fault: Fault) -> bool:
        if fault.slices:
            return any(s not in self.dead for s in fault.slices)
        return fault.kind is not Kind.ROT or bool(self.disk.keys() - self.rotten)

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.LOSS | Kind.LOSSES | Kind.UNSEEN:
                self._lose_all(fault.slices, fault)
            case Kind.HANG:
                self.hung |= {s: self.ticks for s in fault.slices if s not in self.dead}
                self.harm += len(fault.slices)
                assert fault.returns is not None
                self.at(fault.returns, partial(self._unhang, fault.slices))
            case Kind.SILENT:
                self._silent.update(s for s in fault.slices if s not in self.dead)
                self.harm += len(fault.slices)
            case Kind.STALL:
                until = self.clock.now() + (FOREVER if fault.returns is None else fault.returns)
                self._stalled[fault.phase] = max(self._stalled.get(fault.phase, 0.0), until)
            case Kind.ROT:
                self.rotten.add(max(self.disk.keys() - self.rotten))
            case Kind.NOTICE:
                victims = frozenset(s for s in fault.slices if s not in self.dead)
                self.notices.append(Notice(victims, fault.warning))
                self.at(fault.warning, partial(self._lose_all, victims, fault))
            case Kind.PREEMPTION:
                self.preempt()
            case Kind.DISK_FULL:
                raise CheckpointError(f"no space left on device, {PLANTED}")
            case Kind.DATA:
                raise OSError(f"the source cannot be read, {PLANTED}")
            case Kind.PROGRAM:
                raise TypeError(f"INTERNAL: no such thing as a slice, {PLANTED}")
            case _:
                assert fault.kind in ERRORS
                self.harm += fault.kind is Kind.DATA_LOSS
                self.disconnected = self.disconnected or fault.kind is Kind.UNAVAILABLE
                raise _status(fault.kind)

    def _lose_all(self, slices: Iterable[int], fault: Fault) -> None:
        for slice_id in sorted(slices):
            self._lose(slice_id, fault)

    def _unhang(self, slices: Iterable[int]) -> None:
        """Hung slices return as dead ones do, with empty memory."""
        for slice_id in sorted(self.hung.keys() & set(slices)):
            self._die(slice_id, "read")
            self.bring_back(slice_id)

    def _lose(self, slice_id: int, fault: Fault) -> None:
        if slice_id in self.dead:
            return
        self._die(slice_id, fault.surfaces)
        if fault.kind is Kind.UNSEEN:
            self.bring_back(slice_id)
        elif fault.returns is not None:
            self.at(fault.returns, lambda: self.bring_back(slice_id))

    def _die(self, slice_id: int, surfaces: str) -> None:
        self.dead[slice_id] = surfaces
        self.hung.pop(slice_id, None)
        for names in (self.emptied, self.suspended):
            names.discard(slice_id)
        self.died_at[slice_id] = self.ticks
        self.harm += 1
        for wipe in self.on_loss:
            wipe(slice_id)

    def bring_back(self, slice_id: int) -> None:
        """Return a slice, with empty memory."""
        if slice_id in self.dead:
            del self.dead[slice_id]
            self.emptied.add(slice_id)
            for forget in self.on_return:
                forget(slice_id)

    def take_notice(self) -> Notice | None:
        """The next notice of preemption that has not been heard."""
        return self.notices.pop(0) if self.notices else None

    def repair(self) -> None:
        """Between two processes somebody has brought everything back."""
        self._stalled.clear()
        self._unhang(self.hung)
        for slice_id in sorted(self.dead):
            self.bring_back(slice_id)

    # --- health -----------------------------------------------------------------------------

    def alive(self, slice_id: int) -> bool:
        """Whether what this slice should hold is there, in truth."""
        return slice_id not in self.dead and slice_id not in self.emptied

    def health(self, slice_id: int) -> Health:
        """What a probe of the slice tells."""
        if slice_id in self.dead or slice_id in self.suspended:
            return Health.DOWN
        return Health.EMPTIED if slice_id in self.emptied else Health.UP

    def take_silent(self, slices: Iterable[int]) -> frozenset[int]:
        """Of the slices asked now, those that do not answer in time; next time they do."""
        silent = frozenset(self._silent.intersection(slices))
        self._silent -= silent
        return silent

    def stalls(self, phase: Phase) -> float:
        """For how many seconds what is done in this phase hangs."""
        return max(0.0, self._stalled.get(phase, 0.0) - self.clock.now())

    def stall(self, phase: Phase, deadline: float, what: str) -> None:
        """Let time pass while what is done in this phase hangs.

        Raises:
            StuckError: it still does after `deadline` seconds.
        """
        seconds = self.stalls(phase)
        self.pass_time(min(seconds, deadline))
        if seconds > deadline:
            raise StuckError(what)

    def unnoticed(self) -> int:
        """Slices that were harmed and may be taken for lost later."""
        each = range(self.schedule.num_slices)
        harmed = self._silent | self.hung.keys()
        return sum(s in harmed or not self.alive(s) for s in each)

    def good_checkpoint(self, step: int) -> bool:
        """Whether the disk has a checkpoint of the right state after `step`, and it loads."""
        found = self.disk.get(step)
        return found is not None and step not in self.rotten and found[0] == expected(step)


def _status(kind: Kind) -> jax.errors.JaxRuntimeError:
    return jax.errors.JaxRuntimeError(f"{kind.value}: {PLANTED}")


def expected(step: int) -> Ghost:
    """The train state after `step` updates of an undisturbed run."""
    return tuple(range(step))
