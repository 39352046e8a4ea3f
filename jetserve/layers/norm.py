"""Normalization layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetserve.kernels import select


class RMSNorm(nnx.Module):
    """`x / rms(x) * (scale + offset)` (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization").

    The offset is 1 for Gemma, whose checkpoints hold how far scales are from it.
    """

    def __init__(self, size: int, *, epsilon: float, offset: float = 0.0) -> None:
        self.size = size
        self.epsilon = epsilon
        self.offset = offset
        self.scale: nnx.Param[Any] = nnx.Param(jax.ShapeDtypeStruct((size,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        scale = self.scale.get_value()
        if self.offset:
            scale = scale.astype(jnp.float32) + self.offset
        return select.call("rms_norm", x, scale, epsilon=self.epsilon)


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / sqrt(variance(x) + epsilon) * scale + bias` (Ba et al. 2016, "Layer Normalization")."""

    def __init__(self, size: int, *, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale: nnx.Param[Any] = nnx.Param(jax.ShapeDtypeStruct((size,), jnp.float32))
        self.bias: nnx.Param[Any] = nnx.Param(jax.ShapeDtypeStruct((size,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D], computed in float32."""
        y = x.astype(jnp.float32)
        y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        scale, bias = (parameter.get_value().astype(jnp.float32) for parameter in (self.scale, self.bias))
        return (y * scale + bias).astype(x.dtype)
