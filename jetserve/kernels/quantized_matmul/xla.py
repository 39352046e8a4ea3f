"""The reference: plain einsums that XLA compiles for every platform."""

import jax
import jax.numpy as jnp

from jetserve.kernels import select
from jetserve.quantize.qarray import QArray, Weight, quantize_activation

PLATFORMS = None
PRIORITY = 0

MAX_PARTIAL_SUMS = 2**26
"""Float32 per-block partial sums held at once (256 MiB); more rows than that are taken in turns."""


def run(x: jax.Array, w: Weight, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """[..., K] x [K, N] -> [..., N] in `out_dtype` (x's unless given)."""
    out_dtype = out_dtype or x.dtype
    if not isinstance(w, QArray):
        return jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32).astype(out_dtype)
    if w.input_order is not None:
        x = jnp.take(x, w.input_order, axis=-1)
    if not w.blockwise:
        return _per_channel(x, w).astype(out_dtype)
    lead, G, N = x.shape[:-1], w.values.shape[0], w.values.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    rows = jnp.pad(rows, ((0, 0), (0, w.shape[0] - rows.shape[1])))  # blocks of zeros may have been added to w
    turns = -(-rows.shape[0] * G * N // MAX_PARTIAL_SUMS)
    if turns > 1:
        T = rows.shape[0]
        rows = jnp.pad(rows, ((0, -T % turns), (0, 0))).reshape(turns, -1, rows.shape[1])
        y = jax.lax.map(lambda part: _blockwise(part, w).astype(out_dtype), rows).reshape(-1, N)[:T]
    else:
        y = _blockwise(rows, w).astype(out_dtype)
    return y.reshape(*lead, N)


def _operands(x: jax.Array, w: QArray) -> tuple[jax.Array, jax.Array | None, jax.Array, jnp.dtype]:
    """x as the einsum takes it, its scale or None, w's values in the same dtype, and the dtype to accumulate in."""
    if w.quantize_activation:
        x, x_scale = quantize_activation(x)
        return x, x_scale, w.values.astype(jnp.int8), jnp.dtype(jnp.int32)
    if w.blockwise and select.current_platform() == "cpu":
        x = x.astype(jnp.float32)  # XLA's CPU backend has no batched bfloat16 matmul with float32 sums
    return x, None, w.values.astype(x.dtype), jnp.dtype(jnp.float32)


def _per_channel(x: jax.Array, w: QArray) -> jax.Array:
    x, x_scale, values, accumulator = _operands(x, w)
    y = jnp.einsum("...k,kn->...n", x, values, preferred_element_type=accumulator).astype(jnp.float32)
    if w.zero_point is not None:
        y -= jnp.sum(x, axis=-1, keepdims=True, dtype=accumulator) * w.zero_point.astype(jnp.float32)
    y *= w.scale.astype(jnp.float32)
    return y if x_scale is None else y * x_scale


def _blockwise(x: jax.Array, w: QArray) -> jax.Array:
    """[T, K] -> float32 [T, N]."""
    x, x_scale, values, accumulator = _operands(x, w)
    x = x.reshape(x.shape[0], *w.values.shape[:2])  # [T, G, g]
    scale = w.scale.astype(jnp.float32)
    partial = jnp.einsum("tgk,gkn->tgn", x, values, preferred_element_type=accumulator).astype(jnp.float32)
    y = jnp.einsum("tgn,gn->tn", partial, scale)
    if w.zero_point is not None:
        sums = jnp.sum(x, axis=-1, dtype=accumulator).astype(jnp.float32)
        y -= jnp.einsum("tg,gn->tn", sums, w.zero_point.astype(jnp.float32) * scale)
    return y if x_scale is None else y * x_scale
