"""The files of a run beside its checkpoints, kept in a local folder and published in a bucket.

A file of rows only grows, and an object cannot: it is published in parts, of which the last is
written again until it is large enough. The first part has the name of the file, so that a short
run in a bucket, copied to a disk, is a run directory. Each change leaves a beginning of the file.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from elastix.object_store.bucket import Bucket, BucketError

PART = 4 << 20
"""Bytes from which on a part is not written again."""

_ROWS = re.compile(r"([^/]+\.jsonl)(?:\.part-(\d{6,}))?")
_WHOLE = re.compile(r"[^/]+\.json")


class _Part(NamedTuple):
    """A part as it was published: where it begins in the file, its size, and its crc32."""

    start: int
    size: int
    crc: int

    @property
    def end(self) -> int:
        return self.start + self.size


class Mirror:
    """The files in `folder` and their copies in `bucket`; one process writes both."""

    def __init__(self, bucket: Bucket, folder: Path, part: int = PART):
        self._bucket, self._folder, self._size = bucket, folder, part
        self._parts: dict[str, list[_Part]] = {}
        self._count: dict[str, int] = {}
        """How many parts of each file there are in the bucket, true ones or not."""
        self._whole: dict[str, bytes] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    def download(self) -> None:
        """Make the folder hold what the bucket holds.

        Raises:
            BucketError: a part is missing, or cannot be read.
            OSError: the folder cannot be written.
        """
        names = self._bucket.names()
        for name in filter(_WHOLE.fullmatch, names):
            self._whole[name] = _present(self._bucket, name)
            (self._folder / name).write_bytes(self._whole[name])
        for name in sorted({match[1] for name in names if (match := _ROWS.fullmatch(name))}):
            self._parts[name] = parts = []
            with (self._folder / name).open("wb") as file:
                for data in part_contents(self._bucket, name, names):
                    parts.append(_Part(file.tell(), len(data), zlib.crc32(data)))
                    file.write(data)
            self._count[name] = len(parts)

    def publish(self) -> None:
        """Write to the bucket what has changed in the folder since.

        Raises:
            BucketError: the bucket does not take it; the next call tries again.
        """
        for path in sorted(self._folder.glob("*.jsonl")):
            self._publish_rows(path)
        for path in sorted(self._folder.glob("*.json")):
            data = path.read_bytes()
            if self._whole.get(path.name) != data:
                self._bucket.write(path.name, data)
                self._whole[path.name] = data

    def _publish_rows(self, path: Path) -> None:
        stat = path.stat()
        state = stat.st_size, stat.st_mtime_ns
        if self._seen.get(path.name) == state:
            return
        with path.open("rb") as file:
            parts = self._parts.setdefault(path.name, [])
            while parts and not _matches(file, parts[-1]):  # rows were taken back
                parts.pop()
            first = len(parts)
            if parts and parts[-1].size < self._size:
                first -= 1
            self._keep(path.name, first + 1)
            self._write_parts(file, path.name, first)
            self._keep(path.name, len(parts))
        self._seen[path.name] = state

    def _keep(self, name: str, count: int) -> None:
        """Delete the parts after the first `count`, which are not true any more, last first."""
        while self._count.get(name, 0) > count:
            self._bucket.delete(part_name(name, self._count[name] - 1))
            self._count[name] -= 1

    def _write_parts(self, file: IO[bytes], name: str, first: int) -> None:
        parts = self._parts[name]
        start = parts[first].start if first < len(parts) else parts[-1].end if parts else 0
        file.seek(start)
        for number, data in enumerate(_cut(file, self._size), first):
            part = _Part(start, len(data), zlib.crc32(data))
            if parts[number:] != [part]:
                self._bucket.write(part_name(name, number), data)
                parts[number:] = [part]
                self._count[name] = max(self._count.get(name, 0), number + 1)
            start = part.end


class BucketFile:
    """A file of rows in a bucket, which is only read."""

    def __init__(self, bucket: Bucket, name: str):
        self._bucket, self._name = bucket, name

    def open(self, mode: str = "rb") -> IO[bytes]:
        """All parts of it, as one file of bytes.

        Raises:
            FileNotFoundError: there is none.
            BucketError: it cannot be read.
        """
        names = self._bucket.names(self._name)
        if self._name not in names:
            raise FileNotFoundError(f"{self} does not exist")
        return io.BufferedReader(_Joined(part_contents(self._bucket, self._name, names)))

    def exists(self) -> bool:
        return self._bucket.read(self._name) is not None

    def __str__(self) -> str:
        return self._bucket.where(self._name)


class _Joined(io.RawIOBase):
    """Pieces of bytes as one file, of which one piece is in memory at a time."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._piece = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = memoryview(piece)
        count = min(len(buffer), len(self._piece))
        buffer[:count], self._piece = self._piece[:count], self._piece[count:]
        return count


def part_name(name: str, number: int) -> str:
    """The object that holds part `number`, counted from 0, of a file."""
    return name if number == 0 else f"{name}.part-{number:06d}"


def part_contents(bucket: Bucket, name: str, names: list[str]) -> Iterator[bytes]:
    """The parts of a file among the objects `names`, in order.

    Raises:
        BucketError: one is missing, or cannot be read.
    """
    count = sum((match := _ROWS.fullmatch(n)) is not None and match[1] == name for n in names)
    for number in range(count):
        yield _present(bucket, part_name(name, number))


def _present(bucket: Bucket, name: str) -> bytes:
    data = bucket.read(name)
    if data is None:
        raise BucketError(f"{bucket.where(name)} is missing: put it back")
    return data


def _matches(file: IO[bytes], part: _Part) -> bool:
    file.seek(part.start)
    return zlib.crc32(file.read(part.size)) == part.crc


def _cut(file: IO[bytes], size: int) -> Iterator[bytes]:
    """The rest of the file in parts of whole lines, each of `size` bytes or little more but the
    last. A line without its end is left out."""
    while data := file.read(size):
        data += b"" if data.endswith(b"\n") else file.readline()
        if whole := data[: data.rfind(b"\n") + 1]:
            yield whole
