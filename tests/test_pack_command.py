"""`elastix data pack`: what it writes, kill -9 at any moment, bad input, and what reads it back."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from elastix import cli
from elastix.data import PackedRecords, load_tokenizer, open_documents
from elastix.data.pack_job import Job
from elastix.data.pack_job import pack as pack_job
from elastix.data.packed_records import decode_row, encode_row
from elastix.run_directory import RunDirectory
from tests.recipes import tiny
from tests.test_data import assert_equal, refuses, take, train, write_records
from tests.test_packing import cache, some_texts, write_documents  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]


def pack(out, *arguments) -> int:
    return cli.main(["data", "pack", *map(str, arguments), "--out", str(out)])


@pytest.fixture
def corpus(tmp_path) -> str:
    return write_documents(tmp_path / "corpus.jsonl", some_texts(300))


def options(corpus, tokenizer="bytes") -> list[str]:
    """Of a corpus of about 20 kB in eight parts."""
    return [corpus, "--tokenizer", tokenizer, "--seq-len", "32", "--shard-size", "0.0025"]


def contents(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(out).iterdir()}


def segments_of(out) -> list[list[int]]:
    """The tokens of every segment, read back through the stream, once each."""
    data, found = PackedRecords(str(out), shuffle=False).build(1, 0), []
    for batch in take(data, data.num_examples):
        ids = batch["segment_ids"][0]
        found += [batch["tokens"][0][ids == s].tolist() for s in range(1, ids.max() + 1)]
    return found


def pieces(texts, seq_len, tokenizer) -> list[list[int]]:
    found = []
    for text in texts:
        tokens = [*tokenizer.encode(text).tolist(), tokenizer.end_id]
        found += [tokens[i : i + seq_len + 1] for i in range(0, len(tokens) - 1, seq_len)]
    return found


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_packed_is_read_back(tmp_path, corpus, trained, capsys):
    name = train(tmp_path / "tokenizer.json", ["</s>"]) if trained else "bytes"
    assert pack(tmp_path / "out", *options(corpus, name)) == 0
    tokenizer = load_tokenizer(name)
    expected = pieces(some_texts(300), 32, tokenizer)
    assert sorted(segments_of(tmp_path / "out")) == sorted(expected)
    config = PackedRecords(tmp_path / "out")
    assert (config.seq_len, config.vocab_size) == (32, tokenizer.vocab_size)
    index = json.loads((tmp_path / "out/index.json").read_text())
    names = [
        f"part-{n:05}-of-{len(index['shards']):05}.arrayrecord" for n in range(len(index["shards"]))
    ]
    assert [shard["name"] for shard in index["shards"]] == names and len(names) > 5
    assert sorted(contents(tmp_path / "out")) == sorted([*names, "index.json"])
    assert index["made_from"]["tokenizer"] == tokenizer.fingerprint
    assert sum(shard["tokens"] for shard in index["shards"]) == sum(map(len, expected))
    out, err = capsys.readouterr()
    assert f"{len(names)} files" in out and "% full" in out
    assert f"packing: {len(names)} of {len(names)} files" in err


def test_the_same_again_changes_nothing(tmp_path, corpus):
    assert pack(tmp_path / "out", *options(corpus)) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert pack(tmp_path / "out", *options(corpus)) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert pack(tmp_path / "other", *options(corpus)) == 0
    assert contents(tmp_path / "other") == contents(tmp_path / "out")


@pytest.mark.parametrize("damage", ["flipped", "gone", "index gone", "stale temporary files"])
def test_what_is_damaged_is_packed_again(tmp_path, corpus, damage):
    out = tmp_path / "out"
    assert pack(out, *options(corpus)) == 0
    good = contents(out)
    part = sorted(out.glob("part-*"))[2]
    if damage == "flipped":
        part.write_bytes(part.read_bytes()[:-1] + b"x")
        refuses(lambda: PackedRecords(str(out)).build(1, 0), part.name, "index.json", "again")
    elif damage == "gone":
        part.unlink()
        refuses(lambda: PackedRecords(str(out)).build(1, 0), part.name, "does not exist")
    elif damage == "index gone":
        (out / "index.json").rename(out / "packing.json")
        refuses(lambda: PackedRecords(str(out)).build(1, 0), "has no index.json", "to its end")
    else:
        part.rename(f"{part}.tmp")
        (out / "index.json").rename(out / "packing.json")
        (out / "packing.json.tmp").write_text("{")
    assert pack(out, *options(corpus)) == 0
    assert contents(out) == good


# Killed


def process(out, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "elastix", "data", "pack", *arguments, "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def when(running: subprocess.Popen, ready) -> None:
    """Returns when `ready()` holds, or the process has ended."""
    while running.poll() is None and not ready():
        time.sleep(0.0002)


@pytest.fixture
def long_corpus(tmp_path) -> list[str]:
    texts = [f"{n} " + text * 20 for n, text in enumerate(some_texts(2000))]
    corpus = write_documents(tmp_path / "long.jsonl", texts)
    return [corpus, "--tokenizer", "bytes", "--seq-len", "64", "--shard-size", "0.1"]


def test_killed_at_any_moment_it_goes_on(tmp_path, long_corpus):
    assert pack(tmp_path / "undisturbed", *long_corpus) == 0
    good, out = contents(tmp_path / "undisturbed"), tmp_path / "out"
    assert len(good) > 15
    kept = 0
    for parts, temporary in [(0, False), (4, True), (9, False)]:
        running = process(out, *long_corpus)
        when(
            running,
            lambda parts=parts, temporary=temporary: (
                (out / "packing.json").exists()
                and len(list(out.glob("part-*.arrayrecord"))) >= parts
                and (not temporary or any(out.glob("part-*.tmp")))
            ),
        )
        running.kill()
        _, err = running.communicate()
        assert running.returncode == -signal.SIGKILL, err.decode()
        assert not (out / "index.json").exists()
        found = contents(out)
        whole = [name for name in found if name.endswith(".arrayrecord")]
        assert len(whole) >= max(parts, kept)
        assert all(found[name] == good[name] for name in whole)
        kept = len(whole)
    untouched = {path: path.stat().st_mtime_ns for path in sorted(out.glob("part-*d"))[: kept - 1]}
    assert pack(out, *long_corpus) == 0
    assert contents(out) == good
    assert {path: path.stat().st_mtime_ns for path in untouched} == untouched


def test_ctrl_c_is_one_line_and_it_goes_on(tmp_path, long_corpus):
    out = tmp_path / "out"
    running = process(out, *long_corpus)
    when(running, lambda: any(out.glob("part-*.arrayrecord")))
    running.send_signal(signal.SIGINT)
    _, err = running.communicate()
    assert running.returncode == 130
    progress, line = err.decode().splitlines()
    assert progress.startswith("packing: ") and line.startswith(
        "elastix: interrupted: run the same"
    )
    assert (out / "packing.json").exists() and not (out / "index.json").exists()
    assert pack(out, *long_corpus) == 0
    assert pack(tmp_path / "undisturbed", *long_corpus) == 0
    assert contents(out) == contents(tmp_path / "undisturbed")


class Ends(Exception):
    """The end of a process."""


class Until:
    """A progress that ends the process at its call number `last`."""

    def __init__(self, last):
        self.calls, self.last = 0, last

    def tokenized(self, document):
        self._count()

    def finished(self, documents, kept):
        self._count()

    def _count(self):
        self.calls += 1
        if self.calls == self.last:
            raise Ends


def test_ended_after_every_document_it_goes_on(tmp_path):
    corpus = write_documents(tmp_path / "a.jsonl", some_texts(20))
    job = Job(open_documents((corpus,)), load_tokenizer("bytes"), 32, 1, 300)
    undisturbed = Until(None)
    pack_job(job, tmp_path / "undisturbed", undisturbed)
    good = contents(tmp_path / "undisturbed")
    assert len(good) > 4 and undisturbed.calls > 24
    out = tmp_path / "out"
    for last in range(1, undisturbed.calls + 1):
        with pytest.raises(Ends):
            pack_job(job, out, Until(last))
        refuses(lambda: PackedRecords(str(out)).build(1, 0), "has no index.json")
        pack_job(job, out, Until(None))
        assert contents(out) == good
        # The next one finds a part that was lost, and ends while it is away.
        sorted(out.glob("part-*"))[last % 4].unlink()
        with pytest.raises(Ends):
            pack_job(job, out, Until(1))
        refuses(lambda: PackedRecords(str(out)).build(1, 0), "has no index.json")
        shutil.rmtree(out)


def test_a_full_disk_is_one_line_and_it_goes_on(tmp_path, long_corpus):
    out = tmp_path / "out"
    words = [sys.executable, "-m", "elastix", "data", "pack", *long_corpus, "--out", str(out)]
    # No file may grow beyond 60 kB: a part is at least 64.
    limited = ["bash", "-c", 'ulimit -f 60; trap "" XFSZ; exec "$@"', "bash", *words]
    ran = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    assert re.fullmatch(
        r"elastix: failed: --out .* cannot be written \(.*too large.*\)\n", ran.stderr
    )
    assert not list(out.glob("*.tmp")), "half a file would keep the disk full"
    assert pack(out, *long_corpus) == 0
    assert not list(out.glob("*.tmp")) and (out / "index.json").exists()


def test_one_process_at_a_time(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    out.mkdir()
    other = os.open(out, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert pack(out, *options(corpus)) == 2
    assert "in use by another process" in capsys.readouterr().err and not contents(out)
    os.close(other)
    assert pack(out, *options(corpus)) == 0


class UsedMeanwhile(type(Path())):
    """A folder in which another process has packed something else just before it is made."""

    other: Job

    def mkdir(self, *arguments, **options):
        pack_job(self.other, Path(self), Until(0))


def test_what_another_process_packed_meanwhile_is_never_taken_for_ones_own(tmp_path, corpus):
    documents, tokenizer = open_documents((corpus,)), load_tokenizer("bytes")
    out = UsedMeanwhile(tmp_path / "out")
    out.other = Job(documents, tokenizer, 16, 1, 10**9)
    refuses(
        lambda: pack_job(Job(documents, tokenizer, 32, 1, 10**9), out, Until(0)),
        "packed from something else",
        "seq_len was 16, is 32",
    )
    assert PackedRecords(str(out)).seq_len == 16


# Refused


def told(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastix: ")
    return line


def test_a_folder_of_something_else_is_refused(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    assert pack(out, *options(corpus)) == 0
    good = contents(out)
    tokenizer = train(tmp_path / "tokenizer.json")
    for name, other in [
        ("seq_len was 32, is 33", [*options(corpus), "--seq-len", "33"]),
        ("tokenizer was", options(corpus, tokenizer)),
        ("shard_bytes was 2500, is 3000", [*options(corpus), "--shard-size", "0.003"]),
        ("min_tokens was 1, is 2", [*options(corpus), "--min-tokens", "2"]),
    ]:
        capsys.readouterr()
        assert pack(out, *other) == 2
        line = told(capsys)
        assert name in line and "packed from something else" in line
    write_documents(Path(corpus), some_texts(299))
    assert pack(out, *options(corpus)) == 2
    assert "documents was" in told(capsys)
    assert contents(out) == good
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tmp").write_text("mine")
    assert pack(foreign, *options(corpus)) == 2
    assert "holds thesis.tmp but no index.json" in told(capsys)
    assert contents(foreign) == {"thesis.tmp": b"mine"}
    assert pack(corpus, *options(corpus)) == 2
    assert "is no folder" in told(capsys)
    (out / "index.json").write_text("{")
    assert pack(out, *options(corpus)) == 2
    assert "index.json' is damaged" in told(capsys)


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (b'{"text": "a"}\n{"text"', [], ["corpus.jsonl", "line 2"]),
        (b'{"text": "a"}', ["--field", "body"], ["line 1", '"body"']),
        (b'{"text": "a"}', ["--format", "csv"], ["'csv'", "jsonl"]),
        (b'{"text": "a"}', ["--tokenizer", "none.json"], ["'none.json'", "does not exist"]),
        (b'{"text": "a"}', ["--seq-len", "0"], ["--seq-len '0'", "at least 1"]),
        (b'{"text": "a"}', ["--min-tokens", "x"], ["--min-tokens 'x'"]),
        (b'{"text": "a"}', ["--shard-size", "nan"], ["--shard-size 'nan'", "megabytes"]),
        (b'{"text": "a"}', ["--shard-size", "1e400"], ["--shard-size '1e400'"]),
        (b'{"text": "a"}', ["--shard-size", "1e300"], ["--shard-size '1e300'", "megabytes"]),
        (b'{"text": "a"}', ["--seq-len", "99999999999"], ["--seq-len=99999999999", "at most"]),
        (b'{"text": "a"}', ["--seq-len", "9" * 30], ["--seq-len=", "at most"]),
        (b"a", ["--format", "text", "--separator", "\udcff"], ["separator='\\udcff'", "UTF-8"]),
        (b'{"text": "a"}', ["--tokeniser", "x"], ["--tokeniser", "--help"]),
        (b"", [], ["corpus.jsonl", "is empty"]),
        (b'{"text": "abc"}', ["--min-tokens", "4"], ["fewer than 4 tokens", "--min-tokens"]),
        (b'{"text": ""}', [], ["nothing to pack"]),
    ],
)
def test_bad_input_changes_nothing(tmp_path, capsys, content, more, words):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(content)
    assert pack(tmp_path / "out", corpus, "--tokenizer", "bytes", *more) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("elastix: ") and all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(corpus, capsys):
    assert pack("/proc/nowhere", *options(corpus)) == 2
    assert "--out /proc/nowhere cannot be written" in told(capsys)


def test_paths_that_the_library_of_array_records_cannot_be_given(tmp_path, corpus, capsys):
    assert pack(tmp_path / "out", *options(corpus)) == 0
    odd = tmp_path / "a\udcff.arrayrecord"
    shutil.copy(next((tmp_path / "out").glob("part-*")), odd)
    capsys.readouterr()
    for out, inputs in [(tmp_path / "b\udcff", [corpus]), (tmp_path / "c", [odd])]:
        assert pack(out, *inputs, "--tokenizer", "bytes") == 2
        assert "is not UTF-8" in told(capsys) and not out.exists()


def test_help_is_worth_reading(capsys):
    assert cli.main(["data", "pack", "--help"]) == 0
    text = capsys.readouterr().out
    assert "elastix data pack corpus.jsonl --tokenizer tokenizer.json" in text
    assert all(
        word in text for word in ("--seq-len", "--shard-size", "exit status", "PackedRecords")
    )
    assert cli.main(["data"]) == 2 and "COMMAND" in told(capsys)
    assert cli.main(["data", "unpack"]) == 2 and "pack" in told(capsys)


# Records


def test_a_crash_anywhere_changes_nothing(tmp_path, corpus):
    assert pack(tmp_path / "out", *options(corpus)) == 0
    directory = str(tmp_path / "out")
    whole = take(PackedRecords(directory, prefetch=0).build(6, 3), 12)
    for crash in range(10):
        for prefetch in range(5):
            resumed = PackedRecords(directory, prefetch=prefetch).build(6, 3)
            assert_equal(take(resumed, 2, crash), whole[crash : crash + 2])


def test_repacked_data_is_refused_at_resume(tmp_path, corpus):
    def opens(out):
        found = PackedRecords(str(out)).build(4, 0).fingerprint
        RunDirectory.open(tmp_path / "run", tiny.recipe(), found, {}).close()

    assert pack(tmp_path / "one", *options(corpus)) == 0
    opens(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "moved")
    opens(tmp_path / "moved")
    assert pack(tmp_path / "two", *options(corpus), "--seq-len", "33") == 0
    with pytest.raises(ValueError, match="made_from.seq_len was 32, is 33"):
        opens(tmp_path / "two")


def test_records_that_will_not_do(tmp_path, corpus):
    out = tmp_path / "out"
    assert pack(out, *options(corpus)) == 0
    index = json.loads((out / "index.json").read_text())
    small, dtype = np.array([1, 2], "<u2"), np.dtype("<u2")
    row = encode_row([small, small])
    assert [s.tolist() for s in decode_row(row, dtype, "")] == [[1, 2], [1, 2]]
    bad = {
        "no packed row": [b"", row[:-1], row + b"xx", row[:6], np.array([0], "<u4").tobytes()],
        "longer than seq_len=32": [encode_row([np.ones(34, "<u2")])],
        "id 257 is outside": [encode_row([np.array([1, 257], "<u2")])],
    }
    for words, records in bad.items():
        for record in records:
            part = index["shards"][0]
            write_records(out / part["name"], [row, record])
            part["sha256"] = hashlib.sha256((out / part["name"]).read_bytes()).hexdigest()
            (out / "index.json").write_text(json.dumps(index))
            data = PackedRecords(str(out), shuffle=False).build(1, 0)
            refuses(lambda data=data: take(data, 2), "record 1", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i: i.update(format_version=2), ["format 2", "this is 1"]),
        (lambda i: i.pop("shards"), ["damaged"]),
        (lambda i: i["made_from"].update(dtype="<f4"), ["damaged"]),
        (lambda i: i["made_from"].update(seq_len=0), ["damaged"]),
        (lambda i: i["shards"][0].pop("sha256"), ["damaged"]),
    ],
)
def test_an_index_that_will_not_do(tmp_path, corpus, change, words):
    out = tmp_path / "out"
    assert pack(out, *options(corpus)) == 0
    index = json.loads((out / "index.json").read_text())
    change(index)
    (out / "index.json").write_text(json.dumps(index))
    refuses(lambda: PackedRecords(str(out)).build(1, 0), "index.json", *words)


def test_bad_values(tmp_path):
    refuses(lambda: PackedRecords(3), "directory", "3")
    refuses(lambda: PackedRecords("a", shuffle=0), "shuffle=0")
    refuses(lambda: PackedRecords("a", prefetch=-1), "prefetch=-1")
    refuses(lambda: PackedRecords(str(tmp_path)).build(1, 0), "has no index.json", "data pack")
    refuses(lambda: PackedRecords("nowhere").vocab_size, "'nowhere'", "has no index.json")
