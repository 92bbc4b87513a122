"""A run directory: whose it is, what lies in it, and that one process writes it at a time."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, TextIO

from elastix.recipe import Recipe, describe

FORMAT_VERSION = 1


class RunDirectory:
    """The files of one run. `open` makes it, or takes it up if it belongs to the same recipe."""

    def __init__(self, path: Path, lock: TextIO, same_versions: bool):
        self.path, self._lock = path, lock
        self.same_versions = same_versions
        self.checkpoints = path / "checkpoints"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"

    @staticmethod
    def open(path: str | Path, recipe: Recipe, versions: dict[str, str]) -> RunDirectory:
        """Create or take up a run directory.

        Raises:
            ValueError: it cannot be written, belongs to another recipe, holds something else, or
                is in use by another process.
        """
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            stored = _read_recipe(path)
            lock = (path / "lock").open("a+")
        except OSError as error:
            raise ValueError(f"run directory {path} cannot be written: {error}") from error
        _take(lock, path)
        try:
            if stored is None:
                _refuse_foreign_files(path)
            else:
                _refuse_other_recipe(path, stored, recipe)
            write_json(path / "recipe.json", _recipe_file(recipe, versions))
        except ValueError:
            lock.close()
            raise
        same = stored is None or stored["versions"] == versions
        return RunDirectory(path, lock, same)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.summary, summary)

    def close(self) -> None:
        self._lock.close()


def write_json(path: Path, value: Any) -> None:
    """Write the whole file or nothing: through a temporary file in the same directory."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _recipe_file(recipe: Recipe, versions: dict[str, str]) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "identity_sha256": recipe.identity_sha256(),
        "identity": recipe.identity(),
        "num_steps": recipe.num_steps,
        "mesh": describe(recipe.mesh),
        "policy": describe(recipe.policy),
        "versions": versions,
    }


def _read_recipe(path: Path) -> dict[str, Any] | None:
    file = path / "recipe.json"
    if not file.exists():
        return None
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        stored["identity_sha256"], stored["identity"], stored["versions"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): choose another --run-dir") from error
    return stored


def _take(lock: TextIO, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        pid = lock.read().strip() or "unknown"
        lock.close()
        raise ValueError(
            f"run directory {path} is in use by process {pid}: wait for it or choose another"
        ) from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def _refuse_foreign_files(path: Path) -> None:
    foreign = sorted(p.name for p in path.iterdir() if p.name != "lock")
    if foreign:
        raise ValueError(
            f"run directory {path} holds {foreign[0]} but no recipe.json: "
            "choose an empty or a new directory"
        )


def _refuse_other_recipe(path: Path, stored: dict[str, Any], recipe: Recipe) -> None:
    if stored["identity_sha256"] == recipe.identity_sha256():
        return
    changed = "; ".join(_differences("", stored["identity"], recipe.identity())) or "its format"
    raise ValueError(
        f"run directory {path} belongs to another recipe ({changed}): choose another --run-dir"
    )


def _differences(where: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            found += _differences(f"{where}.{key}" if where else key, old.get(key), new.get(key))
        return found
    return [] if old == new else [f"{where} was {old!r}, is {new!r}"]
