"""Feed-forward layers."""

from collections.abc import Mapping

import jax
from flax import nnx

from jetserve.layers.linear import Linear, project


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, sizes: Mapping[str, int], *, bias: bool = False) -> None:
        self.gate = Linear("D -> F", sizes, bias=bias)
        self.up = Linear("D -> F", sizes, bias=bias)
        self.down = Linear("F -> D", sizes, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        gate, up = project(x, self.gate, self.up)
        return self.down(jax.nn.silu(gate) * up)
