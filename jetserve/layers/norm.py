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
        scale, bias = (parameter.get_value().astype(jnp.float32) for parameter in (self.scale, self.bias))
        return (_standardized(x, self.epsilon) * scale + bias).astype(x.dtype)


class HeadNorms(nnx.Module):
    """A layer norm for every head, each with a scale of its own and no bias (StableLM 2 12B)."""

    def __init__(self, heads: int, head_size: int, *, epsilon: float) -> None:
        self.head_size = head_size
        self.epsilon = epsilon
        self.scale: nnx.Param[Any] = nnx.Param(jax.ShapeDtypeStruct((heads * head_size,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., heads * H] -> [..., heads * H], computed in float32."""
        y = _standardized(x.reshape(*x.shape[:-1], -1, self.head_size), self.epsilon)
        return (y.reshape(x.shape) * self.scale.get_value().astype(jnp.float32)).astype(x.dtype)


def _standardized(x: jax.Array, epsilon: float) -> jax.Array:
    """Float32 of mean 0 and variance 1 along the last axis."""
    y = x.astype(jnp.float32)
    y -= jnp.mean(y, axis=-1, keepdims=True)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
