"""PURE: the memory of this machine."""

from __future__ import annotations

import os


def host_memory() -> int:
    """Bytes of memory that this machine has, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
