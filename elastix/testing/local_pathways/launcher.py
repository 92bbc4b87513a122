"""`LocalPathways`: starts the server, and does to its slices what the world does to real ones."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from elastix.testing.local_pathways.process import is_stopped

PACKAGES = ("grpc", "google.protobuf")
INSTALL = "pip install 'elastix-jax[local-pathways]'"
ANSWERED = 60.0
"""Seconds for the server to answer a command."""
MOST_DEVICES = 1024
"""More is a slip of the finger, which would fork a process for each slice."""


class LocalPathways:
    """Pathways on one machine: a proxy that the JAX client talks to, one process for each slice.

    Use it as a context; it ends with all its processes. The controller is another process, started
    with `environment`.

    Args:
        slices: how many.
        devices_per_slice: how many in each; with one, a loss takes no other slice along.
        heartbeat: seconds until a slice that is stopped, or that died and was not asked for
            anything, is noticed.
        restart_after: seconds until a slice that ended is started again; None: by `give_back` only.
        port: of the loopback interface; 0 takes a free one.
        log_dir: gets what the slices' processes print; None: nothing does.
        compile_cache: a directory of yours that keeps executables for other servers, up to 1 GiB:
            beyond that, those used least recently go. Whoever can write to it can run what they
            like as you. None: nothing is kept, and each server compiles what it is asked to.
        on_event: called, in a thread of its own, with what happens. It may call these methods. What
            it raises is printed, and the next event comes.

    Raises:
        ValueError: bad input, or a package is not installed.
    """

    def __init__(
        self,
        slices: int,
        devices_per_slice: int = 1,
        heartbeat: float = 10.0,
        restart_after: float | None = None,
        port: int = 0,
        log_dir: str | os.PathLike[str] | None = None,
        compile_cache: str | os.PathLike[str] | None = None,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
    ):
        _check(slices, devices_per_slice, heartbeat, restart_after, port)
        self._options = {
            "slices": slices,
            "devices_per_slice": devices_per_slice,
            "heartbeat": heartbeat,
            "restart_after": restart_after,
            "port": port,
            "log_dir": None if log_dir is None else str(log_dir),
            "compile_cache": None if compile_cache is None else str(compile_cache),
        }
        self._log_dir, self._compile_cache = (
            None if path is None else Path(path) for path in (log_dir, compile_cache)
        )
        self._on_event = on_event or (lambda event: None)
        self._events: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._joined, self._is_over = threading.Condition(), False
        self._joins: dict[int, int] = dict.fromkeys(range(slices), 0)
        self._first: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def __enter__(self) -> LocalPathways:
        _make_writable("log_dir", self._log_dir)
        _make_writable("compile_cache", self._compile_cache)
        with self._log() as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.server", json.dumps(self._options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )
        work = (self._listen, self._tell)
        self._threads = [threading.Thread(target=do, daemon=True) for do in work]
        for thread in self._threads:
            thread.start()
        try:
            first = self._first.get()
            if first["event"] != "ready":
                raise ValueError(first["reason"])
        except BaseException:  # Ctrl-C too: there is no context yet that would end it
            self.close()
            raise
        self._port = first["port"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server and all slices, stopped ones too."""
        assert self._server.stdin and self._server.stdout
        with contextlib.suppress(BrokenPipeError):  # it is gone
            self._server.stdin.close()
        self._server.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():  # it may be asked to by an event
                thread.join()
        self._server.stdout.close()

    @property
    def target(self) -> str:
        """The address for `JAX_BACKEND_TARGET`."""
        return f"grpc://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the controller's process."""
        return {
            "JAX_PLATFORMS": "proxy",
            "JAX_BACKEND_TARGET": self.target,
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        }

    @property
    def server_pid(self) -> int:
        """The proxy's process."""
        return self._server.pid

    @property
    def pids(self) -> dict[int, int | None]:
        """The process of each slice now; None where there is none."""
        return {int(i): pid for i, pid in self._ask(do="pids")["pids"].items()}

    @property
    def num_bytes(self) -> dict[int, int | None]:
        """What the arrays of each slice take now; None where it is not there or stopped."""
        return {int(i): n for i, n in self._ask(do="num_bytes")["num_bytes"].items()}

    def kill(self, slice: int) -> None:
        """SIGKILL the slice's process: the memory is gone at once. Returns when it has ended."""
        pid = self._signal(slice, signal.SIGKILL)
        while self.pids[slice] == pid:
            time.sleep(0.001)

    def stop(self, slice: int) -> None:
        """SIGSTOP the slice's process: there, but stuck. After `heartbeat` seconds it is lost.
        Returns when it has stopped."""
        pid = self._signal(slice, signal.SIGSTOP)
        while not is_stopped(pid) and self.pids[slice] == pid:
            time.sleep(0.001)

    def resume(self, slice: int) -> None:
        """SIGCONT: it goes on; if it was lost meanwhile, it is started again with empty memory."""
        self._signal(slice, signal.SIGCONT)

    def give_back(self, slice: int) -> None:
        """Start the slice's process again, with empty memory; returns when it serves.

        Raises:
            ValueError: it is there.
        """
        with self._joined:
            joins = self._joins[self._checked(slice)]
        self._ask(do="give_back", slice=slice)
        with self._joined:
            self._joined.wait_for(lambda: self._joins[slice] > joins or self._is_over, ANSWERED)
            if self._joins[slice] == joins:
                raise TimeoutError(f"slice {slice} did not come back within {ANSWERED:g} s")

    def _signal(self, slice: int, number: signal.Signals) -> int:
        pid = self.pids[self._checked(slice)]
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            if pid is not None:
                os.kill(pid, number)
                return pid
        raise ValueError(f"slice {slice} has no process: give_back({slice}) starts one")

    def _checked(self, slice: int) -> int:
        if slice not in self._joins:
            raise ValueError(f"slice {slice}: there are 0 to {len(self._joins) - 1}")
        return slice

    def _ask(self, **command: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        assert self._server.stdin
        try:
            with self._asking:
                self._server.stdin.write(json.dumps({"id": number, **command}) + "\n")
            said = answer.get(timeout=ANSWERED)
        except (OSError, ValueError, queue.Empty):  # ValueError: it was closed
            said = None
        if said is None:
            raise RuntimeError(f"the server (pid {self.server_pid}) does not answer")
        if "error" in said:
            raise ValueError(said["error"])
        return said

    def _listen(self) -> None:
        assert self._server.stdout
        for line in self._server.stdout:
            said = json.loads(line)
            if "answer" in said:
                self._answers.pop(said["answer"]).put(said)
            elif said["event"] in ("ready", "refused"):
                self._first.put(said)
            else:
                self._note(said)
        self._first.put({"event": "refused", "reason": self._obituary()})
        self._end()

    def _end(self) -> None:
        """Nobody need wait for the server any more."""
        with self._joined:
            self._is_over = True
            self._joined.notify_all()
        for answer in list(self._answers.values()):
            answer.put(None)
        self._events.put({"event": "ended"})

    def _tell(self) -> None:
        """Apart from `_listen`: who is told may ask, and the answers come there."""
        event: Mapping[str, Any] = {"event": "started"}
        while event["event"] != "ended":
            event = self._events.get()
            try:
                self._on_event(event)
            except Exception:
                traceback.print_exc()

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "joined":
            with self._joined:
                self._joins[event["slice"]] += 1
                self._joined.notify_all()
        self._events.put(event)

    def _obituary(self) -> str:
        where = self._log_dir or "log_dir, if you give one"
        return f"the server ended with status {self._server.wait()}: see {where}"

    def _log(self) -> Any:
        return open(self._log_dir / "server.log" if self._log_dir else os.devnull, "ab")


def _check(
    slices: int, devices_per_slice: int, heartbeat: float, restart_after: float | None, port: int
) -> None:
    for name, value in (("slices", slices), ("devices_per_slice", devices_per_slice)):
        if value < 1:
            raise ValueError(f"{name}={value}: use 1 or more")
    if slices * devices_per_slice > MOST_DEVICES:
        raise ValueError(
            f"slices={slices} of devices_per_slice={devices_per_slice}: use at most {MOST_DEVICES} "
            "devices, each slice is a process on this machine"
        )
    if not heartbeat > 0:  # NaN is not, either
        raise ValueError(f"heartbeat={heartbeat:g}: use more than 0 seconds")
    if restart_after is not None and not restart_after >= 0:
        raise ValueError(f"restart_after={restart_after:g}: use 0 seconds or more, or None")
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port={port}: use 1 to 65535, or 0 for any that is free")
    check_installed(PACKAGES)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            what = "is taken" if error.errno == errno.EADDRINUSE else f"is refused ({error})"
            raise ValueError(
                f"port {port} {what}: use another, or 0 for any that is free"
            ) from None


def _make_writable(option: str, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in it
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{option}={path} cannot be written ({why}): name another directory"
        ) from None


def check_installed(packages: Sequence[str]) -> None:
    """Raises a ValueError with the remedy for the first package that is not there."""
    for package in packages:
        if not _is_installed(package):
            raise ValueError(f"a local Pathways needs {package}: {INSTALL}")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
