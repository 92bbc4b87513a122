"""The command line, heard from its first moment: importing JAX takes seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. A signal that comes before anything was begun ends the process at once:
    75 for SIGTERM, since the same command does what was asked, and 130 for Ctrl-C."""
    for number, status in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
        signal.signal(number, lambda *_, status=status: _leave(status))
    # Read by JAX's C++ when it is loaded: a line for each call that a lost slice fails.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from elastix.cli import main as run

    status = run()
    # All is written and closed. Python would wait for every thread now: one in which a library
    # reads data that never come, or that compiles for ever, would keep the process from ending.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _leave(status: int) -> None:
    os.write(2, b"elastix: stopped before it began: run the same command again\n")
    os._exit(status)


if __name__ == "__main__":
    main()
