"""For CPUs: columns of a weight that `quantized_matmul/cpu.py` packed."""

import jax
import jax.numpy as jnp

from jetserve.kernels.quantized_matmul.cpu import PackedWeight
from jetserve.quantize.qarray import Weight

PLATFORMS = frozenset({"cpu"})
PRIORITY = 20


def run(ids: jax.Array, w: Weight | PackedWeight, *, dtype: jnp.dtype) -> jax.Array:
    """[T], [D, V] -> [T, D]."""
    if not isinstance(w, PackedWeight):
        raise NotImplementedError("the weight is not packed")
    T, lanes = ids.shape[0], w.lanes
    tile, lane = ids // lanes, ids % lanes
    tiles, steps, _ = w.values.shape
    packed = w.values.reshape(tiles, steps, -1, lanes, 4)[tile, :, :, lane]  # [T, steps, vectors, 4]
    if w.bits == 4:
        nibbles = jnp.stack([packed & 15, packed >> 4], axis=-2)  # [T, steps, vectors, 2, 4]
        values = nibbles.astype(jnp.float32)
    else:
        values = jax.lax.bitcast_convert_type(packed, jnp.int8).astype(jnp.float32)
    scale = w.scale[tile, :, lane]  # [T, G]
    rows = values.reshape(T, scale.shape[1], -1) * scale[..., None]
    if w.offset.size:
        rows += w.offset[tile, :, lane][..., None]
    return rows.reshape(T, -1)[:, : w.shape[0]].astype(dtype)
