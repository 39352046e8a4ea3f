"""Feed-forward layers and their activations."""

import functools
from collections.abc import Callable, Mapping

import jax
from flax import nnx

from jetserve.layers.linear import Linear, project

_GELU_TANH = functools.partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
}
"""By Hugging Face's names."""


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, sizes: Mapping[str, int], *, activation: str = "silu", bias: bool = False) -> None:
        self.activation = activation
        self.gate = Linear("D -> F", sizes, bias=bias)
        self.up = Linear("D -> F", sizes, bias=bias)
        self.down = Linear("F -> D", sizes, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        gate, up = project(x, self.gate, self.up)
        return self.down(ACTIVATIONS[self.activation](gate) * up)


class MLP(nnx.Module):
    """`down(activation(up(x)))`."""

    def __init__(self, sizes: Mapping[str, int], *, activation: str, bias: bool) -> None:
        self.activation = activation
        self.up = Linear("D -> F", sizes, bias=bias)
        self.down = Linear("F -> D", sizes, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))
