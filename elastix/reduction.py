"""Sums over logical replicas that give the same bits for any number of slices.

A strict left fold in the order of the replica index, from -0.0 (the exact identity of float
addition): each slice folds its own replicas into what the slice before it passed on. The last
slice's accumulator is the sum, and is sent to all as raw bits, since a masked float sum would turn
-0.0 into +0.0.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from elastix.mesh import SLICE


def fold(values: Float[Array, "padded ..."], count: int) -> Float[Array, "..."]:
    """The left fold of the first `count` rows; rows after them are padding and are not read."""
    zero = jnp.full(values.shape[1:], -0.0, values.dtype)
    return lax.scan(lambda acc, v: (acc + v, None), zero, values[:count])[0]


def sum_in_order(
    grads: PyTree[Array], specs: list[P], mesh: Mesh, num_replicas: int
) -> PyTree[Array]:
    """Sum gradients stacked over padded replicas, split over `slice` by their first dim.

    Args:
        grads: leaves `[padded, ...]`, one row for each replica.
        specs: the partition spec of each leaf's other dims, in the order of the leaves.

    Returns:
        Leaves `[...]`, the same on every slice.
    """
    leaves, treedef = jax.tree.flatten(grads)
    dtypes = [leaf.dtype for leaf in leaves]

    def local(*stacked: Array) -> tuple[Array, ...]:
        flat = jnp.concatenate(
            [x.reshape(x.shape[0], -1).astype(jnp.float32) for x in stacked], axis=1
        )
        total = _ring(flat, mesh.shape[SLICE], num_replicas)
        shapes = [x.shape[1:] for x in stacked]
        ends = [prod(s) for s in shapes]
        parts = jnp.split(total, [sum(ends[: i + 1]) for i in range(len(ends) - 1)])
        return tuple(p.reshape(s).astype(d) for p, s, d in zip(parts, shapes, dtypes, strict=True))

    reduce = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(P(SLICE, *spec) for spec in specs),
        out_specs=tuple(specs),
        check_vma=False,
    )
    return jax.tree.unflatten(treedef, reduce(*leaves))


def _ring(rows: Float[Array, "k n"], num_slices: int, num_replicas: int) -> Float[Array, " n"]:
    """Each slice in turn folds its own rows into the accumulator of the one before."""
    me = lax.axis_index(SLICE)
    k = rows.shape[0]
    valid = me * k + jnp.arange(k) < num_replicas

    def add(acc: Array) -> Array:
        def body(acc, row_valid):
            row, keep = row_valid
            return jnp.where(keep, acc + row, acc), None

        return lax.scan(body, acc, (rows, valid))[0]

    acc = add(jnp.full(rows.shape[1], -0.0, rows.dtype))
    if num_slices == 1:
        return acc
    ahead = [(i, i + 1) for i in range(num_slices - 1)]

    def hop(acc, turn):
        received = lax.ppermute(acc, SLICE, ahead)
        return jnp.where(me == turn, add(received), acc), None

    acc, _ = lax.scan(hop, acc, jnp.arange(1, num_slices))
    bits = lax.bitcast_convert_type(acc, jnp.uint32)
    last = jnp.where(me == num_slices - 1, bits, jnp.zeros_like(bits))
    return lax.bitcast_convert_type(lax.psum(last, SLICE), rows.dtype)
