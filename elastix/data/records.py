"""ArrayRecord files as one sequence of byte strings."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import grain

from elastix.data.stream import DataError

RECORD_SUFFIXES = (".arrayrecord", ".array_record")


def check_record_name(path: str) -> None:
    """DataError for a path that the library of ArrayRecord files cannot be given."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{path!r} is not UTF-8, as paths of ArrayRecord files are; rename"
        ) from None


class RecordFiles:
    """The records of files written with group_size:1, one file after the other, read on demand.

    DataError for a file that is no complete ArrayRecord file, or holds no records.
    """

    def __init__(self, paths: Sequence[str]):
        self.paths = tuple(paths)
        self._files = [_open(path) for path in paths]  # each for itself, so that errors can name it
        self._ends = list(accumulate(map(len, self._files)))

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, index: int) -> str:
        """How to speak of a record: its file and its number in it."""
        file, number = self._place(index)
        return f"{self.paths[file]!r} record {number}"

    def __getitem__(self, index: int) -> bytes:
        """Returns the bytes of a record; DataError if they are not those that were written."""
        file, number = self._place(index)
        try:
            return self._files[file][number]
        except RuntimeError as error:
            reason = _first_line(error)
            raise DataError(f"{self.where(index)} is corrupt ({reason}); write it again") from None

    def _place(self, index: int) -> tuple[int, int]:
        file = bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)


def _open(path: str) -> grain.sources.ArrayRecordDataSource:
    check_record_name(path)
    try:
        records = grain.sources.ArrayRecordDataSource([path])
        if len(records):
            return records
        reason = "it holds no records"
    except (RuntimeError, ValueError) as error:
        reason = _first_line(error)
    raise DataError(f"{path!r} is no complete ArrayRecord file ({reason}); write it again")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
