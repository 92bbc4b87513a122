"""What can go wrong, as the status codes that a client of Pathways sees."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """The codes of `absl::Status` that are sent here."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    UNIMPLEMENTED = 12
    INTERNAL = 13
    DATA_LOSS = 15


class Failure(Exception):
    """An answer that is an error: its status code, and what happened in one line."""

    def __init__(self, code: Code, message: str):
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def internal(error: BaseException) -> Failure:
    """Any exception as a `Failure`: itself, or INTERNAL with its type and text. It is kept as a
    value, and does not keep the arrays that were around when it was raised."""
    if isinstance(error, Failure):
        return error.with_traceback(None)
    return Failure(Code.INTERNAL, f"{type(error).__name__}: {error}")
