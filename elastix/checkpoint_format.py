"""The bytes of a checkpoint: leaves packed into one array, and the sealed table that checks them.

Pure functions on host arrays; `checkpoints` puts what they make on disk.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

FORMAT_VERSION = 1
CHUNK = 4 << 20  # bytes; bounds what a load needs beyond the state itself

_ALIGN = 64  # bytes; leaves are views into the loaded array, so each starts at a cache line
_NUMPY = frozenset(np.dtype(code).name for code in "?bhiqBHIQefdFD")  # bool to complex128


class CheckpointError(ValueError):
    """A checkpoint could not be written, read or trusted: one line with step, leaf or file."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnreadableHereError(CheckpointError):
    """The checkpoint may be good, but not for this process: newer format, no memory, no access."""


# What says more about this process, or about the way to the checkpoint, than about what it reads.
_HERE = (
    *map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES)),
    *("PERMISSION_DENIED:", "UNAUTHENTICATED:", "UNAVAILABLE:", "DEADLINE_EXCEEDED:"),
    "retry attempts failed",  # of a request to a bucket
)
# What TensorStore appends to a message: its whole spec, among others.
_APPENDED = re.compile(r" \[(tensorstore_spec|source|os_error|http_).*", re.DOTALL)
_UNREADABLE = (MemoryError, UnreadableHereError, ConnectionError, TimeoutError)


def error_of(what: str, error: BaseException) -> CheckpointError:
    """`what`, and the innermost cause of a failure, in one line."""
    chain = [error]
    while cause := chain[-1].__cause__:  # Orbax wraps the reason
        chain.append(cause)
    here = any(isinstance(e, _UNREADABLE) for e in chain)
    here = here or any(sign in str(e) for e in chain for sign in _HERE)
    text = _APPENDED.sub("", str(chain[-1]))
    text = text if len(text) < 400 else f"{text[:100]} ... {text[-300:]}"
    cls = UnreadableHereError if here else CheckpointError
    return cls(f"{what}: {type(chain[-1]).__name__}: {text}")


def pack(
    step: int, leaves: Mapping[str, np.ndarray], metadata: Mapping[str, object]
) -> tuple[dict[str, object], np.ndarray]:
    """The sealed document and the one flat array: all leaves, sorted by path, each aligned."""
    if step < 0 or "checkpoint" in metadata:
        raise CheckpointError(f'step {step}: is negative, or has the reserved key "checkpoint"')
    parts = {path: _bytes_of(step, path, leaf) for path, leaf in leaves.items()}
    starts, end = {}, 0
    for path in sorted(parts):
        starts[path] = end
        end += _round_up(parts[path].size, _ALIGN)
    packed, table = np.zeros(padded(end), np.uint8), []
    for path, start in starts.items():
        part = packed[start : start + parts[path].size]
        part[:] = parts[path]
        row = {"path": path, "dtype": str(leaves[path].dtype), "shape": leaves[path].shape}
        table.append(row | {"offset": start, "bytes": part.size, "crc32": zlib.crc32(part.data)})
    own = {"format_version": FORMAT_VERSION, "step": int(step), "leaves": table}
    return _sealed(step, {"metadata": dict(metadata), "checkpoint": own}), packed


def padded(size: int) -> int:
    """`size` rounded up, at least 1, so that equal chunks of at most CHUNK bytes make it up.

    Orbax cuts by divisors of the length: a length that is prime could not be cut.
    """
    return _round_up(max(1, size), max(1, -(-size // CHUNK)))


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _bytes_of(step: int, path: str, leaf: np.ndarray) -> np.ndarray:
    host = isinstance(leaf, np.ndarray | np.generic)
    if not host or _dtype(str(leaf.dtype)) is None or not isinstance(path, str):
        what = f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}"
        raise CheckpointError(f"step {step}: leaf {path}: a {what} is no host array of a JAX dtype")
    return np.asarray(leaf, order="C").reshape(-1).view(np.uint8)


def _dtype(name: str) -> np.dtype | None:
    """The dtype that JAX knows by this name, in the byte order of this machine, or None."""
    if name in _NUMPY:
        return np.dtype(name)
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else None


def _sealed(step: int, document: dict) -> dict:
    try:
        document = json.loads(json.dumps(document, allow_nan=False))  # as it will be read
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"step {step}: the metadata are not JSON: {error}") from error
    return document | {"seal": seal(document)}


def seal(document: dict) -> int:
    """The crc32 of the canonical JSON of all but the seal itself; the same in every format."""
    body = {key: value for key, value in document.items() if key != "seal"}
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def checked(step: int, document: dict | None) -> dict:
    if not document or document.get("seal") != seal(document):
        raise CheckpointError(f"step {step}: the metadata do not match their checksum")
    own = document["checkpoint"]
    if own["format_version"] > FORMAT_VERSION:
        what = f"format {own['format_version']} is newer than {FORMAT_VERSION}: update elastix"
        raise UnreadableHereError(f"step {step}: {what}")
    if own["step"] != step:
        raise CheckpointError(f"step {step}: the directory holds step {own['step']}")
    return document


def unpack(step: int, row: dict[str, Any], part: np.ndarray) -> np.ndarray:
    """The leaf that a row of the table describes, from its bytes, uint8[bytes]."""
    if part.size != row["bytes"] or zlib.crc32(part.data) != row["crc32"]:
        raise CheckpointError(f"step {step}: leaf {row['path']}: wrong checksum")
    dtype = _dtype(row["dtype"])
    if dtype is None:
        raise UnreadableHereError(f"step {step}: leaf {row['path']}: no {row['dtype']} here")
    return part.view(dtype).reshape(row["shape"])
