"""Where a train state comes from: leaves that fit, and runs that begin from another's."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastix.checkpoints import CheckpointError, CheckpointReader, CheckpointStore
from elastix.jsonl import RowReader, append
from elastix.object_store.bucket import LOCK, Bucket, BucketError, bucket_url
from elastix.object_store.checkpoints import BucketFolder
from elastix.object_store.home import BucketHome
from elastix.object_store.rows import BucketFile
from elastix.recipe import Recipe
from elastix.run_directory import recipe_file, write_json
from elastix.run_home import LocalHome
from elastix.train_state import StateSpec

_FORKING = "forking"
"""The file or object that says that not all of a fork may be there yet, and of which."""
_MADE = ("checkpoints", "metrics.jsonl", "evaluations.jsonl", "lineage.json", "lineage.tmp")
"""What a fork on disk makes, besides `recipe.json`, which comes last: with it, all is there."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run begins from: that of `step` in another run's directory, which is
    named by a path or a URL."""

    run_dir: Path | str
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
        return Origin(bucket_url(match[1]) or Path(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.run_dir}@{self.step}"

    @property
    def bucket(self) -> Bucket | None:
        """The bucket that holds it; None if it is on disk.

        Raises:
            BucketError: it cannot be opened.
        """
        url = bucket_url(self.run_dir)
        return None if url is None else Bucket(url)


@dataclass(frozen=True)
class _Start:
    """What the run that forks off begins with, checked to fit its recipe."""

    origin: Origin
    leaves: Any
    metadata: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    recipe_file: dict[str, Any]

    def save_checkpoint(self, where: Path | BucketFolder) -> None:
        own = {key: value for key, value in self.metadata.items() if key != "checkpoint"}
        CheckpointStore(where, keep=1).save(self.origin.step, self.leaves, own)

    def write_files(self, folder: Path) -> None:
        """All but the checkpoint."""
        for name, rows in self.rows.items():
            with (folder / name).open("wb", buffering=0) as file:
                for row in rows:
                    append(file, row)
        write_json(folder / "lineage.json", _told(self.origin))
        write_json(folder / "recipe.json", self.recipe_file)


def fork(
    origin: Origin,
    where: str | Path,
    recipe: Recipe,
    spec: StateSpec,
    data: Mapping[str, Any],
    numerics: Mapping[str, Any],
) -> None:
    """Make the run directory `where` of a run that begins where `origin` is: its checkpoint, and
    its metrics and evaluations up to there. The recipe may be another, of the same train state.

    A directory that was forked from there before is left as it is: the run is resumed.

    Raises:
        ValueError: there is no such checkpoint, it is bad, its leaves do not fit the recipe, or
            `where` holds something else. Nothing was made then.
    """
    exact_from = origin.step + 1  # what was done before may come of another recipe

    def start() -> _Start:
        if recipe.num_steps < origin.step:
            raise ValueError(f"--fork {origin}: num_steps={recipe.num_steps} is less than its step")
        leaves, metadata = _load(origin)
        refuse_other_leaves(f"--fork {origin}", spec, metadata["checkpoint"]["leaves"])
        made = recipe_file(recipe, dict(data), dict(numerics), exact_from)
        return _Start(origin, leaves, metadata, _rows_up_to(origin), made)

    url = bucket_url(where)
    try:
        if url is None:
            _fork_on_disk(origin, LocalHome(Path(where)), start)
        else:
            _fork_in_bucket(origin, url, start)
    except BucketError as error:
        raise ValueError(f"--fork {origin}: {error}") from error
    except OSError as error:
        raise ValueError(
            f"--fork {origin}: run directory {where} cannot be made ({error.strerror}): choose a "
            "new directory where there is room"
        ) from error


def _fork_on_disk(origin: Origin, home: LocalHome, start: Callable[[], _Start]) -> None:
    """In its place from the beginning, under its lock: two processes never make it at once."""
    if _is_made(origin, home):
        return
    begun, is_new = start(), not home.path.exists()
    try:
        home.claim()
        if not _is_made(origin, home):  # another process may have, meanwhile
            _make(begun, home, is_new)
    finally:
        home.give_up()


def _is_made(origin: Origin, home: LocalHome) -> bool:
    """Whether the fork is there; not if it is one that was killed. Refuses all else."""
    path, whole = home.path, (home.path / "recipe.json").exists()
    if not whole and _read(path / _FORKING) == json.dumps(_told(origin)).encode():
        return False
    if whole and (lineage := _read(path / "lineage.json")) is not None:
        _refuse_another(str(path), lineage, origin)
        return True
    if foreign := home.foreign():
        _refuse_full(str(path), foreign, origin)
    return False


def _make(begun: _Start, home: LocalHome, is_new: bool) -> None:
    path = home.path
    try:
        home.sign()
        _remove(path, *_MADE)
        (path / _FORKING).write_text(json.dumps(_told(begun.origin)))
        begun.save_checkpoint(path / "checkpoints")
        begun.write_files(path)
    except BaseException:
        _remove(path, *_MADE, _FORKING, *(("lock",) if is_new else ()))
        if is_new:
            with contextlib.suppress(OSError):  # somebody else put something there
                path.rmdir()
        raise
    _remove(path, _FORKING)


def _remove(folder: Path, *names: str) -> None:
    for path in (folder / name for name in names):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _fork_in_bucket(origin: Origin, url: str, start: Callable[[], _Start]) -> None:
    """Objects cannot be renamed: until all are there, one of them says that some may be missing."""
    bucket, told = Bucket(url), json.dumps(_told(origin)).encode()
    names = [name for name in bucket.names() if name != LOCK]
    unfinished = bucket.read(_FORKING) == told
    if "lineage.json" in names and not unfinished:
        _refuse_another(url, bucket.read("lineage.json") or b"{}", origin)
        return
    if names and not unfinished:
        _refuse_full(url, names[0], origin)
    begun, home = start(), BucketHome(url)
    try:
        home.claim()
        bucket.write(_FORKING, told)
        bucket.delete(*(name for name in names if name != _FORKING))
        begun.save_checkpoint(home.checkpoints())
        begun.write_files(home.path)
        home.publish()
        bucket.delete(_FORKING)
    finally:
        home.give_up()


def refuse_other_leaves(what: str, spec: StateSpec, found: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint whose leaves are not those of the recipe.

    Raises:
        ValueError: with the leaves that differ, in one line.
    """
    if differences := spec.misfit(found):
        raise ValueError(
            f"{what}: the train state of its checkpoint is not that of the recipe: {differences}"
        )


def _load(origin: Origin) -> tuple[Any, Any]:
    bucket = origin.bucket
    folder = BucketFolder(bucket) if bucket else Path(origin.run_dir, "checkpoints")
    reader = CheckpointReader(folder)
    try:
        steps = reader.steps()
        if origin.step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"--fork {origin}: there is no such checkpoint (there are: {there})")
        return reader.load(origin.step)[0], reader.metadata(origin.step)
    except CheckpointError as error:
        raise ValueError(f"--fork {origin}: {error}") from error


def _rows_up_to(origin: Origin) -> dict[str, list[dict[str, Any]]]:
    """The rows of the other run up to its checkpoint, by the name of their file."""
    metrics = list(_read_rows(origin, "metrics.jsonl"))
    if [row["step"] for row in metrics] != list(range(1, origin.step + 1)):
        raise ValueError(
            f"--fork {origin}: {origin.run_dir}/metrics.jsonl lacks rows of steps 1 to "
            f"{origin.step}: put the file back, or fork from another run"
        )
    evaluations = list(_read_rows(origin, "evaluations.jsonl"))
    return {"metrics.jsonl": metrics} | ({"evaluations.jsonl": evaluations} if evaluations else {})


def _read_rows(origin: Origin, name: str) -> Iterator[dict[str, Any]]:
    bucket = origin.bucket
    source = BucketFile(bucket, name) if bucket else Path(origin.run_dir, name)
    try:
        for row in RowReader(source) if source.exists() else ():
            if not isinstance(row.get("step"), int):
                raise ValueError(f"{origin.run_dir}/{name} has a line that is no row of a step")
            if row["step"] > origin.step:
                return
            yield row
    except BucketError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"--fork {origin}: {error}: fork from another run") from error


def _told(origin: Origin) -> dict[str, Any]:
    where = bucket_url(origin.run_dir) or Path(origin.run_dir).resolve()
    return {"forked_from": str(where), "step": origin.step}


def _refuse_another(where: str, lineage: bytes, origin: Origin) -> None:
    try:
        told = json.loads(lineage)
        other = f"{told['forked_from']}@{told['step']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        told, other = None, "nobody knows where: its lineage.json is damaged"
    if told != _told(origin):
        raise ValueError(
            f"--fork {origin}: run directory {where} was forked from {other}: choose another "
            "--run-dir"
        )


def _refuse_full(where: str, first: str, origin: Origin) -> None:
    raise ValueError(
        f"--fork {origin}: run directory {where} holds {first} already: "
        "choose an empty or a new directory"
    )
