"""For CPUs: some rows of one expert after the other, with the matmul that a weight has on its own.

XLA's CPU backend multiplies every row with every expert instead: 16 times the work where 8 of 128 are chosen.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jetserve.kernels import native
from jetserve.kernels.quantized_matmul import cpu, xla
from jetserve.kernels.quantized_matmul.cpu import PackedWeight
from jetserve.quantize.qarray import QArray, Weight

PLATFORMS = frozenset({"cpu"})
PRIORITY = 20

FEWEST_ROWS, MOST_ROWS = 8, 128
"""Taken at once of an expert: about twice what each would have, were they chosen alike."""


def prepare(weight: Weight, *, exact_activations: bool = False) -> Weight | PackedWeight:
    """Packs all experts in one piece, [K, E * N], an expert's tiles after those of the one before; floats stay."""
    if not isinstance(weight, QArray):
        return weight
    if weight.shape[1] % native.lanes():
        raise NotImplementedError(f"{weight.shape[1]} outputs are not a multiple of the {native.lanes()} lanes")

    def side_by_side(leaf: jax.Array) -> jax.Array:
        moved = jnp.moveaxis(leaf, 0, -2)
        return moved.reshape(*moved.shape[:-2], -1)

    return cpu.prepare(jax.tree.map(side_by_side, weight), exact_activations=exact_activations)


def run(
    x: jax.Array, w: Weight | PackedWeight, group_sizes: jax.Array, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """See the package."""
    if isinstance(w, QArray):
        raise NotImplementedError("the weight is not packed")
    out_dtype = out_dtype or x.dtype
    R, E = x.shape[0], group_sizes.shape[0]
    N = w.shape[-1] // (E if isinstance(w, PackedWeight) else 1)
    rows = min(R, MOST_ROWS, max(FEWEST_ROWS, 2 * R // E))
    padded = jnp.pad(x, ((0, rows), (0, 0)))
    turns_of = -(-group_sizes // rows)
    first_row, first_turn = jnp.cumsum(group_sizes) - group_sizes, jnp.cumsum(turns_of) - turns_of

    def turn(i: jax.Array, y: jax.Array) -> jax.Array:
        e = jnp.searchsorted(first_turn + turns_of, i, side="right")
        start = first_row[e] + (i - first_turn[e]) * rows
        found = _multiply(jax.lax.dynamic_slice_in_dim(padded, start, rows), w, e, E, out_dtype)
        # Rows past the expert's end belong to later ones, whose turns write them again.
        return jax.lax.dynamic_update_slice_in_dim(y, found, start, axis=0)

    return jax.lax.fori_loop(0, jnp.sum(turns_of), turn, jnp.zeros((R + rows, N), out_dtype))[:R]


def _multiply(x: jax.Array, w: Any, e: jax.Array, experts: int, out_dtype: jnp.dtype) -> jax.Array:
    """x [R, K] times the matrix of expert e."""
    if not isinstance(w, PackedWeight):
        return xla.run(x, w[e], out_dtype=out_dtype)
    tiles, (K, N) = w.data.shape[0] // experts, w.shape
    data = jax.lax.dynamic_slice_in_dim(w.data, e * tiles, tiles)
    return cpu.run(x, dataclasses.replace(w, data=data, shape=(K, N // experts)), out_dtype=out_dtype)
