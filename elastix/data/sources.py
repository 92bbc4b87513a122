"""The configurations of data that a recipe holds, and the sources they build."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from elastix.data.files import NO_IDENTITY, Corpus, file_identity, stdlib_corpus, text_corpus
from elastix.data.records import RECORD_SUFFIXES, RecordFiles
from elastix.data.stream import (
    DataError,
    Source,
    Stream,
    check_prefetch,
    check_shuffle,
    stream,
    whole,
)
from elastix.data.tokenizers import Tokenizer, check_ids, load_tokenizer

_RECORD_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_MOST_IDS = 2**31  # batches hold int32


class Opened(NamedTuple):
    """A source that was opened, and what says which data it is."""

    source: Source
    fingerprint: Mapping[str, object]


class SourceConfig(Protocol):
    """A configuration whose source may also be one of several in a `Mixture`."""

    @property
    def shuffle(self) -> bool | int: ...

    @property
    def prefetch(self) -> int: ...

    def open(self) -> Opened:
        """Reads what has to be read. Raises DataError for files that will not do."""
        ...


def build_stream(config: SourceConfig, global_batch: int, seed: int) -> Stream:
    """Returns the stream of one configuration by itself."""
    source, fingerprint = config.open()
    return stream(
        source,
        global_batch=global_batch,
        seed=seed,
        shuffle=config.shuffle,
        prefetch=config.prefetch,
        fingerprint=fingerprint,
    )


@dataclass(frozen=True)
class Text:
    """Next-token data from text: batches have `tokens`, int32 [global_batch, seq_len + 1].

    `files` are UTF-8 `.txt` (one document each) or `.jsonl` (one {"text": ...} a line); none means
    the source of Python's standard library. Documents are joined, each followed by the end-of-
    document token, and cut into windows that overlap by one, so each token is a target once an
    epoch (a last piece too short for a window is left out). `tokenizer` is "bytes" or the path of
    a Hugging Face tokenizer.json. The token array is held in memory. Raises DataError, here or in
    the methods, for values and files that will not do.
    """

    files: tuple[str, ...] = field(default=(), metadata=NO_IDENTITY)
    seq_len: int = 128
    tokenizer: str = field(default="bytes", metadata=NO_IDENTITY)
    shuffle: bool | int = True
    prefetch: int = field(default=2, metadata=NO_IDENTITY)

    def __post_init__(self):
        object.__setattr__(self, "files", check_paths(self.files))
        object.__setattr__(self, "tokenizer", check_path("tokenizer", self.tokenizer))
        whole("seq_len", self.seq_len, 1)
        check_prefetch(self.prefetch)
        check_shuffle(self.shuffle)

    @property
    def vocab_size(self) -> int:
        """The number of token ids: 257 for "bytes"; a model may pad it."""
        return load_tokenizer(self.tokenizer).vocab_size

    def build(self, global_batch: int, seed: int) -> Stream:
        """Reads and tokenizes the files and returns their stream."""
        return build_stream(self, global_batch, seed)

    def open(self) -> Opened:
        """Reads and tokenizes the files and returns their windows."""
        tokenizer, corpus = load_tokenizer(self.tokenizer), self._corpus()
        tokens = _token_array(corpus.documents, tokenizer)
        fingerprint = {
            "kind": "text",
            "files": corpus.files,
            "documents": len(corpus.documents),
            "tokens": len(tokens),
            "tokenizer": tokenizer.fingerprint,
            "seq_len": self.seq_len,
        }
        return Opened(_Windows(tokens, self.seq_len), fingerprint)

    def unigram_loss(self) -> float:
        """Returns the loss, in nats per token, of knowing how frequent each token is, no more."""
        tokenizer = load_tokenizer(self.tokenizer)
        return unigram_entropy(_token_array(self._corpus().documents, tokenizer))

    def _corpus(self) -> Corpus:
        return text_corpus(self.files) if self.files else stdlib_corpus()


@dataclass(frozen=True)
class TokenRecords:
    """Next-token data tokenized before: `tokens`, int32 [global_batch, seq_len + 1].

    `files` are ArrayRecord files written with group_size:1; each record is seq_len + 1 token ids,
    little-endian `dtype` ("uint16" or "uint32"), read on demand. Ids must be below `vocab_size`
    (the default is all that uint16 holds). Raises DataError, here, in `build` (which reads every
    file once to hash it), or from the stream when it meets a record that will not do.
    """

    files: tuple[str, ...] = field(metadata=NO_IDENTITY)
    dtype: str = "uint16"
    seq_len: int = 128
    vocab_size: int = 2**16
    shuffle: bool | int = True
    prefetch: int = field(default=2, metadata=NO_IDENTITY)

    def __post_init__(self):
        object.__setattr__(self, "files", check_paths(self.files))
        if not self.files:
            raise DataError("files=() must name at least one ArrayRecord file")
        for path in self.files:
            if Path(path).suffix.lower() not in RECORD_SUFFIXES:
                raise DataError(f"{path!r} must end in {' or '.join(RECORD_SUFFIXES)}")
        if self.dtype not in _RECORD_DTYPES:
            raise DataError(f"dtype={self.dtype!r} must be one of {', '.join(_RECORD_DTYPES)}")
        whole("seq_len", self.seq_len, 1)
        check_prefetch(self.prefetch)
        check_shuffle(self.shuffle)
        if whole("vocab_size", self.vocab_size, 1) > _MOST_IDS:
            raise DataError(f"vocab_size={self.vocab_size} must be at most {_MOST_IDS}")

    def build(self, global_batch: int, seed: int) -> Stream:
        """Hashes and opens the files and returns their stream."""
        return build_stream(self, global_batch, seed)

    def open(self) -> Opened:
        """Hashes and opens the files and returns their records."""
        fingerprint = {
            "kind": "token records",
            "files": [file_identity(path) for path in self.files],
            "dtype": self.dtype,
            "seq_len": self.seq_len,
        }
        return Opened(_Records(self), fingerprint)


def unigram_entropy(tokens: np.ndarray) -> float:
    """Returns -sum p log p over the token frequencies p of `tokens`, ids [n]: nats per token.

    The loss of a model that has learned how often each token occurs and nothing else; DataError
    if there are no tokens.
    """
    if not tokens.size:
        raise DataError("tokens is empty; it must hold at least one id")
    counts = np.zeros(int(tokens.max()) + 1, np.int64)
    for start in range(0, len(tokens), 1 << 20):  # bincount makes an int64 copy of what it is given
        counts += np.bincount(tokens[start : start + (1 << 20)], minlength=len(counts))
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


def check_paths(files: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Returns the files of a configuration as strings; DataError for anything but paths."""
    if isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Iterable):
        raise DataError(f"files={files!r} must be a tuple of paths, such as ('corpus.txt',)")
    return tuple(check_path("files", path) for path in files)


def check_path(name: str, value: str | os.PathLike[str]) -> str:
    """Returns a path as a string; DataError, which begins with `name`, if it is none."""
    if not isinstance(value, str | os.PathLike):
        raise DataError(f"{name}: {value!r} is not a path; give a string")
    return os.fspath(value)


def _token_array(documents: list[bytes], tokenizer: Tokenizer) -> np.ndarray:
    """Returns the ids of all documents, each with its end, in the smallest fitting dtype."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    end = np.array([tokenizer.end_id], dtype)
    parts: list[np.ndarray] = []
    for number, document in enumerate(documents):
        ids = check_ids(tokenizer.encode(document), tokenizer.vocab_size, f"document {number}")
        parts += (ids.astype(dtype), end)
    return np.concatenate(parts)


class _Windows:
    """Record i is tokens[i * seq_len : i * seq_len + seq_len + 1]."""

    def __init__(self, tokens: np.ndarray, seq_len: int):
        self._tokens, self._seq_len = tokens, seq_len
        if len(self) < 1:
            raise DataError(
                f"seq_len={seq_len} needs at least {seq_len + 1} tokens and there are "
                f"{len(tokens)}; give more text or a shorter seq_len"
            )

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self._seq_len
        window = self._tokens[start : start + self._seq_len + 1]
        return {"tokens": window.astype(np.int32)}


class _Records:
    """The records of a `TokenRecords`, as rows of tokens."""

    def __init__(self, config: TokenRecords):
        self._config, self._records = config, RecordFiles(config.files)
        self._dtype = np.dtype(_RECORD_DTYPES[config.dtype])

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        data, where = self._records[index], self._records.where(index)
        expected = (self._config.seq_len + 1) * self._dtype.itemsize
        if len(data) != expected:
            raise DataError(
                f"{where} has {len(data)} bytes; seq_len={self._config.seq_len} and "
                f"dtype={self._config.dtype!r} need {expected}"
            )
        ids = check_ids(np.frombuffer(data, self._dtype), self._config.vocab_size, where)
        return {"tokens": ids.astype(np.int32)}
