"""The reference: gather the columns, then dequantize just those."""

import dataclasses

import jax
import jax.numpy as jnp

from jetserve.quantize.qarray import QArray, Weight, dequantize

PLATFORMS = None
PRIORITY = 0


def run(ids: jax.Array, w: Weight, *, dtype: jnp.dtype) -> jax.Array:
    """[T], [D, V] -> [T, D]."""
    if not isinstance(w, QArray):
        return jnp.take(w, ids, axis=-1).T.astype(dtype)
    columns = dataclasses.replace(
        w,
        values=jnp.take(w.values, ids, axis=-1),
        scale=jnp.take(w.scale, ids, axis=-1),
        zero_point=None if w.zero_point is None else jnp.take(w.zero_point, ids, axis=-1),
    )
    return dequantize(columns, dtype).T
