"""Where a run directory lives: on a local disk, with a lock, or elsewhere, with a local copy."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from elastix.checkpoint_folder import PROBE, Folder, LocalFolder
from elastix.durable import sync
from elastix.object_store.bucket import bucket_url
from elastix.object_store.home import BucketHome


class Home(Protocol):
    """One run directory and this process's right to write it.

    All methods raise OSError if the place cannot be read or written.
    """

    name: str
    """What the user calls it: a path or a URL."""
    path: Path
    """The local folder that its files but the checkpoints are written in."""

    def foreign(self) -> str | None:
        """The first of what lies there beside a lock; None if it is empty or does not exist."""
        ...

    def claim(self) -> None:
        """Make it, and from now on be the only one to write there; have its files in `path`.

        Raises:
            ValueError: another process is, with its name.
        """
        ...

    def sign(self) -> None:
        """Say who has claimed it, once nothing about it was refused."""
        ...

    def checkpoints(self) -> Folder:
        """Where its checkpoints lie."""
        ...

    def when_lost(self, tell: Callable[[], object]) -> None:
        """Call `tell` if another process takes it away, from another thread."""
        ...

    def publish(self) -> None:
        """Make what was written in `path` so far durable where the run directory lives."""
        ...

    def close(self) -> None:
        """Publish the last of it, and let others write there."""
        ...

    def give_up(self) -> None:
        """Let others write there, with nothing published: it was refused."""
        ...


def open_home(where: str | Path) -> Home:
    """The place that a path or a URL names. Nothing is made there yet.

    Raises:
        ValueError: it is a URL of a kind that is not known.
        OSError: it cannot be reached.
    """
    url = bucket_url(where)
    return LocalHome(Path(where)) if url is None else BucketHome(url)


class LocalHome:
    """A directory, with a lock file in it that the system frees when the process ends.

    Raises:
        ValueError: its path is not UTF-8, and no checkpoint could be written there.
    """

    def __init__(self, path: Path):
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ValueError(f"run directory {str(path)!r} is not UTF-8: choose another") from None
        self.path, self.name = path, str(path)
        self._lock: TextIO | None = None

    def foreign(self) -> str | None:
        found = self.path.iterdir() if self.path.exists() else ()
        return min((p.name for p in found if not _is_of_a_start(p)), default=None)

    def claim(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            pid = self._lock.read().strip() or "unknown"
            raise ValueError(
                f"run directory {self.path} is in use by process {pid}: wait for it or choose "
                "another"
            ) from error

    def sign(self) -> None:
        """Past the buffer, which could not be closed on a full disk."""
        assert self._lock
        os.ftruncate(self._lock.fileno(), 0)
        os.pwrite(self._lock.fileno(), f"{os.getpid()}\n".encode(), 0)

    def checkpoints(self) -> Folder:
        return LocalFolder(self.path / "checkpoints")

    def when_lost(self, tell: Callable[[], object]) -> None:
        """Nobody can take a locked directory away."""

    def publish(self) -> None:
        """It is there; now it stays, with the folder it is in, even if the power is cut."""
        with contextlib.suppress(OSError):  # a folder that may be entered and not read
            sync(self.path.absolute().parent)

    def close(self) -> None:
        if self._lock:
            self._lock.close()

    give_up = close


def _is_of_a_start(path: Path) -> bool:
    """Whether a run that was killed before it had a recipe.json may have left this."""
    if path.name == "checkpoints" and path.is_dir():
        return all(inner.name == PROBE for inner in path.iterdir())
    return path.name in ("lock", "recipe.tmp")
