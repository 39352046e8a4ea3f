"""Normalization layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetserve.kernels import select


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization")."""

    def __init__(self, size: int, *, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale: nnx.Param[Any] = nnx.Param(jax.ShapeDtypeStruct((size,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return select.call("rms_norm", x, self.scale.get_value(), epsilon=self.epsilon)
