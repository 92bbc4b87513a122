"""`elastix replay`: check a recorded run against the machine, stop it anywhere, and explain it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from elastix.event_log import encode
from elastix.explain import describe, explain, explanation
from elastix.jsonl import RowReader
from elastix.machine import Done, Failed, Started, State, Training
from elastix.object_store.bucket import Bucket, bucket_url
from elastix.object_store.rows import BucketFile
from elastix.recoveries import Recoveries
from elastix.replay import Decision, Process, Replay, replay
from elastix.usage import UsageParser

SAME, DIFFERENT, USAGE, BROKEN_PIPE = 0, 1, 2, 141

_ABOUT = """\
Feed the recorded events of a run to the recovery machine, and check that it makes the same
decisions again: the same states, the same effects. Needs the log alone, no device and no recipe:
the log of a cluster can be replayed on a laptop. The file is never changed.

Rows are counted from 0, as `seq` in the log. Summary: rows that agree, processes that wrote them,
epochs (meshes prepared or waited for), recoveries, and how the run ended.

examples:
  elastix replay runs/quickstart
  elastix replay runs/quickstart/events.jsonl --until 120 --explain"""

_STATUS = """\
exit status:
  0 the same decisions   1 a difference: the first, with its row and field, on one line
  2 usage or bad input: no such file, not an event log, a damaged line"""

_TORN = (
    "the last line is torn and was left out: its process was killed, or is still writing; "
    "a resumed run cuts it off"
)


def replay_main(argv: Sequence[str]) -> int:
    """Run `elastix replay` with these arguments, and return its exit status.

    0 the same decisions, 1 a difference, 2 usage or bad input; 141 if nobody reads the output.
    """
    parser = _parser()
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return SAME
    try:
        given = parser.parse_args(argv)
        status = _Command(_find(given.log), given.until, given.explain, given.json).execute()
        sys.stdout.flush()
        return status
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE  # as `| head` leaves any program
        return _say(str(error), USAGE)


@dataclass
class _Command:
    """One replay and what is shown of it."""

    path: Path | BucketFile
    until: int | None
    explain: bool
    json: bool
    last: Decision | None = None
    recoveries: list[Recoveries] = field(default_factory=list)
    """One for each process."""

    def execute(self) -> int:
        reader = RowReader(self.path)
        result = replay(self._rows(reader), self._observe)
        self._check_extent(result, reader.torn)
        if self.last and self.last.seq == self.until and not self.json:
            print(describe(self.last))
        if self.json:
            print(json.dumps(self._summary_json(result, reader.torn)))
        if result.difference:
            return _say(str(result.difference), DIFFERENT)
        if not self.json:
            print(*([_TORN] if reader.torn else []), self._summary(result), sep="\n")
        return SAME

    def _rows(self, reader: RowReader) -> Iterator[Any]:
        """The rows up to the one to stop after."""
        read, rows = 0, islice(reader, None if self.until is None else self.until + 1)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except ValueError as error:
                remedy = f": replay them with --until {read - 1}" if read else ""
                raise ValueError(f"{error}{remedy}") from error
            read += 1
            yield row

    def _observe(self, decision: Decision) -> None:
        self.last = decision
        if isinstance(decision.event, Started):
            self.recoveries.append(Recoveries())
        self.recoveries[-1].update(decision.before, decision.event, decision.after)
        if self.explain and self.until in (None, decision.seq):
            print(json.dumps(explanation(decision)) if self.json else explain(decision))

    def _check_extent(self, result: Replay, torn: bool) -> None:
        if result.difference:
            return
        if not result.rows:
            what = "holds one torn line and no row" if torn else "is empty"
            raise ValueError(f"{self.path} {what}: the run ended before its first event")
        if self.until is not None and result.rows <= self.until:
            last = result.rows - 1
            raise ValueError(f"--until {self.until}: the last row is {last}, use {last} or less")

    @property
    def _num_recoveries(self) -> int:
        return sum(len(found.done) for found in self.recoveries)

    def _summary(self, result: Replay) -> str:
        epochs = sum(process.epochs for process in result.processes)
        counts = ", ".join(
            [
                _count(result.rows, "row"),
                _count(len(result.processes), "process", "processes"),
                _count(epochs, "epoch"),
                _count(self._num_recoveries, "recovery", "recoveries"),
            ]
        )
        return f"the same decisions: {counts}; {_ending(result.processes[-1], self.until)}"

    def _summary_json(self, result: Replay, torn: bool) -> dict[str, Any]:
        return {
            "same": result.difference is None,
            "rows": result.rows,
            "processes": [_process_json(process) for process in result.processes],
            "recoveries": self._num_recoveries,
            "difference": asdict(result.difference) if result.difference else None,
            "torn": torn,
            "state": encode(self.last.after) if self.last else None,
        }


def _find(log: str) -> Path | BucketFile:
    """The event log that a file or a run directory names.

    Raises:
        ValueError: there is none.
    """
    if url := bucket_url(log):
        return _find_in_bucket(url.removesuffix("/events.jsonl"))
    path = Path(log)
    if path.is_dir():
        if not (path / "events.jsonl").is_file():
            raise ValueError(f"{path} holds no events.jsonl: give the directory of a run")
        return path / "events.jsonl"
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a run directory or its events.jsonl")
    return path


def _find_in_bucket(url: str) -> BucketFile:
    file = BucketFile(Bucket(url), "events.jsonl")
    if not file.exists():
        raise ValueError(f"{url} holds no events.jsonl: give the URL of a run directory")
    return file


def _ending(process: Process, until: int | None) -> str:
    state: State = process.end
    match state:
        case Done():
            return f"ended {state.outcome} at step {state.iterator_state}"
        case Failed():
            return f"ended failed: {' '.join(state.reason.split())}"
    at = f" at step {state.committed}" if isinstance(state, Training) else ""
    where = f"{type(state).__name__}{at}"
    if until is not None:
        return f"stopped after row {until} in {where}"
    return f"the log ends in {where}: its process was killed, or is still running"


def _process_json(process: Process) -> dict[str, Any]:
    return {**asdict(process), "end": type(process.end).__name__}


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _say(line: str, status: int) -> int:
    """Tell standard error in one line why the exit status is what it is."""
    print(f"elastix: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="elastix replay",
        usage="elastix replay RUN_DIR [--until N] [--explain] [--json]",
        description=_ABOUT,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("log", metavar="RUN_DIR", help="a run directory, or an events.jsonl by itself")
    add("--until", metavar="N", type=_row_number, help="stop after row N and print the state there")
    add(
        "--explain",
        action="store_true",
        help="for each row (with --until: for row N) the rule that fired, what it changed in the "
        "state, and the effects that followed",
    )
    add(
        "--json",
        action="store_true",
        help="the summary as JSON on the last line; before it, with --explain, one line a row",
    )
    return parser


def _row_number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no row: use 0 or more")
    return number
