"""Packing a folder of ArrayRecord files: part by part, and from where an earlier process was ended.

Nothing has its final name before it is whole and on the disk: a part, and last of all the index.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from elastix.data.documents import Documents
from elastix.data.packed_records import FORMAT_VERSION, INDEX, encode_row, read_index
from elastix.data.packing import encode, plan, token_dtype
from elastix.data.records import check_record_name
from elastix.data.stream import DataError
from elastix.data.tokenizers import Tokenizer
from elastix.durable import sync

UNFINISHED = "packing.json"
"""The index while parts are missing. It gets its final name when all are there."""


class Progress(Protocol):
    """Who is told how far it is."""

    def tokenized(self, document: int) -> None: ...

    def finished(self, documents: range, kept: bool) -> None: ...


@dataclass(frozen=True)
class Job:
    """What is to be packed, and how; `shard_bytes` is how much input goes into one file."""

    documents: Documents
    tokenizer: Tokenizer
    seq_len: int
    min_tokens: int
    shard_bytes: int

    def made_from(self) -> dict[str, Any]:
        """What decides every byte of the files, as JSON values."""
        return {
            "documents": self.documents.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "end_id": self.tokenizer.end_id,
            "dtype": token_dtype(self.tokenizer.vocab_size).str,
            "seq_len": self.seq_len,
            "min_tokens": self.min_tokens,
            "shard_bytes": self.shard_bytes,
        }

    def shards(self) -> list[range]:
        """The documents of each file."""
        before = np.cumsum(self.documents.sizes) - self.documents.sizes
        number = before // self.shard_bytes
        begins = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist()]
        return [
            range(begin, end)
            for begin, end in zip(begins, [*begins[1:], len(self.documents)], strict=True)
        ]


def pack(job: Job, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes the files of a job into `out`, or those that are missing, and returns the index.

    Raises DataError if `out` is no folder to write in, holds other things or is in use, or no
    document is long enough to be packed: nothing was changed then. Raises OSError if the disk is
    full, say: called again, it goes on.
    """
    made_from = job.made_from()
    check_record_name(str(out))
    try:
        _refuse(out, made_from)
        is_new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"--out {out} cannot be written ({error.strerror}); name another folder"
        ) from None
    try:
        with _locked(out):
            _refuse(out, made_from)  # another process may have used it meanwhile
            _refuse_unwritable(out)
            return _Packing(job, out, progress).run()
    except DataError:
        if is_new:
            with contextlib.suppress(OSError):  # it is in use
                out.rmdir()
        raise


class _Packing:
    """One process that packs a job into a folder which is its own."""

    def __init__(self, job: Job, out: Path, progress: Progress):
        self._job, self._out, self._progress = job, out, progress
        self._made_from = job.made_from()
        self._done = {shard["name"]: shard for shard in _finished(out)}

    def run(self) -> dict[str, Any]:
        parts = self._job.shards()
        if not (self._out / INDEX).exists() or len(self._done) < len(parts):
            self._begin()
        for number, documents in enumerate(parts):
            name = f"part-{number:05}-of-{len(parts):05}.arrayrecord"
            kept = name in self._done
            if not kept:
                self._done[name] = _write_part(
                    self._job, documents, self._out / name, self._progress
                )
                _write_json(self._out / UNFINISHED, self._index())
            self._progress.finished(documents, kept)
        if not any(part["rows"] for part in self._done.values()):
            self._give_up()
        if not (self._out / INDEX).exists():
            os.replace(self._out / UNFINISHED, self._out / INDEX)
            sync(self._out)
        return self._index()

    def _index(self) -> dict[str, Any]:
        shards = [self._done[name] for name in sorted(self._done)]
        return {"format_version": FORMAT_VERSION, "made_from": self._made_from, "shards": shards}

    def _begin(self) -> None:
        """Says whose folder it is before the first part lies in it."""
        _write_json(self._out / UNFINISHED, self._index())
        # If a part was lost or damaged, there is no index until it is back.
        (self._out / INDEX).unlink(missing_ok=True)

    def _give_up(self) -> None:
        for name in (*self._done, UNFINISHED):
            (self._out / name).unlink()
        raise DataError(
            f"every document has fewer than {self._job.min_tokens} tokens: nothing to pack; give "
            "longer ones, or lower --min-tokens"
        )


def _refuse(out: Path, made_from: dict[str, Any]) -> None:
    """Refuse a folder that is not this job's, before anything in it is touched."""
    if out.exists() and not out.is_dir():
        raise DataError(f"--out {out} is no folder; name a new or an empty one")
    for name in (INDEX, UNFINISHED):
        index = read_index(out, name)
        if index is None:
            continue
        wanted = json.loads(json.dumps(made_from))
        if changed := _changes(index["made_from"], wanted):
            raise DataError(
                f"--out {out} was packed from something else ({changed}); choose another folder, "
                "or remove it"
            )
        return
    found = set(out.iterdir()) if out.exists() else set()
    foreign = sorted(path.name for path in found - set(_leftovers(out)))
    if foreign:
        raise DataError(f"--out {out} holds {foreign[0]} but no {INDEX}; choose an empty folder")


def _refuse_unwritable(out: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise DataError(
            f"--out {out} cannot be written ({error.strerror}); name another folder"
        ) from None


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    return "; ".join(
        f"{key} was {_short(old.get(key))}, is {_short(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 150 else f"{text[:147]}..."


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One process at a time: a lock on the folder itself, which leaves no file."""
    fd = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(f"--out {out} is in use by another process; wait for it") from None
    finally:
        os.close(fd)


def _finished(out: Path) -> list[dict[str, Any]]:
    """The shards of an earlier process that are as it wrote them."""
    index = read_index(out) or read_index(out, UNFINISHED)
    shards = index["shards"] if index else []
    return [shard for shard in shards if _sha256(out / shard["name"]) == shard["sha256"]]


def _leftovers(out: Path) -> list[Path]:
    """What a process that was killed had not finished: the next one writes over it."""
    return [*out.glob("part-*.arrayrecord.tmp"), *out.glob(f"{UNFINISHED}.tmp")]


def _write_part(job: Job, numbers: range, path: Path, progress: Progress) -> dict[str, Any]:
    """Packs some documents into one file, which has its name when it is whole."""
    parts = []
    for number in numbers:
        parts.append(encode(job.documents, number, job.tokenizer))
        progress.tokenized(number)
    tokens, lengths = np.concatenate(parts), np.array([len(part) for part in parts])
    pieces, ends = plan(lengths, job.seq_len, job.min_tokens)
    rows = (
        encode_row([tokens[start:stop] for start, stop in pieces[begin:end].tolist()])
        for begin, end in pairwise([0, *ends.tolist()])
    )
    with _named_when_whole(path) as temporary:
        _write_records(temporary, rows)
        sha256 = _sha256(temporary)
    packed = int((pieces[:, 1] - pieces[:, 0]).sum())
    size = path.stat().st_size
    return {"name": path.name, "size": size, "sha256": sha256, "rows": len(ends), "tokens": packed}


def _write_records(path: Path, records: Iterable[bytes]) -> None:
    from array_record.python import array_record_module  # type: ignore[import-untyped]

    try:
        # One record a chunk: what Grain needs to read any of them by its number.
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
    except RuntimeError as error:  # it has no type for a full disk, only a text
        raise OSError(str(error).partition("\n")[0]) from None


def _write_json(path: Path, value: Any) -> None:
    with _named_when_whole(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _named_when_whole(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which gets its name when that is done, or is removed: half a
    file would keep a full disk full."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(
            f"{str(path)!r} cannot be read ({error.strerror}); make it readable, or remove it"
        ) from None
