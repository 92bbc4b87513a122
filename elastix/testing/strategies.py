"""Hypothesis strategies for tests of recovery: policies, fault scripts, and whole schedules.

    @given(faults=strategies.faults(num_slices=3, num_steps=20))
    def test_whatever_dies_the_bits_are_the_same(faults):
        assert_recovers(recipe(), faults, num_slices=3)

Hypothesis is imported here alone. All of these shrink to one loss of slice 0 in the first step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from elastix import faults as scripts
from elastix.machine import Policy
from elastix.testing.schedules import CELLS, FOREVER, NAMING, Fault, Kind, Phase, Schedule, Surfaces

INFLIGHT = 3
"""Most steps in flight under a policy drawn here."""

_MANY = 1000
_PATIENT = 600.0


@st.composite
def policies(
    draw: DrawFn, num_slices: int = 4, *, deadline: float = _PATIENT, max_losses: int = _MANY
) -> Policy:
    """Policies for so many slices, the odd ones too.

        @given(policies(4), faults(4, 20, min_slices=4))
        def test_no_policy_changes_what_is_learned(policy, faults):
            assert_recovers(replace(recipe(), policy=policy), faults)

    Args:
        deadline: seconds; with the default a run waits long enough for any return that is drawn.
        max_losses: by default more than are drawn.
    """
    min_slices = draw(st.integers(1, num_slices))
    return Policy(
        min_slices=min_slices,
        max_slices=draw(st.none() | st.integers(min_slices, num_slices)),
        patience=draw(st.sampled_from((0.0, 1.5, 8.0))),
        deadline=deadline,
        lookback=draw(st.sampled_from(("host", "live"))),
        inflight=draw(st.integers(1, INFLIGHT)),
        snapshot_every=draw(st.integers(1, 5)),
        checkpoint_every=draw(st.sampled_from((0, 1, 2, 3, 5))),
        checkpoint_seconds=draw(st.sampled_from((0.0, 0.0, 0.001, 2.5, 6.0))),
        keep_checkpoints=draw(st.integers(1, 3)),
        max_losses=max_losses,
        probe_every=draw(st.sampled_from((0.5, 2.0, 5.0))),
        stable_probes=draw(st.integers(1, 3)),
    )


# --- for simulated slices -----------------------------------------------------------------------


@st.composite
def faults(
    draw: DrawFn,
    num_slices: int = 4,
    num_steps: int = 40,
    *,
    max_faults: int = 6,
    min_slices: int = 1,
    inflight: int = INFLIGHT,
) -> tuple[scripts.Fault, ...]:
    """Faults that all strike, in a run of so many steps on so many simulated slices.

        @given(faults(num_slices=2, num_steps=10))
        def test_either_slice_may_die(faults):
            assert_recovers(recipe(), faults, num_slices=2)

    Args:
        max_faults: most losses, hangs and returns; more returns may follow, see `min_slices`.
        min_slices: of a policy that goes on in the end: as many are never lost, or return.
        inflight: the most steps in flight. A slice is lost again only when its return, which
            comes with a step's commit, is past for sure.
    """
    after_return = [1] * num_slices
    """The first step in which each slice can be lost."""
    down: set[int] = set()
    script: list[scripts.Fault] = []
    step = 1
    for gap, victim, kind in draw(_strikes(num_slices, num_steps, max_faults)):
        step = min(step + gap, num_steps)
        if victim in down:
            down.remove(victim)
            script.append(scripts.Return(victim, step=step))
            after_return[victim] = step + inflight
        elif max(step, after_return[victim]) <= num_steps:
            step = max(step, after_return[victim])
            down.add(victim)
            script.append(kind(victim, step=step))
    stay_down = num_slices - min_slices
    script += [scripts.Return(s, step=step) for s in sorted(down)[stay_down:]]
    surfaces: Surfaces = draw(st.sampled_from(("read", "dispatch")))
    return tuple(
        replace(f, surfaces=surfaces) if isinstance(f, scripts.Lose) else f for f in script
    )


def _strikes(num_slices: int, num_steps: int, most: int) -> SearchStrategy[list]:
    """(steps since the one before, slice, what happens to it if it is up)."""
    gaps = st.integers(0, max(1, 2 * num_steps // most))
    victims = st.integers(0, num_slices - 1)
    kinds = st.sampled_from((scripts.Lose, scripts.Lose, scripts.Hang))
    return st.lists(st.tuples(gaps, victims, kinds), min_size=1, max_size=most)


# --- for the simulator --------------------------------------------------------------------------

_ENDING = frozenset(
    {
        *(Kind.PREEMPTION, Kind.PROGRAM, Kind.INTERNAL, Kind.UNAVAILABLE),
        *(Kind.DATA, Kind.DISK_FULL, Kind.HANG),
    }
)
"""Kinds that may end a process. The simulator runs the command again a dozen times at most."""
_MOST_ENDING = 6
_FEW = 8


@st.composite
def schedules(
    draw: DrawFn,
    *,
    max_slices: int = 4,
    max_steps: int = 12,
    min_faults: int = 0,
    max_faults: int = 8,
) -> Schedule:
    """Schedules for the simulator: every kind of fault in every phase, under odd policies.

        @given(schedules(max_slices=8, min_faults=10, max_faults=40))
        def test_nothing_is_lost(schedule):
            assert simulate(schedule).violation is None

    Args:
        min_faults, max_faults: how many faults a schedule has, as long as those are left out of
            it that would only end one process more.
    """
    num_slices = draw(st.integers(1, max_slices))
    num_steps = draw(st.integers(1, max_steps))
    policy = draw(policies(num_slices))
    impatient = max_faults <= _FEW and draw(st.integers(0, 9)) == 9
    each = _faults(num_slices, impatient)
    drawn = draw(st.lists(each, min_size=min_faults, max_size=max_faults))
    durable = draw(st.sampled_from((True, True, True, False)))
    return Schedule(
        num_slices=num_slices,
        num_steps=num_steps,
        policy=replace(policy, **draw(_limits(drawn, impatient))),
        faults=_without_too_many_ends(drawn),
        save_seconds=draw(st.sampled_from((1.0, 0.1, 2.5, 6.0))),
        on_disk=draw(_steps_on_disk(num_steps)) if durable else (),
        durable=durable,
    )


@st.composite
def _limits(draw: DrawFn, drawn: list[Fault], impatient: bool) -> dict[str, Any]:
    """Limits of the policy that make a run fail only where the simulator expects it."""
    hangs = any(fault.kind is Kind.HANG for fault in drawn)
    deadline = _PATIENT if hangs else FOREVER
    if impatient:
        deadline = draw(st.sampled_from((30.0, 10.0, 2.0, 0.0)))
    losses = (_MANY, 3, 2, 1) if len(drawn) <= _FEW else (_MANY,)
    return {"deadline": deadline, "max_losses": draw(st.sampled_from(losses))}


@st.composite
def _faults(draw: DrawFn, num_slices: int, impatient: bool) -> Fault:
    phase, kind = draw(st.sampled_from(CELLS))
    most = num_slices if kind in (Kind.LOSSES, Kind.NOTICE) else 1
    # Drawn for every kind: one that took fewer choices would be simpler than a loss.
    victims = sorted(draw(st.sets(st.integers(0, num_slices - 1), min_size=1)))
    returns = st.sampled_from((1.0, 0.1, 0.5, 2.0, 5.0, 20.0))
    if kind is Kind.HANG:
        returns = st.sampled_from((5.0, 25.0, 50.0, 200.0))
    never = impatient and kind is not Kind.HANG and draw(st.booleans())
    return Fault(
        phase=phase,
        kind=kind,
        visit=draw(st.integers(1, 12 if phase is not Phase.RESTORE else 3 * num_slices)),
        slices=tuple(victims[:most]) if kind in NAMING else (),
        returns=None if never else draw(returns),
        warning=draw(st.sampled_from((1.0, 0.0, 4.0, 15.0))),
        surfaces=draw(st.sampled_from(("read", "dispatch"))),
    )


def _steps_on_disk(num_steps: int) -> SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, num_steps), max_size=3).map(lambda steps: tuple(sorted(steps)))


def _without_too_many_ends(drawn: list[Fault]) -> tuple[Fault, ...]:
    ending = [fault for fault in drawn if fault.kind in _ENDING]
    spare = ending[_MOST_ENDING:]
    return tuple(fault for fault in drawn if not any(fault is other for other in spare))
