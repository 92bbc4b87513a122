"""Packing: every token is a target once, no segment sees another; and the cache of the plan."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.data import (
    DataError,
    Filtered,
    MaxLength,
    MinLength,
    Packed,
    PackedText,
    load_tokenizer,
    stream,
)
from elastix.data.cache import cached_arrays
from elastix.data.packing import best_fit, packed_row, plan
from elastix.run_directory import RunDirectory
from tests.recipes import tiny
from tests.test_data import assert_equal, ids, refuses, take, train

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "elastix" / "data"


class Listed:
    """Documents in memory."""

    def __init__(self, documents):
        self._documents = documents
        self.sizes = np.array([len(d) for d in documents], np.int64)
        digest = hashlib.sha256(json.dumps([d.hex() for d in documents]).encode()).hexdigest()
        self.fingerprint = {"listed": digest}

    def __len__(self):
        return len(self._documents)

    def __getitem__(self, index):
        return self._documents[index]


def write_documents(path, documents) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


def some_texts(count=30, seed=0) -> list[str]:
    sizes = np.random.default_rng(seed).integers(1, 60, count)
    return [f"{number}: " + "la" * size for number, size in enumerate(sizes.tolist())]


# The plan


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=30),
    seq_len=st.integers(1, 25),
    min_tokens=st.integers(1, 4),
)
def test_every_token_is_a_target_once(lengths, seq_len, min_tokens):
    starts = np.cumsum([0, *lengths])
    pieces, ends = plan(np.array(lengths, np.int64), seq_len, min_tokens)
    tokens = np.arange(starts[-1])  # each is its own number
    targets, context = [], []
    for begin, end in itertools.pairwise([0, *ends.tolist()]):
        segments = [tokens[a:b] for a, b in pieces[begin:end].tolist()]
        row = packed_row(segments, seq_len)
        assert segments and sum(map(len, segments)) <= seq_len + 1
        targets += row["tokens"][1:][row["mask"] == 1].tolist()
        context += [int(segment[0]) for segment in segments]
    kept = [(a, n) for a, n in zip(starts.tolist(), lengths, strict=False) if n > min_tokens]
    expected = [token for a, n in kept for token in range(a + 1, a + n)]
    assert sorted(targets) == expected
    # A segment begins with its document, or with the last token of the piece before it.
    begins = sorted(a + k for a, n in kept for k in range(0, n - 1, seq_len))
    assert sorted(context) == begins


@settings(max_examples=200)
@given(lengths=st.lists(st.integers(1, 30), max_size=40), more=st.integers(0, 30))
def test_best_fit_is_that_of_the_paper(lengths, more):
    capacity = max(lengths, default=1) + more
    free = []  # one row after the other, the slow way
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(free)) if free[row] >= length]
        if not fitting:
            free.append(capacity - length)
        else:
            free[min(fitting, key=free.__getitem__)] -= length
    rows = best_fit(np.array(lengths, np.int64), capacity)
    used = np.bincount(rows, weights=lengths, minlength=0) if lengths else np.zeros(0)
    assert sorted(used.tolist()) == sorted(capacity - f for f in free)


def test_rows_are_in_the_order_of_their_documents():
    lengths = np.random.default_rng(0).integers(2, 50, 200)
    pieces, ends = plan(lengths, 63, 1)
    begins = [0, *ends[:-1].tolist()]
    firsts = pieces[begins, 0]
    assert np.all(np.diff(firsts) > 0)
    for begin, end in zip(begins, ends.tolist(), strict=True):
        assert np.all(np.diff(pieces[begin:end, 0]) > 0)
    assert lengths.sum() / (64 * len(ends)) > 0.98


def test_a_row_by_hand():
    row = packed_row([np.array([5, 6, 7]), np.array([8, 9])], 6)
    expected = {
        "tokens": [5, 6, 7, 8, 9, 0, 0],
        "segment_ids": [1, 1, 1, 2, 2, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 0],
        "mask": [1, 1, 0, 1, 0, 0],
    }
    assert {name: column.tolist() for name, column in row.items()} == expected
    dtypes = {name: column.dtype for name, column in row.items()}
    assert dtypes.pop("mask") == np.float32 and set(dtypes.values()) == {np.dtype(np.int32)}


# Packed documents


@settings(max_examples=40)
@given(
    texts=st.lists(st.text(max_size=20), min_size=1, max_size=8),
    seq_len=st.integers(1, 40),
    prefetch=st.integers(0, 4),
)
def test_the_pieces_are_the_documents(texts, seq_len, prefetch):
    documents = [text.encode() for text in texts]
    if not any(documents):
        refuses(lambda: Packed(Listed(documents), load_tokenizer("bytes"), seq_len), "none of")
        return
    packed = Packed(Listed(documents), load_tokenizer("bytes"), seq_len)
    segments = [s.tolist() for row in range(len(packed)) for s in packed.segments(row)]
    expected = []
    for document in filter(None, documents):
        tokens = [*document, 256]
        pieces = range(0, len(tokens) - 1, seq_len)
        expected += [tokens[start : start + seq_len + 1] for start in pieces]
    assert sorted(segments) == sorted(expected)
    rows = [packed[i] for i in range(len(packed))]
    assert sum(row["mask"].sum() for row in rows) == sum(map(len, documents))
    assert all(row["segment_ids"].max() == len(packed.segments(i)) for i, row in enumerate(rows))


def test_short_documents_are_left_out():
    documents = Listed([b"a", b"bb", b"", b"ccc"])
    packed = Packed(documents, load_tokenizer("bytes"), 20, min_tokens=2)
    assert [s.tolist() for s in packed.segments(0)] == [[98, 98, 256], [99, 99, 99, 256]]
    refuses(
        lambda: Packed(documents, load_tokenizer("bytes"), 20, min_tokens=4), "min_tokens=4", "4"
    )
    refuses(lambda: Packed(documents, load_tokenizer("bytes"), 0), "seq_len=0")


def test_a_trained_tokenizer_packs(tmp_path):
    name = train(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    config = PackedText(
        (write_documents(tmp_path / "a.jsonl", some_texts()),), tokenizer=name, seq_len=16
    )
    assert config.vocab_size == 300
    tokenizer, seen = load_tokenizer(name), {}
    for batch in take(config.build(4, 0), 200):
        for row, tokens in zip(batch["segment_ids"], batch["tokens"], strict=True):
            for segment in range(1, row.max() + 1):
                text = tokenizer.decode(tokens[row == segment])
                seen[text] = True
    assert {text for text in some_texts() if len(tokenizer.encode(text)) <= 16} <= set(seen)


class Chunks:
    """A tokenizer that two releases of a library would make: one name, ids of `size` bytes each."""

    vocab_size, end_id, fingerprint = 2**16, 0, "chunks"

    def __init__(self, size):
        self.size = size

    def encode(self, text):
        return np.arange(1, 1 + len(text) // self.size, dtype=np.int32)


def test_another_release_of_a_tokenizer_is_noticed(cache):
    documents = Listed([b"some text", b"and some more of it"])
    before = Packed(documents, Chunks(1), 16)
    for path in cache.glob("*/tokens.npy"):
        path.unlink()  # or the tokens of before would be used, which is right as well
    after = Packed(documents, Chunks(3), 16)
    changed = {k for k in after.fingerprint if after.fingerprint[k] != before.fingerprint[k]}
    assert changed == {"tokens", "tokens_sha256", "plan_sha256"}
    found = [s.tolist() for row in range(len(after)) for s in after.segments(row)]
    assert sorted(found) == [[1, 2, 3, 0], [1, 2, 3, 4, 5, 6, 0]]


# One position


def configs(tmp_path) -> dict[str, PackedText]:
    plain = PackedText((write_documents(tmp_path / "a.jsonl", some_texts()),), seq_len=40)
    return {
        "plain": plain,
        "window": replace(plain, shuffle=5),
        "in order": replace(plain, shuffle=False),
        "filtered": replace(plain, keep=(MinLength(20), MaxLength(90)), min_tokens=25),
    }


@pytest.mark.parametrize("name", ["plain", "window", "in order", "filtered"])
def test_a_crash_anywhere_changes_nothing(tmp_path, name, cache):
    config = configs(tmp_path)[name]
    whole = take(replace(config, prefetch=0).build(6, 3), 12)
    for crash in range(12):
        for prefetch in (crash % 5, (crash + 2) % 5):
            # As another process does it: everything is opened anew.
            resumed = replace(config, prefetch=prefetch).build(6, 3)
            assert_equal(take(resumed, 2, crash)[: 12 - crash], whole[crash : crash + 2])


@settings(max_examples=40)
@given(size=st.integers(1, 40), window=st.integers(1, 50), seed=st.integers(0, 99))
def test_a_window_moves_nothing_further(size, window, seed):
    rows = [{"x": np.int32(i)} for i in range(size)]
    data = stream(rows, global_batch=size, seed=seed, shuffle=window, fingerprint={})
    for batch in take(data, 3):
        order = batch["example_id"].tolist()
        assert sorted(order) == list(range(size))
        assert all(number // window == index // window for number, index in enumerate(order))


def test_windows_are_shuffled_and_known(tmp_path):
    plain = configs(tmp_path)["plain"]
    size = plain.build(1, 0).num_examples
    orders = {
        shuffle: tuple(ids(replace(plain, shuffle=shuffle).build(1, 0), 2 * size))
        for shuffle in (True, False, 8, 9)
    }
    assert len(set(orders.values())) == 4
    assert orders[8][:size] != orders[8][size:]  # each epoch anew
    blocks = {tuple(i % 8 for i in orders[8][start : start + 8]) for start in (0, 8, 16)}
    assert len(blocks) == 3  # each block anew
    assert replace(plain, shuffle=8).build(1, 0).fingerprint["shuffle"] == 8
    for bad in (0, -1, 1.5, "yes", None):
        refuses(lambda bad=bad: replace(plain, shuffle=bad), f"shuffle={bad!r}", "window")


# What is changed is refused


def opens(run_dir, data: PackedText):
    recipe = replace(tiny.recipe(), data=tiny.Points())  # the stream alone is compared
    RunDirectory.open(run_dir, recipe, data.build(4, 0).fingerprint, {}).close()


def test_a_changed_stream_is_refused_at_resume(tmp_path):
    path = tmp_path / "a.jsonl"
    write_documents(path, some_texts())
    config = PackedText((str(path),), seq_len=40)
    opens(tmp_path / "run", config)
    opens(tmp_path / "run", replace(config, prefetch=0))
    tokenizer = train(tmp_path / "tokenizer.json")
    changed = {
        "seq_len was 40, is 41": replace(config, seq_len=41),
        "tokenizer was 'bytes-257'": replace(config, tokenizer=tokenizer),
        "shuffle was True, is 7": replace(config, shuffle=7),
        "min_tokens was 1, is 3": replace(config, min_tokens=3),
        "documents.keep was None": replace(config, keep=(MinLength(1),)),
    }
    for words, other in changed.items():
        with pytest.raises(ValueError, match="belongs to another data") as caught:
            opens(tmp_path / "run", other)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    write_documents(path, some_texts()[:-1] + ["another"])
    with pytest.raises(ValueError, match="documents.files was .*sha256"):
        opens(tmp_path / "run", config)
    write_documents(path, some_texts())
    opens(tmp_path / "run", config)


# Filters


@dataclass(frozen=True)
class Has:
    word: str

    def __call__(self, document):
        return self.word.encode() in document


@dataclass
class Thawed:
    def __call__(self, document):
        return True


@dataclass(frozen=True)
class Opaque:
    what: object = frozenset()

    def __call__(self, document):
        return True


def test_filters_keep_what_they_say():
    documents = Listed([b"abc", b"b", b"", b"cab", b"abcd"])
    kept = Filtered(documents, (MinLength(1), MaxLength(3), Has("b")))
    assert [kept[i] for i in range(len(kept))] == [b"abc", b"b", b"cab"]
    assert kept.sizes.tolist() == [3, 1, 3]
    prints = [
        Filtered(documents, keep).fingerprint
        for keep in [(MinLength(1),), (MinLength(0),), (MaxLength(9),), (Has("b"),), (Has("c"),)]
    ]
    assert len({json.dumps(p) for p in prints}) == 5


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda d: True, ["lambda", "frozen dataclass"]),
        (Thawed(), ["Thawed", "frozen dataclass"]),
        (Opaque(), ["Opaque", "JSON"]),
        (MinLength(9), ["leaves none of 2 records", "MinLength"]),
    ],
)
def test_filters_that_will_not_do(keep, words):
    refuses(lambda: Filtered(Listed([b"a", b"b"]), (keep,)), *words)


def test_a_filter_runs_once(tmp_path):
    calls = []

    @dataclass(frozen=True)
    class Counts:
        def __call__(self, document):
            calls.append(document)
            return True

    for _ in range(3):
        Filtered(Listed([b"a", b"b"]), (Counts(),))
    assert calls == [b"a", b"b"]


@dataclass(frozen=True)
class Even:
    def __call__(self, row):
        return row["x"] % 2 == 0


def test_rows_of_any_source_are_filtered():
    rows = [{"x": np.int32(i)} for i in range(9)]
    even = Filtered(rows, (Even(),), fingerprint={"kind": "numbers", "size": 9})
    data = stream(even, global_batch=5, seed=0, fingerprint=even.fingerprint)
    assert sorted(take(data, 1)[0]["x"].tolist()) == [0, 2, 4, 6, 8]
    refuses(lambda: Filtered(rows, (Even(),)), "fingerprint=None", "list")


# The cache


def numbers(built, size=1000):
    def build(writer):
        built.append(size)
        for start in range(0, size, 100):
            writer.append("n", np.arange(start, min(start + 100, size)))
        writer.append("pairs", np.zeros((0, 2), np.int64))

    return cached_arrays({"size": size}, build)


def test_what_is_cached_is_built_once(cache):
    built = []
    first, again = numbers(built), numbers(built)
    assert built == [1000]
    for made in (first, again):
        np.testing.assert_array_equal(made.arrays["n"], np.arange(1000))
        assert made.arrays["pairs"].shape == (0, 2) and isinstance(made.arrays["n"], np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            made.arrays["n"][0] = 1
    assert first.sha256 == again.sha256
    numbers(built, 5)
    assert built == [1000, 5] and len(list(cache.iterdir())) == 2


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "n.npy"),
        lambda folder: (folder / "n.npy").write_bytes(b""),
        lambda folder: (folder / "n.npy").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").write_text('{"sha256": {"x": "y"}}'),
        lambda folder: [path.unlink() for path in folder.iterdir()],
        lambda folder: ([path.unlink() for path in folder.iterdir()], folder.rmdir()),
    ],
)
def test_a_damaged_cache_is_built_anew(cache, damage):
    built = []
    before = numbers(built)
    (folder,) = cache.iterdir()
    damage(folder)
    after = numbers(built)
    assert built == [1000, 1000]
    np.testing.assert_array_equal(after.arrays["n"], np.arange(1000))
    assert list(cache.iterdir()) == [folder]  # the damaged one is gone
    numbers(built)
    assert built == [1000, 1000] and before.sha256 == after.sha256


@pytest.mark.parametrize("obstacle", ["file", "folder that cannot be written"])
def test_without_a_cache_it_works_as_well(cache, obstacle, monkeypatch):
    cache.parent.parent.mkdir(exist_ok=True)
    if obstacle == "file":
        cache.parent.write_text("in the way")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    built = []
    for _ in range(2):
        np.testing.assert_array_equal(numbers(built).arrays["n"], np.arange(1000))
    assert built == [1000, 1000]


def test_a_failed_build_leaves_nothing(cache):
    def build(writer):
        writer.append("n", np.arange(3))
        raise DataError("no")

    for _ in range(2):
        refuses(lambda: cached_arrays({"a": 1}, build), "no")
    assert list(cache.iterdir()) == []


def test_a_killed_build_is_cleared_away_after_a_day(cache):
    numbers([])
    (folder,) = cache.iterdir()
    old, new = cache / f"{folder.name}.old", cache / f"{folder.name}.new"
    for left in (old, new):
        left.mkdir()
    os.utime(old, (0, 0))
    flip(folder / "n.npy")
    numbers([])
    assert not old.exists() and new.exists()


BUILD = """
import sys
import numpy as np
from elastix.data.packed_text import PackedText
sys.stdin.readline()
data = PackedText((sys.argv[1],), seq_len=40).build(4, 0)
batch = next(data.batches(7))
print(data.fingerprint["plan_sha256"], batch["tokens"].sum(), batch["example_id"].tolist())
"""


def test_two_processes_may_build_at_once(tmp_path, cache):
    path = write_documents(tmp_path / "a.jsonl", some_texts(3000))
    command = [sys.executable, "-c", BUILD, path]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen(command, **options) for _ in range(3)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len(set(told)) == 1 and told[0]
    assert not [path for path in cache.iterdir() if "." in path.name]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PackedText(seq_len=0), ["seq_len=0"]),
        (lambda: PackedText(min_tokens=0), ["min_tokens=0"]),
        (lambda: PackedText(seq_len=10**11), ["seq_len=100000000000", "at most"]),
        (lambda: PackedText(prefetch=-1), ["prefetch=-1"]),
        (lambda: PackedText(prefetch=10**12), ["prefetch=1000000000000", "at most"]),
        (lambda: PackedText("a.txt"), ["'a.txt'", "tuple"]),
        (lambda: PackedText(format="csv"), ["'csv'", "jsonl"]),
        (lambda: PackedText(field=3), ["field=3", "string"]),
        (lambda: PackedText(separator=None), ["separator=None", "string"]),
        (lambda: PackedText(tokenizer=7), ["tokenizer", "7"]),
        (lambda: PackedText(keep=MinLength(3)), ["keep", "tuple"]),
        (lambda: MinLength(-1), ["num_bytes=-1"]),
        (lambda: MaxLength("3"), ["num_bytes='3'"]),
    ],
)
def test_bad_values(make, words):
    refuses(make, *words)


def test_the_bench_tells_what_resuming_costs():
    command = [sys.executable, str(ROOT / "bench/data.py"), "--megabytes", "1"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    _, _, head, *rows = ran.stdout.splitlines()
    assert head.split() == ["data", "opened", *("step", "10", "10^6", "ratio") * 2]
    assert len(rows) == 5 and all(len(row[16:].split()) == 7 for row in rows)
