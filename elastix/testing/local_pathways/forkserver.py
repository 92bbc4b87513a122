"""The process that all others below the server are forked from: it has imported what they need,
once for all of them, and has no thread and no client of JAX's, so that to fork is sound.

A slice that is killed or stopped does not touch it; its own death takes all slices along, as that
of the server does, and the next that is started gets a new one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from elastix.testing.local_pathways import forks
from elastix.testing.local_pathways.blobs import Blob, SharedFile
from elastix.testing.local_pathways.serving import attach

Roles = dict[str, Callable[[list[str]], None]]
"""What a process can be, by the name of the module: its `main`."""


def main(argv: list[str]) -> None:
    """Fork when asked, until the server is gone: FD SERVER_PID."""
    link, own = attach(argv), os.getpid()
    roles = _roles()
    signal.signal(signal.SIGCHLD, _bury)
    gc.freeze()  # else the children's collectors would copy all pages that hold objects
    while True:
        try:
            request, blobs = link.receive()
        except EOFError:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            os.close(int(argv[0]))
            _be(request, own, blobs, roles)
        link.send((pid, None))
        del blobs


def _roles() -> Roles:
    """Import what each needs."""
    # A pool of NumPy's would be threads, and none may be here; nothing multiplies with NumPy.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from elastix.testing.local_pathways import compiler, runtime, worker

    runtime.set_flags()
    runtime.warm_up()
    return {"compiler": compiler.main, "worker": worker.main}


def _bury(*_: Any) -> None:
    with contextlib.suppress(ChildProcessError):  # none are left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _be(request: forks.Start, parent: int, blobs: list[Blob], roles: Roles) -> None:
    """In the child: be what is asked for, and never return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _print_to(request.log)
        link = blobs[0]  # the other is held open, and does nothing else
        assert isinstance(link, SharedFile)
        roles[request.module]([str(link.fd), str(parent), *request.arguments])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _print_to(path: str) -> None:
    with open(path, "ab") as log:
        for standard in (1, 2):
            os.dup2(log.fileno(), standard)


if __name__ == "__main__":
    main(sys.argv[1:])
