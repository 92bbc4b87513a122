"""Damage to checkpoints on disk: never a wrong value, and a run resumes from the next good one."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from elastix import SimulatedBackend, train
from elastix.checkpoints import CheckpointError, CheckpointReader, CheckpointStore
from tests.recipes import tiny
from tests.test_checkpoints import METADATA, assert_same, files_of, flip, never_wrong, state

OLD, NEW = 1, 2
FLIPS = 300
PAGE = 512


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (OLD, NEW):
        store.save(step, state(step), METADATA)
    return store


def leaf_at(content: bytes, offset: int, leaves) -> str | None:
    """The leaf whose bytes, as they lie in a data file, hold this offset."""
    for path, leaf in leaves.items():
        start = content.find(leaf.tobytes()) if leaf.size else -1
        if 0 <= start <= offset < start + leaf.nbytes:
            return path
    return None


def places(root: Path, step: int, count: int, seed: int) -> list[tuple[Path, int]]:
    """Places drawn uniformly from all bytes of all files of a checkpoint."""
    files = [path for path in files_of(root, step) if path.stat().st_size]
    sizes = [path.stat().st_size for path in files]
    rng = random.Random(seed)
    drawn = rng.choices(files, sizes, k=count)
    return [(path, rng.randrange(path.stat().st_size)) for path in drawn]


def test_a_flipped_bit_anywhere_is_caught_or_harmless(store):
    leaves, rng, caught, in_leaves = state(NEW), random.Random(5), 0, 0
    for path, offset in places(store.root, NEW, FLIPS, seed=5):
        content = path.read_bytes()
        leaf = leaf_at(content, offset, leaves)
        flip(path, offset, rng.randrange(8))
        if leaf:  # in an array: always caught, and named
            in_leaves += 1
            with pytest.raises(CheckpointError) as error:
                store.load(NEW)
            assert str(error.value) == f"step {NEW}: leaf {leaf}: wrong checksum"
        caught += never_wrong(store, NEW)
        path.write_bytes(content)
    assert not never_wrong(store, NEW), "unharmed again, it loads"
    assert_same(store.load(OLD)[0], state(OLD))
    print(f"{FLIPS} flips, {caught} caught, {in_leaves} of them in arrays")
    assert in_leaves > FLIPS / 2 and caught > 0.9 * FLIPS


def test_small_files_too(store):
    """Each file alike, however small: the files that say how to read the arrays."""
    rng, caught, count = random.Random(6), 0, 0
    for path in files_of(store.root, NEW):
        content = path.read_bytes()
        for _ in range(25 if content else 0):
            flip(path, rng.randrange(len(content)), rng.randrange(8))
            count += 1
            caught += never_wrong(store, NEW)
            path.write_bytes(content)
    assert not never_wrong(store, NEW)
    print(f"{count} flips, {caught} caught")
    assert count >= 150 and caught >= count / 3


def test_truncated_files_and_zeroed_pages(store):
    caught, count = 0, 0
    for path, offset in places(store.root, NEW, 40, seed=7):
        content, page = path.read_bytes(), offset - offset % PAGE
        zeroed = content[:page] + bytes(len(content[page : page + PAGE])) + content[page + PAGE :]
        for damaged in (content[:offset], zeroed):
            count += 1
            path.write_bytes(damaged)
            caught += never_wrong(store, NEW)
            path.write_bytes(content)
    assert not never_wrong(store, NEW)
    print(f"{count} truncations and zeroed pages, {caught} caught")
    assert caught > 0.9 * count


def test_deleted_files(store):
    for path in files_of(store.root, NEW):
        content = path.read_bytes()
        path.unlink()
        never_wrong(store, NEW)
        path.write_bytes(content)
    assert not never_wrong(store, NEW)


def pairs(root: Path) -> list[tuple[Path, Path]]:
    """Files of both steps that play the same part: data files have random names."""

    def parts(step: int) -> list[tuple[str, int, Path]]:
        files = files_of(root, step)
        return sorted((str(p.parent.relative_to(root / str(step))), _size(p), p) for p in files)

    old, new = parts(OLD), parts(NEW)
    assert [folder for folder, _, _ in old] == [folder for folder, _, _ in new]
    return [(one, two) for (_, _, one), (_, _, two) in zip(old, new, strict=True)]


def _size(path: Path) -> int:
    return path.stat().st_size


def swap(one: Path, two: Path) -> None:
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)


def test_files_swapped_between_two_steps(store):
    """Each file is whole and its own checksum right: that it belongs to another step is seen."""
    caught = 0
    for one, two in pairs(store.root):
        swap(one, two)
        caught += never_wrong(store, OLD) + never_wrong(store, NEW)
        swap(one, two)
        assert not never_wrong(store, OLD) and not never_wrong(store, NEW)
    assert caught >= 2
    shutil.move(store.root / str(OLD), store.root / "9")
    assert never_wrong(store, 9), "the whole directory under another step"


# --- a run that resumes ---------------------------------------------------------------------------


def run(run_dir, num_steps=40):
    recipe = replace(tiny.recipe(), num_steps=num_steps)
    return train(recipe, backend=SimulatedBackend(4, 2), run_dir=run_dir)


@pytest.fixture(scope="module")
def undisturbed():
    return run(None)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run directory with several checkpoints, the newest of step 30."""
    path = tmp_path_factory.mktemp("half") / "run"
    run(path, num_steps=20)
    run(path, num_steps=30)
    return path


def damage(folder: Path, rng: random.Random) -> None:
    """One of the damages above, to a file drawn by its size."""
    path, offset = places(folder.parent, int(folder.name), 1, rng.randrange(2**32))[0]
    content = path.read_bytes()
    match rng.randrange(4):
        case 0:
            flip(path, offset, rng.randrange(8))
        case 1:
            path.write_bytes(content[:offset])
        case 2:
            page = content[offset : offset + PAGE]
            path.write_bytes(content[:offset] + bytes(len(page)) + content[offset + len(page) :])
        case 3:
            path.unlink()


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 10))]
)
def test_a_run_resumes_from_the_newest_good_one_with_the_same_bits(
    seed, half, undisturbed, tmp_path
):
    run_dir, rng = tmp_path / "run", random.Random(seed)
    shutil.copytree(half, run_dir)
    root = run_dir / "checkpoints"
    steps = CheckpointReader(root).steps()
    assert len(steps) >= 3 and steps[-1] == 30
    harmed = steps[-rng.choice((1, 1, 2)) :]
    for step in harmed:
        damage(root / str(step), rng)
    bad = [step for step in steps if not loads(root, step)]
    assert set(bad) <= set(harmed), "nothing else was harmed"
    good = max(step for step in steps if step not in bad)
    summary = run(run_dir)
    assert (summary.outcome, summary.resumed_at) == ("done", good)
    assert summary.state_sha256 == undisturbed.state_sha256
    assert (summary.losses, summary.consumed) == (undisturbed.losses, undisturbed.consumed)
    aside = CheckpointReader(root).set_aside_list()
    assert [item.step for item in aside] == [step for step in bad if step > good]
    assert all(f"step {item.step}" in item.why for item in aside)


def loads(root: Path, step: int) -> bool:
    try:
        CheckpointReader(root).load(step)
    except CheckpointError:
        return False
    return True
