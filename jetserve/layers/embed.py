"""Token embedding, kept as the matrix [D, V] of the output head so that tied weights are one array."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jetserve.kernels import select
from jetserve.layers.linear import Linear


class Embed(Linear):
    """A `Linear("D -> V")` with a lookup: `embed.lookup(ids)` embeds, `embed(x)` is the tied head."""

    def __init__(self, sizes: Mapping[str, int], axes: str = "D -> V") -> None:
        super().__init__(axes, sizes)

    def lookup(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[T] -> [T, D]."""
        return select.call("embedding_lookup", ids, self.weight.get_value(), dtype=dtype)


class LearnedPositions(Embed):
    """A vector for every position, [D, P], the first `unused` of which no position has (OPT's 2)."""

    def __init__(self, sizes: Mapping[str, int], *, max_position: int, unused: int = 0) -> None:
        super().__init__({**sizes, "P": max_position + unused}, "D -> P")
        self.unused = unused

    def __call__(self, positions: jax.Array, dtype: jnp.dtype) -> jax.Array:  # type: ignore[override]
        """[T] -> [T, D]."""
        return self.lookup(positions + self.unused, dtype)
