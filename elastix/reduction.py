"""Sums over logical replicas that give the same bits for any number of slices.

Float addition depends on its order, so gradients are added as integers, whose sum knows no order.
For each element, the largest exponent among the replicas is found first (a maximum, one byte); then
every replica's value is rounded to a multiple of one unit, some bits below that exponent; these
multiples are added as int32, and the sum is rounded to float32 once. The unit depends on the
replicas' values and their number alone, so it does not matter which slice adds what, nor how XLA
groups the additions: plain all-reduces do. Of 12 replicas each is rounded by at most 2^-28 of the
power of two above the largest, which is less than a float sum in any order would lose.

As in any float sum: NaN, or infinities of both signs, give NaN, one sign gives that infinity, and
-0.0 is the sum of nothing but -0.0. It is the identity, and stands for the padding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32, PyTree, UInt8, UInt32

from elastix.mesh import SLICE

MOST_REPLICAS = 2**14
"""More could overflow the counts of infinities; above 2^7, a replica's last bits are rounded."""

_MINUS_ZERO, _INFINITY = np.uint32(0x80000000), 0x7F800000
_FRACTION_BITS, _LEADING_BIT = 23, 1 << 23
_BIAS = 150
"""A float32 of exponent field e is its 24-bit significand times 2^(e - 150)."""
_NOT_FINITE = 255
_COUNT_BITS = 16


def fold(values: Float[Array, "padded ..."], count: int) -> Float[Array, "..."]:
    """The left fold of the first `count` rows; rows after them are padding and are not read."""
    zero = jnp.full(values.shape[1:], -0.0, values.dtype)
    return lax.scan(lambda acc, v: (acc + v, None), zero, values[:count])[0]


def sum_over_replicas(
    grads: PyTree[Array], specs: list[P], mesh: Mesh, num_replicas: int
) -> PyTree[Array]:
    """Sum gradients stacked over padded replicas, split over `slice` by their first dim.

    Args:
        grads: leaves `[padded, ...]`, one row for each replica; float32 or narrower.
        specs: the partition spec of each leaf's other dims, in the order of the leaves.

    Returns:
        Leaves `[...]`, the same on every slice.

    Raises:
        ValueError: there are more replicas than `MOST_REPLICAS`.
    """
    if num_replicas > MOST_REPLICAS:
        raise ValueError(f"num_replicas={num_replicas}: use at most {MOST_REPLICAS}")
    leaves, treedef = jax.tree.flatten(grads)
    alone = mesh.shape[SLICE] == 1

    def local(*stacked: Array) -> tuple[Array, ...]:
        rows = stacked[0].shape[0]
        index = lax.axis_index(SLICE) * rows + jnp.arange(rows)
        bits = [_bits(x, index < num_replicas) for x in stacked]
        tops = [jnp.max(_exponents(b), axis=0) for b in bits]
        tops = tops if alone else lax.pmax(tops, SLICE)
        units = [_in_units(b, t, num_replicas) for b, t in zip(bits, tops, strict=True)]
        sums = [jnp.sum(u, axis=0, dtype=jnp.int32) for u in units]
        sums = sums if alone else lax.psum(sums, SLICE)
        together = zip(stacked, sums, tops, strict=True)
        return tuple(_to_float(s, t, num_replicas).astype(x.dtype) for x, s, t in together)

    reduce = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(P(SLICE, *spec) for spec in specs),
        out_specs=tuple(specs),
        check_vma=False,
    )
    return jax.tree.unflatten(treedef, reduce(*leaves))


def _bits(rows: Float[Array, "k ..."], valid: Bool[Array, " k"]) -> UInt32[Array, "k ..."]:
    """The rows as raw float32; padding becomes -0.0, which adds nothing."""
    bits = lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.uint32)
    keep = valid.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(keep, bits, _MINUS_ZERO)


def _field(bits: UInt32[Array, "..."]) -> Int32[Array, "..."]:
    """The exponent of each: that of the smallest normal numbers for those that are smaller."""
    return jnp.maximum((bits >> _FRACTION_BITS) & 0xFF, 1).astype(jnp.int32)


def _exponents(bits: UInt32[Array, "..."]) -> UInt8[Array, "..."]:
    """The exponents, where -0.0 lies below all."""
    return jnp.where(bits == _MINUS_ZERO, 0, _field(bits)).astype(jnp.uint8)


def _guard_bits(num_replicas: int) -> int:
    """Bits that an int32 holds below the 24 of the largest value, when so many are added to it."""
    return 7 - (num_replicas - 1).bit_length()


def _in_units(
    bits: UInt32[Array, "k ..."], tops: UInt8[Array, "..."], num_replicas: int
) -> Int32[Array, "k ..."]:
    """Each value as a multiple of the unit, rounded to the nearest.

    Where a value is not finite, values count instead: 2^16 for one that is not, and beside it 1
    for an infinity, -1 for a negative one.
    """
    guard, top = _guard_bits(num_replicas), tops.astype(jnp.int32)
    fraction = bits & (_LEADING_BIT - 1)
    leading = jnp.where((bits >> _FRACTION_BITS) & 0xFF, _LEADING_BIT, 0).astype(jnp.uint32)
    down = jnp.clip(top - _field(bits) + max(-guard, 0), 0, 31).astype(jnp.uint32)
    magnitude = (fraction | leading) << max(guard, 0)
    magnitude = (magnitude + ((jnp.uint32(1) << down) >> 1)) >> down
    one = jnp.where(fraction == 0, 1, 0)  # an infinity, if it is not finite
    amount = jnp.where(top == _NOT_FINITE, one, magnitude.astype(jnp.int32))
    signed = jnp.where(bits >> 31, -amount, amount)
    count = (1 << _COUNT_BITS) + signed
    special = jnp.where(_field(bits) == _NOT_FINITE, count, 0)
    return jnp.where(top == _NOT_FINITE, special, signed)


def _to_float(
    sums: Int32[Array, "..."], tops: UInt8[Array, "..."], num_replicas: int
) -> Float[Array, "..."]:
    """The float32 nearest to `sums` units.

    By integers, because some devices flush what lies below the normal numbers to zero.
    """
    top = tops.astype(jnp.int32)
    sign = jnp.where(sums < 0, _MINUS_ZERO, np.uint32(0))
    scale = top - _BIAS - _guard_bits(num_replicas)
    bits = lax.bitcast_convert_type(jnp.abs(sums).astype(jnp.float32), jnp.int32)
    field = (bits >> _FRACTION_BITS) + scale
    normal = bits + (scale << _FRACTION_BITS)
    down = jnp.clip(1 - field, 0, 31)
    below = ((bits & (_LEADING_BIT - 1) | _LEADING_BIT) + ((1 << down) >> 1)) >> down
    magnitude = jnp.where(field > 0, jnp.where(field < _NOT_FINITE, normal, _INFINITY), below)
    finite = jnp.where(sums == 0, 0, magnitude).astype(jnp.uint32) | sign
    finite = jnp.where(top == 0, _MINUS_ZERO, finite)
    total = lax.bitcast_convert_type(finite, jnp.float32)
    return jnp.where(top == _NOT_FINITE, _sum_of_specials(sums), total)


def _sum_of_specials(sums: Int32[Array, "..."]) -> Float[Array, "..."]:
    """What infinities and NaNs add up to, from their counts."""
    count = (sums + (1 << _COUNT_BITS - 1)) >> _COUNT_BITS
    signed = sums - (count << _COUNT_BITS)
    same = jnp.where(signed == count, jnp.inf, jnp.nan)
    return jnp.where(signed == -count, -jnp.inf, same).astype(jnp.float32)
