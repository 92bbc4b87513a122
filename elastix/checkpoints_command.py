"""`elastix checkpoints`: what lies on disk, whether it is good, and where a resume would start.

It only looks: nothing is renamed, removed or written, so it may be asked while a run is writing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastix.checkpoints import CheckpointError, CheckpointReader, UnreadableHereError
from elastix.leaf_hash import difference
from elastix.object_store.bucket import Bucket, BucketError, bucket_url
from elastix.object_store.checkpoints import BucketFolder
from elastix.usage import UsageParser
from elastix.wording import names, plural, size

COMPLETE, VERIFIED, BAD, UNREADABLE = "complete", "verified", "BAD", "unreadable here"
"""`complete`: committed, and its metadata match their checksum; `verified`: all bytes do too."""

_ATTEMPTS = 3
"""How often a step is read that changes meanwhile: a run may remove or replace it."""


@dataclass(frozen=True)
class Found:
    """One checkpoint: `written_at` is in seconds since 1970, `mesh` the slices it was written on,
    `examples` how many were consumed up to it; None where nothing says so."""

    step: int
    num_bytes: int
    written_at: float | None
    mesh: list[int] | None
    examples: int | None
    status: str
    why: str = ""


@dataclass(frozen=True)
class Listing:
    """All that lies in one checkpoints folder; `checkpoints` ascend by step."""

    folder: str
    checkpoints: tuple[Found, ...]
    unfinished: tuple[int, ...]
    """Steps that are being written or removed, or were when their process was killed."""
    set_aside: tuple[dict[str, Any], ...]

    @property
    def resume(self) -> Found | None:
        """What a resume would try first, and stop at if this process cannot read it; None: it
        would start from step 0."""
        good = [found for found in self.checkpoints if found.status != BAD]
        return good[-1] if good else None

    @property
    def bad(self) -> tuple[int, ...]:
        """The steps that are not good, or that nobody can say it of."""
        return tuple(f.step for f in self.checkpoints if f.status in (BAD, UNREADABLE))


def checkpoints_main(argv: Sequence[str]) -> int:
    """`elastix checkpoints`: 0, or 1 if --verify found one that is not good.

    Raises:
        ValueError: bad input, in one line with the remedy.
    """
    given = _parser().parse_args(argv)
    try:
        return _tell(CheckpointReader(_place(given.directory)), given)
    except BucketError as error:
        raise ValueError(str(error)) from error


def _tell(reader: CheckpointReader, given: argparse.Namespace) -> int:
    progress = _Progress() if given.verify else None
    found = survey(reader, progress)
    if progress:
        progress.end()
    print(as_json(found) if given.json else as_text(found))
    return 1 if given.verify and found.bad else 0


def survey(reader: CheckpointReader, progress: _Progress | None = None) -> Listing:
    """What lies there now; with `progress`, every byte of every checkpoint is read."""
    steps, found = reader.steps(), []
    for number, step in enumerate(steps, 1):
        if progress:
            progress.begin(number, len(steps), step)
        one = _inspect(reader, step, verify=progress is not None)
        if one:
            found.append(one)
            if progress:
                progress.read(one.num_bytes)
    aside = tuple(
        {"step": s, "path": str(path), "why": w} for s, path, w in reader.set_aside_list()
    )
    return Listing(str(reader.root), tuple(found), reader.unfinished(), aside)


def _inspect(reader: CheckpointReader, step: int, *, verify: bool) -> Found | None:
    """One checkpoint; None if a run removed it meanwhile."""
    for _ in range(_ATTEMPTS):
        try:
            before = reader.stamp(step)
            found = _read(reader, step, before.written_at, verify=verify)
            if reader.stamp(step).identity == before.identity:
                return found
        except FileNotFoundError:  # between two looks at it
            continue
    return None


def _read(reader: CheckpointReader, step: int, written_at: float | None, *, verify: bool) -> Found:
    num_bytes, metadata, why = reader.size(step), dict[str, Any](), ""
    status = VERIFIED if verify else COMPLETE
    try:
        metadata = reader.metadata(step)
        if verify:
            _check(reader, step)
    except UnreadableHereError as error:
        status, why = UNREADABLE, str(error)
    except CheckpointError as error:
        status, why = BAD, str(error)
    examples = metadata.get("progress", {}).get("examples")
    return Found(step, num_bytes, written_at, metadata.get("mesh"), examples, status, why)


def _check(reader: CheckpointReader, step: int) -> None:
    """Read all of it, as a resume does: raises CheckpointError if that would refuse it."""
    leaves, metadata = reader.load(step)
    hashes: Any = metadata.get("leaf_hashes", {})
    if wrong := difference(leaves, hashes):
        raise CheckpointError(f"step {step}: {wrong} is not what the device held")


def _place(directory: str) -> Path | BucketFolder:
    """Where the checkpoints are that a path or a URL names."""
    url = bucket_url(directory)
    return _folder(Path(directory)) if url is None else _folder_in_bucket(url)


def _folder_in_bucket(url: str) -> BucketFolder:
    run = url.removesuffix("/checkpoints")
    bucket = Bucket(run)
    if not bucket.names("checkpoints/") and bucket.read("recipe.json") is None:
        raise ValueError(
            f"{url} holds no checkpoints: name a run directory, such as gs://bucket/run"
        )
    return BucketFolder(bucket)


def _folder(directory: Path) -> Path:
    """The folder of the checkpoints of a run directory, or `directory` if it is one itself."""
    try:
        inside = directory / "checkpoints"
        if inside.is_dir():
            return inside
        named = directory.is_dir() and not (directory / "recipe.json").exists()
        reader = CheckpointReader(directory)
        if named and (reader.steps() or reader.set_aside_list() or reader.unfinished()):
            return directory
        if named and directory.absolute().name == "checkpoints":
            return directory
    except (OSError, CheckpointError) as error:
        raise ValueError(f"{directory} cannot be read: {error}") from error
    what = "holds no checkpoints" if directory.exists() else "does not exist"
    raise ValueError(f"{directory} {what}: name a run directory, such as runs/quickstart")


# --- what is printed ------------------------------------------------------------------------------


def as_json(listing: Listing) -> str:
    """The listing as one JSON object; `resume` is a step, or null to start from step 0."""
    resume = listing.resume
    value = {**asdict(listing), "resume": resume.step if resume else None}
    return json.dumps(value, indent=2)


def as_text(listing: Listing) -> str:
    """The listing as a table, a line for what is no checkpoint, and where a resume would start."""
    head = ("step", "size", "written", "slices", "examples", "")
    rows = [head, *map(_row, listing.checkpoints)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    table = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines = [line.rstrip() for line in table] if listing.checkpoints else []
    lines += [f"step {s}: unfinished; it does not count" for s in listing.unfinished]
    for item in listing.set_aside:
        why = " ".join(item["why"].split()) or "no reason is on record"
        lines.append(f"step {item['step']}: set aside as {Path(item['path']).name}: {why}")
    return "\n".join([*lines, _resume_line(listing)])


def _row(found: Found) -> tuple[str, ...]:
    at = found.written_at
    written = "?" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    mesh = "?" if found.mesh is None else names(found.mesh)
    examples = "?" if found.examples is None else str(found.examples)
    status = f"{found.status}: {found.why}" if found.why else found.status
    return str(found.step), size(found.num_bytes), written, mesh, examples, status


def _resume_line(listing: Listing) -> str:
    found = listing.resume
    if found is None:
        return "a resume would start from step 0: there is no good checkpoint"
    if found.status == UNREADABLE:
        return f"a resume would stop at step {found.step}, which may be good: see why above"
    unread = "" if found.status == VERIFIED else " (its arrays were not read: --verify does)"
    return f"a resume would start from step {found.step}{unread}"


class _Progress:
    """Says on standard error how far it is: at each checkpoint on a terminal, every 10 s elsewhere
    and at the end."""

    def __init__(self) -> None:
        self._start = self._said = time.monotonic()
        self._count, self._bytes = 0, 0
        self._terminal = sys.stderr.isatty()

    def begin(self, number: int, total: int, step: int) -> None:
        """Checkpoint `number` of `total`, that of `step`, is being read from now on."""
        if self._terminal:
            self._say(f"reading step {step}, {number} of {total}; {self._so_far()}")
        elif time.monotonic() - self._said >= 10.0:
            self._said = time.monotonic()
            self._say(f"{number - 1} of {total} checkpoints; {self._so_far()}")

    def read(self, num_bytes: int) -> None:
        self._count += 1
        self._bytes += num_bytes

    def end(self) -> None:
        self._say(f"read {plural(self._count, 'checkpoint')}; {self._so_far()}")
        if self._terminal:
            print(file=sys.stderr)

    def _so_far(self) -> str:
        rate = self._bytes / max(time.monotonic() - self._start, 1e-9)
        return f"{size(self._bytes)}, {size(int(rate))} a second"

    def _say(self, line: str) -> None:
        shown = f"\r{line:<70}" if self._terminal else line
        print(shown, end="" if self._terminal else "\n", file=sys.stderr, flush=True)


def _parser() -> UsageParser:
    parser = UsageParser(
        prog="elastix checkpoints",
        description="List the checkpoints of a run: step, size, when and on which slices each was "
        "written, examples consumed, and whether it is complete; what was set aside and why; and "
        "which one a resume would start from. Nothing is changed; a run may be writing there.",
        epilog="examples: elastix checkpoints runs/quickstart; elastix checkpoints runs/quickstart "
        "--verify. Exit status: 0, or 1 if --verify found one that is not good; 2 bad input.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory, or its gs:// URL")
    parser.add_argument("--verify", action="store_true", help="read and check all bytes of each")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser
