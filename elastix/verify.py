"""`elastix verify`: the same run with and without its faults, compared bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from elastix.checkpoints import CheckpointError, CheckpointStore
from elastix.command import Command
from elastix.mesh import FSDP
from elastix.preparation import prepare, simulated_backend
from elastix.recipe import Recipe
from elastix.train_state import StateSpec

_USAGE, _FAILED = 2, 1


@dataclass(frozen=True)
class Outcome:
    """One of the two runs, when it has ended."""

    label: str
    run_dir: Path
    exit_status: int
    last_error: str
    """The last line of its standard error."""

    @property
    def summary(self) -> dict[str, Any]:
        """Its `summary.json`."""
        return json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))


def verify(command: Command) -> str | None:
    """Run `command` with and without its faults; returns what differs, in one line, or None.

    Both run in child processes, at the same time, with run directories of their own, which are
    kept unless all is equal.

    Raises:
        ValueError: bad input, in one line with the remedy.
    """
    if not command.faults:
        raise ValueError("verify compares a run with faults to one without: give --lose S@STEP")
    recipe = prepare(command).recipe
    where = _directory(command)
    labels = {"with faults": True, "undisturbed": False}
    with _children(command, where, labels) as children:
        outcomes = [child.wait() for child in children]
    bad = next((o for o in outcomes if o.exit_status == _USAGE), None)
    if bad:
        shutil.rmtree(where)
        raise ValueError(bad.last_error.removeprefix("elastix: "))
    difference = _difference(command, recipe, *outcomes)
    if difference:
        return f"{difference} (kept: {where})"
    print(f"equal: state_sha256 {outcomes[0].summary['state_sha256']}")
    print(f"equal: consumed {outcomes[0].summary['consumed']}")
    if command.keep or command.run_dir:
        print(f"kept: {where}")
    else:
        shutil.rmtree(where)
    return None


def _directory(command: Command) -> Path:
    if command.run_dir is None:
        return Path(tempfile.mkdtemp(prefix="elastix-verify-"))
    where = Path(command.run_dir)
    try:
        where.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"--run-dir {where} cannot be made ({error.strerror}): name a new directory"
        ) from error
    return where
