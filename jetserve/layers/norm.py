"""Normalization layers, computed in float32."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization")."""

    def __init__(self, size: int, *, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale: nnx.Param[Any] = nnx.Param(jax.ShapeDtypeStruct((size,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        return (y * self.scale.get_value().astype(jnp.float32)).astype(x.dtype)
