"""Messages between the server and a slice's process, over a Unix socket that both were born with.

Only the two ends of one pair of sockets talk here, both of this package: hence pickle.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from typing import Any

from elastix.testing.local_pathways.blobs import Blob, SharedFile

_HEADER = struct.Struct("<QI")
MAX_FILES = 200
"""Linux passes at most 253 descriptors with one message."""


class Link:
    """One end of the connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket):
        self._socket, self._sending = connection, threading.Lock()

    def send(self, message: Any, blobs: list[Blob] | None = None) -> None:
        """Send a message with its blobs.

        Raises:
            OSError: the other end is gone.
        """
        blobs = blobs or []
        files = [blob.fd for blob in blobs if isinstance(blob, SharedFile)]
        assert len(files) <= MAX_FILES
        light = [blob.size if isinstance(blob, SharedFile) else blob for blob in blobs]
        body = pickle.dumps((message, light))
        with self._sending:
            header = _HEADER.pack(len(body), len(files))
            sent = socket.send_fds(self._socket, [header], files) if files else 0
            self._socket.sendall(header[sent:])
            self._socket.sendall(body)

    def receive(self) -> tuple[Any, list[Blob]]:
        """The next message and its blobs.

        Raises:
            EOFError: the other end is gone.
        """
        try:
            header, fds = self._header()
            size, _ = _HEADER.unpack(header)
            message, light = pickle.loads(self._exactly(size))
        except OSError as error:
            raise EOFError(str(error)) from None
        files = iter(fds)
        return message, [x if isinstance(x, bytes) else SharedFile(next(files), x) for x in light]

    def close(self) -> None:
        """Wake whoever waits on either end."""
        with contextlib.suppress(OSError):  # it was closed by the other end
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _header(self) -> tuple[bytes, list[int]]:
        data, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size, MAX_FILES)
        if not data:
            raise EOFError
        return data + self._exactly(_HEADER.size - len(data)), fds

    def _exactly(self, size: int) -> bytes:
        data, got = bytearray(size), 0
        while got < size:
            count = self._socket.recv_into(memoryview(data)[got:])
            if not count:
                raise EOFError
            got += count
        return bytes(data)
