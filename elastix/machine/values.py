"""The nouns of the machine: names, the ledger and the states.

Everything here is a frozen value that compares, hashes and prints. The machine never holds an
array: `TrainStateName` and `Source` are names under which the driver keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastix.machine.messages import Evaluate, RunStep

Slices = frozenset[int]
"""A set of slice ids."""

_NOBODY: Slices = frozenset()


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


@dataclass(frozen=True, slots=True)
class Leaving:
    """A slice that will be preempted: it is left before second `until`. If it still answers
    after that, the notice was wrong."""

    slice_id: int
    until: float


@dataclass(frozen=True, slots=True)
class Flap:
    """How often a slice was lost, less one for each checkpoint that was written since."""

    slice_id: int
    losses: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A mesh that takes slices back: training goes on until its executables are `ready`."""

    mesh: Slices
    ready: bool = False


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
    saved_at: float = 0.0
    """When the last save was begun, or the process; only kept for `Policy.checkpoint_seconds`."""
    save_owed: bool = False
    losses: int = 0
    stuck: int = 0
    """Times in a row that something did not finish, without a committed step in between."""
    data_failures: int = 0
    evaluated: int = 0
    """The last step whose evaluation is on record."""
    below_since: float | None = None
    stable: tuple[Stable, ...] = ()
    """The slices outside the mesh that the last probe found up."""
    draining: bool = False
    leaving: tuple[Leaving, ...] = ()
    """Slices that will be taken away; they are not in `up`, though they still answer."""
    flaps: tuple[Flap, ...] = ()
    """Slices that were lost before; they are taken back more slowly."""
    corrupt: Slices = frozenset()
    """Slices whose bits were found to differ: they are not used any more."""

    def stability(self, slice_id: int) -> Stable | None:
        """How long `slice_id`, outside the mesh, has been up; None if it is not."""
        return next((s for s in self.stable if s.slice_id == slice_id), None)

    @property
    def noticed(self) -> Slices:
        """The slices that will be taken away."""
        return frozenset(n.slice_id for n in self.leaving) if self.leaving else _NOBODY


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
    """The dispatched step whose host snapshot must be begun before the next one runs."""
    asked: RunStep | Evaluate | None = None
    """The effect in the foreground that has not been answered yet: there is at most one."""
    growth: Growth | None = None
    """The mesh to be trained on next, if slices outside are there to be taken back."""
    copying: int | None = None
    """The dispatched step whose host snapshot was begun and is not published: at most one. Later
    steps run meanwhile, and commit after it."""


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
class Diagnosing:
    """Something on `mesh` did not finish in its time (`during` says what): who is to blame?"""

    ledger: Ledger
    mesh: Slices
    during: str


@dataclass(frozen=True, slots=True)
class Finishing:
    """The last step is committed; its snapshot and its checkpoint are not yet."""

    ledger: Ledger
    why: str
    mesh: Slices
    train_state: TrainStateName
    iterator_state: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """Nothing runs, and nothing will: the newest host snapshot is being made durable. Then the
    run ends as `preempted`, or as failed for `reason`."""

    ledger: Ledger
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The end that was asked for: `outcome` is `done` or `preempted`."""

    outcome: str
    train_state: TrainStateName | None
    iterator_state: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The end with a reason, in one line. `resumable`: the world is to blame and not the run, so
    the same command, which goes on from disk, may end otherwise."""

    reason: str
    resumable: bool = False

    @property
    def outcome(self) -> str:
        return "preempted" if self.resumable else "failed"


Live = Training | Waiting | Restoring | Diagnosing | Finishing | Stopping
State = Starting | Live | Done | Failed
