"""Grouped-query attention over the paged cache."""

from collections.abc import Mapping

import jax
from flax import nnx

from jetserve.kernels import select
from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.layers.linear import Linear, project
from jetserve.layers.rope import Rope


class Attention(nnx.Module):
    """Projections, rotation and attention (Ainslie et al. 2023, "GQA"): N query heads share K KV heads of size H."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        rope: Rope,
        sliding_window: int | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
    ) -> None:
        self.q = Linear("D -> N H", sizes, bias=qkv_bias)
        self.k = Linear("D -> K H", sizes, bias=qkv_bias)
        self.v = Linear("D -> K H", sizes, bias=qkv_bias)
        self.o = Linear("N H -> D", sizes, bias=output_bias)
        self.head_size = sizes["H"]
        self.rope = rope
        self.sliding_window = sliding_window

    def __call__(self, x: jax.Array, batch: RaggedBatch, pages: KVPages) -> tuple[jax.Array, KVPages]:
        """[T, D] -> [T, D], and the layer's pages with this batch's keys and values in them."""
        T, H = x.shape[0], self.head_size
        q, k, v = (y.reshape(T, -1, H) for y in project(x, self.q, self.k, self.v))
        q, k = self.rope(q, k, batch.positions)
        out, pages = select.call("attention", q, k, v, pages, batch, scale=H**-0.5, sliding_window=self.sliding_window)
        return self.o(out.reshape(T, -1)), pages
