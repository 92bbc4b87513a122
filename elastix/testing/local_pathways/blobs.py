"""Bytes on their way between client, server and slices: small ones in memory, large ones in files
without a name that are handed on and never mapped by the server, whose memory stays small."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator

INLINE = 1 << 16
"""Up to so many bytes travel in the message itself."""
CHUNK = 1 << 20


class SharedFile:
    """An unlinked file in memory, passed on by its descriptor; closed with its last reference."""

    def __init__(self, fd: int, size: int = 0):
        self.fd, self.size = fd, size
        weakref.finalize(self, os.close, fd)

    @classmethod
    def new(cls) -> SharedFile:
        """An empty one: in memory where the system can, else in the directory for such files."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("elastix"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def append(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            written = os.pwrite(self.fd, rest, self.size)
            self.size, rest = self.size + written, rest[written:]


Blob = bytes | SharedFile


def pack(data: memoryview) -> Blob:
    """The bytes of a C-contiguous buffer."""
    return collect([data])


def collect(chunks: Iterable[bytes | memoryview]) -> Blob:
    """The bytes of all chunks; no more than `INLINE` of them are held in memory."""
    small, file = bytearray(), None
    for chunk in chunks:
        if file is None and len(small) + memoryview(chunk).nbytes > INLINE:
            file = SharedFile.new()
            file.append(bytes(small))
        if file is None:
            small += chunk
        else:
            file.append(chunk)
    return bytes(small) if file is None else file


def view(blob: Blob) -> memoryview:
    """Its bytes, to be read; those of a file are mapped."""
    if isinstance(blob, bytes):
        return memoryview(blob)
    return memoryview(mmap.mmap(blob.fd, blob.size, prot=mmap.PROT_READ))


def chunks(blob: Blob) -> Iterator[bytes]:
    """Its bytes in pieces of at most `CHUNK`; at least one, which may be empty."""
    if isinstance(blob, bytes):
        yield blob
        return
    for start in range(0, blob.size, CHUNK):
        yield os.pread(blob.fd, CHUNK, start)
