"""Processes that the fork server forks, as the server has them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elastix.testing.local_pathways.blobs import SharedFile
from elastix.testing.local_pathways.link import Link


class Start(NamedTuple):
    """Fork a process and be what the module is, with these arguments and this log. Its end of the
    link comes along, and one of a pipe that the other end sees broken when the process is gone."""

    module: str
    arguments: tuple[str, ...]
    log: str


class Forked:
    """A process that another one forked; as `subprocess.Popen` has its own."""

    def __init__(self, pid: int, life: SharedFile):
        self.pid, self._life = pid, life

    def poll(self) -> bool | None:
        """None while it is there."""
        return bool(select.select([self._life.fd], [], [], 0)[0]) or None

    def wait(self) -> None:
        select.select([self._life.fd], [], [])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """As the server has it. It ends with the thread that first starts a process, which alone may
    start others."""

    def __init__(self, log_dir: Path | None):
        self._log_dir = log_dir
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, module: str, name: str, arguments: Sequence[str]) -> tuple[Forked, Link]:
        """Fork a process that logs under a name; the link to it.

        Raises:
            EOFError: no process can be forked.
        """
        request = Start(module, tuple(arguments), self._log(name))
        try:
            return self._start(request)
        except (OSError, EOFError):
            self.end()
            return self._start(request)

    def end(self) -> None:
        """End it, and all that it forked."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._link.close()
            self._child = None

    def _start(self, request: Start) -> tuple[Forked, Link]:
        if self._child is None:
            self._begin()
        (ours, theirs), (life, its_life) = socket.socketpair(), map(SharedFile, os.pipe())
        self._link.send(request, [SharedFile(theirs.detach()), its_life])
        del its_life
        (pid, _), _ = self._link.receive()
        return Forked(pid, life), Link(ours)

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        numbers = str(theirs.fileno()), str(os.getpid())
        with theirs, open(self._log("forkserver"), "ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.forkserver", *numbers],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._link = Link(ours)

    def _log(self, name: str) -> str:
        return str(self._log_dir / f"{name}.log") if self._log_dir else os.devnull
