"""What a process below the server does, whatever it is for: answer, and end with the server."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from elastix.testing.local_pathways.blobs import Blob
from elastix.testing.local_pathways.failures import internal
from elastix.testing.local_pathways.futures import Future, failed
from elastix.testing.local_pathways.link import Link

Do = Callable[[Any, list[Blob]], Any]
"""A command and its blobs to an answer, or a future of it. A tuple is a value and its blobs."""
_SET_DEATH_SIGNAL = 1


def attach(argv: list[str]) -> Link:
    """The link to the server, of FD and PARENT_PID; this process ends with its parent."""
    fd, parent = map(int, argv[:2])
    if sys.platform == "linux":  # a process that is stopped could not see the link break
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the terminal's; the server ends its own
        signal.signal(ignored, signal.SIG_IGN)
    return Link(socket.socket(fileno=fd))


def serve(link: Link, do: Do) -> None:
    """Take commands in order, answer each when it is done, until the server is gone."""
    link.send((None, "joined"))
    while True:
        try:
            (number, command), blobs = link.receive()
        except EOFError:
            os._exit(0)
        try:
            answer = do(command, blobs)
        except Exception as error:
            answer = failed(internal(error))
        if isinstance(answer, Future):
            answer.add_done_callback(partial(_finish, link, number))
        else:
            _send(link, number, answer)


def _finish(link: Link, number: int, future: Future[Any]) -> None:
    error = future.exception()
    _send(link, number, internal(error) if error else future.result())


def _send(link: Link, number: int, answer: Any) -> None:
    value, blobs = answer if isinstance(answer, tuple) else (answer, [])
    with contextlib.suppress(OSError):  # the server is gone, and the main thread sees it
        link.send((number, value), blobs)
