"""A hash of each leaf that is a sum, and so the same on any sharding.

Each element is mixed with its index in the whole array (the finalizer of MurmurHash3, a bijection
of 32 bits). The hash is the sum of the results modulo 2^32, and the same sum with odd weights: one
wrong element always changes it, and more of them leave it as it was with a chance of 2^-64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from elastix.classification import SliceCorruptError

_SEED = 0x9E3779B9
_CHUNK = 1 << 20
"""Elements that numpy mixes at a time."""


def hashes_on_device(leaves: Sequence[Array]) -> UInt32[Array, "leaves 2"]:
    """The hash of each leaf, to be traced; of a sharded one, its shards add up."""
    return jnp.stack([word for leaf in leaves for word in _sums(leaf)]).reshape(-1, 2)


def _sums(leaf: Array) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
    """Both sums in one pass: two of their own take XLA several times as long on CPU."""
    words = _words(leaf)
    index, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index += along * np.uint32(stride % 2**32)
        stride *= words.shape[axis]
    none = np.uint32(0), np.uint32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
    return jax.lax.reduce(_terms(words, index), none, add, tuple(range(words.ndim)))


def hash_on_host(array: np.ndarray) -> tuple[int, int]:
    """The same of a whole array in host memory."""
    flat = _host_words(array)
    sums = [0, 0]
    for start in range(0, flat.size, _CHUNK):
        words = flat[start : start + _CHUNK].astype(np.uint32)
        index = np.arange(start, start + words.size, dtype=np.uint64).astype(np.uint32)
        for n, term in enumerate(_terms(words, index)):
            sums[n] += int(term.sum(dtype=np.uint64))
    return sums[0] % 2**32, sums[1] % 2**32


def hashes_of(leaves: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The hash of each leaf in host memory, by path, as text."""
    return {path: _spelled(hash_on_host(array)) for path, array in leaves.items()}


def difference(leaves: Mapping[str, np.ndarray], hashes: Mapping[str, str]) -> str | None:
    """The first leaf, by path, whose hash is not the one given; None if there is none."""
    found = hashes_of(leaves)
    return next((path for path in sorted(found) if found[path] != hashes.get(path)), None)


def agreed(rows: Mapping[int, np.ndarray], paths: Sequence[str]) -> dict[str, str]:
    """The hashes by path, if all slices hold the same.

    Args:
        rows: for each slice, the hashes of its leaves, uint32[leaves, 2].

    Raises:
        SliceCorruptError: most hold the same, and some do not.
        RuntimeError: no majority says what is right.
    """
    counts = Counter(row.tobytes() for row in rows.values())
    (most, count), names = counts.most_common(1)[0], ", ".join(map(str, sorted(rows)))
    if len(counts) > 1 and 2 * count <= len(rows):
        raise RuntimeError(
            f"slices {names} hold different bits of one train state, and no majority says which "
            "are right: run again without the slice whose memory is bad"
        )
    right = next(row for row in rows.values() if row.tobytes() == most)
    odd = frozenset(s for s, row in rows.items() if row.tobytes() != most)
    if odd:
        differs = (rows[min(odd)] != right).any(axis=-1)
        path, names = paths[int(np.argmax(differs))], ", ".join(map(str, sorted(odd)))
        raise SliceCorruptError(odd, f"slice {names} holds other bits than the rest, in {path}")
    return {path: _spelled(row) for path, row in zip(paths, right, strict=True)}


def _spelled(words: Iterable[int]) -> str:
    return "".join(f"{int(word):08x}" for word in words)


def _words(leaf: Array) -> UInt32[Array, "..."]:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):  # as they lie in memory
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    unsigned = _UNSIGNED.get(width_in_bits(leaf.dtype), jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _host_words(array: np.ndarray) -> np.ndarray:
    """Unsigned words of an element's own width, at most 32 bits: those of `_words`, flat."""
    flat = np.ascontiguousarray(array).reshape(-1)
    words = flat.view({1: np.uint8, 2: np.uint16}.get(array.dtype.itemsize, np.uint32))
    bits = width_in_bits(array.dtype)
    return words & np.uint8(2**bits - 1) if bits < 8 else words


_UNSIGNED = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16}


@cache  # numpy takes a tenth of a millisecond to look it up
def width_in_bits(dtype: Any) -> int:
    """The width of an element. Those of less than a byte take one in host memory, of which the
    other bits may be anything."""
    if dtype == jnp.bool_:
        return 8
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo
    return info(dtype).bits


def _terms(words: Any, index: Any) -> tuple[Any, Any]:
    """What one element adds to each of the two sums."""
    x = words + index * np.uint32(_SEED) + np.uint32(_SEED)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    x = x ^ (x >> np.uint32(16))
    return x, x * (index * np.uint32(2) + np.uint32(1))
