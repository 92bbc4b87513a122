"""The environment of the processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent


def environment(**more: str) -> dict[str, str]:
    """This process's own, in which `elastix`, `models` and `tests` are those of the checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def reading_the_cache(**more: str) -> dict[str, str]:
    """With the compiled programs of the tests, to be read alone: a child that is killed would leave
    half of one behind. For children that are given no cache of their own (`--compile-cache off`).
    """
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    return environment(**cache, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="1e9", **more)
