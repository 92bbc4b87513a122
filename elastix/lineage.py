"""Where a train state comes from: leaves that fit, and runs that begin from another's."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastix.checkpoints import CheckpointError, CheckpointReader, CheckpointStore
from elastix.jsonl import RowReader, append
from elastix.recipe import Recipe
from elastix.run_directory import recipe_file, write_json
from elastix.train_state import StateSpec


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run begins from: that of `step` in another run's directory."""

    run_dir: Path
    step: int

    @staticmethod
    def parse(text: str) -> Origin:
        """`runs/long@2000` is step 2000 of that run.

        Raises:
            ValueError: the text is not of that form.
        """
        match = re.fullmatch(r"(.+)@(\d+)", text)
        if match is None:
            raise ValueError(f"--fork {text!r}: write DIR@STEP, such as runs/quickstart@100")
        return Origin(Path(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.run_dir}@{self.step}"


def fork(
    origin: Origin,
    path: Path,
    recipe: Recipe,
    spec: StateSpec,
    data: Mapping[str, Any],
    numerics: Mapping[str, Any],
) -> None:
    """Make the run directory `path` of a run that begins where `origin` is: its checkpoint, and its
    metrics and evaluations up to there. The recipe may be another, of the same train state.

    A directory that was forked from there before is left as it is: the run is resumed.

    Raises:
        ValueError: there is no such checkpoint, it is bad, its leaves do not fit the recipe, or
            `path` holds something else. Nothing was made then.
    """
    if (path / "lineage.json").exists():
        _refuse_another(path, origin)
        return
    if path.exists() and any(path.iterdir()):
        raise ValueError(
            f"--fork {origin}: run directory {path} holds {sorted(path.iterdir())[0].name} "
            "already: choose an empty or a new directory"
        )
    if recipe.num_steps < origin.step:
        raise ValueError(f"--fork {origin}: num_steps={recipe.num_steps} is less than its step")
    leaves, metadata = _load(origin)
    refuse_other_leaves(f"--fork {origin}", spec, metadata["checkpoint"]["leaves"])
    made = path.with_name(f"{path.name}.forking")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    own = {key: value for key, value in metadata.items() if key != "checkpoint"}
    CheckpointStore(made / "checkpoints", keep=1).save(origin.step, leaves, own)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        _copy_rows(origin, name, made / name)
    exact_from = origin.step + 1  # what was done before may come of another recipe
    write_json(made / "recipe.json", recipe_file(recipe, dict(data), dict(numerics), exact_from))
    write_json(made / "lineage.json", _told(origin))
    if path.exists():
        path.rmdir()
    os.rename(made, path)


def refuse_other_leaves(what: str, spec: StateSpec, found: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint whose leaves are not those of the recipe.

    Raises:
        ValueError: with the leaves that differ, in one line.
    """
    differences = list(_differences(spec, found))
    if differences:
        raise ValueError(
            f"{what}: the train state of its checkpoint is not that of the recipe: "
            f"{'; '.join(differences[:4])}{'; ...' if len(differences) > 4 else ''}"
        )


def _differences(spec: StateSpec, found: list[dict[str, Any]]) -> Iterator[str]:
    there = {row["path"]: f"{row['dtype']}{list(row['shape'])}" for row in found}
    wanted = {leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in spec.leaves}
    for path in sorted({*there, *wanted}):
        if there.get(path) != wanted.get(path):
            is_there, is_wanted = there.get(path, "not there"), wanted.get(path, "none")
            yield f"{path} is {is_there}, and the recipe has {is_wanted}"


def _load(origin: Origin) -> tuple[Any, Any]:
    reader = CheckpointReader(origin.run_dir / "checkpoints")
    try:
        steps = reader.steps()
        if origin.step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"--fork {origin}: there is no such checkpoint (there are: {there})")
        return reader.load(origin.step)[0], reader.metadata(origin.step)
    except CheckpointError as error:
        raise ValueError(f"--fork {origin}: {error}") from error


def _copy_rows(origin: Origin, name: str, to: Path) -> None:
    source = origin.run_dir / name
    if not source.exists():
        return
    with to.open("w", encoding="utf-8") as file:
        for row in RowReader(source):
            if row["step"] <= origin.step:
                append(file, row)


def _told(origin: Origin) -> dict[str, Any]:
    return {"forked_from": str(origin.run_dir.resolve()), "step": origin.step}


def _refuse_another(path: Path, origin: Origin) -> None:
    told = json.loads((path / "lineage.json").read_text(encoding="utf-8"))
    if told != _told(origin):
        raise ValueError(
            f"--fork {origin}: run directory {path} was forked from "
            f"{told['forked_from']}@{told['step']}: choose another --run-dir"
        )
