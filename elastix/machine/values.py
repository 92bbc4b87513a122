"""The nouns of the machine: names, states, events and effects.

Everything here is a frozen value that compares, hashes and prints. The machine never holds an
array: `TrainStateName` and `Source` are names under which the driver keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Slices = frozenset[int]
"""A set of slice ids."""


class ProtocolError(Exception):
    """The driver and the machine disagree: a defect of elastix, never of a user or a device."""


# --- names ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainStateName:
    """Names the arrays after `step` updates, made in `epoch`, held whole by each of `holders`."""

    step: int
    epoch: int
    holders: Slices


class Tier(StrEnum):
    """Where a source lives, in the order in which equally recent ones are tried."""

    LIVE = "live"
    HOST = "host"
    DISK = "disk"
    SEED = "seed"


_RANK = {Tier.LIVE: 3, Tier.HOST: 2, Tier.DISK: 1, Tier.SEED: 0}


@dataclass(frozen=True, slots=True)
class Source:
    """Something a restore can start from. `holders` is empty for disk and seed: no slice's death
    takes those away."""

    tier: Tier
    step: int
    epoch: int = 0
    holders: Slices = frozenset()

    @property
    def preference(self) -> tuple[int, int]:
        """The newest step first, then the tier that moves least."""
        return self.step, _RANK[self.tier]


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint being written from the host copy that `holder` has of `step`."""

    step: int
    epoch: int
    holder: int


@dataclass(frozen=True, slots=True)
class Stable:
    """A slice outside the mesh that probes found up: how many in a row (counted up to
    `Policy.stable_probes`), since when."""

    slice_id: int
    probes: int
    since: float


# --- states --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ledger:
    """What every live state knows: the job, health, sources, budgets and wishes."""

    num_steps: int
    slices: Slices
    up: Slices
    durable: bool
    sources: tuple[Source, ...]
    epoch: int = 0
    saving: Saving | None = None
    save_owed: bool = False
    losses: int = 0
    data_failures: int = 0
    below_since: float | None = None
    stable: tuple[Stable, ...] = ()
    """The slices outside the mesh that the last probe found up."""
    draining: bool = False

    def stability(self, slice_id: int) -> Stable | None:
        """How long `slice_id`, outside the mesh, has been up; None if it is not."""
        return next((s for s in self.stable if s.slice_id == slice_id), None)


@dataclass(frozen=True, slots=True)
class Starting:
    """Before the first event: nothing is known."""


@dataclass(frozen=True, slots=True)
class Training:
    """Steps run on `mesh`; `committed` were read, `dispatched` were started."""

    ledger: Ledger
    mesh: Slices
    committed: int
    dispatched: int
    train_state: TrainStateName
    iterator_state: int
    owed: int | None = None
    """The dispatched step whose host snapshot must be published before the next one runs."""
    asked: RunStep | Snapshot | None = None
    """The effect in the foreground that has not been answered yet: there is at most one."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing runs until `want` slices are up, or until enough are up and `until` has passed."""

    ledger: Ledger
    mesh: Slices
    """The slices that trained before: they come first when the next mesh is chosen."""
    want: int
    until: float


@dataclass(frozen=True, slots=True)
class Restoring:
    """The train state is being rebuilt on `mesh` from `source`."""

    ledger: Ledger
    mesh: Slices
    source: Source


@dataclass(frozen=True, slots=True)
class Finishing:
    """The last step is committed; its snapshot and its checkpoint are not yet."""

    ledger: Ledger
    why: str
    mesh: Slices
    train_state: TrainStateName
    iterator_state: int


@dataclass(frozen=True, slots=True)
class Done:
    """The end that was asked for: `outcome` is `done` or `preempted`."""

    outcome: str
    train_state: TrainStateName | None
    iterator_state: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The end with a reason, in one line."""

    reason: str


Live = Training | Waiting | Restoring | Finishing
State = Starting | Live | Done | Failed


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
    """The memory of these slices is gone; `cause` is what was noticed."""

    slices: Slices
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed(Event):
    """Of the slices asked: `up` answered with their memory intact, `emptied` answered without
    it (they died and came back), `down` did not answer."""

    up: Slices = frozenset()
    emptied: Slices = frozenset()
    down: Slices = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Event):
    """State and executable are ready on the mesh that was asked for. The seconds and compiles
    are for the reader of the log; no rule looks at them."""

    step: int
    restore_seconds: float = 0.0
    compile_seconds: float = 0.0
    compiles: int = 0


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
class Saved(Event):
    """The checkpoint of `step` is durable. `epoch` is the one in which the save began."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """The checkpoint of `step` could not be written; nothing of it is left."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFailed(Event):
    """An error with every slice healthy: the user's program or ours, never retried. `trace` is
    for the reader of the log."""

    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFailed(Event):
    """The data stream raised before `step` could be dispatched."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLost(Event):
    """The connection to every device is gone; only the durable tier is left."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNoticed(Event):
    """The whole job is asked to stop: finish the steps in flight, save, end."""


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
class RunStep(Effect):
    """Call the executable. Answers: Dispatched and then Committed, or DataFailed, SlicesLost,
    ProgramFailed, ControllerLost."""

    step: int


@dataclass(frozen=True, slots=True)
class Snapshot(Effect):
    """Copy the committed state of `step` to the host memory of each slice of the mesh. Answers:
    Snapshotted, SlicesLost, ProgramFailed, ControllerLost."""

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
class WakeAt(Effect):
    """Answer with Woke at this second of the backend's clock."""

    at: float
