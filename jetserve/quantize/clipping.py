"""Scales that clip: narrower than the range of the weights where that makes their squared error smaller.

Owns the search for the range of every group. Knows nothing of where the importance of an input comes from.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jetserve.quantize.qarray import QArray, QuantizationConfig, fit_range, round_to

SMALLEST_RANGE = 0.5
"""Of the weights' own range, that is tried."""
TRIES = 50


def search(
    w: jax.Array, importance: jax.Array | None, config: QuantizationConfig
) -> tuple[jax.Array, jax.Array | None]:
    """The scale and zero point of every group with the least sum of squared errors.

    Args:
      w: float32 [..., g, N], groups along g.
      importance: of the error of each weight, 0 or more, [..., g]; None for all alike.
      config: its bits and symmetry.

    Returns:
      scale and zero point as `fit_range` returns them.
    """
    weight = jnp.ones(w.shape[:-1]) if importance is None else importance

    def error(scale: jax.Array, zero_point: jax.Array | None) -> jax.Array:
        values = round_to(w, scale, zero_point, config.bits)
        if zero_point is not None:
            values -= jnp.expand_dims(zero_point, -2)
        difference = values * jnp.expand_dims(scale, -2) - w
        return jnp.einsum("...gn,...g->...n", difference * difference, weight)

    def attempt(i: jax.Array, best: tuple) -> tuple:
        scale, zero_point = fit_range(w, config, shrink=1.0 - (1.0 - SMALLEST_RANGE) * i / TRIES)
        found = (scale, zero_point, error(scale, zero_point))
        return jax.tree.map(lambda new, old: jnp.where(found[2] < best[2], new, old), found, best)

    scale, zero_point = fit_range(w, config)
    return jax.lax.fori_loop(1, TRIES + 1, attempt, (scale, zero_point, error(scale, zero_point)))[:2]


@functools.partial(jax.jit, static_argnames=("config",))
def with_best_scales(
    w: jax.Array, rounded: QArray, config: QuantizationConfig, importance: jax.Array | None = None
) -> QArray:
    """A weight [K, N] rounded with the scales of least error in place of those that span its range.

    `importance` is that of the errors of each row, [K]; None for all alike.
    """
    w = w.astype(jnp.float32).reshape(-1, config.block_size or w.shape[0], w.shape[-1])  # [G, g, N]
    scale, zero_point = search(w, None if importance is None else importance.reshape(w.shape[:2]), config)
    # A range just above the smallest that a scale can be stays as it is.
    full = rounded.scale.reshape(scale.shape)
    usable = scale >= jnp.finfo(jnp.float32).tiny
    scale = jnp.where(usable, scale, full)
    if zero_point is not None and rounded.zero_point is not None:
        zero_point = jnp.where(usable, zero_point, rounded.zero_point.reshape(scale.shape))
    values = round_to(w, scale, zero_point, config.bits).astype(jnp.int8)
    return dataclasses.replace(
        rounded,
        values=values.reshape(rounded.values.shape),
        scale=scale.reshape(rounded.scale.shape),
        zero_point=None if zero_point is None else zero_point.reshape(rounded.scale.shape),
    )
