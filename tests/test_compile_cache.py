"""The cache of executables: what is made when, and what is let go."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from elastix.compile_cache import Build, CompileCache, count_compiles, size_of


def slices(*ids: int) -> frozenset[int]:
    return frozenset(ids)


@dataclass(frozen=True)
class Executable:
    """So many bytes of code."""

    name: str
    nbytes: int = 100

    def memory_analysis(self):
        return SimpleNamespace(generated_code_size_in_bytes=self.nbytes)


class Compiler:
    """Makes executables when `gate` is open, and notes the order in which they were begun."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), []
        self.gate.set()

    def build(self, *ids: int, name: str = "step", nbytes: int = 100) -> Build:
        def lower():
            self.begun.append((name, ids))
            self.gate.wait(30.0)
            return SimpleNamespace(compile=lambda: Executable(name, nbytes))

        return Build(name, slices(*ids), lower)


@pytest.fixture
def compiler():
    made = Compiler()
    yield made
    made.gate.set()


def until(true) -> None:
    give_up = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_a_set_is_made_once(compiler):
    cache = CompileCache()
    first = cache.get(compiler.build(0, 1))
    assert cache.get(compiler.build(0, 1)) is first and first.result(30.0).name == "step"
    assert cache.get(compiler.build(1)).result(30.0) is not first.result()
    assert compiler.begun == [("step", (0, 1)), ("step", (1,))]


def test_a_compile_that_failed_is_begun_again_by_who_needs_it():
    tries = []

    def lower():
        tries.append(len(tries))
        if len(tries) == 1:
            raise RuntimeError("out of memory")
        return SimpleNamespace(compile=lambda: Executable("step"))

    cache, build = CompileCache(), Build("step", slices(0), lower)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.get(build).result(30.0)
    assert cache.get(build).result(30.0) == Executable("step")


def test_sets_are_warmed_one_after_another_and_what_is_there_is_not_made_again(compiler):
    cache = CompileCache()
    cache.get(compiler.build(0, 1)).result(30.0)
    compiler.gate.clear()
    cache.warm([compiler.build(0, 1), compiler.build(0), compiler.build(1)])
    until(lambda: len(compiler.begun) == 2)
    assert compiler.begun == [("step", (0, 1)), ("step", (0,))], "the next waits for this one"
    assert cache.is_making(slices(0)) and not cache.is_making(slices(1))
    compiler.gate.set()
    until(lambda: slices(1) in cache.sets and not cache.is_making(slices(1)))
    assert compiler.begun[2:] == [("step", (1,))]
    assert cache.get(compiler.build(1)).done(), "nothing is left to wait for"


def test_what_is_needed_now_does_not_wait_for_what_is_warmed(compiler):
    cache = CompileCache()
    compiler.gate.clear()
    cache.warm([compiler.build(0), compiler.build(1)])
    until(lambda: compiler.begun == [("step", (0,))])
    needed = cache.get(compiler.build(1))
    until(lambda: len(compiler.begun) == 2)
    assert compiler.begun[1] == ("step", (1,))
    being_made = cache.get(compiler.build(0))
    compiler.gate.set()
    assert needed.result(30.0) and being_made.result(30.0)
    assert len(compiler.begun) == 2, "what is on its way is waited for"


def test_what_was_to_be_warmed_before_and_was_not_begun_is_forgotten(compiler):
    cache = CompileCache()
    compiler.gate.clear()
    cache.warm([compiler.build(0), compiler.build(1), compiler.build(2)])
    until(lambda: len(compiler.begun) == 1)
    cache.warm([compiler.build(3)])
    compiler.gate.set()
    until(lambda: slices(3) in cache.sets and not cache.is_making(slices(3)))
    cache.warm([])
    assert compiler.begun == [("step", (0,)), ("step", (3,))]


def test_the_set_that_was_used_least_recently_goes_first(compiler):
    cache = CompileCache(most_bytes=250)
    for ids in ((0,), (1,)):
        cache.get(compiler.build(*ids)).result(30.0)
    cache.get(compiler.build(0))
    cache.get(compiler.build(2)).result(30.0)
    until(lambda: cache.nbytes <= 250)
    assert cache.sets == {slices(0), slices(2)}


def test_the_set_in_use_stays_whatever_its_size(compiler):
    cache = CompileCache(most_bytes=50)
    cache.get(compiler.build(0)).result(30.0)
    cache.get(compiler.build(0, name="hashes")).result(30.0)
    assert cache.sets == {slices(0)} and cache.nbytes == 200


def test_warming_makes_room_of_what_is_not_likely_and_ends_where_there_is_no_more(compiler):
    cache = CompileCache(most_bytes=350)
    cache.get(compiler.build(7)).result(30.0)
    cache.get(compiler.build(0, 1, 2)).result(30.0)
    cache.warm([compiler.build(n) for n in range(5)])
    until(lambda: len(compiler.begun) >= 5 and cache.nbytes <= 350)
    kept = {slices(0, 1, 2), slices(0), slices(1)}
    until(lambda: cache.sets == kept)
    assert len(compiler.begun) == 5, "the third did not fit, and the others were not tried"


def test_real_executables_have_a_size_and_a_count():
    count_compiles()
    shape = jax.ShapeDtypeStruct((5, 7), jnp.float32)
    build = Build("x", slices(0), lambda: jax.jit(lambda x: jnp.sum(x * 3.25)).lower(shape))
    job = CompileCache().get(build)
    job.result(60.0)
    assert job.nbytes == size_of(job.result()) > 0
    assert job.compiles + count_compiles()[1] >= 1, "made, or found in the persistent cache"
