"""Token embedding, kept as the matrix [D, V] of the output head so that tied weights are one array."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jetserve.kernels import select
from jetserve.layers.linear import Linear


class Embed(Linear):
    """A `Linear("D -> V")` with a lookup: `embed.lookup(ids)` embeds, `embed(x)` is the tied head."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__("D -> V", sizes)

    def lookup(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[T] -> [T, D]."""
        return select.call("embedding_lookup", ids, self.weight.get_value(), dtype=dtype)
