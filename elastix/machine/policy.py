"""What a user decides about recovery, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

_LONGEST = 1e9
"""Seconds; the system's own waits take little more."""


@dataclass(frozen=True)
class Policy:
    """How a run answers the loss and the return of slices.

    Pause-and-resume is `Policy(min_slices=<all>)`: below that many the run waits. Replica-resize
    is a small `min_slices`: the run goes on with those left and grows back later. Times are in
    seconds of the backend's clock, intervals in steps.

    Raises:
        ValueError: a field is out of range; the message names the value and the remedy.
    """

    min_slices: int = 1
    """Fewest slices to train on; below it the run waits up to `deadline` seconds."""
    max_slices: int | None = None
    """Most slices to train on; more stand by and join when one is lost. None: all."""
    patience: float = 0.0
    """After a loss that leaves `min_slices`, seconds to wait for a return before going on."""
    deadline: float = 1800.0
    """Seconds to wait below `min_slices`, from the first moment below, before the run fails. The
    one budget of time: every other deadline is a share of it (`deadlines`)."""
    lookback: Literal["live", "host"] = "host"
    """After a loss, go back to the last committed step on the surviving devices (`live`: costs
    `inflight` more device copies of the state, redoes nothing) or to the last host snapshot."""
    inflight: int = 2
    """Steps dispatched before the oldest one is read."""
    warm: Literal["off", "next", "all"] = "next"
    """Which sets of slices to compile for in the background, one at a time: those that one loss or
    one return leads to (`next`), all that can be trained on, the nearest first (`all`), or none
    (`off`): then a set is compiled for when it is needed."""
    compiled_bytes: int = 4 * 2**30
    """Most bytes of compiled programs to keep; those of the set that was used least recently go
    first."""
    snapshot_every: int = 10
    """Steps between host-memory snapshots: at most this many are redone after a loss."""
    checkpoint_every: int = 100
    """Steps between checkpoints on disk; the last step is always saved. 0: only the last."""
    checkpoint_seconds: float = 0.0
    """A checkpoint is also due when so many seconds have passed since the last one was begun; with
    a tiny value the next is begun as soon as the last is durable. 0: steps alone decide."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep on disk."""
    keep_best: int = 0
    """Checkpoints of the lowest evaluation loss to keep besides the newest; those of steps without
    an evaluation never count."""
    eval_every: int = 0
    """Steps between evaluations; the last step is evaluated too. 0: none."""
    max_losses: int = 10
    """Losses in a row without a committed step in between before the run fails."""
    probe_every: float = 5.0
    """Seconds between probes of slices that are missing."""
    stable_probes: int = 2
    """Good probes in a row before a returned slice is taken back into a training run."""
    grace: float = 25.0
    """Seconds that the whole job has to end by itself after it was asked to stop."""
    on_nonfinite: Literal["fail", "continue"] = "fail"
    """What a loss or gradient that is not finite does to the run."""

    @property
    def step_deadline(self) -> float:
        """Seconds for a step, for the state to be copied from or to devices, and for a batch to be
        read: `deadline` / 30, at least 5."""
        return self._share(30, 5.0)

    @property
    def prepare_deadline(self) -> float:
        """Seconds for a compile, for a mesh's first step, and for a checkpoint to be read:
        `deadline` / 3, at least 60."""
        return self._share(3, 60.0)

    @property
    def probe_deadline(self) -> float:
        """Seconds in which a slice must answer a probe: `deadline` / 180, at least 1."""
        return self._share(180, 1.0)

    @property
    def save_deadline(self) -> float:
        """Seconds for a checkpoint to be written: `deadline` / 6, at least 30."""
        return self._share(6, 30.0)

    def _share(self, part: int, least: float) -> float:
        return min(max(self.deadline / part, least), _LONGEST)

    @property
    def deadlines(self) -> dict[str, float]:
        """Every deadline of a run by what it is for, in seconds."""
        return {
            "wait": self.deadline,
            "compile": self.prepare_deadline,
            "save": self.save_deadline,
            "step": self.step_deadline,
            "probe": self.probe_deadline,
        }

    def __post_init__(self) -> None:
        self._at_least("min_slices", 1)
        self._at_least("inflight", 1)
        self._at_least("snapshot_every", 1)
        self._at_least("checkpoint_every", 0)
        self._at_least("checkpoint_seconds", 0)
        self._at_least("keep_checkpoints", 1)
        self._at_least("keep_best", 0)
        self._at_least("eval_every", 0)
        self._at_least("max_losses", 1)
        self._at_least("stable_probes", 1)
        self._at_least("compiled_bytes", 0)
        self._at_least("patience", 0)
        self._at_least("grace", 0)
        self._at_least("deadline", 0)
        self._at_least("probe_every", 0)
        if not self.probe_every:
            raise ValueError(f"policy.probe_every={self.probe_every}: use a time above 0 seconds")
        if self.max_slices is not None and type(self.max_slices) is not int:
            raise ValueError(f"policy.max_slices={self.max_slices!r}: use a whole number, or None")
        if self.max_slices is not None and self.max_slices < self.min_slices:
            raise ValueError(
                f"policy.max_slices={self.max_slices} is below min_slices={self.min_slices}: "
                "raise the one or lower the other"
            )
        if self.keep_best and not self.eval_every:
            raise ValueError(
                f"policy.keep_best={self.keep_best} but eval_every=0: set eval_every, so that "
                "there is a loss to tell the best by, or set keep_best=0"
            )
        self._one_of("lookback", ("live", "host"))
        self._one_of("warm", ("off", "next", "all"))
        self._one_of("on_nonfinite", ("fail", "continue"))

    def _at_least(self, field: str, low: int) -> None:
        value = getattr(self, field)
        if self.__dataclass_fields__[field].type == "int" and type(value) is not int:
            raise ValueError(f"policy.{field}={value!r}: use a whole number")
        if not isinstance(value, int | float) or not low <= value < inf:
            raise ValueError(f"policy.{field}={value!r}: use {low} or more, and a finite number")

    def _one_of(self, field: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if value not in choices:
            raise ValueError(f"policy.{field}={value!r}: use one of {', '.join(choices)}")
