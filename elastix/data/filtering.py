"""Leaving out records: which ones are kept is decided once, and kept in the cache."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from elastix.data.cache import ArrayWriter, cached_arrays
from elastix.data.stream import DataError, whole

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Keep = Callable[[Any], bool]
"""Whether a record is kept: a frozen dataclass of plain values with `__call__`."""


class Records(Protocol[T_co]):
    """Documents, the rows of a `Source`, or anything else that is read by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@dataclass(frozen=True)
class MinLength:
    """Keeps documents of at least `num_bytes` bytes of UTF-8."""

    num_bytes: int

    def __post_init__(self):
        whole("MinLength: num_bytes", self.num_bytes, 0)

    def __call__(self, document: bytes) -> bool:
        return len(document) >= self.num_bytes


@dataclass(frozen=True)
class MaxLength:
    """Keeps documents of at most `num_bytes` bytes of UTF-8."""

    num_bytes: int

    def __post_init__(self):
        whole("MaxLength: num_bytes", self.num_bytes, 0)

    def __call__(self, document: bytes) -> bool:
        return len(document) <= self.num_bytes


class Filtered(Generic[T]):
    """The records that every one of `keep` keeps, in their order: documents, or a `Source`.

    A predicate is known by its class and its fields: one that is changed in its code alone is not
    noticed, so give it another name, or a field that counts versions. `fingerprint` says which
    records there are to begin with; documents have one of their own. The result's `fingerprint`
    says which are left. Raises DataError for a predicate that is no frozen dataclass of JSON
    values, and if no record is left.

        Filtered(open_documents(("a.jsonl",)), (MinLength(100),))
    """

    def __init__(
        self,
        records: Records[T],
        keep: Sequence[Keep],
        fingerprint: Mapping[str, object] | None = None,
    ):
        self._records, self._keep = records, tuple(keep)
        spelled = [_spelled(predicate) for predicate in self._keep]
        known = getattr(records, "fingerprint", None) if fingerprint is None else fingerprint
        if known is None:
            raise DataError(f"fingerprint=None: say which records a {type(records).__name__} has")
        self.fingerprint: dict[str, object] = {**known, "keep": spelled}
        what = {"kind": "kept", **self.fingerprint}
        self._kept = cached_arrays(what, self._write_kept).arrays["kept"]
        if not len(self._kept):
            raise DataError(f"keep={spelled} leaves none of {len(records)} records; keep more")

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def sizes(self) -> np.ndarray:
        """Of documents: how many bytes of its file each takes, int64 [n]."""
        return self._records.sizes[self._kept]  # type: ignore[attr-defined]

    def __getitem__(self, index: int) -> T:
        return self._records[int(self._kept[index])]

    def _keeps(self, index: int) -> bool:
        record = self._records[index]
        return all(predicate(record) for predicate in self._keep)

    def _write_kept(self, writer: ArrayWriter) -> None:
        kept = [index for index in range(len(self._records)) if self._keeps(index)]
        writer.append("kept", np.array(kept, np.int64))


def _spelled(predicate: Keep) -> dict[str, object]:
    """Returns the class and the fields of a predicate, by which a later run knows it again."""
    kind: Any = type(predicate)
    frozen = is_dataclass(predicate) and kind.__dataclass_params__.frozen
    if not (frozen and callable(predicate)):
        raise DataError(
            f"keep: {predicate!r} cannot be known again in a later run; make it a frozen "
            "dataclass with __call__"
        )
    values = {field.name: getattr(predicate, field.name) for field in fields(kind)}
    try:
        values = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DataError(f"keep: {predicate!r} must have JSON values only: {error}") from None
    return {"type": f"{kind.__module__}.{kind.__qualname__}", **values}
