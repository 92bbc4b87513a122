"""The long tests of recovery: a million fault schedules, on as many cores as there are."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from elastix.testing import CELLS, random_schedule, simulate
from elastix.testing.simulate_command import matrix
from elastix.testing.storms import storm

SCHEDULES = 1_000_000
CHUNK = 2_000
SLICES = (2, 3, 4, 6, 8)


def run(first: int) -> tuple[Counter, str]:
    """A chunk of seeds: the hits of each cell, and the first violation with its seed."""
    hits: Counter = Counter()
    slices = SLICES[first // CHUNK % len(SLICES)]
    for seed in range(first, first + CHUNK):
        result = simulate(random_schedule(seed, slices))
        hits += result.hits
        if result.violation:
            return hits, f"seed {seed}, up to {slices} slices: {result.violation}"
    return hits, ""


def in_processes(do, work: range) -> Iterator:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        yield from pool.map(do, work)


@pytest.mark.soak
def test_a_million_schedules_violate_nothing():
    hits: Counter = Counter()
    chunks = range(0, SCHEDULES, CHUNK)
    for first, (found, violation) in zip(chunks, in_processes(run, chunks), strict=True):
        assert not violation, violation
        hits += found
        if first % (25 * CHUNK) == 0:
            print(f"{first} schedules, {sum(hits.values())} faults", flush=True)
    print(matrix(hits))
    assert min(hits[cell] for cell in CELLS) >= 1000


def weather(seed: int) -> str:
    result = simulate(storm(seed, 500))
    return f"seed {seed}: {result.violation}" if result.violation else ""


@pytest.mark.soak
def test_hundreds_of_storms_of_five_hundred_faults_are_survived():
    assert not [found for found in in_processes(weather, range(400)) if found]
