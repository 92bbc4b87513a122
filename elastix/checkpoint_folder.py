"""Where checkpoints lie: what a store asks of a folder of them, and the folder on a local disk.

What differs from place to place is how a checkpoint is committed, removed and set aside, and is
here alone: on a disk it is by renames and syncs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from orbax.checkpoint import v1 as ocp

from elastix.checkpoint_format import CHUNK
from elastix.durable import sync

TMP = ".orbax-checkpoint-tmp"
PROBE = ".elastix-probe"
STEP = re.compile(r"0|[1-9][0-9]*")
SET_ASIDE = re.compile(rf"set-aside-({STEP.pattern})-({STEP.pattern})")
_TEMPORARY = re.compile(rf"({STEP.pattern}){re.escape(TMP)}(-.*)?")


class Stamp(NamedTuple):
    """When a checkpoint was written, in seconds since 1970, or None if nobody knows; and what
    changes when another takes its place."""

    written_at: float | None
    identity: Hashable


class Folder(Protocol):
    """Checkpoints by step. A method raises what its place raises when it fails: OSError mostly."""

    @property
    def root(self) -> Path | str:
        """Where it is, for messages."""
        ...

    @property
    def deadline(self) -> float | None:
        """Seconds after which a read that has no answer has failed; None: it is waited for."""
        ...

    def committed(self) -> list[int]:
        """The steps that were committed, in any order."""
        ...

    def unfinished(self) -> list[int]:
        """The steps that are being written or removed, or were; in any order, some twice."""
        ...

    def holds(self, step: int) -> bool:
        """Whether anything lies where a checkpoint of `step` would."""
        ...

    def size(self, step: int) -> int:
        """The bytes of all files of `step`."""
        ...

    def stamp(self, step: int) -> Stamp:
        """Raises FileNotFoundError if there is no such checkpoint."""
        ...

    def document(self, step: int) -> Any:
        """The custom metadata that Orbax keeps with `step`."""
        ...

    def array(self, step: int) -> dict[str, Any]:
        """The array database of `step`, as a `kvstore` of TensorStore."""
        ...

    def aside(self) -> list[tuple[int, int]]:
        """(step, k) of each `set-aside-<step>-<k>`, in any order."""
        ...

    def aside_path(self, step: int, k: int) -> Path | str:
        """Where that lies."""
        ...

    def why_aside(self, step: int, k: int) -> str:
        """Why it was set aside; "" if that is not on record."""
        ...

    def prepare(self) -> None:
        """Make it ready to be written, and remove what is unfinished."""
        ...

    def write(self, step: int, document: dict[str, Any], packed: np.ndarray) -> None:
        """Commit a checkpoint, where none lies; it is durable at the end."""
        ...

    def remove(self, step: int) -> None:
        """Delete `step` and what is unfinished of it, so that no half of it is ever committed."""
        ...

    def set_aside(self, step: int, why: str) -> int:
        """Take `step` out of use, and return the k of its new name."""
        ...

    def put_back(self, step: int, k: int) -> None:
        """Undo that."""
        ...


class LocalFolder:
    """Checkpoints on a local disk: `<step>/`, renamed to that when it is complete."""

    deadline: float | None = None

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self._context = orbax_context()

    def committed(self) -> list[int]:
        # Orbax takes any directory with a number for a checkpoint, an empty one too.
        found = [p for p in self.root.iterdir() if STEP.fullmatch(p.name) and p.is_dir()]
        return [int(path.name) for path in found if any(path.iterdir())]

    def unfinished(self) -> list[int]:
        return [step for step, _ in self._temporaries()]

    def holds(self, step: int) -> bool:
        return os.path.lexists(self._path(step))

    def size(self, step: int) -> int:
        files = (path for path in self._path(step).rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in files)

    def stamp(self, step: int) -> Stamp:
        stat = self._path(step).stat()
        return Stamp(stat.st_mtime, stat.st_ino)

    def document(self, step: int) -> Any:
        _refuse_unreadable(self._path(step))
        return ocp.metadata(self._path(step)).custom_metadata

    def array(self, step: int) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self._path(step)}/state/"}

    def aside(self) -> list[tuple[int, int]]:
        matches = [m for p in self.root.iterdir() if (m := SET_ASIDE.fullmatch(p.name))]
        return [(int(m[1]), int(m[2])) for m in matches]

    def aside_path(self, step: int, k: int) -> Path:
        return self.root / f"set-aside-{step}-{k}"

    def why_aside(self, step: int, k: int) -> str:
        try:
            return _note(self.aside_path(step, k)).read_text(encoding="utf-8").strip()
        except OSError:  # none was written, or it is being put back
            return ""

    def prepare(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_temporaries()
        probe = self.root / PROBE
        probe.write_bytes(b"probe")
        probe.unlink()

    def write(self, step: int, document: dict[str, Any], packed: np.ndarray) -> None:
        if not self.root.is_dir():  # Orbax would make a new one, perhaps on another disk
            raise FileNotFoundError(f"{self.root} is gone")
        self._remove_temporaries()  # of a save that failed and could not remove its own
        path = self._path(step)
        with self._context:
            ocp.save(path, {"leaves": packed}, custom_metadata=document)
        # Orbax syncs its arrays, but not its metadata files nor the rename.
        for written in (*path.rglob("*"), path, self.root):
            sync(written)

    def remove(self, step: int) -> None:
        self._remove_temporaries(step)
        if self.holds(step):
            # Renamed first: killed half way, no half-deleted step is left with a good name.
            trash = self.root / f"{step}{TMP}-removed"
            os.rename(self._path(step), trash)
            sync(self.root)
            shutil.rmtree(trash)

    def set_aside(self, step: int, why: str) -> int:
        paths = ((k, self.aside_path(step, k)) for k in itertools.count())
        k, target = next((k, p) for k, p in paths if not p.exists() and not _note(p).exists())
        os.rename(self._path(step), target)
        sync(self.root)
        with contextlib.suppress(OSError):  # a full disk must not stop a recovery
            _note(target).write_text(why + "\n", encoding="utf-8")
        return k

    def put_back(self, step: int, k: int) -> None:
        moved = self.aside_path(step, k)
        os.rename(moved, self._path(step))
        _note(moved).unlink()

    def _path(self, step: int) -> Path:
        return self.root / str(step)

    def _temporaries(self) -> list[tuple[int, Path]]:
        matches = [(_TEMPORARY.fullmatch(p.name), p) for p in self.root.iterdir() if p.is_dir()]
        return [(int(match[1]), path) for match, path in matches if match]

    def _remove_temporaries(self, step: int | None = None) -> None:
        for unfinished, path in self._temporaries():
            if step in (None, unfinished):
                shutil.rmtree(path)


def orbax_context(file_size: int | None = None) -> ocp.Context:
    """How Orbax writes: in chunks of CHUNK bytes, into files of about `file_size` bytes."""
    context = ocp.Context()
    context.array.saving.use_compression = False  # slow, and weights hardly compress
    context.array.saving.storage_options.chunk_byte_size = CHUNK
    if file_size is not None:
        context.array.saving.ocdbt_target_data_file_size = file_size
    context.memory.deepcopy_host_arrays = False  # what is saved is a copy already
    # Made in the background, they keep threads, and the exit, for five minutes if it fails.
    context.asynchronous.create_directories_asynchronously = False
    return context


def _refuse_unreadable(path: Path) -> None:
    """To Orbax a file that this process may not open is not there, and a good checkpoint is none.

    Raises OSError for one that it may not; those that are missing, Orbax tells.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.listdir(path / "state")
        os.stat(path / "state" / "manifest.ocdbt")
        os.close(os.open(path / "_CHECKPOINT_METADATA", os.O_RDONLY))


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".txt")
