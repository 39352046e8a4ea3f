"""How attention and feed-forward layers are joined to the residual stream."""

import jax
from flax import nnx

from jetserve.kernels.attention import KVPages, RaggedBatch


class Block(nnx.Module):
    """Attention, then the feed-forward layer, each `x + multiplier * post(layer(pre(x)))`; norms may be missing.

    Llama has norms before its layers, OLMo 2 after them, Gemma 2 both.
    """

    def __init__(
        self,
        *,
        attention: nnx.Module,
        mlp: nnx.Module,
        attention_norm: nnx.Module | None = None,
        mlp_norm: nnx.Module | None = None,
        attention_post_norm: nnx.Module | None = None,
        mlp_post_norm: nnx.Module | None = None,
        multiplier: float = 1.0,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_post_norm = attention_post_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_post_norm = mlp_post_norm
        self.multiplier = multiplier

    def __call__(self, x: jax.Array, batch: RaggedBatch, pages: KVPages) -> tuple[jax.Array, KVPages]:
        """[T, D] -> [T, D], and the layer's pages with this batch in them."""
        attended, pages = self.attention(_normed(self.attention_norm, x), batch, pages)
        x = self._added(x, _normed(self.attention_post_norm, attended))
        return self._added(x, _normed(self.mlp_post_norm, self.mlp(_normed(self.mlp_norm, x)))), pages

    def _added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y if self.multiplier == 1.0 else x + y * self.multiplier


class ParallelBlock(nnx.Module):
    """`x + attention(attention_norm(x)) + mlp(mlp_norm(x))` (Wang and Komatsuzaki 2021, GPT-J).

    Without a norm of its own, the feed-forward layer takes what attention takes.
    """

    def __init__(
        self, *, attention: nnx.Module, mlp: nnx.Module, attention_norm: nnx.Module, mlp_norm: nnx.Module | None
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: jax.Array, batch: RaggedBatch, pages: KVPages) -> tuple[jax.Array, KVPages]:
        """See `Block`."""
        normed = self.attention_norm(x)
        attended, pages = self.attention(normed, batch, pages)
        return x + attended + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x)), pages


def _normed(norm: nnx.Module | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
