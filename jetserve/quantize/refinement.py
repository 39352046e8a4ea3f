"""Makes a rounded weight better: coordinate descent over its scales and integers, from wherever a method left them.

With D what rounding changed and H the second moment of the inputs, every step lowers the error in what the weight's
layer computes, tr(D^T H D). A scale has a best value in closed form; an integer becomes the one nearest to the best
value given all others. Follows the idea of Behdin et al. 2023, "QuantEase", with scales among the coordinates.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jetserve.quantize.qarray import QArray, dequantize, round_to

LAZY_ROWS = 32
"""Rows after which their changes are spread over all others at once."""


@functools.partial(jax.jit, static_argnames=("bits", "sweeps"))
def refine(w: jax.Array, rounded: QArray, hessian: jax.Array, *, bits: int, sweeps: int) -> QArray:
    """Goes over all scales, then over all rows, `sweeps` times.

    Args:
      w: float32 [K, N].
      rounded: of w, with values in an int8 container and an integer zero point, or none.
      hessian: float32 [K, K], positive definite.
      bits: of the values.
      sweeps: how often.

    Returns:
      A QArray of the same form. Zero points stay.
    """

    def sweep(state: QArray, _: None) -> tuple[QArray, None]:
        gradient = hessian @ (w - dequantize(state))
        state, gradient = _fit_scales(state, hessian, gradient)
        return _fit_values(state, hessian, gradient, bits), None

    return jax.lax.scan(sweep, rounded, None, length=sweeps)[0]


def _shifted(state: QArray) -> jax.Array:
    """The integers less their zero points, [G, g, N]; per-channel, G is 1."""
    values = state.values.astype(jnp.float32)
    if state.zero_point is not None:
        values -= jnp.expand_dims(state.zero_point, -2)
    return values if state.blockwise else values[None]


def _fit_scales(state: QArray, hessian: jax.Array, gradient: jax.Array) -> tuple[QArray, jax.Array]:
    """The best scale of one group after the other; `gradient` is H D [K, N], before and after."""
    shifted = _shifted(state)
    G, g, _ = shifted.shape

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scale, gradient = carry
        moved = jax.lax.dynamic_slice_in_dim(hessian, i * g, g, axis=1) @ shifted[i]  # [K, N], for each unit of scale
        curvature = jnp.sum(shifted[i] * jax.lax.dynamic_slice_in_dim(moved, i * g, g), axis=0)
        slope = jnp.sum(shifted[i] * jax.lax.dynamic_slice_in_dim(gradient, i * g, g), axis=0)
        change = jnp.where(curvature > 0, slope / jnp.where(curvature > 0, curvature, 1.0), 0.0)
        # A group that is all but zeros may ask for any scale; within a factor of 2 it stays a scale of these integers.
        change = jnp.where(jnp.abs(change) < 0.5 * scale[i], change, 0.0)
        return scale.at[i].add(change), gradient - moved * change

    scale = state.scale if state.blockwise else state.scale[None]
    scale, gradient = jax.lax.fori_loop(0, G, step, (scale, gradient))
    return dataclasses.replace(state, scale=scale if state.blockwise else scale[0]), gradient


def _fit_values(state: QArray, hessian: jax.Array, gradient: jax.Array, bits: int) -> QArray:
    """The best integer of one row after the other."""
    K, N = gradient.shape
    g = state.block_size or K
    B = next(size for size in range(LAZY_ROWS, 0, -1) if K % size == 0)
    scale = state.scale.reshape(-1, N)
    zero_point = jnp.zeros_like(scale) if state.zero_point is None else state.zero_point.reshape(-1, N)

    def block(b: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        values, gradient = carry
        columns = jax.lax.dynamic_slice_in_dim(hessian, b * B, B, axis=1)  # [K, B]
        own = jax.lax.dynamic_slice_in_dim(columns, b * B, B)
        old = jax.lax.dynamic_slice_in_dim(values, b * B, B)

        def row(gradient: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            s, z = scale[(b * B + i) // g], zero_point[(b * B + i) // g]
            now = (old[i] - z) * s
            value = round_to((now + gradient[i] / own[i, i])[None], s, z, bits)[0]
            change = (value - z) * s - now
            return gradient - own[:, i][:, None] * change, (value.astype(jnp.int8), change)

        _, (new, changes) = jax.lax.scan(row, jax.lax.dynamic_slice_in_dim(gradient, b * B, B), jnp.arange(B))
        return jax.lax.dynamic_update_slice_in_dim(values, new, b * B, 0), gradient - columns @ changes

    values, _ = jax.lax.fori_loop(0, K // B, block, (state.values.reshape(K, N), gradient))
    return dataclasses.replace(state, values=values.reshape(state.values.shape))
