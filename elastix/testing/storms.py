"""Storms: one long run in which something goes wrong every few steps."""

from __future__ import annotations

import random
from dataclasses import replace

from elastix.machine import Policy
from elastix.testing.schedules import CELLS, NAMING, Fault, Kind, Phase, Schedule, Surfaces

_FATAL = frozenset({Kind.PROGRAM, Kind.INTERNAL, Kind.UNAVAILABLE, Kind.PREEMPTION})
"""Kinds that end a process, as they should."""
_ENDS = frozenset({Phase.FIRST_STEP, Phase.LAST_STEP})
STORM_CELLS = tuple((p, k) for p, k in CELLS if k not in _FATAL and p not in _ENDS)


def storm(seed: int, num_faults: int, slices: int = 4, steps_apart: int = 2) -> Schedule:
    """One process that survives `num_faults` faults, of every kind that does not end a process, in
    every phase but the first and the last step; each slice is a victim in its turn.

    The next fault comes `steps_apart` steps after the one before. Those that strike nothing, such
    as a loss in a regrow that does not come, wait for their time.
    """
    rng = random.Random(seed)
    cells = rng.sample(STORM_CELLS, len(STORM_CELLS))
    faults = tuple(
        _fault(rng, cells[n % len(cells)], n % slices, slices, after=1 + n * steps_apart)
        for n in range(num_faults)
    )
    policy = Policy(
        deadline=1800.0,
        lookback=rng.choice(("live", "host")),
        snapshot_every=3,
        checkpoint_every=6,
        eval_every=5,
        max_losses=50,
        probe_every=0.5,
        stable_probes=1,
    )
    quiet = 60  # steps in which what waits for a restore or a regrow has its last chance
    return Schedule(slices, 1 + num_faults * steps_apart + quiet, policy, faults, save_seconds=0.7)


def _fault(
    rng: random.Random, cell: tuple[Phase, Kind], victim: int, slices: int, after: int
) -> Fault:
    phase, kind = cell
    fault = Fault(
        phase,
        kind,
        visit=rng.randint(1, 4),
        slices=(victim,) if kind in NAMING else (),
        returns=rng.choice((0.1, 0.5, 2.0, 5.0)),
        warning=rng.choice((0.0, 1.0, 4.0)),
        after=after,
    )
    if kind is Kind.LOSSES:
        fault = replace(fault, slices=tuple(sorted({victim, (victim + 1) % slices})))
    if kind in (Kind.HANG, Kind.STALL):
        fault = replace(fault, returns=rng.choice((5.0, 50.0, 90.0)))
    surfaces: Surfaces = rng.choice(("read", "dispatch"))
    return replace(fault, surfaces=surfaces)
