"""Documents: where they lie in files of text, JSON lines and records, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.data import PackedText, open_documents
from elastix.data.files import stdlib_corpus
from tests.test_data import refuses, write_records
from tests.test_packing import cache  # noqa: F401


def all_of(documents) -> list[bytes]:
    return [documents[i] for i in range(len(documents))]


def written(tmp_path, name, content) -> str:
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=8),
    blank=st.sampled_from(["", "\n", "\r\n", "  \n\n"]),
    end=st.sampled_from(["\n", "\r\n"]),
    ascii_only=st.booleans(),
)
def test_lines_of_json(tmp_path_factory, texts, blank, end, ascii_only):
    lines = [json.dumps({"n": 1, "body": t}, ensure_ascii=ascii_only) + end for t in texts]
    content = (blank + blank.join(lines)).encode("utf-8", "surrogatepass")
    path = written(tmp_path_factory.mktemp("a"), "a.jsonl", content)
    documents = open_documents((path,), field="body")
    assert all_of(documents) == [text.encode() for text in texts]
    assert documents.sizes.tolist() == [len(line.encode()) for line in lines]
    assert json.loads(json.dumps(documents.fingerprint)) == documents.fingerprint


def test_a_last_line_without_its_end(tmp_path):
    path = written(tmp_path, "a.jsonl", b'{"text": "a"}\n{"text": "b"}')
    assert all_of(open_documents((path,))) == [b"a", b"b"]


@settings(max_examples=60)
@given(st.lists(st.text("ab\n é", max_size=8), max_size=8), st.sampled_from(["\n\n", "--", "\n"]))
def test_text_between_separators(tmp_path_factory, parts, separator):
    content = separator.join(["first", *parts])
    path = written(tmp_path_factory.mktemp("a"), "a.txt", content.encode())
    expected = [p for p in content.split(separator) if p.encode().strip()]
    documents = open_documents((path,), separator=separator)
    assert [d.decode() for d in all_of(documents)] == expected


def test_files_follow_each_other(tmp_path):
    text = written(tmp_path, "a.txt", "naïve\n\ntext".encode())
    lines = written(tmp_path, "b.JSONL", b'{"text": "one"}\n\n{"text": "two"}\n')
    records = write_records(tmp_path / "c.arrayrecord", [b"three", "fünf".encode()])
    documents = open_documents((lines, text, records))
    expected = [b"one", b"two", "naïve\n\ntext".encode(), b"three", "fünf".encode()]
    assert all_of(documents) == expected and len(documents.sizes) == 5
    names = [part["files"][0]["name"] for part in documents.fingerprint["parts"]]
    assert names == ["b.JSONL", "a.txt", "c.arrayrecord"]
    assert all_of(open_documents((text,), "text")) == [expected[2]]


def test_any_name_will_do_if_the_format_is_given(tmp_path):
    path = written(tmp_path, "source.py", b"print()\n")
    assert all_of(open_documents((path,), format="text")) == [b"print()\n"]
    refuses(lambda: open_documents((path,)), "source.py", "'.py'", "give the format")
    refuses(lambda: open_documents((path,), format="csv"), "'csv'", "jsonl")


def test_no_files_are_the_standard_library():
    documents = open_documents(())
    assert all_of(documents) == stdlib_corpus().documents
    assert documents.sizes.sum() == sum(map(len, all_of(documents)))


def test_the_index_is_kept_under_what_the_file_holds(tmp_path, cache):  # noqa: F811
    content = b'{"text": "one"}\n{"text": "two"}\n'
    for name in ("a.jsonl", "b.jsonl"):
        open_documents((written(tmp_path, name, content),))
    assert len(list(cache.iterdir())) == 1
    written(tmp_path, "a.jsonl", content.replace(b"one", b"six"))
    assert all_of(open_documents((str(tmp_path / "a.jsonl"),))) == [b"six", b"two"]
    open_documents((str(tmp_path / "b.jsonl"),), format="text")
    assert len(list(cache.iterdir())) == 3


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = written(tmp_path, "a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    documents = open_documents((path,))
    written(tmp_path, "a.jsonl", b'{"text": "one"}\n')
    refuses(lambda: documents[0], "a.jsonl", "changed", "start again")
    Path(path).unlink()
    refuses(lambda: documents[0], "a.jsonl", "cannot be read")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", ["empty"]),
        ("a.jsonl", b" \n\n", ["blank"]),
        ("a.txt", b" \n\n", ["blank"]),
        ("a.jsonl", b'{"text": "abc"}\n{"txt": "abc"}', ["line 2", '"text"']),
        ("a.jsonl", b'{"text": "abc"}\n\n{"text": 3}', ["line 3", '"text"']),
        ("a.jsonl", b'{"text": "abc"', ["line 1", "delimiter"]),
        ("a.jsonl", b'{"text": "\\ud83d"}', ["line 1", "surrogates"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', ["UTF-8", "0xe9 at 24"]),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), ["not text", "NUL"]),
        ("a.txt", b"caf\xe9 au lait", ["UTF-8", "0xe9 at 3"]),
        ("a.txt", b"abc\0def", ["not text", "NUL byte at 3"]),
        ("a.csv", b"a,b", ["'.csv'", ".jsonl"]),
        ("a.arrayrecord", b"no record " * 9999, ["a.arrayrecord", "write it again"]),
    ],
)
def test_bad_files(tmp_path, name, content, words):
    path = written(tmp_path, name, content)
    for _ in range(2):  # nothing of it is cached
        refuses(lambda: open_documents((path,)), name, *words)


def test_files_that_are_none(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    refuses(lambda: open_documents((str(tmp_path / "folder.txt"),)), "is a directory")
    refuses(lambda: open_documents((str(tmp_path / "none.txt"),)), "does not exist")
    records = write_records(tmp_path / "a.arrayrecord", [b"fine", b"caf\xe9"])
    refuses(lambda: open_documents((records,)), "record 1", "UTF-8", "0xe9 at 3")
    refuses(lambda: PackedText((records,), seq_len=4).build(1, 0), "record 1")


def test_where_the_error_is_in_a_long_file(tmp_path):
    lines = [b'{"text": "a"}'] * 70_000 + [b'{"text": 1}']  # more than are indexed at once
    path = written(tmp_path, "a.jsonl", b"\n".join(lines))
    refuses(lambda: open_documents((path,)), "line 70001", '"text"')
    documents = open_documents((written(tmp_path, "b.jsonl", b"\n".join(lines[:-1])),))
    assert len(documents) == 70_000 and documents[69_999] == b"a"
    np.testing.assert_array_equal(documents.sizes[:3], [14, 14, 14])
