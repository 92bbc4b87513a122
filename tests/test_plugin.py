"""The pytest plugin: its fixture and markers, in sessions of their own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import jax
import pytest

import elastix
import elastix.testing

ROOT = Path(__file__).parents[1]
PLUGIN = "elastix.testing.plugin"
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]

pytest_plugins = ["pytester"]


@pytest.fixture
def session(pytester, monkeypatch):
    """Runs pytest on a file of tests, in a process of its own, with the plugin alone."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

    def run(text: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=text)
        cache = "ignore:Error reading persistent compilation cache entry:UserWarning"
        strict = ("--strict-markers", "-W", "error", "-W", cache, "-p", "no:cacheprovider")
        return pytester.runpytest_subprocess("-p", PLUGIN, *strict, *arguments)

    return run


GOOD = """\
import jax
import pytest
from dataclasses import replace

import elastix
from tests.recipes import net

POLICY = elastix.Policy(snapshot_every=2, probe_every=1, warm="off")
NET = replace(net.recipe(), num_steps=12, policy=POLICY)


def test_four_slices_of_two_by_default(slices):
    assert list(slices.devices) == [0, 1, 2, 3]
    assert {len(devices) for devices in slices.devices.values()} == {2}


@pytest.mark.slices(3, devices_per_slice=1)
@pytest.mark.faults("lose 1@4", "return 1@5")
def test_a_lost_slice_is_taken_back(slices):
    summary = elastix.train(NET, backend=slices)
    assert summary.outcome == "done"
    assert [r["kind"] for r in summary.recoveries] == ["loss", "regrow"]
    assert summary.seconds == 12.0 + summary.recoveries[0]["steps_lost"]


@pytest.mark.slices(10, devices_per_slice=1)
def test_jax_has_as_many_devices_as_the_largest_test_needs(slices):
    assert len(jax.devices("cpu")) == 10


@pytest.mark.faults('''
    lose 0@4
    # and never
    lose 1@9000s
''')
def test_unfired(slices):
    slices.dispatched(4, [0])


@pytest.mark.faults("lose 0@4")
def test_failed_already(slices):
    assert slices is None
"""

BAD = """\
import pytest


@pytest.mark.faults("lose 1@2", "loose 1@12")
def test_unreadable(slices):
    pass


@pytest.mark.slices(2)
@pytest.mark.faults("lose 2@4")
def test_no_such_slice(slices):
    pass


@pytest.mark.faults("return 1@2")
def test_unlost(slices):
    pass


@pytest.mark.faults(3)
def test_no_line(slices):
    pass


@pytest.mark.slices(0)
def test_none(slices):
    pass


@pytest.mark.slices(2, device_per_slice=1)
def test_misspelt(slices):
    pass


@pytest.mark.faults("lose 1@2")
def test_without_the_fixture():
    pass


@pytest.mark.faults("lose 1@2\\nlose 0@99")
def test_too_late(slices):
    slices.check_faults((), 40)
"""

TOLD = [
    "test_it.py:4: fault script, line 2: 'loose 1@12': write lose, hang, corrupt or return, then "
    "SLICE@STEP such as 1@40, or SLICE@SECONDSs",
    "test_it.py:9: fault script, line 1: lose 2@4: there are slices 0 to 1 only",
    "test_it.py:15: fault script, line 1: return 1@2: slice 1 is not lost before that; lose it "
    "first",
    "test_it.py:20: faults(3): write strings such as 'lose 1@12'",
    "test_it.py:25: slices: num_slices=0: use a whole number, 1 or more",
    "test_it.py:30: slices(2, device_per_slice=1): write slices(4, devices_per_slice=2)",
    "test_it.py:35: the marker `faults` is for the fixture `slices`: add it to the test's "
    "arguments",
    "*ValueError: test_it.py:40: fault script, line 2: lose 0@99: the run has 40 steps only",
]


def test_the_fixture_runs_the_script_and_a_fault_that_did_not_strike_fails_the_test(session):
    result = session(GOOD)
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["test_it.py:31: did not strike: lose 1@9000s"])
    result.stdout.no_fnmatch_line("*did not strike: lose 0@4*")


def test_what_makes_no_sense_is_one_line_with_the_place(session):
    result = session(BAD)
    result.assert_outcomes(errors=7, failed=1)
    result.stdout.fnmatch_lines([line.replace("[", "[[]") for line in TOLD])


IN_USE = """\
import jax

jax.devices()


def test_too_few(slices):
    pass
"""


def test_jax_in_use_with_fewer_devices_is_one_line(session):
    result = session(IN_USE)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["test_it.py:6: slices: 8 CPU devices are needed and JAX has 1: call elastix.simul*"]
    )


def test_a_session_without_slices_imports_nothing_of_weight(session):
    text = """
        import sys

        def test_nothing_is_loaded():
            loaded = {name for name in sys.modules if name.startswith("elastix")}
            assert loaded == {
                "elastix", "elastix.lazy", "elastix.testing", "elastix.testing.plugin"
            }
            assert not {"jax", "numpy", "hypothesis"} & sys.modules.keys()
    """
    session(text).assert_outcomes(passed=1)
    shown = session("", "--markers").stdout
    shown.fnmatch_lines(["@pytest.mark.slices(num_slices=4*", "@pytest.mark.faults(*lines)*"])


def test_the_plugin_is_the_entry_point():
    assert ENTRY_POINTS == {"pytest11": {"elastix": PLUGIN}}


@pytest.mark.parametrize("package", [elastix, elastix.testing])
def test_lazy_names_are_all_names(package):
    assert dir(package) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'tran'"):
        package.tran  # noqa: B018


def test_elastix_testing_does_not_need_hypothesis():
    code = f"import {PLUGIN}, elastix.testing as t, sys; [getattr(t, n) for n in t.__all__]"
    code += "; assert 'hypothesis' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert import_module("elastix.testing.strategies").__name__ not in elastix.testing.__all__
