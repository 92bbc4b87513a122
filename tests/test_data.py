"""elastix.data: the stream, its position, its fingerprint, its sources, and every bad input."""

import ast
import collections
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from array_record.python import array_record_module
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.data import (
    DataError,
    Stream,
    Text,
    TokenRecords,
    load_tokenizer,
    stream,
    unigram_entropy,
)
from elastix.data.order import example_at

ROOT = Path(__file__).resolve().parents[1]


class Squares:
    """Record i is {x: i * i, y: [i, -i]}; fails once at each index in `failures`."""

    def __init__(self, size, failures=()):
        self.size, self.failures, self.reads = size, set(failures), []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads.append(index)
        if index in self.failures:
            self.failures.remove(index)
            raise OSError(f"disk error at {index}")
        return {"x": np.int32(index * index), "y": np.array([index, -index], np.float32)}


def squares(size=10, *, global_batch=4, seed=0, source=None, **options) -> Stream:
    source = source or Squares(size)
    return stream(
        source, global_batch=global_batch, seed=seed, fingerprint={"kind": "squares"}, **options
    )


def take(data: Stream, count, position=0):
    iterator = data.batches(position)
    batches = list(itertools.islice(iterator, count))
    iterator.close()
    return batches


def ids(data: Stream, count, position=0) -> list[int]:
    return np.concatenate([b["example_id"] for b in take(data, count, position)]).tolist()


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name], b[name])


def refuses(make, *words):
    """Asserts that `make()` raises DataError, in one line that has each of the words."""
    with pytest.raises(DataError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500, message
    for word in words:
        assert word in message, message


# The stream


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 30),
    global_batch=st.integers(1, 40),
    position=st.integers(0, 12),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    prefetch=st.integers(0, 4),
)
def test_position_is_the_whole_state(size, global_batch, position, seed, shuffle, prefetch):
    options = {"global_batch": global_batch, "seed": seed, "shuffle": shuffle}
    whole = take(squares(size, prefetch=0, **options), position + 3)
    resumed = take(squares(size, prefetch=prefetch, **options), 3, position)
    assert_equal(resumed, whole[position:])


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 30), global_batch=st.integers(1, 40), shuffle=st.booleans())
def test_each_example_once_an_epoch(size, global_batch, shuffle):
    data = squares(size, global_batch=global_batch, shuffle=shuffle, prefetch=0)
    seen = ids(data, -(-3 * size // global_batch))  # at least three epochs, batches straddle
    for epoch in range(3):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_prefetch_changes_no_batch():
    runs = [take(squares(50, global_batch=7, prefetch=depth), 20) for depth in range(5)]
    for run in runs[1:]:
        assert_equal(run, runs[0])


@pytest.mark.parametrize("depth", range(5))
def test_prefetch_reads_as_far_ahead_as_its_depth(depth):
    class Watched(Squares):
        def __getitem__(self, index):
            record = super().__getitem__(index)
            if index == 10 + depth:
                reached.set()
            return record

    source, reached = Watched(1000), threading.Event()
    data = squares(source=source, global_batch=1, shuffle=False, prefetch=depth)
    iterator = data.batches(10)
    next(iterator)
    assert reached.wait(10)
    assert max(source.reads) == 10 + depth
    iterator.close()


def test_batches_hold_what_the_ids_say():
    for batch in take(squares(10, global_batch=4), 6):
        example = batch["example_id"]
        assert example.dtype == np.int64 and example.shape == (4,)
        assert batch["x"].dtype == np.int32 and batch["y"].dtype == np.float32
        np.testing.assert_array_equal(batch["x"], example**2)
        np.testing.assert_array_equal(batch["y"], np.stack([example, -example], axis=1))


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = set()
    for seed in range(4):
        seen = ids(squares(40, global_batch=40, seed=seed), 3)
        orders |= {tuple(seen[i : i + 40]) for i in (0, 40, 80)}
    # With Grain's own shuffle epoch 1 of seed 0 is epoch 0 of seed 1, which leaves 6 orders.
    assert len(orders) == 12
    assert tuple(range(40)) not in orders


def test_without_shuffle_the_order_is_the_source():
    assert ids(squares(5, global_batch=3, shuffle=False), 4) == [0, 1, 2, 3, 4] * 2 + [0, 1]


@pytest.mark.parametrize(("size", "global_batch"), [(10, 1), (1, 1), (10, 3), (3, 10), (1, 8)])
def test_any_size_and_any_batch(size, global_batch):
    data = squares(size, global_batch=global_batch)
    assert (data.global_batch, data.num_examples) == (global_batch, size)
    assert all(len(a) == global_batch for batch in take(data, 7) for a in batch.values())
    assert_equal(take(data, 2, 5), take(data, 7)[5:])


def test_a_position_far_away_is_as_near_as_the_first():
    far = take(squares(10), 2, 10**12)
    assert_equal(far[1:], take(squares(10), 1, 10**12 + 1))


@pytest.mark.parametrize("prefetch", range(5))
def test_an_error_in_the_source_then_the_same_batches(prefetch):
    expected = take(squares(40, shuffle=False), 10)
    for failing in range(1, 40):  # record 0 is read when the stream is built
        source = Squares(40, failures=[failing])
        data = squares(source=source, shuffle=False, prefetch=prefetch)
        got, iterator = [], data.batches(0)
        with pytest.raises(OSError, match=f"disk error at {failing}"):
            got.extend(iterator)
        assert len(got) == failing // 4  # everything before the failing batch, nothing after
        assert next(iterator, None) is None  # Grain alone would skip the batch and go on
        got += itertools.islice(data.batches(len(got)), 10 - len(got))
        assert_equal(got, expected)


def test_a_source_with_one_buffer_is_read_by_one_thread_at_a_time():
    class OneBuffer:
        buffer = np.zeros(3, np.int32)

        def __len__(self):
            return 50

        def __getitem__(self, index):
            for place in range(3):
                self.buffer[place] = index
                sum(range(300))  # long enough for another thread to get in
            return {"x": self.buffer}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        data = squares(source=OneBuffer(), global_batch=5)
        for pair in itertools.islice(zip(data.batches(0), data.batches(3), strict=False), 40):
            for batch in pair:
                np.testing.assert_array_equal(batch["x"].T, [batch["example_id"]] * 3)
    finally:
        sys.setswitchinterval(interval)


def test_discarded_iterators_leave_no_thread():
    data, before, begun = squares(10), set(threading.enumerate()), set()
    for position in range(20):
        iterator = data.batches(position)
        next(iterator)
        begun |= set(threading.enumerate()) - before  # an earlier test may have left others
        del iterator
    assert begun, "each reads ahead in a thread"
    assert_ended(begun)


def test_an_iterator_that_failed_leaves_no_thread_though_its_error_is_kept():
    """The error holds its traceback, that holds the iterator: only closing it ends the thread."""
    before, begun, kept = set(threading.enumerate()), set(), []

    def read_to_the_end(iterator):
        for _ in iterator:
            begun.update(set(threading.enumerate()) - before)

    for failing in range(4, 40, 4):
        source = Squares(40, failures=[failing])
        with pytest.raises(OSError, match=f"disk error at {failing}") as error:
            read_to_the_end(squares(source=source, shuffle=False).batches(0))
        kept.append(error)
    assert begun and len(kept) == 9
    assert_ended(begun)


def assert_ended(threads):
    give_up = time.monotonic() + 10
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
    assert not [thread for thread in threads if thread.is_alive()]


def test_bfloat16_and_bool_columns():
    import ml_dtypes

    rows = [{"a": np.ones(2, ml_dtypes.bfloat16), "b": np.bool_(True), "c": 1.5}] * 3
    (batch,) = take(squares(source=rows, global_batch=2), 1)
    assert batch["a"].dtype == ml_dtypes.bfloat16 and batch["b"].dtype == np.bool_
    assert batch["c"].shape == (2,)


# The order


@settings(deadline=None)
@given(size=st.integers(1, 300), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(size, seed, epoch):
    numbers = range(epoch * size, (epoch + 1) * size)
    assert sorted(example_at(n, size, seed) for n in numbers) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_are_equally_likely(size):
    epochs, orders = 6000, math.factorial(size)
    counts = collections.Counter(
        tuple(example_at(epoch * size + i, size, seed=7) for i in range(size))
        for epoch in range(epochs)
    )
    assert len(counts) == orders
    expected, degrees = epochs / orders, orders - 1
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5


def test_a_large_order_has_no_trend():
    order = np.array([example_at(n, 10**9, seed=0) for n in range(20_000)])
    assert len(set(order)) == 20_000
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03
    shares = np.histogram(order, bins=10, range=(0, 10**9))[0] / 20_000
    assert np.all(abs(shares - 0.1) < 0.01)


def test_the_order_never_changes():
    # Pinned: another order would part every run that resumes from what it consumed before.
    assert [example_at(n, 10, 0) for n in range(20)] == [
        4,
        6,
        9,
        1,
        2,
        3,
        8,
        0,
        5,
        7,
        0,
        3,
        2,
        4,
        6,
        7,
        9,
        8,
        5,
        1,
    ]
    assert [example_at(n, 10**6, 12345) for n in (0, 1, 2, 10**6, 10**12)] == [
        307020,
        484167,
        815207,
        423051,
        708778,
    ]


# Fingerprints


def test_fingerprint_is_json_and_says_what_decides_the_batches():
    base = squares().fingerprint
    assert json.loads(json.dumps(base)) == base
    assert squares(prefetch=4).fingerprint == base
    changed = [
        squares(11),
        squares(global_batch=5),
        squares(seed=1),
        squares(shuffle=False),
        squares(source=[{"x": np.float32(0)}] * 10),
        stream(Squares(10), global_batch=4, seed=0, fingerprint={"kind": "cubes"}),
    ]
    prints = [json.dumps(data.fingerprint, sort_keys=True) for data in changed]
    assert len({*prints, json.dumps(base, sort_keys=True)}) == len(changed) + 1


def test_fingerprint_notices_another_shuffle():
    # What it records must be the order that is used, or a changed shuffle would pass unseen.
    data = squares(30, global_batch=8, seed=3)
    assert data.fingerprint["order"] == ids(data, 1)


def test_text_fingerprint(tmp_path):
    corpus, other = tmp_path / "a.txt", tmp_path / "elsewhere" / "a.txt"
    other.parent.mkdir()
    corpus.write_text("to be or not to be" * 20)
    other.write_text("to be or not to be" * 20)
    base = Text((corpus,), seq_len=8).build(4, 0)
    assert json.loads(json.dumps(base.fingerprint)) == base.fingerprint
    assert base.fingerprint["files"][0]["size"] == 360
    assert Text((corpus,), seq_len=8).build(4, 0).fingerprint == base.fingerprint
    assert Text((other,), seq_len=8, prefetch=0).build(4, 0).fingerprint == base.fingerprint
    for config, batch, seed in [
        (Text((corpus,), seq_len=9), 4, 0),
        (Text((corpus, other), seq_len=8), 4, 0),
        (Text((corpus,), seq_len=8, shuffle=False), 4, 0),
        (Text((corpus,), seq_len=8), 5, 0),
        (Text((corpus,), seq_len=8), 4, 1),
    ]:
        assert config.build(batch, seed).fingerprint != base.fingerprint
    corpus.write_text("to be or not to BE" * 20)  # as long as before
    assert Text((corpus,), seq_len=8).build(4, 0).fingerprint != base.fingerprint


# Text


def windows_by_hand(documents: list[bytes], seq_len: int) -> np.ndarray:
    tokens = [token for document in documents for token in [*document, 256]]
    count = (len(tokens) - 1) // seq_len
    return np.array([tokens[i * seq_len : (i + 1) * seq_len + 1] for i in range(count)])


def assert_windows(data: Stream, windows: np.ndarray):
    assert data.num_examples == len(windows)
    for batch in take(data, 5):
        assert batch["tokens"].dtype == np.int32
        np.testing.assert_array_equal(batch["tokens"], windows[batch["example_id"]])


@pytest.mark.parametrize("seq_len", [1, 4, 7, 41])
def test_txt_windows_by_hand(tmp_path, seq_len):
    documents = ["Grüße, Welt\n".encode(), bytes(range(1, 28))]
    for name, document in zip(("b.txt", "a.TXT"), documents, strict=True):
        (tmp_path / name).write_bytes(document)
    config = Text((str(tmp_path / "b.txt"), str(tmp_path / "a.TXT")), seq_len=seq_len)
    windows = windows_by_hand(documents, seq_len)
    assert windows.shape == ((len(b"".join(documents)) + 1) // seq_len, seq_len + 1)
    assert_windows(config.build(3, 0), windows)


def test_jsonl_is_a_document_a_line(tmp_path):
    texts = ["one", "", "two\nlines", "U+2028 \u2028 is no line end", "\N{SNOWMAN}"]
    lines = [json.dumps({"id": n, "text": t}, ensure_ascii=n == 1) for n, t in enumerate(texts)]
    path = tmp_path / "a.jsonl"
    path.write_bytes("\r\n".join(lines).encode() + b"\n\n")
    windows = windows_by_hand([t.encode() for t in texts], 5)
    assert_windows(Text((path,), seq_len=5).build(4, 1), windows)


@pytest.fixture(scope="module")
def stdlib() -> Stream:
    return Text().build(16, 0)


def test_the_default_corpus_is_the_standard_library(stdlib):
    (files,) = stdlib.fingerprint["files"]
    assert 5e6 < files["size"] < 20e6
    assert stdlib.fingerprint == Text().build(16, 0).fingerprint
    assert_overlap_and_python(Text(shuffle=False, seq_len=4000).build(40, 0))


def assert_overlap_and_python(data: Stream):
    (batch,) = take(data, 1)
    tokens = batch["tokens"]
    np.testing.assert_array_equal(tokens[:-1, -1], tokens[1:, 0])
    joined = np.concatenate([tokens[0], *tokens[1:, 1:]])
    first = joined[: np.flatnonzero(joined == 256)[0]]
    source = load_tokenizer("bytes").decode(first)
    assert source == Path(os.__file__).with_name("__future__.py").read_text()
    ast.parse(source)


def test_the_default_corpus_leaves_out_tests_and_packages():
    from elastix.data.files import stdlib_corpus

    documents = stdlib_corpus().documents
    root = Path(os.__file__).parent
    assert Path(json.__file__).read_bytes() in documents
    for outside in [Path(np.__file__), root / "ensurepip/__init__.py", root / "idlelib/idle.py"]:
        if outside.exists() and outside.stat().st_size:
            assert outside.read_bytes() not in documents


def test_unigram_loss(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("aaab")  # with its end: frequencies 3/5, 1/5, 1/5
    expected = -(0.6 * np.log(0.6) + 0.4 * np.log(0.2))
    assert Text((path,), seq_len=2).unigram_loss() == pytest.approx(expected, abs=1e-12)
    tokens = np.random.default_rng(0).zipf(1.5, 3_000_000).clip(max=50_000).astype(np.uint16)
    share = np.unique(tokens, return_counts=True)[1] / tokens.size
    assert unigram_entropy(tokens) == pytest.approx(-(share @ np.log(share)), abs=1e-12)
    assert unigram_entropy(np.full(9, 7)) == 0
    assert 2.5 < Text().unigram_loss() < 4  # Python source, in nats per byte
    refuses(lambda: unigram_entropy(np.array([], np.int32)), "empty")


# Tokenizers


@given(st.text())
def test_bytes_tokenizer_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    encoded = tokenizer.encode(text)
    assert encoded.dtype == np.int32 and encoded.tolist() == list(text.encode())
    np.testing.assert_array_equal(tokenizer.encode(text.encode()), encoded)
    assert tokenizer.decode([*encoded, tokenizer.end_id]) == text


def test_bytes_tokenizer_edges():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_id, Text().vocab_size) == (257, 256, 257)
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"
    refuses(lambda: tokenizer.decode([65, 257]), "257", "vocabulary")
    refuses(lambda: tokenizer.decode([-1]), "-1", "vocabulary")


def train(path, special_tokens=(), max_length=None, begin=None) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    text = [Path(json.__file__).read_text()]
    trained.train_from_iterator(text, 300, special_tokens=list(special_tokens))
    if max_length:
        trained.enable_truncation(max_length)
    if begin:
        begins = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $0", special_tokens=[(begin, trained.token_to_id(begin))]
        )
        trained._tokenizer.post_processor = begins
    trained.save(str(path))
    return str(path)


def test_hugging_face_tokenizer(tmp_path):
    name = train(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    tokenizer = load_tokenizer(name)
    assert tokenizer.vocab_size == 300 and tokenizer.end_id == 0
    document = 'def naïve(): return "\N{SNOWMAN}"\n'
    encoded = tokenizer.encode(document)
    assert encoded.dtype == np.int32 and len(encoded) < len(document.encode())
    np.testing.assert_array_equal(tokenizer.encode(document.encode()), encoded)
    assert tokenizer.decode([*encoded, 0]) == document
    refuses(lambda: tokenizer.decode([300]), "300", "vocabulary")
    refuses(lambda: tokenizer.encode(b"\xff"), "UTF-8", '"bytes"')
    corpus = tmp_path / "a.txt"
    corpus.write_text(document)
    config = Text((corpus,), seq_len=len(encoded), tokenizer=name)
    assert config.vocab_size == 300
    (batch,) = take(config.build(1, 0), 1)
    assert batch["tokens"].tolist() == [[*encoded.tolist(), 0]]
    share = np.unique([*encoded, 0], return_counts=True)[1] / (len(encoded) + 1)
    assert config.unigram_loss() == pytest.approx(-(share @ np.log(share)), abs=1e-12)


def test_hugging_face_files_with_ends_beginnings_and_truncation(tmp_path):
    tokenizer = load_tokenizer(train(tmp_path / "tokenizer.json", max_length=3))
    assert (tokenizer.end_id, tokenizer.vocab_size) == (300, 301)
    document = "a document longer than three tokens"
    assert tokenizer.decode(tokenizer.encode(document)) == document
    ends = load_tokenizer(train(tmp_path / "ends.json", ["<s>", "</s>"], begin="<s>"))
    assert ends.end_id == 1
    assert ends.encode("abc")[0] != 0 and ends.decode(ends.encode(document)) == document
    assert ends.fingerprint != tokenizer.fingerprint
    assert tokenizer.fingerprint == load_tokenizer(str(tmp_path / "tokenizer.json")).fingerprint


def test_hugging_face_fingerprint_reaches_the_stream(tmp_path):
    corpus = tmp_path / "a.txt"
    corpus.write_text("to be or not to be" * 20)
    names = ["bytes", train(tmp_path / "a.json"), train(tmp_path / "b.json", ["</s>"])]
    streams = [Text((corpus,), seq_len=8, tokenizer=name).build(4, 0) for name in names]
    assert len({data.fingerprint["tokenizer"] for data in streams}) == 3


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_jax_backend_is_touched(tmp_path):
    code = """
import sys, itertools
from elastix.data import Text
list(itertools.islice(Text(seq_len=64).build(4, 0).batches(2), 3))
Text().unigram_loss()
bridge = sys.modules.get("jax._src.xla_bridge")
print(sorted(bridge._backends) if bridge else [], "jax" in sys.modules)
"""
    assert python(code).startswith("[] ")
    touched = code + "import jax; jax.devices(); print(sorted(jax._src.xla_bridge._backends))"
    assert "cpu" in python(touched)  # so the check above can fail


def test_a_missing_tokenizers_package_names_the_extra(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    code = f"""
import sys
sys.modules["tokenizers"] = None
from elastix.data import load_tokenizer
try: load_tokenizer({str(tmp_path / "tokenizer.json")!r})
except ValueError as error: print(error)
"""
    assert "pip install 'elastix-jax[text]'" in python(code)


# ArrayRecord


def write_records(path, records, options="group_size:1") -> str:
    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_records(tmp_path, dtype):
    little_endian = {"uint16": "<u2", "uint32": "<u4"}[dtype]
    rows = np.random.default_rng(0).integers(0, 50_000, (7, 9)).astype(little_endian)
    files = (
        write_records(tmp_path / "a.arrayrecord", [row.tobytes() for row in rows[:4]]),
        write_records(tmp_path / "b.array_record", [row.tobytes() for row in rows[4:]]),
    )
    config = TokenRecords(files, dtype, seq_len=8, vocab_size=50_000)
    data = config.build(4, 0)
    assert_windows(data, rows)
    assert json.loads(json.dumps(data.fingerprint)) == data.fingerprint
    names = [file["name"] for file in data.fingerprint["files"]]
    assert names == ["a.arrayrecord", "b.array_record"]
    swapped = TokenRecords(files[::-1], dtype, seq_len=8).build(4, 0)
    assert swapped.fingerprint != data.fingerprint
    write_records(files[1], [row.tobytes() for row in rows[3:6]])
    assert config.build(4, 0).fingerprint != data.fingerprint


def test_token_record_of_the_wrong_length_or_vocabulary(tmp_path):
    short = [np.arange(9, dtype="<u2").tobytes()] * 3
    a = write_records(tmp_path / "a.arrayrecord", short)
    b = write_records(tmp_path / "b.arrayrecord", [short[0], short[0][:-2]])
    data = TokenRecords((a, b), seq_len=8, shuffle=False).build(1, 0)
    assert ids(data, 4) == [0, 1, 2, 3]
    refuses(lambda: take(data, 1, 4), "b.arrayrecord", "record 1", "16 bytes", "18")
    refuses(lambda: TokenRecords((a,), seq_len=7).build(1, 0), "a.arrayrecord", "record 0")
    refuses(lambda: TokenRecords((a,), seq_len=8, vocab_size=8).build(1, 0), "id 8", "record 0")
    high = write_records(tmp_path / "c.arrayrecord", [np.full(9, 2**31, "<u4").tobytes()])
    config = TokenRecords((high,), "uint32", seq_len=8, vocab_size=2**31)
    refuses(lambda: config.build(1, 0), "2147483648", "vocabulary")


def test_corrupt_array_records(tmp_path):
    path = tmp_path / "a.arrayrecord"
    rows = [np.random.default_rng(n).integers(0, 9999, 513).astype("<u2") for n in range(50)]
    write_records(path, [row.tobytes() for row in rows], "group_size:1,uncompressed")
    data, good = TokenRecords((path,), seq_len=512, shuffle=False), path.read_bytes()
    at = good.index(rows[30].tobytes()[100:140])
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    damaged = data.build(1, 0)
    assert ids(damaged, 30) == list(range(30))
    refuses(lambda: take(damaged, 1, 30), "a.arrayrecord", "record 30", "corrupt", "write it again")
    assert ids(damaged, 5, 31) == [31, 32, 33, 34, 35]
    path.write_bytes(good[: len(good) // 2])
    refuses(lambda: data.build(1, 0), "a.arrayrecord", "write it again")
    path.write_bytes(b"no record " * 9999)
    refuses(lambda: data.build(1, 0), "a.arrayrecord", "write it again")
    write_records(path, [])
    refuses(lambda: data.build(1, 0), "a.arrayrecord", "no records")


# Bad input


class Ends(Squares):
    """An endless stream must not end in silence where its source does."""

    def __init__(self):
        super().__init__(10)

    def __getitem__(self, index):
        return next(iter([])) if index == 7 else super().__getitem__(index)


def bad_file(tmp_path, name, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    return lambda: Text((path,), seq_len=2).build(1, 0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", ["empty"]),
        ("a.txt", b"caf\xe9 au lait", ["UTF-8", "0xe9 at 3"]),
        ("a.txt", b"abc\0def", ["not text", "NUL byte at 3"]),
        ("a.jsonl", b"", ["empty"]),
        ("a.jsonl", b" \n\n", ["blank"]),
        ("a.jsonl", b'{"text": "abc"}\n{"txt": "abc"}', ["line 2", '"text"']),
        ("a.jsonl", b'{"text": "abc"}\n\n{"text": 3}', ["line 3", '"text"']),
        ("a.jsonl", b'["text"]', ["line 1", '"text"']),
        ("a.jsonl", b'{"text": "abc"', ["line 1", "delimiter"]),
        ("a.jsonl", b'{"text": "\\ud83d"}', ["line 1", "surrogates"]),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, ["line 1"]),
        ("a.csv", b"a,b", ["'.csv'", ".txt or .jsonl"]),
        ("noname", b"abc", ["suffix ''", ".txt or .jsonl"]),
        ("a.arrayrecord", b"abc", ["TokenRecords"]),
    ],
)
def test_bad_text_file(tmp_path, name, content, words):
    refuses(bad_file(tmp_path, name, content), name, *words)


def test_corpus_shorter_than_one_window(tmp_path):
    refuses(bad_file(tmp_path, "a.txt", b"a"), "seq_len=2", "3 tokens", "are 2", "shorter seq_len")
    assert bad_file(tmp_path, "a.txt", b"ab")().num_examples == 1


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".arrayrecord"])
def test_files_that_cannot_be_read(tmp_path, suffix):
    (tmp_path / f"folder{suffix}").mkdir()
    os.mkfifo(tmp_path / f"pipe{suffix}")
    make = TokenRecords if suffix == ".arrayrecord" else Text
    for name, word in [
        ("missing", "does not exist"),
        ("folder", "is a directory"),
        ("pipe", "not a regular file"),
        ("n" * 300, "cannot be read"),
        ("nul\0", "cannot be read"),
        ("new\nline", "does not exist"),
    ]:
        path = str(tmp_path / f"{name}{suffix}")
        refuses(lambda path=path: make((path,)).build(1, 0), repr(path)[-12:], word)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path):
    make = bad_file(tmp_path, "a.txt", b"abc")
    (tmp_path / "a.txt").chmod(0)
    refuses(make, "a.txt", "Permission denied")


def test_bad_tokenizer_file(tmp_path):
    pytest.importorskip("tokenizers")
    corpus, broken = tmp_path / "a.txt", tmp_path / "tokenizer.json"
    corpus.write_text("abc")
    for content, word in [("", "is empty"), ("{}", "valid"), ("[1", "valid"), ("caf\xe9", "valid")]:
        broken.write_bytes(content.encode("latin-1"))
        config = Text((corpus,), seq_len=2, tokenizer=broken)
        refuses(lambda config=config: config.build(1, 0), "tokenizer.json", word)
        refuses(lambda config=config: config.vocab_size, "tokenizer.json", word)
    refuses(lambda: load_tokenizer("byte"), "'byte'", "does not exist", '"bytes"')
    refuses(lambda: load_tokenizer(str(tmp_path)), "is a directory")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Text(seq_len=0), ["seq_len=0", "at least 1"]),
        (lambda: Text(seq_len=1.5), ["seq_len=1.5", "whole"]),
        (lambda: Text(seq_len=True), ["seq_len=True", "whole"]),
        (lambda: Text(prefetch=-1), ["prefetch=-1", "at least 0"]),
        (lambda: Text("a.txt"), ["'a.txt'", "tuple", "('corpus.txt',)"]),
        (lambda: Text(None), ["files=None", "tuple"]),
        (lambda: Text((b"a.txt",)), ["files", "b'a.txt'", "string"]),
        (lambda: Text(tokenizer=None), ["tokenizer", "None", "string"]),
        (lambda: TokenRecords("a.arrayrecord"), ["'a.arrayrecord'", "tuple"]),
        (lambda: TokenRecords(()), ["files=()", "at least one"]),
        (lambda: TokenRecords(("a.txt",)), ["'a.txt'", ".arrayrecord"]),
        (lambda: TokenRecords(("a.arrayrecord",), "int8"), ["'int8'", "uint16"]),
        (lambda: TokenRecords(("a.arrayrecord",), seq_len=0), ["seq_len=0"]),
        (lambda: TokenRecords(("a.arrayrecord",), prefetch=-1), ["prefetch=-1"]),
        (lambda: TokenRecords(("a.arrayrecord",), vocab_size=0), ["vocab_size=0"]),
        (lambda: TokenRecords(("a.arrayrecord",), vocab_size=2**32), ["4294967296", "at most"]),
        (lambda: squares(global_batch=0), ["global_batch=0", "at least 1"]),
        (lambda: squares(seed=-1), ["seed=-1", "at least 0"]),
        (lambda: squares(seed="0"), ["seed='0'", "whole"]),
        (lambda: squares(prefetch=-1), ["prefetch=-1"]),
        (lambda: squares(prefetch=10**23), ["prefetch=1", "at most 1000"]),
        (lambda: squares(0), ["0 records"]),
        (lambda: squares(source=range(2**52 + 1)), ["4503599627370497 records"]),
        (lambda: squares().batches(-1), ["position=-1"]),
        (lambda: squares().batches(2**50), ["position=1125899906842624", "last"]),
        (lambda: squares(source=[1, 2]), ["record 0", "int", "mapping"]),
        (lambda: squares(source=[{}]), ["record 0", "no columns"]),
        (lambda: squares(source=[{1: 2}]), ["record 0", "named 1"]),
        (lambda: squares(source=[{"x": "text"}]), ["record 0", "'x'", "numbers"]),
        (lambda: squares(source=[{"x": {"y": 1}}]), ["record 0", "'x'", "numbers"]),
        (lambda: squares(source=[{"example_id": 1}]), ["record 0", "example_id", "rename"]),
        (lambda: take(squares(source=[{"x": 1}, {"y": 1}]), 9), ["record 1", "alike"]),
        (lambda: take(squares(source=[{"x": [1]}, {"x": [1, 2]}]), 9), ["record 1", "alike"]),
        (lambda: take(squares(source=[{"x": 1}, {"x": 1.0}]), 9), ["record 1", "alike"]),
        (lambda: take(squares(source=[{"x": 1}, None]), 9), ["record 1", "NoneType"]),
        (lambda: take(squares(source=Ends()), 9), ["StopIteration", "another error"]),
        (lambda: stream([{"x": 1}], global_batch=1, seed=0, fingerprint="x"), ["'x'", "mapping"]),
        (
            lambda: stream([{"x": 1}], global_batch=1, seed=0, fingerprint={"seed": 1}),
            ["'seed'", "another name"],
        ),
        (
            lambda: stream([{"x": 1}], global_batch=1, seed=0, fingerprint={"a": float("nan")}),
            ["JSON"],
        ),
        (lambda: stream([{"x": 1}], global_batch=1, seed=0, fingerprint={"a": {1}}), ["JSON"]),
    ],
)
def test_bad_values(make, words):
    refuses(make, *words)


def test_configs_are_plain_frozen_values(tmp_path):
    config = Text([tmp_path / "a.txt"], tokenizer="bytes")
    assert config == Text((str(tmp_path / "a.txt"),)) and hash(config)
    assert config.files == (str(tmp_path / "a.txt"),)
    with pytest.raises(AttributeError):
        config.seq_len = 3
