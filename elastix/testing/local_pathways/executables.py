"""Executables kept in a directory, so that a program is compiled once and not once for each server.

What is kept is what the compiler gives, and every slice loads the same bytes either way: a program
that was kept gives the bits of one compiled anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from elastix.testing.local_pathways import messages, runtime
from elastix.testing.local_pathways.messages import Compile, Compiled

Made = tuple[bytes, Compiled]
"""An executable, serialized, and what is known of it."""
MOST_BYTES = 1 << 30
"""What a directory holds at most: thousands of executables of small models."""
_DIGEST = hashlib.sha256().digest_size
_HALF = ".half"
_OURS = re.compile(rf"[0-9a-f]{{64}}|tmp.*{re.escape(_HALF)}")
"""What may be removed: executables, and what a process that was killed had half written."""


class File(NamedTuple):
    """A file of ours, when it was used, and how large it is."""

    used: int
    path: Path
    size: int


class Directory:
    """One file for each program, by a name that stands for all that matters to it. Of more than
    `most` bytes, those that were used least recently go."""

    def __init__(self, path: Path, most: int = MOST_BYTES):
        self._path, self._most = path, most

    def get(self, name: str, make: Callable[[], Made]) -> Made:
        """What is kept under this name; else what `make` makes, which is kept from now on. A file
        that is torn, or that cannot be written, is no error: it costs time."""
        kept = self._read(name)
        if kept is None:
            kept = make()
            with contextlib.suppress(OSError):
                self._write(name, kept)
        return kept

    def _read(self, name: str) -> Made | None:
        try:
            data = (self._path / name).read_bytes()
            self._used(self._path / name)
        except OSError:
            return None
        digest, body = data[:_DIGEST], data[_DIGEST:]
        return pickle.loads(body) if hashlib.sha256(body).digest() == digest else None

    def _write(self, name: str, made: Made) -> None:
        """Whole or not at all, whoever else writes it."""
        self._path.mkdir(parents=True, exist_ok=True)
        body = pickle.dumps(made)
        with tempfile.NamedTemporaryFile(dir=self._path, suffix=_HALF, delete=False) as file:
            try:
                file.write(hashlib.sha256(body).digest() + body)
                file.flush()
                os.replace(file.name, self._path / name)
            except BaseException:
                os.unlink(file.name)
                raise
        self._evict()

    def _used(self, path: Path) -> None:
        """Note the time: a system may not by itself. Who may only read it leaves no trace."""
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def _evict(self) -> None:
        """The one that was used last stays, however large; one that another process reads just now
        it reads to the end."""
        held = 0
        for file in sorted(self._files(), reverse=True):
            held += file.size
            if held > self._most and held > file.size:
                file.path.unlink(missing_ok=True)

    def _files(self) -> list[File]:
        found = []
        for path in self._path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                if _OURS.fullmatch(path.name):
                    stat = path.stat()
                    found.append(File(stat.st_atime_ns, path, stat.st_size))
        return found


def name_of(command: Compile, program: bytes, num_devices: int, system: Mapping[str, str]) -> str:
    """A name for an executable: of the program, its options and devices, how many devices there
    are, and the system that compiles it."""
    digest = hashlib.sha256()
    for part in (program, command.options, repr((command.assignment, num_devices)).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(repr(sorted(system.items())).encode())
    return digest.hexdigest()


def this_system() -> dict[str, str]:
    """What an executable depends on beside its program: jaxlib, the flags of XLA, the processor,
    and the code here that compiles it and tells what is known of it."""
    from jaxlib import version

    return {
        "jaxlib": version.__version__,
        "flags": os.environ.get("XLA_FLAGS", ""),
        "processor": _processor(),
        "threads": str(os.cpu_count()),
        "code": _digest_of(runtime, messages),
    }


def _digest_of(*modules: ModuleType) -> str:
    return hashlib.sha256(b"".join(_source(module) for module in modules)).hexdigest()


def _source(module: ModuleType) -> bytes:
    assert module.__file__
    return Path(module.__file__).read_bytes()


def _processor() -> str:
    """With its features, where the system tells."""
    lines = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return "\n".join([platform.machine(), *told])
