"""Documents by number, from files of text, of JSON lines and of ArrayRecords.

Where each document lies is found in one pass that also checks all of them, and is kept in the
cache: opened again, files are hashed and nothing in them is looked for. There is no Parquet: what
reads it, pyarrow, is larger than all that elastix needs together. Write JSON lines from it.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np

from elastix.data.cache import ArrayWriter, cached_arrays
from elastix.data.files import check_text, file_identity, file_problem, json_text, stdlib_corpus
from elastix.data.records import RECORD_SUFFIXES, RecordFiles
from elastix.data.stream import DataError

FORMATS = ("auto", "text", "jsonl", "arrayrecord")
_SUFFIXES = {".txt": "text", ".jsonl": "jsonl"} | dict.fromkeys(RECORD_SUFFIXES, "arrayrecord")
_CHUNK = 1 << 16
"""Documents of which the places are written at once."""


class Documents(Protocol):
    """Random access to documents, as UTF-8 bytes.

    `sizes` is int64 [n]: how much of its file each takes, in bytes. `fingerprint` holds JSON values
    and says which documents these are.
    """

    fingerprint: dict[str, object]

    @property
    def sizes(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> bytes: ...


def open_documents(
    files: Sequence[str], format: str = "auto", field: str = "text", separator: str = ""
) -> Documents:
    r"""Returns the documents of files, in their order; no files: Python's standard library.

    `format` is "text" (a file is a document, or what stands between two `separator`s, such as
    "\n\n", if it is not blank), "jsonl" (a line is an object with the string `field`; blank lines
    are skipped), "arrayrecord" (a record is the UTF-8 text of a document) or "auto", which goes by
    the suffixes .txt, .jsonl and .arrayrecord. Raises DataError for files that cannot be read,
    that hold no documents, or one that will not do: it names the file and the line.
    """
    if not files:
        return _StandardLibrary()
    parts = [_open(path, _format_of(path, format), field, separator) for path in files]
    return parts[0] if len(parts) == 1 else _Joined(parts)


def check_format(format: str) -> None:
    """Raises DataError unless `format` is one that `open_documents` knows."""
    if format not in FORMATS:
        raise DataError(f"format={format!r} must be one of {', '.join(FORMATS)}")


def _format_of(path: str, format: str) -> str:
    check_format(format)
    if format != "auto":
        return format
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise DataError(
            f"{path!r} has the suffix {suffix!r}, which tells no format; name it .txt, .jsonl or "
            ".arrayrecord, or give the format"
        )
    return _SUFFIXES[suffix]


def _open(path: str, format: str, field: str, separator: str) -> Documents:
    if problem := file_problem(path):
        raise DataError(f"{path!r} {problem}; name a file with documents in it")
    if format == "text":
        return TextFile(path, separator)
    return JsonLines(path, field) if format == "jsonl" else DocumentRecords(path)


class _IndexedFile:
    """A file, and where in it each document lies: int64 [n, 3], begin, end and line."""

    def __init__(self, path: str, options: dict[str, object]):
        self.path = path
        # Without this a file that is being written would put into the cache, under the hash of what
        # it was, documents that it has become.
        self._written = _written(os.stat(path))
        # The file without its name: under another one it has the same documents.
        identity = file_identity(path)
        what = {"kind": "places", **options, "sha256": identity["sha256"]}
        self._places = cached_arrays(what, self._write_places).arrays["places"]
        if not len(self._places):
            raise DataError(f"{path!r} has no documents, only blank ones; give one with text")
        self.fingerprint = {"files": [identity], **options, "documents": len(self)}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def sizes(self) -> np.ndarray:
        return self._places[:, 1] - self._places[:, 0]

    def _places_in(self, data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
        raise NotImplementedError

    def _write_places(self, writer: ArrayWriter) -> None:
        rows: list[tuple[int, int, int]] = []
        for place in self._checked_places():
            rows.append(place)
            if len(rows) == _CHUNK:
                writer.append("places", np.array(rows, np.int64))
                rows.clear()
        writer.append("places", np.array(rows, np.int64).reshape(-1, 3))

    def _checked_places(self) -> Iterator[tuple[int, int, int]]:
        try:
            with open(self.path, "rb") as file:
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                    yield from self._places_in(data)
                self._refuse_change(file.fileno())
        except OSError as error:
            raise DataError(f"{self.path!r} cannot be read ({error.strerror})") from None

    def _read(self, index: int) -> tuple[bytes, int]:
        """The bytes of a document in the file, and its line."""
        begin, end, line = self._places[index].tolist()
        try:
            with open(self.path, "rb") as file:
                self._refuse_change(file.fileno())
                return os.pread(file.fileno(), end - begin, begin), line
        except OSError as error:
            raise DataError(f"{self.path!r} cannot be read ({error.strerror})") from None

    def _refuse_change(self, fd: int) -> None:
        if _written(os.fstat(fd)) != self._written:
            raise DataError(f"{self.path!r} was changed while it was in use; start again")


def _written(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


class TextFile(_IndexedFile):
    """A file of UTF-8 text: one document, or one between two separators."""

    def __init__(self, path: str, separator: str = ""):
        try:
            self._separator = separator.encode()
        except UnicodeEncodeError:
            raise DataError(f"separator={separator!r} is not UTF-8; give one that is") from None
        super().__init__(path, {"format": "text", "separator": separator})

    def __getitem__(self, index: int) -> bytes:
        return self._read(index)[0]

    def _places_in(self, data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
        begin, line = 0, 1
        while begin <= len(data):
            end = data.find(self._separator, begin) if self._separator else -1
            end = len(data) if end < 0 else end
            document = check_text(self.path, data[begin:end], begin)
            if document.strip():
                yield begin, end, line
            line += document.count(b"\n") + self._separator.count(b"\n")
            begin = end + (len(self._separator) or 1)


class JsonLines(_IndexedFile):
    """A file of JSON lines, each an object that has a document as the string `field`."""

    def __init__(self, path: str, field: str = "text"):
        self._field = field
        super().__init__(path, {"format": "jsonl", "field": field})

    def __getitem__(self, index: int) -> bytes:
        data, line = self._read(index)
        return json_text(self.path, line, data, self._field)

    def _places_in(self, data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
        begin = 0
        for number, line in enumerate(iter(data.readline, b""), 1):
            if line.strip():
                check_text(self.path, line, begin)  # or JSON would guess at UTF-16 and the like
                json_text(self.path, number, line, self._field)
                yield begin, begin + len(line), number
            begin += len(line)


class DocumentRecords:
    """An ArrayRecord file, written with group_size:1, whose records are UTF-8 text."""

    def __init__(self, path: str):
        self._records = RecordFiles([path])
        identity = file_identity(path)
        what = {"kind": "record sizes", "sha256": identity["sha256"]}
        self.sizes = cached_arrays(what, self._write_sizes).arrays["sizes"]
        options = {"format": "arrayrecord", "documents": len(self)}
        self.fingerprint: dict[str, object] = {"files": [identity], **options}

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> bytes:
        return self._records[index]

    def _write_sizes(self, writer: ArrayWriter) -> None:
        for index in range(len(self)):
            where = self._records.where(index)
            size = len(check_text(where, self._records[index]))
            writer.append("sizes", np.array([size], np.int64))


class _StandardLibrary:
    """The source of Python's own standard library, a document a module: text on every machine."""

    def __init__(self) -> None:
        corpus = stdlib_corpus()
        self._documents = corpus.documents
        self.sizes = np.array([len(document) for document in corpus.documents], np.int64)
        self.fingerprint: dict[str, object] = {"files": corpus.files, "documents": len(self)}

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> bytes:
        return self._documents[index]


class _Joined:
    """The documents of several files, one after the other."""

    def __init__(self, parts: Sequence[Documents]):
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))
        self.fingerprint: dict[str, object] = {"parts": [part.fingerprint for part in parts]}

    @property
    def sizes(self) -> np.ndarray:
        return np.concatenate([part.sizes for part in self._parts])

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> bytes:
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]
