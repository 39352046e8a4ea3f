"""The reference: one matmul after the other."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jetserve.kernels import select

PLATFORMS = None
PRIORITY = 0


def run(
    x: jax.Array, weights: Sequence[Any], biases: Sequence[jax.Array | None], *, out_dtype: jnp.dtype | None = None
) -> list[jax.Array]:
    """See the package; results in `out_dtype` (x's unless given)."""
    results = [select.call("quantized_matmul", x, w, out_dtype=out_dtype) for w in weights]
    return [y if bias is None else y + bias.astype(y.dtype) for y, bias in zip(results, biases, strict=True)]
