"""Growing: training goes on until the next mesh is compiled for, and what is compiled for ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastix.machine import (
    Committed,
    Compile,
    Compiled,
    Flap,
    Growth,
    Policy,
    Prepared,
    Probed,
    RunStep,
    Stable,
    Training,
    WakeAt,
    Warm,
)
from elastix.machine.warming import all_sets, next_sets
from tests.test_machine import (
    ALL,
    EPOCH,
    POLICY,
    growing,
    host,
    ledger,
    on,
    restoring,
    slices,
    training,
)


def test_training_goes_on_until_the_mesh_to_grow_onto_is_compiled_for():
    state, effects = on(growing(), Committed, step=46)
    assert effects == (RunStep(EPOCH, 48),) and state.growth == Growth(ALL), "asked for once"
    state, effects = on(growing(), Compiled, mesh=slices(0, 1))
    assert state == growing() and effects == (), "of another mesh"
    state, _ = on(growing(), Compiled, mesh=ALL)
    assert state == growing(growth=Growth(ALL, True))


def test_a_slice_that_is_lost_while_it_is_compiled_for_is_not_taken_back():
    state, effects = on(growing(), Probed, down=slices(3))
    assert state.growth is None and effects == (WakeAt(EPOCH, 105.0),)
    state, effects = on(state, Compiled, mesh=ALL)
    assert isinstance(state, Training) and effects == ()


def test_another_slice_that_returns_meanwhile_is_compiled_for_too():
    both = (Stable(2, 2, 90.0), Stable(3, 1, 95.0))
    state = training(45, 47, mesh=slices(0, 1), ledger=ledger(stable=both))
    state = replace(state, growth=Growth(slices(0, 1, 2), True))
    state, effects = on(state, Probed, up=slices(2, 3))
    assert state.growth == Growth(ALL)
    assert effects == (WakeAt(EPOCH, 105.0), Compile(EPOCH, ALL))


def test_of_those_that_return_the_ones_that_were_compiled_for_are_taken():
    policy = replace(POLICY, max_slices=3)
    both = (Stable(2, 2, 95.0), Stable(3, 2, 90.0))
    state = training(45, 47, mesh=slices(0, 1), ledger=ledger(stable=both))
    state, _ = on(state, Committed, policy, step=46)
    assert state.growth == Growth(slices(0, 1, 3)), "the one that has been up longest"
    state = replace(state, growth=Growth(slices(0, 1, 2)), asked=None)
    state, _ = on(state, Compiled, policy, mesh=slices(0, 1, 2))
    assert state.growth == Growth(slices(0, 1, 2), True)


# --- which sets are compiled for ahead ------------------------------------------------------------

NEXT = replace(POLICY, warm="next")


def warmed(policy: Policy, mesh=ALL, **changes):
    book = ledger(sources=(host(40),), **changes)
    _, effects = on(restoring(mesh=mesh, ledger=book), Prepared, policy, step=40)
    assert all(e.sets and e.epoch == EPOCH for e in effects if isinstance(e, Warm))
    return [set(s) for e in effects if isinstance(e, Warm) for s in e.sets]


def test_a_new_mesh_is_followed_by_what_one_loss_leads_to():
    assert warmed(NEXT) == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]
    assert warmed(POLICY) == [], "the policy says off"


def test_returns_come_before_losses_and_slices_that_flapped_before_others():
    found = warmed(NEXT, slices(0, 1, 2), up=slices(0, 1, 2), flaps=(Flap(2, 1),))
    assert found == [{0, 1, 2, 3}, {0, 1}, {1, 2}, {0, 2}]


def test_what_is_too_small_to_train_on_is_not_compiled_for():
    assert warmed(replace(NEXT, min_slices=4)) == []
    few = replace(NEXT, min_slices=3)
    assert warmed(few, slices(0, 1, 2), up=slices(0, 1, 2)) == [{0, 1, 2, 3}]


def test_those_that_stand_by_take_the_place_of_one_that_is_lost():
    policy = replace(NEXT, max_slices=3)
    assert warmed(policy, slices(0, 1, 2)) == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}]


def test_a_slice_with_wrong_bits_is_not_compiled_for():
    found = warmed(NEXT, slices(0, 1, 2), up=slices(0, 1, 2), corrupt=slices(3))
    assert found == [{1, 2}, {0, 2}, {0, 1}]


def test_all_sets_are_in_the_order_of_how_far_away_they_are():
    found = warmed(replace(NEXT, warm="all"), slices(0, 1), up=slices(0, 1))
    assert len(found) == 14 and {0, 1} not in found
    far = [len(s ^ {0, 1}) for s in found]
    assert far == sorted(far) and found[:4] == [{0}, {0, 1, 2}, {0, 1, 3}, {1}]
    few = replace(NEXT, warm="all", min_slices=3, max_slices=3)
    assert sorted(map(sorted, warmed(few, slices(0, 1, 2)))) == [[0, 1, 3], [0, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("find", [next_sets, all_sets])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_sets_that_may_be_trained_on_are_found(find, size):
    policy = replace(POLICY, min_slices=2, max_slices=3)
    found = list(find(ledger(corrupt=slices(3), up=slices(0, 1, 2)), slices(*range(size)), policy))
    assert all(2 <= len(s) <= 3 and 3 not in s for s in found)
    assert len(found) == len(set(found))


def test_of_very_many_slices_the_likeliest_sets_are_compiled_for():
    everyone = frozenset(range(500))
    book = ledger(slices=everyone, up=everyone)
    assert len(list(next_sets(book, everyone, POLICY))) == 64
