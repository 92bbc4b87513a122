"""Notices of preemption: `elastix notify` puts them into a run directory, the run takes them out.

A notice is one small file, written whole under its final name, so that a reader never sees half.
In a bucket it is an object, which the run fetches into its local folder every few seconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastix.jsonl import RowReader
from elastix.machine import PreemptionNoticed
from elastix.object_store import notices as bucket_notices
from elastix.object_store.bucket import Bucket, BucketError, bucket_url
from elastix.object_store.lease import Timing, is_held
from elastix.object_store.rows import BucketFile
from elastix.usage import UsageParser

_EVERY = 0.2
"""Seconds between two looks into the folder."""


@dataclass(frozen=True)
class Notice:
    """`slices` will be taken away in `seconds`; none named: the whole job is asked to stop."""

    slices: frozenset[int]
    seconds: float


class Inbox:
    """The notices of one run directory, oldest first, each once.

    Args:
        clock: seconds on a clock that only goes forward.
        wall: seconds since 1970, on a clock that may be set.
    """

    def __init__(
        self,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        self._folder, self._clock, self._wall = run_dir / "notices", clock, wall
        self._next_look = 0.0
        for late in self._waiting():  # meant for a process that is gone
            late.rename(late.with_suffix(".missed"))

    def _waiting(self) -> list[Path]:
        return sorted(self._folder.glob("*.json")) if self._folder.is_dir() else []

    def take(self) -> Notice | None:
        """The next notice, if one has come."""
        if self._clock() < self._next_look:
            return None
        waiting = self._waiting()
        if not waiting:
            self._next_look = self._clock() + _EVERY
            return None
        text = waiting[0].read_text(encoding="utf-8")
        waiting[0].rename(waiting[0].with_suffix(".taken"))
        value = json.loads(text)
        # Two clocks, perhaps of two machines, one of which may have been set since. Whatever they
        # say: never later than the time that was named, counted from now.
        left = min(value["until"] - self._wall(), value["seconds"])
        return Notice(frozenset(value["slices"]), max(0.0, left))


class Announcements:
    """What the world has announced: the end of the whole job, or of some slices.

    Args:
        stop: set from a signal handler.
        take: gives the next notice, if one has come.
    """

    def __init__(
        self,
        stop: threading.Event | None = None,
        take: Callable[[], Notice | None] = lambda: None,
    ):
        self._stop, self._take = stop or threading.Event(), take
        self._told = False

    def next(self, at: float, epoch: int) -> PreemptionNoticed | None:
        """The next event, each once."""
        if self._stop.is_set() and not self._told:
            self._told = True
            return PreemptionNoticed(at=at, epoch=epoch)
        notice = self._take()
        if notice is None:
            return None
        until = at + notice.seconds
        return PreemptionNoticed(at=at, epoch=epoch, slices=notice.slices, until=until)


def post(
    run_dir: str | Path, slices: frozenset[int], seconds: float, timing: Timing | None = None
) -> Path | str:
    """Leave a notice for the process that runs in `run_dir`; returns where it is.

    Args:
        timing: how a lease in a bucket is watched.

    Raises:
        ValueError: no process runs there, or a slice does not exist; nothing was written.
        OSError: it cannot be written.
    """
    url = bucket_url(run_dir)
    value = {"slices": sorted(slices), "until": time.time() + seconds, "seconds": seconds}
    if url is None:
        return _post_on_disk(Path(run_dir), slices, json.dumps(value))
    return _post_in_bucket(Bucket(url), slices, json.dumps(value), timing)


def _post_on_disk(run_dir: Path, slices: frozenset[int], text: str) -> Path:
    _require_running(run_dir)
    _require_known(str(run_dir), slices, run_dir / "events.jsonl")
    folder = run_dir / "notices"
    folder.mkdir(exist_ok=True)
    path = folder / f"{time.time_ns()}-{os.getpid()}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)
    return path


def _post_in_bucket(
    bucket: Bucket, slices: frozenset[int], text: str, timing: Timing | None
) -> str:
    if not is_held(bucket, timing):
        raise ValueError(f"no process runs in {bucket.url}: there is nobody to notify")
    _require_known(bucket.url, slices, BucketFile(bucket, "events.jsonl"))
    return bucket_notices.leave(bucket, text)


def _require_running(run_dir: Path) -> None:
    try:
        with (run_dir / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError as error:
        raise ValueError(f"{run_dir} is no run directory ({error.strerror}): name one") from error
    raise ValueError(f"no process runs in {run_dir}: there is nobody to notify")


def _require_known(run_dir: str, slices: frozenset[int], events: Path | BucketFile) -> None:
    """The slices of the run are those that its last process began with."""
    started = _last_started(events) if events.exists() else None
    if started is None:
        raise ValueError(f"the run in {run_dir} has not started training yet: try again")
    known = frozenset[int](started["slices"])
    for slice_id in sorted(slices - known):
        raise ValueError(
            f"slice {slice_id} does not exist in {run_dir}: use {min(known)} to {max(known)}"
        )


def _last_started(events: Path | BucketFile) -> dict[str, Any] | None:
    rows = (row["event"] for row in RowReader(events))
    return next(iter(deque((e for e in rows if e["type"] == "Started"), maxlen=1)), None)


def _slice_ids(text: str) -> frozenset[int]:
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--slices {text!r}: name slices such as 1 or 0,2") from error


def notify_main(argv: Sequence[str]) -> int:
    """`elastix notify`: 0 when the notice was left. Raises ValueError for bad input."""
    parser = UsageParser(
        prog="elastix notify",
        description="Tell a run that slices will be taken away: it leaves them before, and loses "
        "no step. Without --slices the whole job is asked to stop: it saves and exits with 75.",
        epilog="example: elastix notify runs/quickstart --slices 1 --in 60",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory, or its gs:// URL")
    parser.add_argument("--slices", metavar="S,S", help="slices, counted from 0")
    parser.add_argument(
        "--in", dest="seconds", metavar="SECONDS", type=float, default=30.0, help="(default: 30)"
    )
    given = parser.parse_args(argv)
    slices = frozenset[int]() if given.slices is None else _slice_ids(given.slices)
    if not 0 <= given.seconds < float("inf"):
        raise ValueError(f"--in {given.seconds}: use 0 seconds or more")
    try:
        post(given.run_dir, slices, given.seconds)
    except BucketError as error:
        raise ValueError(str(error)) from error
    what = f"slices {sorted(slices)}" if slices else "the whole job"
    print(f"noticed: {what} in {given.seconds:g} s")
    return 0
