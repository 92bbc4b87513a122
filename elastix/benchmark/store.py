"""The folder of a bench: what its parts measured, kept as they finish, so that it can go on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastix.benchmark.figures import Found

SETTINGS, REPORT, PICTURE, PARTS, CACHE = (
    *("settings.json", "bench.json", "bench.svg", "parts", "compiled"),
)


@dataclass(frozen=True)
class Store:
    """A folder in which one bench is, finished or not."""

    path: Path

    @staticmethod
    def open(path: Path, settings: dict[str, Any]) -> Store:
        """The folder of a bench with these settings, which is made if it is not there.

        Raises:
            ValueError: it holds something else, or another bench; nothing was changed.
        """
        store, remedy = Store(path), "name another with --out"
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out {path} is a file: {remedy}")
        if not path.exists() or not any(path.iterdir()):
            (path / PARTS).mkdir(parents=True)
            _write(path / SETTINGS, settings)
            return store
        known = store._read(path / SETTINGS)
        if known is None:
            raise ValueError(f"--out {path} holds something else than a bench: {remedy}")
        for name in settings:
            if known.get(name) != settings[name]:
                raise ValueError(
                    f"--out {path} is a bench with {name} {known.get(name)!r}, not "
                    f"{settings[name]!r}: {remedy}"
                )
        return store

    @property
    def cache(self) -> Path:
        """Where JAX keeps compiled programs while the bench runs."""
        return self.path / CACHE

    def part(self, recipe: str, part: str) -> Found | None:
        """What a part measured, if it finished."""
        return self._read(self._place(recipe, part))

    def keep(self, recipe: str, part: str, found: Found) -> None:
        """Keep what a part measured; it is there whole, or not at all."""
        _write(self._place(recipe, part), found)

    def finish(self, report: dict[str, Any], picture: str) -> tuple[Path, Path]:
        """Write the report and the picture. Both follow from the parts, which stay."""
        places = self.path / REPORT, self.path / PICTURE
        _write(places[0], report)
        places[1].write_text(picture, encoding="utf-8")
        return places

    def report(self) -> dict[str, Any]:
        """The report of a bench.

        Raises:
            ValueError: there is none.
        """
        found = self._read(self.path / REPORT)
        if found is None:
            raise ValueError(f"{self.path / REPORT} is no report of a bench: name a folder of one")
        return found

    def _place(self, recipe: str, part: str) -> Path:
        return self.path / PARTS / f"{quote(recipe, safe='')} {part}.json"

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None


def _write(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
