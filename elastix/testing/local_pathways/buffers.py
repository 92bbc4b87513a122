"""The bytes that a client sends beside its requests, or fetches after them, by handle."""

from __future__ import annotations

import threading

from elastix.testing.local_pathways.blobs import Blob
from elastix.testing.local_pathways.failures import Code, Failure


class Buffers:
    """The buffers of one client; they come and go in other threads than the requests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blobs: dict[int, Blob] = {}
        self._is_closed = False

    def put(self, handle: int, blob: Blob) -> None:
        with self._changed:
            self._blobs[handle] = blob
            self._changed.notify_all()

    def get(self, handle: int) -> Blob:
        """Wait for a buffer.

        Raises:
            Failure: CANCELLED when the client is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or handle in self._blobs)
            if handle not in self._blobs:
                raise Failure(Code.CANCELLED, "the client is gone")
            return self._blobs[handle]

    def take(self, handle: int) -> Blob:
        """As `get`, and forget it."""
        blob = self.get(handle)
        self.delete(handle)
        return blob

    def delete(self, handle: int) -> None:
        with self._changed:
            self._blobs.pop(handle, None)

    def close(self) -> None:
        """The client is gone: nobody waits, nothing stays."""
        with self._changed:
            self._is_closed = True
            self._blobs.clear()
            self._changed.notify_all()
