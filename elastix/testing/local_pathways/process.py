"""A process below the server, as the server has it: started, asked, pinged, ended."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastix.testing.local_pathways import messages
from elastix.testing.local_pathways.blobs import Blob
from elastix.testing.local_pathways.forks import Forked
from elastix.testing.local_pathways.futures import Future, settle
from elastix.testing.local_pathways.link import Link

_PING = 0


class Process:
    """The process, a thread that writes to it and one that reads."""

    def __init__(self, child: Forked, link: Link):
        self._child, self._link = child, link
        self._outbox = queue.SimpleQueue[Any]()
        self._lock, self._numbers = threading.Lock(), itertools.count(_PING + 1)
        self._pending: dict[int, Future[Any]] = {}
        self._beat: Future[None] | None = None

    @property
    def pid(self) -> int | None:
        """None when it has ended."""
        return self._child.pid if self._child.poll() is None else None

    def listen(self, joined: Callable[[], None], ended: Callable[[bool], None]) -> None:
        """From now on, call `joined` when it serves, and `ended` with whether it owed an answer."""
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, args=(joined, ended), daemon=True).start()

    def ask(self, command: Any, blobs: Sequence[Blob] = ()) -> Future[Any]:
        """Send it after all that was asked before; never waits. The answer comes with its blobs."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = future
            self._outbox.put(((number, command), list(blobs)))
        return future

    def ping(self, heard: Callable[[], None]) -> None:
        """One at a time: a process that is stopped is not sent more and more."""
        if self._beat is None or self._beat.done():
            self._beat = Future()
            self._beat.add_done_callback(lambda _: heard())
            self._outbox.put(((_PING, messages.Ping()), []))

    def fail(self, error: Exception) -> None:
        """Whatever it owes will not come."""
        with self._lock:
            pending, self._pending = self._pending, {}
        for future in pending.values():
            settle(future, error=error)

    def end(self) -> None:
        """SIGKILL it, stopped or not."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()

    def _write(self) -> None:
        while (item := self._outbox.get()) is not None:
            try:
                self._link.send(*item)
            except OSError:
                return  # the reader sees it, too

    def _read(self, joined: Callable[[], None], ended: Callable[[bool], None]) -> None:
        while True:
            try:
                (number, value), blobs = self._link.receive()
            except EOFError:
                break
            if number is None:
                joined()
            elif number == _PING:
                settle(self._beat or Future())
            else:
                self._answered(number, value, blobs)
        self._outbox.put(None)
        self._child.wait()
        self._link.close()
        ended(bool(self._pending))

    def _answered(self, number: int, value: Any, blobs: list[Blob]) -> None:
        with self._lock:
            future = self._pending.pop(number, None)
        if future is not None:
            settle(future, (value, blobs), value if isinstance(value, Exception) else None)


def is_stopped(pid: int | None) -> bool:
    """Whether a signal has stopped a process; where the system does not tell, it has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return sys.platform != "linux"
    return stat.rpartition(")")[2].split()[0] == "T"
