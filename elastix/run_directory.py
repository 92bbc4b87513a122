"""A run directory: whose it is, what lies in it, and that one process writes it at a time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastix.checkpoints import CheckpointError, CheckpointStore, UnreadableHereError
from elastix.durable import sync
from elastix.evaluation import read_evaluations
from elastix.metrics import read_losses
from elastix.recipe import Recipe, describe
from elastix.run_home import Home, open_home

FORMAT_VERSION = 1


class RunDirectory:
    """The files of one run. `open` makes it, or takes it up if it belongs to the same recipe.

    `name` is what the user calls it, `path` the local directory that its files are written in.
    """

    def __init__(self, home: Home, store: CheckpointStore, exact_from: int):
        self._home, self.store = home, store
        self.name, self.path = home.name, home.path
        self.exact_from = exact_from
        """The first step that was done with the versions and the layout of this process: a step
        done again is only held to its first loss, bit for bit, from there on."""
        self.events = self.path / "events.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.recoveries = self.path / "recoveries.jsonl"
        self.summary = self.path / "summary.json"

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
        with contextlib.ExitStack() as undo:
            try:
                home = open_home(path)
                undo.callback(home.give_up)
                _refuse(home, _read_recipe(home.path), recipe, data)
                home.claim()
                stored = _read_recipe(home.path)
                _refuse(home, stored, recipe, data)  # another process may have made it meanwhile
                store = CheckpointStore(home.checkpoints(), keep=recipe.policy.keep_checkpoints)
                _refuse_fewer_steps(home, store, recipe)
                _refuse_unwritable(home.path)
                rows = len(read_losses(home.path / "metrics.jsonl"))
                read_evaluations(home.path / "evaluations.jsonl")  # refuses what is none
                _refuse_lost_rows(home, store, rows)
                exact_from = _exact_from(rows, stored, numerics)
                home.sign()
                made = recipe_file(recipe, data, numerics, exact_from)
                write_json(home.path / "recipe.json", made)
                home.publish()
            except OSError as error:
                raise ValueError(f"run directory {path} cannot be written: {error}") from error
            undo.pop_all()
        return RunDirectory(home, store, exact_from)

    def when_lost(self, tell: Callable[[], object]) -> None:
        """Call `tell`, from another thread, if another process takes the directory over: nothing
        can be saved from then on."""
        self._home.when_lost(tell)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.summary, summary)

    def close(self) -> None:
        self._home.close()


def write_json(path: Path, value: Any) -> None:
    """Write the whole file or nothing: through a temporary file in the same directory, so that
    no power cut leaves an empty one with a good name."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): choose another --run-dir") from error
    return stored


def _refuse(
    home: Home, stored: dict[str, Any] | None, recipe: Recipe, data: dict[str, Any]
) -> None:
    """Refuse a directory that is not this run's, before anything in it is touched."""
    if stored is None:
        if foreign := home.foreign():
            raise ValueError(
                f"run directory {home.name} holds {foreign} but no recipe.json: "
                "choose an empty or a new directory"
            )
        return
    _refuse_change(home.name, "recipe", stored["identity"], recipe.identity())
    _refuse_change(home.name, "data", stored["data"], json.loads(json.dumps(data)))


def _refuse_unwritable(path: Path) -> None:
    """Raises OSError if a file that grows cannot."""
    for file in path.glob("*.jsonl"):
        with file.open("r+b"):
            pass


def _refuse_fewer_steps(home: Home, store: CheckpointStore, recipe: Recipe) -> None:
    newest = newest_step(store)
    if newest > recipe.num_steps:
        raise ValueError(
            f"num_steps={recipe.num_steps} is less than what is done: {home.name} has a checkpoint "
            f"of step {newest}; ask for more steps or choose another --run-dir"
        )


def _refuse_lost_rows(home: Home, store: CheckpointStore, rows: int) -> None:
    newest = newest_step(store)
    if newest > rows:
        raise ValueError(
            f"{home.name}/metrics.jsonl has rows up to step {rows}, and there is a checkpoint of "
            f"step {newest}: put the file back, or choose another --run-dir"
        )


def newest_step(store: CheckpointStore) -> int:
    """The newest step whose metadata are not damaged, or 0: another will be set aside, and must
    not keep the run from the good ones."""
    for step in reversed(store.steps()):
        try:
            store.metadata(step)
        except UnreadableHereError:  # it may be good
            return step
        except CheckpointError:
            continue
        return step
    return 0


def _refuse_change(name: str, what: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = "; ".join(_differences("", old, new))
    if changed:
        raise ValueError(
            f"run directory {name} belongs to another {what} ({changed}): choose another --run-dir"
        )


def _differences(where: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            found += _differences(f"{where}.{key}" if where else key, old.get(key), new.get(key))
        return found
    return [] if _same(old, new) else [f"{where} was {old!r}, is {new!r}"]


def _same(old: Any, new: Any) -> bool:
    """Whether two JSON values are equal: True is not 1, and NaN is NaN."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    return old == new or (old != old and new != new)
