"""The messages of the machine: events, which say what happened, and effects, what to do."""

from __future__ import annotations

from dataclasses import dataclass

from elastix.machine.values import Slices, Source

# --- events: what happened -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened `at` this second of the backend's clock, in answer to an effect of
    `epoch` (or noticed during it)."""

    at: float
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The process began: these slices exist, these are up, these sources could be restored."""

    num_steps: int
    slices: Slices
    up: Slices
    sources: tuple[Source, ...]
    durable: bool
    evaluated: int = 0
    """The last step whose evaluation is on record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched(Event):
    """The executable of `step` was called; its results are futures."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """The results of `step` were read from every slice of the mesh."""

    step: int
    finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesLost(Event):
    """The memory of these slices is gone; `cause` is what was noticed. `corrupt`: they live, and
    hold other bits than the others, so that nothing since the last snapshot can be trusted."""

    slices: Slices
    cause: str = ""
    corrupt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed(Event):
    """Of the slices asked: `up` answered with their memory intact, `emptied` answered without
    it (they died and came back), `down` did not answer."""

    up: Slices = frozenset()
    emptied: Slices = frozenset()
    down: Slices = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Event):
    """State and executable are ready on the mesh that was asked for. The rest is for the reader of
    the log, and no rule looks at it: `warming`, whether the executable was on its way already."""

    step: int
    restore_seconds: float = 0.0
    compile_seconds: float = 0.0
    compiles: int = 0
    warming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled(Event):
    """The executables for `mesh` are ready. If one cannot be made, the Prepare that follows is
    answered so."""

    mesh: Slices


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMissing(Event):
    """The memory that should hold `source` does not have it."""

    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed(Event):
    """`source` could not be restored, though its holders answer."""

    source: Source
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshotted(Event):
    """Each of `holders` has a whole host copy of the state after `step`."""

    step: int
    holders: Slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """The evaluation of the state after `step` is on record."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """The checkpoint of `step` is durable. `epoch` is the one in which the save began."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """The checkpoint of `step` could not be written; nothing of it is left. `lost` is the slice
    it was written from, if that is found to be gone."""

    step: int
    reason: str
    lost: Slices = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFailed(Event):
    """An error with every slice healthy: the user's program or ours, never retried. `trace` is
    for the reader of the log."""

    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFailed(Event):
    """The data stream gave no batch for `step`, or for the evaluation after it. `trace` is for the
    reader of the log."""

    step: int
    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLost(Event):
    """The connection to every device is gone; only the durable tier is left."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNoticed(Event):
    """`slices` will be taken away at second `until`: leave them before. None named: the whole
    job is asked to stop, so finish the steps in flight, save, end."""

    slices: Slices = frozenset()
    until: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStuck(Event):
    """What was asked for did not finish before its deadline; `during` names it."""

    during: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(Event):
    """Each slice tried a step alone; `stuck` did not finish it."""

    stuck: Slices = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Woke(Event):
    """The time asked for by `WakeAt` has come."""


# --- effects: what to do -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Effect:
    """Something to do; `epoch` is the ticket its answer carries."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Prepare(Effect):
    """Build the state of `source` and the executable on `mesh`. Answers: Prepared,
    SnapshotMissing, RestoreFailed, SlicesLost, ProgramFailed, ControllerLost."""

    mesh: Slices
    source: Source


@dataclass(frozen=True, slots=True)
class Compile(Effect):
    """Make the executables for `mesh` in the background, before any that are warmed. One that is
    never ready costs the regrow, and not the run. Answer: Compiled."""

    mesh: Slices


@dataclass(frozen=True, slots=True)
class Warm(Effect):
    """Make the executables for these sets in the background, in this order, one at a time; what
    was to be warmed before, and was not begun, is forgotten. No answer."""

    sets: tuple[Slices, ...]


@dataclass(frozen=True, slots=True)
class RunStep(Effect):
    """Call the executable. Answers: Dispatched and then Committed, or DataFailed, SlicesLost,
    ProgramFailed, ControllerLost."""

    step: int


@dataclass(frozen=True, slots=True)
class Snapshot(Effect):
    """Copy the state of `step`, which is dispatched or committed, to the host memory of each slice
    of the mesh, while the next steps run. Answered once the step is committed: Snapshotted,
    SlicesLost, StepStuck, ProgramFailed, ControllerLost."""

    step: int


@dataclass(frozen=True, slots=True)
class Evaluate(Effect):
    """Evaluate the committed state of `step`, batch by batch; another effect in the foreground may
    follow before it is answered, and ends it. Answers: Evaluated, DataFailed, SlicesLost,
    StepStuck, ProgramFailed, ControllerLost."""

    step: int


@dataclass(frozen=True, slots=True)
class Save(Effect):
    """Write a checkpoint from the host copy of `holder`, in the background. Answers: Saved,
    SaveFailed."""

    step: int
    holder: int


@dataclass(frozen=True, slots=True)
class Abandon(Effect):
    """Give up the save of `step`, and remove what it wrote. No answer."""

    step: int


@dataclass(frozen=True, slots=True)
class Probe(Effect):
    """Ask these slices for their canaries. Answer: Probed."""

    slices: Slices


@dataclass(frozen=True, slots=True)
class Try(Effect):
    """Let each of these slices do one step alone, in its time. Answer: Tried."""

    slices: Slices


@dataclass(frozen=True, slots=True)
class WakeAt(Effect):
    """Answer with Woke at this second of the backend's clock."""

    at: float
