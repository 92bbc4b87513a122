"""One process at a time: the object that says whose a run directory in a bucket is.

A lease is renewed every few seconds. Who wants one that was not given back watches it: renewed, it
is held by a process that lives; not renewed for as long as a lease lasts, it is taken over. So no
two clocks are compared. Each write names the generation it replaces, so no two can both take it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastix.object_store.bucket import LOCK, Bucket, BucketError

EXPIRY = 60.0
"""Seconds without a renewal after which a lease is taken over."""
RENEW = 10.0
"""Seconds between two renewals."""
_LOOK = 2.0
"""Seconds between two looks at a lease that may be dead."""


class LeaseLostError(BucketError):
    """Another process has taken the run directory over: nothing may be written there any more."""


@dataclass(frozen=True)
class Timing:
    """A clock that only goes forward, and how to wait, both in seconds."""

    now: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep


class Lease:
    """The right to write below `bucket`, once `take` has it."""

    def __init__(self, bucket: Bucket, timing: Timing | None = None):
        self._bucket, self._timing = bucket, timing or Timing()
        self._token, self._generation = uuid.uuid4().hex, b""
        self._guard = threading.Lock()  # the keeper renews it, and so does who saves
        self.lost: str | None = None
        """Why nothing may be written any more; None while the lease is held."""

    def take(self, tell: Callable[[str], None]) -> None:
        """Take the lease, at the latest when one that is not renewed has expired.

        Args:
            tell: is told, in one line, why that takes a while.

        Raises:
            ValueError: a process that lives holds it; its pid and its host.
            BucketError: the bucket does not answer, or not so.
        """
        data, generation = self._bucket.stamped(LOCK)
        if data is not None and not _is_free(data):
            tell(
                f"{self._bucket.url} was left by {_holder(data)}, or is in use: it is taken over "
                f"if its lease is not renewed in {EXPIRY:g} s"
            )
            data, generation = self._watch(data, generation)
        if not self._write(generation):
            data = self._bucket.read(LOCK) or b""
            raise ValueError(self._in_use(data))

    def renew(self) -> None:
        """Say that this process lives, and be sure that the lease is its own.

        Raises:
            LeaseLostError: it is not any more.
            BucketError: nobody can tell.
        """
        if self.lost:
            raise LeaseLostError(self.lost)
        with self._guard:
            if not self._write(self._generation):
                data = self._bucket.read(LOCK)
                by = _holder(data) if data else "somebody who removed its lease"
                self.lost = f"{self._bucket.url} was taken over by {by}: nothing is saved any more"
                raise LeaseLostError(self.lost)

    def release(self) -> None:
        """Give the lease back, if it is still held."""
        with self._guard:
            if not self.lost and self._generation:
                self._bucket.write_if(LOCK, self._document(free=True), self._generation)
                self.lost = f"{self._bucket.url} was given back"

    def _watch(self, data: bytes, generation: bytes) -> tuple[bytes | None, bytes]:
        until = self._timing.now() + EXPIRY
        while self._timing.now() < until:
            self._timing.wait(_LOOK)
            now, seen = self._bucket.stamped(LOCK)
            if now is None or _is_free(now):
                return now, seen
            if seen != generation:
                raise ValueError(self._in_use(now))
        return data, generation

    def _write(self, generation: bytes) -> bool:
        """Whether the lease was of this generation, and so was written."""
        written = self._bucket.write_if(LOCK, self._document(free=False), generation)
        if written is None:  # was it written, this time or before, and the answer lost?
            data, found = self._bucket.stamped(LOCK)
            written = found if _parse(data or b"").get("token") == self._token else None
        if written:
            self._generation = written
        return written is not None

    def _document(self, free: bool) -> bytes:
        value = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "token": self._token,
            "renewed_at": time.time(),
            "free": free,
        }
        return json.dumps(value).encode()

    def _in_use(self, data: bytes) -> str:
        return (
            f"run directory {self._bucket.url} is in use by {_holder(data)}: "
            "wait for it or choose another"
        )


def is_held(
    bucket: Bucket, timing: Timing | None = None, wall: Callable[[], float] = time.time
) -> bool:
    """Whether a process holds the lease, as far as can be told: it was renewed lately or, because
    that compares two clocks, it is renewed while somebody looks.

    Raises:
        BucketError: it cannot be read.
    """
    timing = timing or Timing()
    data, generation = bucket.stamped(LOCK)
    until = timing.now() + 2 * RENEW
    while data is not None and not _is_free(data):
        renewed_at = _parse(data).get("renewed_at")
        if isinstance(renewed_at, float) and abs(wall() - renewed_at) < 2 * EXPIRY:
            return True
        if timing.now() >= until:
            return False
        timing.wait(_LOOK)
        data, seen = bucket.stamped(LOCK)
        if seen != generation and data is not None and not _is_free(data):
            return True
    return False


def _holder(data: bytes) -> str:
    told = _parse(data)
    return f"process {told.get('pid', '(unknown)')} on {told.get('host', 'an unknown host')}"


def _is_free(data: bytes) -> bool:
    return _parse(data).get("free") is True


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
