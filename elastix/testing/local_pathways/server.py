"""The server's process: the proxy, and the slices' processes below it.

    python -m elastix.testing.local_pathways.server OPTIONS

OPTIONS is a JSON object. Standard output is one JSON object a line: what happens, and the answers
to the commands that come, likewise, on standard input. When that ends, so does everything.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from elastix.testing.local_pathways.cluster import Cluster
from elastix.testing.local_pathways.membership import Rules
from elastix.testing.local_pathways.topology import Topology

PATIENCE = 120.0
"""Seconds for the slices' processes to start, on a busy machine."""
_saying = threading.Lock()


def say(**what: Any) -> None:
    """Write one line, whole."""
    with _saying:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


class Control:
    """Answers the commands."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        match command:
            case {"do": "pids"}:
                return {"pids": {str(i): pid for i, pid in self._cluster.pids.items()}}
            case {"do": "num_bytes"}:
                return {"num_bytes": {str(i): n for i, n in self._cluster.num_bytes().items()}}
            case {"do": "give_back", "slice": slice}:
                self._cluster.give_back(slice)
                return {}
        raise ValueError(f"no such command: {command}")


def _control(cluster: Cluster) -> None:
    control = Control(cluster)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = control.answer(command)
        except ValueError as error:
            answer = {"error": str(error)}
        say(answer=command["id"], **answer)


def main(argv: list[str]) -> int:
    """Serve until standard input ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the terminal's; whoever started this decides
        signal.signal(ignored, signal.SIG_IGN)
    options = json.loads(argv[0])
    topology = Topology(options["slices"], options["devices_per_slice"])
    rules = Rules(options["heartbeat"], options["restart_after"])
    log_dir, compile_cache = (
        Path(options[name]) if options[name] else None for name in ("log_dir", "compile_cache")
    )

    def told_of_slice(what: str, slice: int, reason: str) -> None:
        say(event=what, slice=slice, reason=reason)

    def told_of_client(what: str, number: int) -> None:
        say(event=what, client=number)

    cluster = Cluster(topology, rules, log_dir, compile_cache, told_of_slice)
    try:
        from elastix.testing.local_pathways import protocol, service

        spoken = protocol.installed()
        _, port = service.Service(spoken, cluster, told_of_client).serve(options["port"])
        if not cluster.wait_until_up(PATIENCE):
            raise ValueError(
                f"not all slices' processes started within {PATIENCE:g} s: see log_dir"
            )
    except ValueError as error:
        say(event="refused", reason=str(error))
        cluster.close()
        return 1
    say(event="ready", port=port)
    _control(cluster)
    cluster.close()
    return 0


if __name__ == "__main__":
    status = 1
    try:
        status = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
    finally:  # whatever threads there are; the slices' processes end with this one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
