"""`elastix local-pathways`: a local Pathways in a terminal, to try a recipe's recovery by hand."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastix.testing.local_pathways.launcher import LocalPathways
from elastix.usage import UsageParser

DONE, FAILED, INTERRUPTED = 0, 1, 130
_HELP = "kill N, stop N, resume N, return N, quit"


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C (130), `quit` (0), or the death of the server (1).

    Raises:
        ValueError: bad input, in one line with the remedy.
    """
    given = _parser().parse_args(argv)
    todo: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
    cluster = LocalPathways(
        slices=given.slices,
        devices_per_slice=given.devices_per_slice,
        heartbeat=given.heartbeat,
        restart_after=given.restart_after,
        port=given.port,
        log_dir=given.log_dir,
        compile_cache=given.compile_cache,
        on_event=todo.put,
    )
    try:
        with cluster:
            _introduce(cluster)
            if sys.stdin.isatty():
                threading.Thread(target=_read, args=(todo,), daemon=True).start()
            return _follow(cluster, todo)
    except KeyboardInterrupt:
        return INTERRUPTED


def _introduce(cluster: LocalPathways) -> None:
    for name, value in cluster.environment.items():
        print(f"export {name}={value}")
    for slice, pid in cluster.pids.items():
        print(f"slice {slice}: pid {pid}")
    print(f"server: pid {cluster.server_pid}", flush=True)
    if sys.stdin.isatty():
        print(f"commands: {_HELP}", flush=True)


def _read(todo: queue.SimpleQueue[Mapping[str, Any]]) -> None:
    for line in sys.stdin:
        todo.put({"event": "typed", "line": line})


def _follow(cluster: LocalPathways, todo: queue.SimpleQueue[Mapping[str, Any]]) -> int:
    """Tell what happens, do what is typed."""
    while True:
        event = todo.get()
        match event["event"], event.get("line", "").split():
            case "ended", _:
                print("elastix: the server's process ended", file=sys.stderr)
                return FAILED
            case "typed", ["quit"]:
                return DONE
            case "typed", words:
                _obey(cluster, words)
            case _:
                print(told(event), flush=True)


def told(event: Mapping[str, Any]) -> str:
    """An event in a line."""
    match event:
        case {"event": "lost", "slice": slice, "reason": reason}:
            return f"slice {slice} lost: {reason}"
        case {"event": "joined", "slice": slice, "reason": reason}:
            return f"slice {slice} is there: {reason}"
        case {"event": what, "client": client}:
            return f"client {client} {what}"
    return str(dict(event))


def _obey(cluster: LocalPathways, words: list[str]) -> None:
    verbs: dict[str, Callable[[int], None]] = {
        "kill": cluster.kill,
        "stop": cluster.stop,
        "resume": cluster.resume,
        "return": cluster.give_back,
    }
    match words:
        case []:
            return
        case [verb, number] if verb in verbs and number.isdecimal():
            try:
                verbs[verb](int(number))
            except (ValueError, RuntimeError, TimeoutError) as error:  # the last two: it is ill
                print(f"elastix: {error}", file=sys.stderr, flush=True)
        case _:
            print(f"elastix: {' '.join(words)!r}: use {_HELP}", file=sys.stderr, flush=True)


def _parser() -> UsageParser:
    parser = UsageParser(
        prog="elastix local-pathways",
        description="A Pathways on this machine's CPU: JAX's own client talks to it, and each "
        "slice is a process that you can kill, stop and give back while a recipe trains. It "
        "prints what the controller has to export, the process of each slice, and then a line "
        f"for all that happens. On a terminal it takes commands: {_HELP}.",
        epilog="example: elastix local-pathways --slices 3 --port 29000; in another terminal the "
        "exports it printed, and elastix run RECIPE --backend pathways; then kill -9 a slice. "
        "Exit status: 0 after quit, 1 the server died, 2 bad input, 130 Ctrl-C.",
    )
    parser.add_argument("--slices", type=int, metavar="N", default=3, help="so many (default: 3)")
    parser.add_argument(
        "--devices-per-slice", type=int, metavar="N", default=1, help="in each (default: 1)"
    )
    parser.add_argument(
        "--heartbeat",
        type=float,
        metavar="SECONDS",
        default=10.0,
        help="until a slice that is stopped, or dead and not in use, is noticed (default: 10)",
    )
    parser.add_argument(
        "--restart-after",
        type=float,
        metavar="SECONDS",
        help="until a slice that ended is started again (default: when you return it)",
    )
    parser.add_argument("--port", type=int, default=0, help="(default: any that is free)")
    parser.add_argument("--log-dir", metavar="DIR", help="for what the processes print")
    parser.add_argument(
        "--compile-cache",
        metavar="DIR",
        help="keep compiled programs for the next time, up to 1 GiB, used last (default: none)",
    )
    return parser
