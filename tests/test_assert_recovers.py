"""assert_recovers: it returns what the run was, and tells in lines what is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from elastix import Lose, Policy, Return
from elastix.testing import assert_recovers
from elastix.testing.recovery import _train_undisturbed
from tests.recipes import net, planted_skip

NET = replace(
    net.recipe(), num_steps=16, policy=Policy(snapshot_every=5, probe_every=1, warm="off")
)


def test_a_run_that_lost_and_regained_slices_recovers(tmp_path):
    script = """
        lose 0@6      # in the middle
        lose 3@8
        return 0@9
    """
    summary = assert_recovers(NET, script, run_dir=tmp_path / "run")
    assert (summary.outcome, summary.resumed_at, summary.unfired_faults) == ("done", 0, [])
    assert [r["kind"] for r in summary.recoveries] == ["loss", "loss", "regrow"]
    assert summary.recoveries[-1]["slices"] == [0, 1, 2]
    assert (tmp_path / "run" / "summary.json").exists()


def test_the_undisturbed_run_is_trained_once_for_a_recipe():
    _train_undisturbed.cache_clear()
    rows = []
    for policy in (NET.policy, Policy(lookback="live", warm="off")):
        recipe = replace(NET, policy=policy, hooks=(rows.append,))
        assert_recovers(recipe, [Lose(1, step=4), Return(1, step=6)])
    assert len(rows) == 2 * NET.num_steps, "hooks see the run with faults only"
    assert_recovers(NET, ["lose 1@3"], num_slices=3)
    assert _train_undisturbed.cache_info().misses == 2
    assert _train_undisturbed.cache_info().hits == 1


@dataclass(frozen=True)
class Widths(net.NetConfig):
    """A configuration that has no hash."""

    sizes: list[int] | None = None


def test_a_recipe_without_a_hash_is_trained_each_time():
    _train_undisturbed.cache_clear()
    recipe = replace(NET, model=Widths(sizes=[1]), num_steps=4)
    assert assert_recovers(recipe, "lose 1@3").outcome == "done"
    assert _train_undisturbed.cache_info().misses == 0


def test_what_differs_is_told_a_line_each():
    skipping = replace(planted_skip.recipe(), num_steps=8)
    with pytest.raises(AssertionError) as error:
        assert_recovers(skipping, "lose 1@4\nlose 2@9000s")
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert lines[0] == "the run did not recover from its faults"
    told = ("did not fire: lose 2@9000s", "the loss of step ", "consumed is ", "state_sha256 is ")
    for line, start in zip(lines[1:], told, strict=False):
        assert line.startswith(start)
    assert lines[5:-1] == ["faults: lose 1@4, lose 2@9000s"]
    assert lines[-1].startswith("recovery: loss of 1 after step ")
    assert lines[-1].endswith("(live) on 0, 2, 3")


def test_a_run_that_fails_tells_why():
    policy = replace(NET.policy, min_slices=4)
    with pytest.raises(AssertionError, match="3 of 4 slices were up after 1800 s") as error:
        assert_recovers(replace(NET, policy=policy), "lose 2@7")
    assert "\n  the run with faults failed after step " in str(error.value)
    assert str(error.value).endswith("\n  faults: lose 2@7")


def test_a_recipe_that_does_not_train_is_told_apart():
    def loss(model, batch, keys):
        raise TypeError("no such column")

    with pytest.raises(AssertionError) as error:
        assert_recovers(replace(NET, loss=loss), "lose 2@7")
    lines = str(error.value).splitlines()
    assert lines[0] == "the recipe does not train"
    assert lines[1].startswith("  the run undisturbed failed after step 0: ")
    assert "no such column" in lines[1] and "Traceback" in lines[2]


@pytest.mark.parametrize(
    ("faults", "options", "told"),
    [
        ("lose 1@2\nloose 1@12", {}, "fault script, line 2: 'loose 1@12': write lose, hang"),
        ("lose 4@2", {}, "fault script, line 1: lose 4@2: there are slices 0 to 3 only"),
        ("lose 1@17", {}, "fault script, line 1: lose 1@17: the run has 16 steps only"),
        ([Lose(1, step=17)], {}, "--lose 1@17: the run has 16 steps only"),
        ("# nothing", {}, "faults: there is none, and so nothing to recover from"),
        ([], {}, "faults: there is none, and so nothing to recover from"),
        ("lose 0@2", {"num_slices": 0}, "policy.min_slices=1 but there are 0 slices"),
        ("lose 0@2", {"num_slices": 13}, "num_replicas=12 cannot keep 13 slices busy"),
        ("lose 0@2", {"devices_per_slice": 9}, "36 CPU devices are needed and JAX has 8"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_trained(faults, options, told):
    _train_undisturbed.cache_clear()
    with pytest.raises(ValueError, match=f"^{re.escape(told)}[^\n]*$"):
        assert_recovers(NET, faults, **options)
    assert _train_undisturbed.cache_info().currsize == 0
