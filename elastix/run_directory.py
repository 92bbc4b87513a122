"""A run directory: whose it is, what lies in it, and that one process writes it at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any, TextIO

from elastix.checkpoints import CheckpointStore
from elastix.evaluation import read_evaluations
from elastix.metrics import read_losses
from elastix.recipe import Recipe, describe

FORMAT_VERSION = 1


class RunDirectory:
    """The files of one run. `open` makes it, or takes it up if it belongs to the same recipe."""

    def __init__(self, path: Path, lock: TextIO, store: CheckpointStore, exact_from: int):
        self.path, self._lock, self.store = path, lock, store
        self.exact_from = exact_from
        """The first step that was done with the versions and the layout of this process: a step
        done again is only held to its first loss, bit for bit, from there on."""
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.recoveries = path / "recoveries.jsonl"
        self.summary = path / "summary.json"

    @staticmethod
    def open(
        path: str | Path, recipe: Recipe, data: dict[str, Any], numerics: dict[str, Any]
    ) -> RunDirectory:
        """Create or take up a run directory.

        Args:
            data: the fingerprint of the data stream; a run goes on with the same data only.
            numerics: what else decides the bits: versions, and the layout inside a slice.

        Raises:
            ValueError: it cannot be written, belongs to another recipe, holds something else, or
                is in use by another process.
        """
        path = Path(path)
        with contextlib.ExitStack() as undo:
            try:
                stored = _read_recipe(path)
                _refuse(path, stored, recipe, data)
                path.mkdir(parents=True, exist_ok=True)
                lock = undo.enter_context((path / "lock").open("a+"))
                _take(lock, path)
                store = CheckpointStore(path / "checkpoints", keep=recipe.policy.keep_checkpoints)
                _refuse_fewer_steps(path, store, recipe)
                rows = len(read_losses(path / "metrics.jsonl"))
                read_evaluations(path / "evaluations.jsonl")  # refuses what is none
                _refuse_lost_rows(path, store, rows)
                exact_from = _exact_from(rows, stored, numerics)
                _sign(lock)
                write_json(path / "recipe.json", recipe_file(recipe, data, numerics, exact_from))
            except OSError as error:
                raise ValueError(f"run directory {path} cannot be written: {error}") from error
            undo.pop_all()
        return RunDirectory(path, lock, store, exact_from)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.summary, summary)

    def close(self) -> None:
        self._lock.close()


def write_json(path: Path, value: Any) -> None:
    """Write the whole file or nothing: through a temporary file in the same directory."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # half a file would keep a full disk full
        raise


def _exact_from(rows: int, stored: dict[str, Any] | None, numerics: dict[str, Any]) -> int:
    if stored is None:
        return 1
    if stored["numerics"] == numerics:
        return stored["exact_from"]
    return rows + 1


def recipe_file(
    recipe: Recipe, data: dict[str, Any], numerics: dict[str, Any], exact_from: int
) -> dict[str, Any]:
    """What `recipe.json` holds."""
    return {
        "format_version": FORMAT_VERSION,
        "identity_sha256": recipe.identity_sha256(),
        "identity": recipe.identity(),
        "data": data,
        "num_steps": recipe.num_steps,
        "policy": describe(recipe.policy),
        "numerics": numerics,
        "exact_from": exact_from,
    }


def _read_recipe(path: Path) -> dict[str, Any] | None:
    file = path / "recipe.json"
    if not file.exists():
        return None
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {stored['format_version']}, this is {FORMAT_VERSION}")
        stored["identity"], stored["data"], stored["numerics"], int(stored["exact_from"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): choose another --run-dir") from error
    return stored


def _take(lock: TextIO, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        pid = lock.read().strip() or "unknown"
        raise ValueError(
            f"run directory {path} is in use by process {pid}: wait for it or choose another"
        ) from error


def _sign(lock: TextIO) -> None:
    """Say who holds the lock; past the buffer, which could not be closed on a full disk."""
    os.ftruncate(lock.fileno(), 0)
    os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)


def _refuse(
    path: Path, stored: dict[str, Any] | None, recipe: Recipe, data: dict[str, Any]
) -> None:
    """Refuse a directory that is not this run's, before anything in it is touched."""
    if stored is None:
        foreign = (
            sorted(p.name for p in path.iterdir() if p.name != "lock") if path.exists() else ()
        )
        if foreign:
            raise ValueError(
                f"run directory {path} holds {foreign[0]} but no recipe.json: "
                "choose an empty or a new directory"
            )
        return
    _refuse_change(path, "recipe", stored["identity"], recipe.identity())
    _refuse_change(path, "data", stored["data"], json.loads(json.dumps(data)))


def _refuse_fewer_steps(path: Path, store: CheckpointStore, recipe: Recipe) -> None:
    steps = store.steps()
    if steps and steps[-1] > recipe.num_steps:
        raise ValueError(
            f"num_steps={recipe.num_steps} is less than what is done: {path} has a checkpoint of "
            f"step {steps[-1]}; ask for more steps or choose another --run-dir"
        )


def _refuse_lost_rows(path: Path, store: CheckpointStore, rows: int) -> None:
    steps = store.steps()
    if steps and steps[-1] > rows:
        raise ValueError(
            f"{path}/metrics.jsonl has rows up to step {rows}, and there is a checkpoint of step "
            f"{steps[-1]}: put the file back, or choose another --run-dir"
        )


def _refuse_change(path: Path, what: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = "; ".join(_differences("", old, new))
    if changed:
        raise ValueError(
            f"run directory {path} belongs to another {what} ({changed}): choose another --run-dir"
        )


def _differences(where: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            found += _differences(f"{where}.{key}" if where else key, old.get(key), new.get(key))
        return found
    return [] if old == new else [f"{where} was {old!r}, is {new!r}"]
