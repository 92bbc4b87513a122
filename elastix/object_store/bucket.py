"""One folder of objects in a bucket, by name, through TensorStore: every call has a deadline."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tensorstore

LOCK = "~lock"
"""The lease. Its name sorts after all others: a listing that ends with it is complete."""
ABSENT = b"\x02"
"""The generation of an object that does not exist, in TensorStore's words."""

_WITNESSES = (LOCK, "recipe.json")
_AT_ONCE = 4
"""Objects on their way at once; each is in memory while it is."""
_SLOWEST = 1e6
"""Bytes a second; what takes longer is given up."""

T = TypeVar("T")


class BucketError(ConnectionError):
    """The bucket did not do what it was asked to: one line with what was asked and why not."""


@dataclass(frozen=True)
class Patience:
    """How long a request is tried: `retries` times where the bucket says it is busy, after
    `first_delay` seconds, twice as long each time, up to `longest_delay`; and `deadline` seconds in
    all, for an answer that never comes."""

    retries: int = 6
    first_delay: float = 0.5
    longest_delay: float = 8.0
    deadline: float = 60.0

    def to_json(self) -> dict[str, Any]:
        """As TensorStore wants it."""
        first, longest = (f"{s * 1000:.0f}ms" for s in (self.first_delay, self.longest_delay))
        return {"max_retries": self.retries, "initial_delay": first, "max_delay": longest}


def bucket_url(where: str | Path) -> str | None:
    """The URL if `where` names a folder in a bucket, without a slash at its end; None: a path.

    Raises:
        ValueError: a URL of something else, or of no folder in a bucket.
    """
    match = re.match(r"([a-z][a-z0-9+.-]*):/+", str(where))
    if match is None:
        return None
    if match[1] != "gs":
        raise ValueError(f"{where}: use a path, or gs://BUCKET/FOLDER: {match[1]}:// is not known")
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/[^/]+)+/?", str(where)):
        raise ValueError(f"{where}: name a folder in a bucket as text, such as gs://bucket/run")
    return str(where).removesuffix("/")


class Bucket:
    """The objects below `url`, each by the rest of its name.

    Raises:
        BucketError: from every method, in one line.
    """

    def __init__(self, url: str, patience: Patience | None = None):
        self.url, self._patience = url, patience or Patience()
        name, _, folder = url.removeprefix("gs://").partition("/")
        self._spec = {
            "driver": "gcs",
            "bucket": name,
            "path": f"{folder}/",
            "gcs_request_retries": self._patience.to_json(),
        }
        with_error = f"{url} cannot be opened"
        self._store = self._result(with_error, tensorstore.KvStore.open(self._spec))

    def spec(self, folder: str) -> dict[str, Any]:
        """The folder, which ends with a slash, as a `kvstore` of TensorStore."""
        return self._spec | {"path": f"{self._spec['path']}{folder}"}

    @property
    def deadline(self) -> float:
        """Seconds after which a read that has no answer has failed."""
        return self._patience.deadline

    def where(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}"

    def names(self, prefix: str = "") -> list[str]:
        """The names that begin with `prefix`, sorted.

        TensorStore takes the refusal of a listing for an empty one. So what is listed goes on to
        an object that is there, if there is one, and must have found it.
        """
        keys = tensorstore.KvStore.KeyRange(prefix, f"{LOCK}\0")
        listed = self._result(f"{self.url} cannot be listed", self._store.list(keys))
        found = sorted(name.decode() for name in listed)
        for witness in _WITNESSES:
            if witness in found:
                break
            if witness >= prefix and self.read(witness) is not None:
                raise BucketError(
                    f"{self.url} cannot be listed, although {witness} can be read: "
                    "storage.objects.list must be permitted"
                )
        return [name for name in found if name.startswith(prefix)]

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""
        return self.stamped(name)[0]

    def stamped(self, name: str) -> tuple[bytes | None, bytes]:
        """The content of an object, or None, and its generation."""
        asked = f"{self.where(name)} cannot be read"
        found = self._result(asked, self._store.read(name))
        return (found.value if found.state == "value" else None), found.stamp.generation

    def write(self, name: str, data: bytes) -> None:
        """Write an object whole, over what was there."""
        self._written(name, data, self._store.write(name, data))

    def write_if(self, name: str, data: bytes, generation: bytes) -> bytes | None:
        """Write an object if it still is of this generation; its new one, or None if it is not.

        None may also mean that it was written, and the answer was lost.
        """
        asked = self._store.write(name, data, if_equal=generation)
        return self._written(name, data, asked) or None

    def upload(self, files: Iterable[tuple[str, Path]]) -> None:
        """Write new objects from local files, some at once. None may be there yet: what another
        process writes to the same place is not overwritten."""
        pending: list[tuple[str, bytes, Any]] = []
        for name, path in files:
            if len(pending) == _AT_ONCE:
                self._finish(*pending.pop(0))
            data = path.read_bytes()
            pending.append((name, data, self._store.write(name, data, if_equal=ABSENT)))
        for one in pending:
            self._finish(*one)

    def copy(self, name: str, to: str) -> None:
        """Write a copy of an object, through this process."""
        data = self.read(name)
        if data is None:
            raise BucketError(f"{self.where(name)} is gone")
        self.write(to, data)

    def delete(self, *names: str) -> None:
        """Delete objects; those that do not exist are fine."""
        asked = [(name, self._store.write(name, None)) for name in names]
        for name, future in asked:
            self._result(f"{self.where(name)} cannot be deleted", future)

    def _finish(self, name: str, data: bytes, future: Any) -> None:
        # A write that was tried again, since its answer was lost, finds itself there.
        if not self._written(name, data, future) and self.read(name) != data:
            raise BucketError(f"{self.where(name)} is there already: another process writes it")

    def _written(self, name: str, data: bytes, future: Any) -> bytes:
        asked = f"{self.where(name)} cannot be written"
        return self._result(asked, future, len(data) / _SLOWEST).generation

    def _result(self, what: str, future: Any, more_seconds: float = 0.0) -> Any:
        seconds = self._patience.deadline + more_seconds
        try:
            return future.result(timeout=seconds)
        except TimeoutError as error:
            future.cancel()
            raise BucketError(f"{what}: no answer in {seconds:.0f} s") from error
        except Exception as error:  # mostly a ValueError, whatever it is about
            raise BucketError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The message without what TensorStore appends to it."""
    text = re.sub(r"\s*\[(tensorstore_spec|source|http_).*", "", str(error), flags=re.DOTALL)
    return " ".join(text.split())
