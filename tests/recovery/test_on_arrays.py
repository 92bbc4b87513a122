"""Faults in every phase, on arrays: the bits, the losses and the data of the undisturbed run."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace

import pytest

from elastix.machine import Done, Policy
from elastix.testing import CELLS, Fault, Kind, Phase, Schedule, random_schedule
from elastix.testing.array_parts import PointedArrays
from elastix.testing.on_arrays import OnArrays
from elastix.testing.schedules import NAMING
from elastix.testing.storms import storm
from tests.recipes import net

RECIPE = replace(net.recipe(), eval_data=net.WavesConfig(size=48))
POLICY = Policy(
    snapshot_every=2, checkpoint_every=3, eval_every=3, probe_every=0.5, stable_probes=1, inflight=2
)
EARLIER = Fault(Phase.SYNC, Kind.LOSS, visit=2, slices=(1,), returns=1.0)
"""What leads to a restore and, when the slice is back, to a regrow."""


SLICES = 3
"""Of four there would be twice as many sets to compile; the soak tests have them."""


@pytest.fixture(scope="module")
def cluster():
    return OnArrays(RECIPE, SLICES)


@pytest.fixture(scope="module")
def cluster_of_four():
    return OnArrays(RECIPE, 4)


def schedule(phase: Phase, kind: Kind, visit: int = 1) -> Schedule:
    """One fault, and what leads to its phase."""
    slow = kind in (Kind.HANG, Kind.STALL)
    slices = {Kind.LOSSES: (0, 2), Kind.NOTICE: (2,)}.get(kind, (0,)) if kind in NAMING else ()
    fault = Fault(phase, kind, visit, slices, returns=300.0 if slow else 2.0)
    leads = phase in (Phase.RESTORE, Phase.REGROW) or kind is Kind.STALL
    faults = (EARLIER, fault) if leads else (fault,)
    return Schedule(SLICES, 10, POLICY, faults)


@pytest.mark.parametrize("kind", [Kind.LOSS, Kind.HANG, Kind.DATA_LOSS], ids=lambda k: k.name)
@pytest.mark.parametrize("phase", Phase, ids=lambda p: p.name)
def test_a_fault_in_each_phase_is_recovered(cluster, phase, kind):
    """Where no error with that status can come, the data source, a stall or a silence stands in."""
    if (phase, kind) not in CELLS:
        kind = {Phase.DATA: Kind.DATA, Phase.PROBE: Kind.SILENT}[phase]
    result = cluster.run(schedule(phase, kind))
    assert result.violation is None
    assert result.hits[phase, kind] == 1, "it did not strike"
    assert [end.outcome for end in result.ends] == ["done"], "in one process"


@pytest.mark.parametrize("phase", [p for p in Phase if (p, Kind.STALL) in CELLS], ids=str)
def test_what_hangs_in_this_process_ends_it_with_a_reason_or_is_survived(cluster, phase):
    result = cluster.run(schedule(phase, Kind.STALL))
    assert result.violation is None and result.hits[phase, Kind.STALL] == 1
    assert result.ends[-1].outcome == "done"


@pytest.mark.parametrize("phase", [Phase.SYNC, Phase.SNAPSHOT, Phase.RESTORE, Phase.EVALUATION])
def test_a_program_error_ends_the_process_and_the_same_command_resumes(cluster, phase):
    result = cluster.run(schedule(phase, Kind.PROGRAM))
    assert result.violation is None
    failed, done = result.ends
    assert "no such thing as a slice" in failed.reason and done.outcome == "done"


def test_a_rotten_checkpoint_is_set_aside_and_the_run_starts_from_an_older_one(cluster):
    lost = Fault(Phase.SYNC, Kind.LOSSES, visit=1, slices=(0, 1, 2), after=8)
    rot = Fault(Phase.DISPATCH, Kind.ROT, visit=1, after=7)
    result = cluster.run(Schedule(SLICES, 10, POLICY, (rot, lost)))
    assert result.violation is None and len(result.ends) == 1
    assert result.hits[Phase.DISPATCH, Kind.ROT] == 1


STORM = 50


def test_a_storm_of_fifty_faults_ends_with_the_bits_of_the_undisturbed_run(cluster):
    weather = storm(0, STORM, SLICES)
    weather = replace(weather, policy=replace(weather.policy, lookback="host"))
    assert {0} < {s for fault in weather.faults for s in fault.slices}
    result = cluster.run(weather)
    assert result.violation is None
    assert len(result.ends) == 1 and result.ends[0].outcome == "done"
    assert sum(result.hits.values()) >= 0.95 * STORM
    phases = {phase for phase, _ in result.hits}
    assert phases >= {Phase.SNAPSHOT, Phase.SAVE, Phase.RESTORE, Phase.REGROW, Phase.EVALUATION}


class DroppedBit(PointedArrays):
    """Every third snapshot loses the last bit of one number."""

    def finish_snapshot(self):
        step = super().finish_snapshot()
        if step % 3 == 0:
            for slice_id in self._mesh:
                copy = self._backend.host_memory(slice_id)[step]
                array = next(a for a in copy.arrays() if a.dtype.kind == "f" and a.size > 1)
                ctypes.c_uint8.from_address(array.ctypes.data).value ^= 1
        return step


def test_a_wrong_bit_in_a_snapshot_is_found():
    cluster = OnArrays(RECIPE, SLICES, arrays=DroppedBit)
    faults = tuple(
        Fault(Phase.SYNC, Kind.LOSS, after=n, slices=(n // 3 % SLICES,)) for n in (3, 6, 9)
    )
    policy = replace(POLICY, snapshot_every=3)
    result = cluster.run(Schedule(SLICES, 12, policy, faults))
    assert result.violation and result.violation.rule in (
        "a failure fits the schedule",
        "the same bits",
    )


@pytest.mark.soak
def test_five_hundred_faults_in_one_run(cluster_of_four):
    result = cluster_of_four.run(storm(2, 500))
    print(f"{sum(result.hits.values())} faults in {len(result.hits)} cells; ends: {result.ends}")
    assert result.violation is None
    assert isinstance(result.ends[0], Done) and len(result.ends) == 1, "in one process"
    assert sum(result.hits.values()) >= 500


@pytest.mark.soak
def test_every_cell_strikes_ten_times_on_arrays(cluster_of_four):
    least, hits, seed = 10, Counter(), 0
    while any(hits[cell] < least for cell in CELLS):
        seed += 1
        drawn = random_schedule(seed, 4)
        wanted = ((f.phase, f.kind) for f in drawn.faults)
        if not any(hits[cell] < least for cell in wanted):
            continue
        result = cluster_of_four.run(drawn)
        assert result.violation is None, f"seed {seed}: {result.violation}\n{drawn}"
        hits += result.hits
    print(f"{seed} seeds, {sum(hits.values())} faults, at least {min(hits.values())} in each cell")
