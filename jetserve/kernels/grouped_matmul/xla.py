"""The reference: `jax.lax.ragged_dot`, over integers as they are, one block of the contracted axis after the other."""

import jax
import jax.numpy as jnp

from jetserve.quantize.qarray import QArray, Weight, quantize_activation

PLATFORMS = None
PRIORITY = 0


def run(x: jax.Array, w: Weight, group_sizes: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """See the package."""
    out_dtype = out_dtype or x.dtype
    if not isinstance(w, QArray):
        return _ragged(x, w, group_sizes).astype(out_dtype)
    if w.quantize_activation:
        x = rounded(x)
    expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    if not w.blockwise:
        return _scaled(x, w.values, w.scale, w.zero_point, expert, group_sizes).astype(out_dtype)
    blocks, g = w.values.shape[1:3]
    x = jnp.pad(x, ((0, 0), (0, blocks * g - x.shape[1])))  # blocks of zeros may have been added to w

    def add(b: jax.Array, y: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(x, b * g, g, axis=1)
        zero_point = None if w.zero_point is None else w.zero_point[:, b]
        return y + _scaled(rows, w.values[:, b], w.scale[:, b], zero_point, expert, group_sizes)

    start = jnp.zeros((x.shape[0], w.values.shape[-1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks, add, start).astype(out_dtype)


def rounded(x: jax.Array) -> jax.Array:
    """As int8 activations hold it."""
    values, scale = quantize_activation(x)
    return (values * scale).astype(x.dtype)


def _ragged(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Float32 [R, N]."""
    return jax.lax.ragged_dot(x, w.astype(x.dtype), group_sizes, preferred_element_type=jnp.float32)


def _scaled(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    expert: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    """x [R, g] times (values [E, g, N] - zero_point [E, N]) * scale [E, N]: float32 [R, N]."""
    y = _ragged(x, values, group_sizes)
    if zero_point is not None:
        y -= jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.float32) * zero_point[expert].astype(jnp.float32)
    return y * scale[expert].astype(jnp.float32)
