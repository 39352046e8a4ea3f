"""For TPUs: all experts as one weight, by the kernel of `quantized_matmul`.

Blocks of every expert are blocks of one long weight, and a row has zeros where the blocks are another expert's. That
multiplies more than there is to do, but where rows are few, reading the weights is what takes time, and they are read
once. XLA's ragged matmul reads and multiplies all experts too, and converts them ahead, one block after the other.
"""

import jax
import jax.numpy as jnp

from jetserve.kernels.grouped_matmul import split, xla
from jetserve.kernels.quantized_matmul import pallas_tpu as quantized_matmul
from jetserve.kernels.quantized_matmul import tiles
from jetserve.kernels.split import SplitWeight
from jetserve.quantize.qarray import QArray, Weight

PLATFORMS = frozenset({"tpu"})
PRIORITY = 20

MOST_INPUTS = 2**27
"""Of rows with their zeros, that are made at once (256 MiB of bfloat16)."""

prepare = split.prepare


def run(
    x: jax.Array, w: Weight | SplitWeight, group_sizes: jax.Array, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """See the package."""
    return split.apart(_multiply, x, w, group_sizes, out_dtype=out_dtype)


def _multiply(x: jax.Array, w: Weight, group_sizes: jax.Array, *, out_dtype: jnp.dtype) -> jax.Array:
    """On one device."""
    if isinstance(w, QArray) and w.blockwise and not w.quantize_activation:
        E, G, g, _ = w.values.shape
        long = jax.tree.map(lambda leaf: leaf.reshape(E * G, *leaf.shape[2:]), w)
        if _pays(x.shape[0], x.dtype, long):
            expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
            own = expert[:, None] == jnp.arange(E)
            x = jnp.pad(x, ((0, 0), (0, G * g - x.shape[1])))  # blocks of zeros may have been added to w
            rows = jnp.where(own[:, :, None], x[:, None], 0).reshape(x.shape[0], -1)  # [R, E * K]
            return quantized_matmul.run(rows, long, out_dtype=out_dtype)
    return xla.run(x, w, group_sizes, out_dtype=out_dtype)


def _pays(rows: int, dtype: jnp.dtype, long: QArray) -> bool:
    """Whether the kernel is to take so many rows, and can."""
    tile = tiles.find(long, rows)
    if tile is None or not tile.pays or rows * long.shape[0] > MOST_INPUTS:
        return False
    step = quantized_matmul.ROW_STEP
    return quantized_matmul.rows_at_once(-(-rows // step) * step, dtype, long, tile) > 0
