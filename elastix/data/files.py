"""Text files as documents of bytes, and what identifies them: names, sizes and hashes."""

import hashlib
import json
import os
import stat
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastix.data.stream import DataError

# Tests are a third of the library's bytes and mostly tables; the others come and go with the
# distributor, or are no part of it.
_NOT_CORPUS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
_NOT_CORPUS |= {"site-packages", "dist-packages", "__pycache__"}


# Of a field of a configuration: it decides no batch, so a run may be resumed with another value.
# What the files at a path hold is in the fingerprint of the stream, which is held to as well.
NO_IDENTITY = {"identity": False}


@dataclass(frozen=True)
class Corpus:
    """Documents in order, as UTF-8 bytes, and the {name, size, sha256} of the files they are in."""

    documents: list[bytes]
    files: list[dict[str, object]]


def file_problem(path: str) -> str | None:
    """Returns what is wrong with `path` as a file to read, to follow its name; None if nothing."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            return "is a directory"
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"  # reading a named pipe would wait for ever
        with open(path, "rb"):
            pass
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    return "is empty" if status.st_size == 0 else None


def file_identity(path: str) -> dict[str, object]:
    """Returns the {name, size in bytes, sha256} of a file, without the folder it happens to be in.

    The whole file is read, at the speed of the disk or about 1 GB/s. DataError if it cannot be.
    """
    if problem := file_problem(path):
        raise DataError(f"{path!r} {problem}; name a file with data in it")
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": os.path.basename(path), "size": os.path.getsize(path), "sha256": sha256}


def text_corpus(paths: tuple[str, ...]) -> Corpus:
    """Reads `.txt` files, one document each, and `.jsonl` files, one document a line.

    Raises DataError for a file that is missing, empty, of another suffix or not UTF-8 text, and
    for a JSON line without a string "text".
    """
    documents, files = [], []
    for path in paths:
        split = _splitter(path)
        if problem := file_problem(path):
            raise DataError(f"{path!r} {problem}; name a .txt or .jsonl file with text in it")
        data = _text(path)
        documents += split(path, data)
        sha256 = hashlib.sha256(data).hexdigest()
        files.append({"name": os.path.basename(path), "size": len(data), "sha256": sha256})
    return Corpus(documents, files)


def stdlib_corpus() -> Corpus:
    """Reads the source of Python's own standard library, about 10 MB: text on every machine.

    One document a module, sorted by path, without tests and what distributors leave out. It
    differs from one Python release to the next. DataError where the source is not installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(_modules(root), key=lambda path: path.relative_to(root).as_posix())
    documents = [path.read_bytes() for path in paths]
    if not sum(map(len, documents)):
        raise DataError(f"no Python source under {str(root)!r}; give Text(files=...) of your own")
    sha256 = hashlib.sha256()
    for path, document in zip(paths, documents, strict=True):
        sha256.update(f"{path.relative_to(root).as_posix()}\0{len(document)}\0".encode())
        sha256.update(document)
    name = f"standard library of Python {'.'.join(map(str, sys.version_info[:3]))}"
    size = sum(map(len, documents))
    return Corpus(documents, [{"name": name, "size": size, "sha256": sha256.hexdigest()}])


def _modules(root: Path) -> list[Path]:
    found = []
    # os.walk, not rglob: it does not descend into site-packages, which may be huge.
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_CORPUS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return found


def _splitter(path: str) -> Callable[[str, bytes], list[bytes]]:
    suffix = Path(path).suffix.lower()
    if suffix == ".txt":
        return lambda _, data: [data]
    if suffix == ".jsonl":
        return _json_documents
    if suffix in (".arrayrecord", ".array_record"):
        raise DataError(f"{path!r} holds records, not text; use TokenRecords(files=...)")
    raise DataError(f"{path!r} has the suffix {suffix!r}; use .txt or .jsonl")


def _text(path: str) -> bytes:
    return check_text(path, Path(path).read_bytes())


def check_text(path: str, data: bytes, start: int = 0) -> bytes:
    """Returns `data`, which stands at byte `start` of the file; DataError if it is not UTF-8."""
    if (nul := data.find(b"\0")) >= 0:
        raise DataError(f"{path!r} is not text (NUL byte at {start + nul}); give UTF-8 text")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        where = f"byte {data[error.start]:#04x} at {start + error.start}"
        raise DataError(f"{path!r} is not UTF-8 text ({where}); convert it to UTF-8") from None
    return data


def _json_documents(path: str, data: bytes) -> list[bytes]:
    # Split at newlines alone: str.splitlines also splits at U+2028, which JSON strings may hold.
    lines = enumerate(data.split(b"\n"), 1)
    documents = [json_text(path, number, line) for number, line in lines if line.strip()]
    if not documents:
        raise DataError(f"{path!r} has only blank lines; write one JSON object a line")
    return documents


def json_text(path: str, number: int, line: bytes, field: str = "text") -> bytes:
    """Returns the string `field` of a line of JSON, as UTF-8; DataError, with the line's number,
    counted from 1, if it has none."""
    wanted = json.dumps(field)
    try:
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get(field), str):
            return row[field].encode()  # fails for half a surrogate pair
        reason = f"no {wanted} string"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise DataError(
        f"{path!r} line {number}: {reason}; write one object with a {wanted} string a line"
    )
