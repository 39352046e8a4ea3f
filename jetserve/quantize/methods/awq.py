"""AWQ: scales the inputs of linear layers so that the weights that matter most are rounded with the least error.

Follows Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration". Owns the
search for scales and the rounding after it, for weights that take the same input; where that comes from, and what takes
the scales in return, is `calibrate`'s and `folding`'s business.

Letters: E experts, 1 where there are none; K inputs, N outputs, C channels that the inputs come from.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.method_config import Clip
from jetserve.quantize import clipping
from jetserve.quantize.qarray import QArray, QuantizationConfig, fit_range, quantize, round_to

TRIES = 20
"""Exponents from 0, which is no scaling, up to 1."""
SMALLEST = 1e-4
"""Of a mean input, relative to the largest one, that scales tell from nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A weight whose error counts in the search.

    Attributes:
      w: float32 [E, K, N].
      hessian: float32 [E, K, K], the second moment of its input.
      config: what it is rounded to.
    """

    w: jax.Array
    hessian: jax.Array
    config: QuantizationConfig


def search(parts: Sequence[Part], channels: np.ndarray, *, by_expert: bool) -> jax.Array:
    """The scales with which rounding to nearest changes least of what the weights make of their inputs.

    Scales are the root mean square of each channel to the power of an exponent, which is what is searched for.

    Args:
      parts: one or more.
      channels: int [K], the channel that each input is; several inputs of one channel share a scale.
      by_expert: whether each expert has scales of its own.

    Returns:
      float32 [E, C] by expert, else [C]; all 1 where no scaling is better than none.
    """
    squares = jnp.diagonal(parts[0].hessian, axis1=-2, axis2=-1)  # [E, K]
    if not by_expert:
        squares = jnp.sum(squares, axis=0, keepdims=True)
    sums = jnp.zeros((squares.shape[0], int(channels.max()) + 1)).at[:, channels].add(squares)  # [E, C]
    candidates = jnp.stack([_scales(sums, i / TRIES) for i in range(TRIES)])  # [A, E, C]
    errors = sum(_errors(part.w, part.hessian, candidates[..., channels], part.config) for part in parts)  # [A, E]
    if not by_expert:
        errors = jnp.sum(errors, axis=1, keepdims=True)
    best = jnp.argmin(jnp.where(jnp.isfinite(errors), errors, jnp.inf), axis=0)  # [E]
    scales = candidates[best, jnp.arange(best.size)]
    return scales if by_expert else scales[0]


def _scales(squares: jax.Array, exponent: float) -> jax.Array:
    """[E, C], such that the largest times the smallest is 1."""
    highest = jnp.max(squares, axis=-1, keepdims=True)
    relative = jnp.sqrt(squares / jnp.where(highest > 0, highest, 1.0))
    scales = jnp.maximum(relative, SMALLEST) ** exponent
    return scales / jnp.sqrt(jnp.max(scales, axis=-1, keepdims=True) * jnp.min(scales, axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("config",))
def _errors(w: jax.Array, hessian: jax.Array, scales: jax.Array, config: QuantizationConfig) -> jax.Array:
    """The mean square of what rounding changes, [A, E], for scales [A, E or 1, K]."""

    def error(w: jax.Array, hessian: jax.Array, scales: jax.Array) -> jax.Array:
        scaled = (w * scales[:, None]).reshape(-1, config.block_size or w.shape[0], w.shape[1])
        scale, zero_point = fit_range(scaled, config)
        values = round_to(scaled, scale, zero_point, config.bits)
        if zero_point is not None:
            values -= jnp.expand_dims(zero_point, -2)
        difference = (values * jnp.expand_dims(scale, -2)).reshape(w.shape) / scales[:, None] - w
        return jnp.sum(difference * (hessian @ difference))

    def attempt(scales: jax.Array) -> jax.Array:
        every = jnp.broadcast_to(scales, w.shape[:2])
        return jax.lax.map(lambda expert: error(*expert), (w, hessian, every))

    return jax.lax.map(attempt, scales)


def quantize_matrix(w: jax.Array, hessian: jax.Array, config: QuantizationConfig, clip: Clip) -> QArray | None:
    """Rounds a weight to nearest.

    Args:
      w: float32 [K, N].
      hessian: float32 [K, K], the second moment of its input, by whose diagonal squared errors count.
      config: its block size must divide K.
      clip: how scales are chosen.

    Returns:
      A QArray with values in an int8 container; None if the second moment holds NaN or infinite values.
    """
    if not bool(jnp.all(jnp.isfinite(hessian))):
        return None
    rounded = quantize(w, config)
    if clip is Clip.MSE:
        rounded = clipping.with_best_scales(w, rounded, config, jnp.diagonal(hessian))
    return rounded
