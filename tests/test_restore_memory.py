"""What a restore from disk needs of memory, by the high-water mark of a process of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastix.arrays import Arrays
from elastix.backends.simulated import SimulatedBackend, simulate_devices
from elastix.checkpoints import CheckpointStore
from elastix.leaf_hash import hashes_of
from elastix.machine import Policy, Source, Tier
from elastix.program import Program
from elastix.progress import Progress
from elastix.saver import Saver
from tests.recipes import net

ROOT = Path(__file__).parents[1]
MB = 1 << 20


def program_of(hidden: int, slices: int):
    simulate_devices(slices)
    recipe = replace(net.recipe(), model=net.NetConfig(hidden=hidden))
    sample = next(recipe.data.build(recipe.global_batch, 0).batches(0))
    backend = SimulatedBackend(slices, 1)
    return Program(recipe, sample, backend.devices), backend


def write(root: Path, hidden: int) -> None:
    program, _ = program_of(hidden, 1)
    draw = np.random.default_rng(0)
    leaves = {
        leaf.path: draw.integers(0, 99, leaf.shape).astype(leaf.dtype)
        for leaf in program.spec.leaves
    }
    progress = Progress().to_json()
    hashes = hashes_of(leaves)
    CheckpointStore(root, keep=1).save(1, leaves, {"progress": progress, "leaf_hashes": hashes})


def restored(root: Path, hidden: int, slices: int) -> tuple[Program, Arrays]:
    program, backend = program_of(hidden, slices)
    saver = Saver(CheckpointStore(root, keep=1), backend, program.shapes, {}, Policy())
    arrays = Arrays(program, backend, saver, Policy())
    assert arrays.restore(Source(Tier.DISK, 1), 1, frozenset(range(slices)), {}) == Progress()
    return program, arrays


def restore(root: Path, hidden: int, slices: int) -> None:
    """Prints the bytes on all devices, those of the largest leaf, and what the process grew by at
    its highest, once what a restore loads into memory of programs was loaded."""
    restored(root / "small", 1, slices)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    program, _arrays = restored(root, hidden, slices)
    grown = status("VmHWM") - before
    sizes = [np.prod(s.shape, dtype=int) * np.dtype(s.dtype).itemsize for s in program.spec.leaves]
    print(sum(sizes) * slices, max(sizes), grown)


def status(field: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def child(do: str, *args: object) -> list[int]:
    code = f"import sys; from pathlib import Path; from {__name__} import *; {do}"
    words = [sys.executable, "-c", code, *map(str, args)]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [int(word) for word in ran.stdout.split()]


def peak(root: Path, hidden: int, slices: int) -> tuple[int, int, int]:
    for where, size in ((root, hidden), (root / "small", 1)):
        child("write(Path(sys.argv[1]), int(sys.argv[2]))", where, size)
    numbers = ", ".join(f"int(sys.argv[{n}])" for n in (2, 3))
    on_devices, largest, grown = child(
        f"restore(Path(sys.argv[1]), {numbers})", root, hidden, slices
    )
    print(f"{on_devices / MB:.0f} MB on devices, largest {largest / MB:.0f}, {grown / MB:.0f} more")
    return on_devices, largest, grown


@pytest.mark.soak
@pytest.mark.parametrize("slices", [1, 2])
def test_beside_the_state_a_restore_holds_little_more_than_one_leaf(tmp_path, slices):
    on_devices, largest, grown = peak(tmp_path, 2_800_000, slices)
    assert on_devices >= 500 * MB
    assert on_devices <= grown <= 1.1 * on_devices + largest


def test_a_leaf_is_placed_before_the_next_is_read(tmp_path):
    told = []

    class Told(CheckpointStore):
        def stream(self, step):
            leaves, metadata = super().stream(step)
            return (
                (told.append(f"read {path}"), (path, leaf))[1] for path, leaf in leaves
            ), metadata

    leaves = {f".w{n}": np.full(9, n, np.float32) for n in range(3)}
    store = Told(tmp_path, keep=1)
    store.save(1, leaves, {"leaf_hashes": hashes_of(leaves)})
    saver = Saver(store, SimulatedBackend(2, 1), {}, {}, Policy())
    placed, _ = saver.load(1, lambda path, leaf: (told.append(f"place {path}"), leaf.sum())[1])
    assert told == [f"{do} .w{n}" for n in range(3) for do in ("read", "place")]
    assert placed == {".w0": 0, ".w1": 9, ".w2": 18}
