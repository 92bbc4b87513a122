"""What users of other systems ran into, and the test that holds it here.

Each line: what happened elsewhere | the file, under tests/, and the tests in it.

error text with INTERNAL in it was taken for a lost slice | recovery/test_lessons_on_arrays.py: \
test_an_error_of_the_loss_ends_the_run_at_once_and_its_checkpoints_are_intact, \
test_an_error_of_a_step_with_every_canary_intact_is_the_programs, \
test_a_runtime_error_with_a_canary_gone_is_a_loss, \
test_data_loss_is_a_loss_through_every_cause, \
test_an_error_of_the_data_is_never_taken_for_a_loss, \
test_an_error_of_a_hook_disturbs_nothing_whatever_its_text
retries for ever, or a counter that regrows and old losses fill | test_machine.py: \
test_losses_without_progress_are_bounded_and_a_commit_forgets_them
the same, in a whole run | recovery/test_lessons_on_arrays.py: \
test_any_number_of_losses_and_regrows_with_progress_in_between_is_survived
a probe that hung was bounded by nothing | test_lessons.py: \
test_slices_that_do_not_answer_cost_one_deadline_and_are_down
each poll of health compiled a program | test_lessons.py: test_no_probe_compiles_anything
a log call met the error, and swallowed it | recovery/test_lessons_on_arrays.py: \
test_whoever_logs_gets_plain_values_and_never_those_of_a_step_that_was_lost
a slice answered, and never finished its step | recovery/test_stuck.py: \
test_a_slice_that_hangs_is_found_by_trial_and_left_out, \
test_a_slice_that_hung_is_taken_back_when_it_returns
a first step or a compile was taken for stuck | recovery/test_lessons_on_arrays.py: \
test_the_first_step_on_a_mesh_has_the_deadline_of_a_compile
a slice that flapped stopped all others each time | test_machine.py: \
test_a_slice_that_flaps_starts_its_stable_probes_again, \
test_a_slice_that_flaps_is_taken_back_more_slowly_until_checkpoints_forgive_it
a failure in a save, or in another phase that nobody had thought of | \
recovery/test_on_arrays.py: test_a_fault_in_each_phase_is_recovered
the same, without arrays | test_simulation.py: test_every_kind_of_fault_strikes_in_every_phase
a second slice died during a restore | test_machine.py: \
test_a_loss_while_regrowing_falls_back_to_the_live_state_of_the_survivors
survivors waited out a timeout though the death was known | recovery/test_stuck.py: \
test_a_known_loss_interrupts_the_wait
the same, in other threads | test_background.py: test_a_known_loss_interrupts_what_is_waited_for
a leaf that was not replicated died with its slice | recovery/test_lessons_on_arrays.py: \
test_a_leaf_that_would_die_with_its_slice_is_refused_at_the_start, \
test_every_state_lies_whole_on_every_slice
a retry used buffers that were donated | recovery/test_lessons_on_arrays.py: \
test_what_a_step_consumed_is_never_used_again
one buffer at two leaves was donated twice | recovery/test_lessons_on_arrays.py: \
test_tied_leaves_stay_tied_through_every_restore
memory doubled in a restore, or after it | recovery/test_lessons_on_arrays.py: \
test_a_restore_needs_little_more_than_the_state_and_a_restored_state_can_be_donated
a restored state made the step compile again | recovery/test_lessons_on_arrays.py: \
test_one_compile_for_each_set_of_slices_whatever_the_state_came_from
random draws changed with the number of shards | recovery/test_lessons_on_arrays.py: \
test_random_draws_depend_on_no_number_of_shards
moments took another dtype on load, and typed keys could not be loaded | \
recovery/test_lessons_on_arrays.py: test_every_dtype_and_key_survives_every_restore_exactly
a schedule began again after a resume | recovery/test_lessons_on_arrays.py: \
test_the_learning_rate_of_a_run_in_parts_is_that_of_the_whole
a step was saved under another number | recovery/test_lessons_on_arrays.py: \
test_a_step_means_the_same_in_a_checkpoint_its_name_its_state_and_its_data
the recovery machine was saved in mid-transition | recovery/test_lessons_on_arrays.py: \
test_no_state_of_the_machine_is_kept_and_a_run_goes_on_whatever_it_was_doing
a regrow rewound to the last checkpoint | test_lessons.py: \
test_no_regrow_of_any_schedule_loses_a_step
the same, in a whole run | recovery/test_runs.py: \
test_slices_lost_and_returned_leave_no_trace_in_the_weights
nested timeouts that had to be tuned together | test_lessons.py: \
test_every_deadline_follows_from_the_one_budget_and_is_printed_at_the_start

There is no profiler, whose trace would have to end before a recovery, and no launcher, whose budget
of restarts would have to follow from the policy: nothing to test yet.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from elastix.backends import Health
from elastix.backends.simulated import SimulatedBackend, VirtualClock
from elastix.compile_cache import count_compiles
from elastix.machine import Policy
from elastix.recoveries import Recoveries
from elastix.report import start_block
from elastix.testing import random_schedule, simulate
from elastix.testing.coverage import histories
from elastix.testing.storms import storm
from tests.test_display import INFO

TESTS = Path(__file__).parent
ROWS = [line.split(" | ") for line in __doc__.splitlines() if line.count(" | ") == 1][1:]


def test_each_row_names_tests_that_exist():
    assert len(ROWS) >= 27
    for _, where in ROWS:
        file, _, names = where.partition(": ")
        defined = {
            node.name
            for node in ast.parse((TESTS / file.strip()).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        named = re.findall(r"\w+", names)
        assert named and set(named) <= defined, (file, set(named) - defined)


def test_each_test_on_arrays_is_in_a_row():
    tree = ast.parse((TESTS / "recovery/test_lessons_on_arrays.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not {name for name in names if name.startswith("test_") and name not in __doc__}


def backend() -> SimulatedBackend:
    return SimulatedBackend(4, 2, clock=VirtualClock())


@pytest.mark.parametrize("silent", [{0}, {1, 3}, {0, 1, 2, 3}])
def test_slices_that_do_not_answer_cost_one_deadline_and_are_down(silent):
    """However many they are, and the others are heard all the same."""
    sim, deadline = backend(), Policy().probe_deadline
    for slice_id in silent:
        sim.silence(slice_id)
    health = sim.probe(range(4), deadline)
    assert {s for s, h in health.items() if h is Health.DOWN} == silent
    assert {s for s, h in health.items() if h is Health.UP} == set(range(4)) - silent
    assert sim.now() == deadline
    assert set(sim.probe(range(4), deadline).values()) == {Health.UP}, "they live"


def test_no_probe_compiles_anything():
    """The first has nothing to compile either; nor has one of slices that died and came back."""
    sim = backend()
    before = count_compiles()
    for n in range(100):
        sim.probe(range(4), 1.0)
        victim = n % 4
        if n % 3 == 0:
            sim.lose(victim)
            assert sim.probe([victim], 1.0) == {victim: Health.DOWN}
            sim.give_back(victim)
            assert sim.probe([victim], 1.0) == {victim: Health.EMPTIED}
            sim.admit([victim])
    assert count_compiles() == before


def test_no_regrow_of_any_schedule_loses_a_step():
    schedules = [random_schedule(seed, 4) for seed in range(200)] + [storm(s, 50) for s in range(4)]
    regrows = 0
    for schedule in schedules:
        result = simulate(schedule)
        assert result.violation is None
        for found in map(recoveries, histories(result)):
            regrown = [r for r in found if r.kind == "regrow"]
            regrows += len(regrown)
            assert not [r for r in regrown if r.steps_lost], schedule
    assert regrows > 80


def recoveries(decisions):
    watch = Recoveries()
    found = (watch.update(before, event, after) for before, event, _, after, _ in decisions)
    return [recovery for recovery in found if recovery]


@pytest.mark.parametrize("budget", [0.0, 20.0, 600.0, 1800.0, 86400.0])
def test_every_deadline_follows_from_the_one_budget_and_is_printed_at_the_start(budget):
    policy = Policy(deadline=budget)
    recipe = replace(INFO.recipe, policy=policy)
    told = dict(start_block(replace(INFO, recipe=recipe), "tiny").fields)["deadlines"]
    assert told == ", ".join(f"{name} {s:g} s" for name, s in policy.deadlines.items())
    derived = {name for name in dir(Policy) if name.endswith("_deadline")}
    assert {getattr(policy, name) for name in derived} | {budget} == set(policy.deadlines.values())
    for name in derived:
        share = getattr(Policy(deadline=3600.0), name) / 3600.0
        assert getattr(policy, name) >= min(share * budget, getattr(policy, name))
        assert getattr(Policy(deadline=7200.0), name) == pytest.approx(7200.0 * share), name
    settable = {field.name for field in fields(Policy)}
    assert {n for n in settable if re.search("deadline|timeout", n)} == {"deadline"}
