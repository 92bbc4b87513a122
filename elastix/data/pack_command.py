"""`elastix data pack`: documents in, ArrayRecord files of packed rows out; it can be stopped."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elastix.data.documents import FORMATS, open_documents
from elastix.data.pack_job import Job, pack
from elastix.data.packing import MOST_SEQ_LEN
from elastix.data.sources import check_paths
from elastix.data.stream import DataError, whole
from elastix.data.tokenizers import load_tokenizer
from elastix.usage import UsageParser

_MOST_BYTES = 2**62  # of input for one file; more than there is anywhere

_ABOUT = """\
Tokenize documents and pack them, whole, into sequences of one length: ArrayRecord files that
elastix.data.PackedRecords reads, with any seed, batch and number of slices.

OUT gets part-00000-of-000NN.arrayrecord and, when all of them are there, index.json: what they are
made from, and the sha256 of each. Stopped at any moment, by Ctrl-C or kill -9, the same command
goes on: parts that are whole are kept. A part is made of --shard-size MB of input, and packed by
itself: the same input, tokenizer and options give the same bytes."""

_MORE = """\
examples:
  elastix data pack corpus.jsonl --tokenizer tokenizer.json --out data/corpus --seq-len 2048
  elastix data pack notes/*.txt --tokenizer bytes --out data/notes --separator '\\n\\n'

then, in a recipe:
  data=PackedRecords("data/corpus")

exit status:
  0 done   1 failed, the disk is full, say   2 usage or bad input, nothing was changed
  130 interrupted: the same command goes on, as it does after 1"""


def data_main(argv: Sequence[str]) -> int:
    """`elastix data`: 0 when the files are there, 1 if they cannot be written.

    Raises ValueError for bad input.
    """
    parser = UsageParser(prog="elastix data", description="Prepare data for training.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    pack_parser = commands.add_parser(
        "pack",
        help="documents to packed ArrayRecord files",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_options(pack_parser)
    try:
        given = parser.parse_args(argv)
    except SystemExit as helped:  # --help, after it was printed
        return int(helped.code or 0)
    files = check_paths(given.inputs)
    separator = given.separator.replace("\\n", "\n").replace("\\t", "\t")
    tokenizer = load_tokenizer(given.tokenizer)
    seq_len = whole("--seq-len", _number("--seq-len", given.seq_len), 1, MOST_SEQ_LEN)
    shard_bytes = _megabytes("--shard-size", given.shard_size)
    min_tokens = _number("--min-tokens", given.min_tokens)
    documents = open_documents(files, given.format, given.field, separator)
    job = Job(documents, tokenizer, seq_len, min_tokens, shard_bytes)
    out = Path(given.out)
    try:
        with _Progress(job) as progress:
            index = pack(job, out, progress)
    except OSError as error:
        why = error.strerror or error
        print(f"elastix: failed: --out {out} cannot be written ({why})", file=sys.stderr)
        return 1
    print(_summary(index, out))
    return 0


def _summary(index: dict[str, Any], out: Path) -> str:
    shards, seq_len = index["shards"], index["made_from"]["seq_len"]
    rows, tokens = (sum(shard[key] for shard in shards) for key in ("rows", "tokens"))
    full = tokens / (rows * (seq_len + 1))
    return f"{out}: {len(shards)} files, {rows} rows, {tokens} tokens, {full:.1%} full"


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("inputs", metavar="INPUT", nargs="+", help="files: .txt, .jsonl or .arrayrecord")
    add("--tokenizer", metavar="T", required=True, help="a tokenizer.json, or: bytes")
    add("--out", metavar="DIR", required=True, help="an empty or new folder, or one to go on with")
    add("--seq-len", metavar="N", default="1024", help="targets in a row (default: 1024)")
    add("--shard-size", metavar="MB", default="256", help="input for one file (default: 256)")
    add("--min-tokens", metavar="N", default="1", help="leave out shorter documents (default: 1)")
    add("--format", metavar="F", default="auto", help=f"{', '.join(FORMATS)} (default: by suffix)")
    add("--field", metavar="NAME", default="text", help="jsonl: the text's field (default: text)")
    add("--separator", metavar="S", default="", help=r"text: what parts documents, such as '\n\n'")


def _number(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise DataError(f"{option} {text!r}: use a whole number of at least 1")
    return int(text)


def _megabytes(option: str, text: str) -> int:
    try:
        size = round(float(text) * 1e6)
    except (ValueError, OverflowError):  # no number, not a number, infinity
        size = 0
    if not 1 <= size <= _MOST_BYTES:
        raise DataError(f"{option} {text!r}: use a number of megabytes above 0, such as 256")
    return size


class _Progress:
    """Says on standard error how far it is, every second on a terminal and every 10 s elsewhere."""

    def __init__(self, job: Job):
        ends = np.cumsum(job.documents.sizes)
        self._ends, self._total, self._shards = ends, int(ends[-1]), len(job.shards())
        self._finished = self._done = self._kept = 0
        self._start = self._said = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self._say()
            if self._terminal:
                print(file=sys.stderr)

    def tokenized(self, document: int) -> None:
        """A document was tokenized."""
        self._done = int(self._ends[document])
        if time.monotonic() - self._said >= (1.0 if self._terminal else 10.0):
            self._said = time.monotonic()
            self._say()

    def finished(self, documents: range, kept: bool) -> None:
        """A file of so many documents is there; `kept` from an earlier process."""
        self._finished += 1
        done = int(self._ends[documents[-1]])
        self._kept += done - self._done if kept else 0
        self._done = done

    def _say(self) -> None:
        rate = (self._done - self._kept) / max(time.monotonic() - self._start, 1e-9)
        line = (
            f"packing: {self._finished} of {self._shards} files, {self._done / 1e6:.1f} of "
            f"{self._total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"
        )
        ends = "" if self._terminal else "\n"
        print(f"\r{line}" if self._terminal else line, end=ends, file=sys.stderr, flush=True)
