"""SmoothQuant: inputs with a few large channels are evened out, so that they too can be rounded to 8 bits.

Follows Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models".
Owns the scales for weights that take the same input. Weights are then rounded to nearest, as `awq` does, and inputs by
the matmuls, a scale a token, as they run (`QArray.quantize_activation`).

Letters: E experts, 1 where there are none; K inputs, N outputs, C channels that the inputs come from.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A weight, float32 [E, K, N], and the largest absolute value of each of its inputs, float32 [E, K]."""

    w: jax.Array
    largest: jax.Array


def scales(parts: Sequence[Part], channels: np.ndarray, smoothing: float, *, by_expert: bool) -> jax.Array:
    """The largest value of a channel to the power of `smoothing`, over the largest weight to that of what is left of 1.

    Args:
      parts: one or more.
      channels: int [K], the channel that each input is; several inputs of one channel share a scale.
      smoothing: from 0 to 1; with 1, inputs become even and weights take all of their unevenness.
      by_expert: whether each expert has scales of its own.

    Returns:
      float32 [E, C] by expert, else [C]; 1 for channels that are never there, or meet only zeros.
    """
    inputs = _by_channel([part.largest for part in parts], channels, by_expert=by_expert)
    weights = _by_channel([jnp.max(jnp.abs(part.w), axis=-1) for part in parts], channels, by_expert=by_expert)
    there = (inputs > 0) & (weights > 0)
    found = jnp.where(there, inputs, 1.0) ** smoothing / jnp.where(there, weights, 1.0) ** (1 - smoothing)
    return found if by_expert else found[0]


def _by_channel(values: Sequence[jax.Array], channels: np.ndarray, *, by_expert: bool) -> jax.Array:
    """The largest of all [E, K], [E, C]; of all experts [1, C]."""
    largest = jnp.stack([value if by_expert else jnp.max(value, axis=0, keepdims=True) for value in values]).max(axis=0)
    return jnp.zeros((largest.shape[0], int(channels.max()) + 1)).at[:, channels].max(largest)
