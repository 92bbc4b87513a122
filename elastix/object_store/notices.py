"""Notices of preemption in a bucket: objects, which the run fetches into its local folder.

A notice is renamed by whoever took it, so that its fate can be read: `.taken`, or `.missed` if it
was meant for a process that was gone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from elastix.object_store.bucket import Bucket

_FOLDER = "notices"


def leave(bucket: Bucket, text: str) -> str:
    """Leave a notice for the process that writes the run directory; its URL.

    Raises:
        BucketError: it could not be left.
    """
    name = f"{_FOLDER}/{time.time_ns()}-{os.getpid()}.json"
    bucket.write(name, text.encode())
    return bucket.where(name)


def fetch(bucket: Bucket, folder: Path, fate: str = "taken") -> None:
    """Move what notices there are to `folder`/notices, each whole under its final name.

    Raises:
        BucketError: the bucket does not answer; what was not moved is still there.
    """
    for name in bucket.names(f"{_FOLDER}/"):
        data = bucket.read(name) if name.endswith(".json") else None
        if data is not None:
            bucket.write(f"{name.removesuffix('.json')}.{fate}", data)
            bucket.delete(name)
            (folder / _FOLDER).mkdir(exist_ok=True)
            temporary = (folder / name).with_suffix(".tmp")
            temporary.write_bytes(data)
            temporary.rename(folder / name)
