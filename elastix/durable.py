"""What no power cut can take any more."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have what a file holds, or which entries a folder has, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
