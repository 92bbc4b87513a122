"""The command line: `elastix run` and `elastix verify`. How it ends is an exit status."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from elastix.checkpoints_command import checkpoints_main
from elastix.command import Command, parse
from elastix.display import open_display
from elastix.lineage import Origin
from elastix.notices import notify_main
from elastix.object_store.bucket import bucket_url
from elastix.overrides import print_field_help
from elastix.preparation import open_backend, prepare
from elastix.replay_command import replay_main
from elastix.run import Summary, train
from elastix.supervision import InterruptedRun, supervise
from elastix.verify import verify


def _simulate_main(argv: Sequence[str]) -> int:
    """The simulator is imported by those who ask for it."""
    from elastix.testing.simulate_command import main

    return main(argv)


def _advise_main(argv: Sequence[str]) -> int:
    """So is what advises."""
    from elastix.advise_command import advise_main

    return advise_main(argv)


def _bench_main(argv: Sequence[str]) -> int:
    """And what measures."""
    from elastix.bench_command import bench_main

    return bench_main(argv)


def _launch_main(argv: Sequence[str]) -> int:
    """And what makes manifests."""
    from elastix.launch.command import launch_main

    return launch_main(argv)


def _local_pathways_main(argv: Sequence[str]) -> int:
    """So is a local Pathways."""
    from elastix.testing.local_pathways.command import main

    return main(argv)


def _data_main(argv: Sequence[str]) -> int:
    """So is what prepares data."""
    from elastix.data.pack_command import data_main

    return data_main(argv)


_TOOLS = {
    "advise": _advise_main,
    "bench": _bench_main,
    "checkpoints": checkpoints_main,
    "data": _data_main,
    "launch": _launch_main,
    "local-pathways": _local_pathways_main,
    "notify": notify_main,
    "replay": replay_main,
    "simulate": _simulate_main,
}
"""Commands that train nothing."""

_TERMINATED = 128 + signal.SIGTERM

DONE, FAILED, USAGE, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return its exit status.

    0 done, 1 failed, 2 usage or bad input (nothing was changed), 75 preempted, 130 interrupted.
    """
    try:
        arguments = sys.argv[1:] if argv is None else list(argv)
        _hear_as_usual(arguments)
        if arguments and arguments[0] in _TOOLS:
            return _TOOLS[arguments[0]](arguments[1:])
        command = parse(arguments)
        if command is None:
            return DONE
        with _quiet():
            return _execute(command)
    except ValueError as error:
        return _say(str(error), USAGE)
    except KeyboardInterrupt:
        return _say("interrupted: run the same command again to go on", INTERRUPTED)


def _hear_as_usual(arguments: Sequence[str]) -> None:
    """From here on Ctrl-C is an exception again; what a run does at SIGTERM, it says itself."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if arguments[:1] != ["run"]:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _execute(command: Command) -> int:
    if command.wants_help:
        print_field_help(prepare(command).recipe, f"elastix {command.name} {command.recipe}")
        return DONE
    if command.name == "run":
        return _run(command)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # its children end with it
    difference = verify(command)
    return DONE if difference is None else _say(difference, FAILED)


def _run(command: Command) -> int:
    prepared = prepare(command)
    origin = Origin.parse(command.fork) if command.fork is not None else None
    backend = open_backend(command, prepared.recipe)
    named = command.run_dir
    run_dir = Path("runs", prepared.name) if named is None else bucket_url(named) or Path(named)
    display = open_display(prepared.name)

    def work(stop: threading.Event) -> Summary:
        return train(
            prepared.recipe,
            backend=backend,
            run_dir=run_dir,
            fork_from=origin,
            display=display,
            stop=stop,
        )

    try:
        with display:
            summary = supervise(work, prepared.recipe.policy.grace)
    except InterruptedRun as given_up:
        _leave_at_once(given_up.status)
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and not display.has_started and "\n" not in str(error):
            raise  # bad input: the message names the value and the remedy
        traceback.print_exc()
        return _say(f"failed: {type(error).__name__}: {error}", FAILED)
    return _end(summary)


def _leave_at_once(status: int) -> NoReturn:
    """Leave while the run's thread is still inside JAX. What it wrote is whole: logs are flushed
    by the row, and a checkpoint is there when it is complete."""
    why = "interrupted" if status == INTERRUPTED else "preempted, and the grace time is over"
    _say(f"{why}: run the same command again to go on", status)
    os._exit(status)


def _end(summary: Summary) -> int:
    """What is left to say of a run that came to an end of its own."""
    if summary.outcome == "failed":
        sys.stderr.write(summary.trace)
        _say(f"failed: {summary.reason}", FAILED)
    elif summary.exit_status == PREEMPTED:
        why = f"preempted after step {summary.steps}"
        why += f", {summary.reason}" if summary.reason else ""
        _say(f"{why}: run the same command again to go on", PREEMPTED)
    return summary.exit_status


def _say(line: str, status: int) -> int:
    """Tell standard error in one line why the exit status is what it is."""
    print(f"elastix: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return status


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' warnings and logs off the terminal, unless Python was asked for them."""
    for name in ("absl", "grain", "jax", "orbax"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        yield
