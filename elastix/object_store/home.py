"""A run directory in a bucket, while a process writes it: a local folder that is kept up there."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from elastix.object_store import notices
from elastix.object_store.bucket import LOCK, Bucket, BucketError
from elastix.object_store.checkpoints import BucketFolder
from elastix.object_store.lease import RENEW, Lease, LeaseLostError, Timing
from elastix.object_store.rows import Mirror

PUBLISH = 30.0
"""Seconds between two publications of rows, besides those before each checkpoint."""


class BucketHome:
    """The run directory below a URL, and a temporary folder that the run writes its files in.

    Raises:
        BucketError: from the constructor and most methods; it is an OSError.
    """

    def __init__(self, url: str, bucket: Bucket | None = None, timing: Timing | None = None):
        self.name = url
        self._bucket = bucket or Bucket(url)
        self._lease = Lease(self._bucket, timing)
        stored = self._bucket.read("recipe.json")
        self.path = Path(tempfile.mkdtemp(prefix="elastix-run-"))
        if stored is not None:
            (self.path / "recipe.json").write_bytes(stored)
        self._mirror, self._guard = Mirror(self._bucket, self.path), threading.Lock()
        self._keepers: list[_Repeating] = []
        self._tell_loss: Callable[[], object] = lambda: None
        self._published = _Told(f"the rows of {url}")
        self._left = False

    def foreign(self) -> str | None:
        names = self._bucket.names()
        return next((name for name in names if name != LOCK), None)

    def claim(self) -> None:
        self._lease.take(_tell)
        self._mirror.download()
        notices.fetch(self._bucket, self.path, "missed")

    def sign(self) -> None:
        """From here on it is kept: the lease is renewed, and rows are published."""
        self._keepers = [_Repeating(RENEW, self.keep), _Repeating(PUBLISH, self.publish_rows)]

    def checkpoints(self) -> BucketFolder:
        return BucketFolder(
            self._bucket, require=self._lease.renew, publish=self._publish, scratch=self.path
        )

    def when_lost(self, tell: Callable[[], object]) -> None:
        self._tell_loss = tell

    def publish(self) -> None:
        self._lease.renew()
        self._publish()

    def _publish(self) -> None:
        with self._guard:
            self._mirror.publish()

    def publish_rows(self) -> None:
        """Publish, or tell once why that fails: the next time may do."""
        try:
            with self._published:
                self.publish()
        except LeaseLostError as error:
            self._leave(error)

    def keep(self) -> None:
        """Renew the lease, and fetch notices; a bucket that does not answer is asked again."""
        try:
            self._lease.renew()
            notices.fetch(self._bucket, self.path)
        except LeaseLostError as error:
            self._leave(error)
        except OSError:
            pass  # what matters of it is told by who publishes and who saves

    def _leave(self, error: LeaseLostError) -> None:
        self._end_keepers()
        with self._guard:
            left, self._left = self._left, True
        if not left:
            _tell(str(error))
            self._tell_loss()

    def close(self) -> None:
        """What could not be published stays in the local folder, whose name is told."""
        self._end_keepers(wait=True)
        try:
            self.publish()
        except (OSError, ValueError) as error:
            _tell(f"{error}: the last rows of the run are kept in {self.path}")
            self._release()
        else:
            self.give_up()

    def give_up(self) -> None:
        self._end_keepers(wait=True)
        self._release()
        shutil.rmtree(self.path, ignore_errors=True)

    def _release(self) -> None:
        with contextlib.suppress(BucketError):  # it expires
            self._lease.release()

    def _end_keepers(self, wait: bool = False) -> None:
        for keeper in self._keepers:
            keeper.end(wait)


class _Repeating:
    """A thread that does something every few seconds until it is ended."""

    def __init__(self, every: float, do: Callable[[], None]):
        self._every, self._do, self._ended = every, do, threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastix-bucket", daemon=True)
        self._thread.start()

    def end(self, wait: bool) -> None:
        self._ended.set()
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            self._do()


class _Told:
    """Tells the first of failures in a row, and when they are over."""

    def __init__(self, what: str):
        self._what, self._fails = what, False

    def __enter__(self) -> None:
        """Nothing is told yet."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, LeaseLostError):
            return False
        failed = isinstance(error, OSError)
        if failed and not self._fails:
            _tell(f"{error}: it is tried again")
        if self._fails and error is None:
            _tell(f"{self._what} are published again, and none is missing")
        self._fails = failed
        return failed


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"elastix: {line}", file=sys.stderr, flush=True)
