"""Checkpoints as objects of a bucket: `<step>/`, committed by a marker that is written last.

Orbax writes each into a local folder, and its files go to the bucket as they are: what lies there
is what Orbax itself would read, and its own marker, `commit_success.txt`, is the commit. It does
not write there by itself, since it neither bounds how long its requests are tried, nor keeps what
another process wrote from being overwritten.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from elastix.checkpoint_folder import SET_ASIDE, STEP, Stamp, orbax_context
from elastix.object_store.bucket import Bucket, BucketError

MARKER = "commit_success.txt"
_DOCUMENT = "_CHECKPOINT_METADATA"
_FILE_SIZE = 64 << 20
"""Bytes of a file of arrays, or some more: it is in memory while it is on its way."""


class BucketFolder:
    """The checkpoints below `folder` of a bucket.

    Args:
        require: raises unless this process may write there; asked before each group of changes.
        scratch: a local folder with room for a checkpoint; by default the system's temporary one.
        publish: makes the rows of all steps so far durable. It is called before a checkpoint is
            committed, which must not be there without them, and before the last `require`.
    """

    def __init__(
        self,
        bucket: Bucket,
        folder: str = "checkpoints",
        require: Callable[[], None] = lambda: None,
        publish: Callable[[], None] = lambda: None,
        scratch: Path | None = None,
    ):
        self._bucket, self._folder = bucket, folder
        self._require, self._publish, self._scratch = require, publish, scratch
        self._context = orbax_context(_FILE_SIZE)

    @property
    def root(self) -> str:
        """The URL of the folder."""
        return self._bucket.where(self._folder)

    @property
    def deadline(self) -> float:
        return self._bucket.deadline

    def committed(self) -> list[int]:
        return [step for step, names in self._steps().items() if MARKER in names]

    def unfinished(self) -> list[int]:
        return [step for step, names in self._steps().items() if MARKER not in names]

    def holds(self, step: int) -> bool:
        return self._marker(step) is not None

    def size(self, step: int) -> int:
        return self._told(step).get("bytes") or self._size_of_leaves(step)

    def stamp(self, step: int) -> Stamp:
        data, generation = self._bucket.stamped(self._name(f"{step}/{MARKER}"))
        if data is None:
            raise FileNotFoundError(f"{self.root}/{step} has no {MARKER}")
        return Stamp(_parse(data).get("written_at"), generation)

    def document(self, step: int) -> Any:
        data = self._bucket.read(self._name(f"{step}/{_DOCUMENT}"))
        if data is None:
            raise FileNotFoundError(f"{self.root}/{step}/{_DOCUMENT} is missing")
        return json.loads(data)["custom_metadata"]

    def array(self, step: int) -> dict[str, Any]:
        return self._bucket.spec(self._name(f"{step}/state/"))

    def aside(self) -> list[tuple[int, int]]:
        firsts = {name.partition("/")[0] for name in self._names() if "/" in name}
        matches = filter(None, map(SET_ASIDE.fullmatch, firsts))
        return [(int(match[1]), int(match[2])) for match in matches]

    def aside_path(self, step: int, k: int) -> str:
        return f"{self.root}/set-aside-{step}-{k}"

    def why_aside(self, step: int, k: int) -> str:
        data = self._bucket.read(self._note(step, k))
        return "" if data is None else data.decode(errors="replace").strip()

    def prepare(self) -> None:
        for step in self.unfinished():
            self.remove(step)

    def write(self, step: int, document: dict[str, Any], packed: np.ndarray) -> None:
        self.prepare()  # what a save that failed could not remove
        self._require()
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            path = Path(scratch, str(step))
            with self._context:
                ocp.save(path, {"leaves": packed}, custom_metadata=document)
            files = sorted(p for p in path.rglob("*") if p.is_file() and p != path / MARKER)
            size = sum(file.stat().st_size for file in files)
            names = (self._name(f"{step}/{file.relative_to(path)}") for file in files)
            self._bucket.upload(zip(names, files, strict=True))
        self._publish()
        self._require()
        self._mark(step, {"bytes": size})

    def remove(self, step: int) -> None:
        names, marker = self._bucket.names(self._name(f"{step}/")), self._name(f"{step}/{MARKER}")
        if names:
            self._require()
        if marker in names:  # first: half a checkpoint is never a committed one
            self._bucket.delete(marker)
        self._bucket.delete(*(name for name in names if name != marker))

    def set_aside(self, step: int, why: str) -> int:
        """Copy its objects but the marker, then remove it: until then it lies where it was."""
        if not self.holds(step):
            raise FileNotFoundError(f"{self.root}/{step} does not exist")
        self._require()
        taken = {name.partition("/")[0].removesuffix(".txt") for name in self._names()}
        k = next(k for k in itertools.count() if f"set-aside-{step}-{k}" not in taken)
        self._bucket.write(self._note(step, k), f"{why}\n".encode())
        self._copy(str(step), f"set-aside-{step}-{k}")
        self.remove(step)
        return k

    def put_back(self, step: int, k: int) -> None:
        self._require()
        aside = f"set-aside-{step}-{k}"
        self._copy(aside, str(step))
        self._mark(step, {})
        self._bucket.delete(*self._bucket.names(self._name(f"{aside}/")), self._note(step, k))

    def _copy(self, source: str, to: str) -> None:
        start = self._name(f"{source}/")
        for name in self._bucket.names(start):
            if (rest := name.removeprefix(start)) != MARKER:
                self._bucket.copy(name, self._name(f"{to}/{rest}"))

    def _mark(self, step: int, told: dict[str, Any]) -> None:
        data = json.dumps({**told, "written_at": time.time()}).encode()
        self._bucket.write(self._name(f"{step}/{MARKER}"), data)

    def _marker(self, step: int) -> bytes | None:
        return self._bucket.read(self._name(f"{step}/{MARKER}"))

    def _told(self, step: int) -> dict[str, Any]:
        return _parse(self._marker(step) or b"")

    def _size_of_leaves(self, step: int) -> int:
        """Of a checkpoint that was copied there, whose marker does not tell."""
        try:
            return sum(row["bytes"] for row in self.document(step)["checkpoint"]["leaves"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, BucketError):
                raise
            return 0  # what is bad with it, its reader tells

    def _steps(self) -> dict[int, set[str]]:
        """The names of what there is of each step."""
        found: dict[int, set[str]] = {}
        for step, _, name in (name.partition("/") for name in self._names()):
            if name and STEP.fullmatch(step):
                found.setdefault(int(step), set()).add(name)
        return found

    def _names(self) -> list[str]:
        """What lies below the folder."""
        return [
            name.removeprefix(f"{self._folder}/") for name in self._bucket.names(self._name(""))
        ]

    def _name(self, rest: str) -> str:
        return f"{self._folder}/{rest}"

    def _note(self, step: int, k: int) -> str:
        return self._name(f"set-aside-{step}-{k}.txt")


def _parse(marker: bytes) -> dict[str, Any]:
    """What the marker tells; of one that Orbax wrote, nothing."""
    try:
        value = json.loads(marker)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
