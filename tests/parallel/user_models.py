"""Modules as users write them, with no word of sharding, and how they would be split by hand (Megatron's way)."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

D, F, N, V = 64, 256, 8, 128


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(num_heads=N, in_features=D, decode=False, rngs=rngs)
        self.mlp = MLP(rngs)
        self.norms = nnx.List([nnx.LayerNorm(D, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserModel:
    """A function of parameters and arguments, and the all-reduces that it takes when split by hand."""

    function: Callable[..., Any]
    params: Any
    args: tuple[jax.Array, ...]
    all_reduces: int


def _model(module: type[nnx.Module], x: jax.Array, all_reduces: int) -> UserModel:
    graph, params = nnx.split(module(rngs=nnx.Rngs(0)))
    return UserModel(
        function=lambda params, x: nnx.merge(graph, params)(x), params=params, args=(x,), all_reduces=all_reduces
    )


MODELS: dict[str, Callable[[], UserModel]] = {
    "mlp": lambda: _model(MLP, jnp.linspace(-1, 1, 4 * D).reshape(4, D), 1),
    "block": lambda: _model(Block, jnp.linspace(-1, 1, 10 * D).reshape(2, 5, D), 2),
    "language model": lambda: _model(LanguageModel, jnp.arange(10).reshape(2, 5), 2 * 2 + 1),
}

_BY_HAND = {
    r"up.*kernel|head.*kernel": (None, "tensor"),
    r"up.*bias": ("tensor",),
    r"down.*kernel|embedding": ("tensor", None),
    r"(query|key|value).*kernel": (None, "tensor", None),  # [D, N, H]
    r"(query|key|value).*bias": ("tensor", None),
    r"out.*kernel": ("tensor", None, None),
}


def by_hand(path: str, rank: int) -> PartitionSpec:
    found = [spec for pattern, spec in _BY_HAND.items() if re.search(pattern, path)]
    return PartitionSpec(*(found[0] if found else (None,) * rank))
