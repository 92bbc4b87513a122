"""Packed rows in ArrayRecord files: the format that `elastix data pack` writes, and its reader.

A folder holds `part-00000-of-000NN.arrayrecord` and `index.json`. A record is one row: the number
of its segments and the length of each, uint32, then their tokens, `dtype`; all little-endian,
without padding.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elastix.data.files import NO_IDENTITY, file_identity, file_problem
from elastix.data.packing import packed_row
from elastix.data.records import RecordFiles
from elastix.data.sources import Opened, build_stream, check_path
from elastix.data.stream import DataError, Stream, check_prefetch, check_shuffle, whole
from elastix.data.tokenizers import check_ids

INDEX = "index.json"
FORMAT_VERSION = 1
_LENGTH = np.dtype("<u4")
_DTYPES = ("<u2", "<u4")


def encode_row(segments: Sequence[np.ndarray]) -> bytes:
    """Returns the record of a row, from the ids of its segments, in the dtype of the ids."""
    head = np.array([len(segments), *map(len, segments)], _LENGTH)
    return head.tobytes() + np.concatenate(segments).tobytes()


def decode_row(record: bytes, dtype: np.dtype, where: str) -> list[np.ndarray]:
    """Returns the ids of each segment; DataError, which begins with `where`, if it is no row."""
    size = _LENGTH.itemsize
    count = int.from_bytes(record[:size], "little")
    head, tokens = record[size : size * (count + 1)], record[size * (count + 1) :]
    whole_head = count and len(head) == size * count
    lengths = np.frombuffer(head if whole_head else b"", _LENGTH).astype(np.int64)
    if not whole_head or len(tokens) != lengths.sum() * dtype.itemsize:
        raise DataError(f"{where} is no packed row; pack the documents again")
    return np.split(np.frombuffer(tokens, dtype), np.cumsum(lengths)[:-1])


def read_index(folder: Path, name: str = INDEX) -> dict[str, Any] | None:
    """Returns what an index says; None if there is none. DataError if it is damaged."""
    path = folder / name
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["format_version"] != FORMAT_VERSION:
            found = index["format_version"]
            raise DataError(
                f"{str(path)!r} has format {found!r}, this is {FORMAT_VERSION}; pack again"
            )
        if index["made_from"]["dtype"] not in _DTYPES:
            raise ValueError("dtype")
        for key in ("seq_len", "vocab_size"):
            whole(key, index["made_from"][key], 1)
        for shard in index["shards"]:
            str(shard["name"]), str(shard["sha256"]), whole("rows", shard["rows"], 0)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DataError) and "this is" in str(error):
            raise
        raise DataError(f"{str(path)!r} is damaged; pack into a new folder") from None
    return index


@dataclass(frozen=True)
class PackedRecords:
    """What `elastix data pack` wrote into the folder `directory`; columns as in `Packed`.

    Rows are read on demand. `shuffle` moves them anywhere (True), within windows of so many (a
    number), or not at all. Raises DataError, here, in the methods (`open` reads every file once, to
    hash it), or from the stream when it meets a record that will not do.
    """

    directory: str = field(metadata=NO_IDENTITY)
    shuffle: bool | int = True
    prefetch: int = field(default=2, metadata=NO_IDENTITY)

    def __post_init__(self):
        object.__setattr__(self, "directory", check_path("directory", self.directory))
        check_shuffle(self.shuffle)
        check_prefetch(self.prefetch)

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the tokenizer; a model may pad it."""
        return self._index()["made_from"]["vocab_size"]

    @property
    def seq_len(self) -> int:
        """The number of targets in a row; it has one token more."""
        return self._index()["made_from"]["seq_len"]

    def build(self, global_batch: int, seed: int) -> Stream:
        """Hashes and opens the files and returns their stream."""
        return build_stream(self, global_batch, seed)

    def open(self) -> Opened:
        """Hashes and opens the files and returns their rows."""
        index = self._index()
        shards = [shard for shard in index["shards"] if shard["rows"]]
        paths = [str(Path(self.directory, shard["name"])) for shard in shards]
        files = [file_identity(path) for path in paths]
        for path, file, shard in zip(paths, files, shards, strict=True):
            if file["sha256"] != shard["sha256"]:
                raise DataError(
                    f"{path!r} is not the file that {INDEX} tells of; run the same `elastix data "
                    "pack` again"
                )
        fingerprint = {"kind": "packed records", "made_from": index["made_from"], "files": files}
        return Opened(_Rows(RecordFiles(paths), index["made_from"]), fingerprint)

    def _index(self) -> dict[str, Any]:
        index = read_index(Path(self.directory))
        if index is None:
            problem = file_problem(str(Path(self.directory, INDEX)))
            raise DataError(
                f"{self.directory!r} has no {INDEX} (it {problem}); write it with `elastix data "
                "pack`, and to its end"
            )
        return index


class _Rows:
    """The rows of packed files, padded."""

    def __init__(self, records: RecordFiles, made_from: dict[str, Any]):
        self._records, self._seq_len = records, made_from["seq_len"]
        self._dtype, self._vocab_size = np.dtype(made_from["dtype"]), made_from["vocab_size"]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        where = self._records.where(index)
        segments = decode_row(self._records[index], self._dtype, where)
        if sum(map(len, segments)) > self._seq_len + 1:
            raise DataError(f"{where} is longer than seq_len={self._seq_len} allows; pack again")
        for segment in segments:
            check_ids(segment, self._vocab_size, where)
        return packed_row(segments, self._seq_len)
