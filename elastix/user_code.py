"""Errors of a user's code in one line: what went wrong, and the line to correct.

What a model, an optimizer or a recipe raises comes from anywhere below it, JAX mostly: the line
that a user can correct is the last one of their own.
"""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_OURS = Path(__file__).parent
_OF_VALUES = (ValueError, ArithmeticError, MemoryError, OSError)


def is_installed(file: Path) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    roots = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib", "stdlib")}
    return any(file.is_relative_to(root) for root in roots)


def told(error: BaseException) -> str:
    """The kind of an error, the first line of its message, and the user's line it comes from."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename} line {error.lineno}"
    else:
        where = _where(traceback.extract_tb(error.__traceback__))
    message = getattr(error, "msg", None) or str(error)
    return f"{type(error).__name__}: {' '.join(message.partition(chr(10))[0].split())} ({where})"


def _where(frames: traceback.StackSummary) -> str:
    files = [(Path(frame.filename), frame.lineno) for frame in frames]
    theirs = [(f, n) for f, n in files if f.is_file() and not (is_installed(f) or _is_ours(f))]
    if theirs:
        return f"{theirs[-1][0]} line {theirs[-1][1]}"
    return "where it is called"


@contextlib.contextmanager
def building(what: str) -> Iterator[None]:
    """What values are to blame for in here is bad input: `what` cannot be built.

    That is what a library refuses, and what arithmetic, memory or the system does. A `TypeError`
    or a `KeyError` of a user's own line is a mistake in the code, and wants its traceback.

    Raises:
        ValueError: one line, with the error and where to correct it; what elastix itself refuses,
            as it is.
    """
    try:
        yield
    except Exception as error:
        if _is_worded(error) or not _is_of_values(error):
            raise
        raise ValueError(
            f"{what} cannot be built: {told(error)}: correct its values, or the code there"
        ) from error


def _is_worded(error: Exception) -> bool:
    """Whether elastix raised it, or a user did by a class of elastix: it names value and remedy."""
    ours = type(error).__module__.startswith("elastix.") or _is_ours(_innermost(error))
    return isinstance(error, ValueError) and ours


def _is_of_values(error: Exception) -> bool:
    return isinstance(error, _OF_VALUES) or is_installed(_innermost(error))


def _innermost(error: Exception) -> Path:
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename)


def _is_ours(file: Path) -> bool:
    return file.is_relative_to(_OURS)
