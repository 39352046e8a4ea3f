"""Grouped-query attention over the paged cache."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetserve.kernels import select
from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.layers.linear import Linear, project
from jetserve.layers.norm import HeadNorms, RMSNorm
from jetserve.layers.rope import Rope


class Sinks(nnx.Module):
    """A score for every query head, [N], of a place that every query sees and nothing is read from (gpt-oss 2025)."""

    def __init__(self, heads: int) -> None:
        self.bias: nnx.Param[Any] = nnx.Param(jax.ShapeDtypeStruct((heads,), jnp.float32))


class Attention(nnx.Module):
    """Projections, rotation and attention (Ainslie et al. 2023, "GQA"): N query heads share K KV heads of size H.

    Attributes of what models differ in:
      rope: None for layers without rotation.
      sliding_window: tokens that a query sees, itself among them; None for all.
      scale: of the scores; None is 1 / sqrt(H).
      soft_cap: of the scores, see `kernels.attention`.
      alibi_slopes: one for each query head, see `alibi_slopes`; None for no bias of distance.
      q_norm, k_norm: over a head where their size is H, over all heads together where it is that of all; `HeadNorms`
        over each with a scale of its own.
      sinks: see `Sinks`; None for none.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        rope: Rope | None,
        sliding_window: int | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
        alibi_slopes: tuple[float, ...] | None = None,
        q_norm: RMSNorm | HeadNorms | None = None,
        k_norm: RMSNorm | HeadNorms | None = None,
        sinks: Sinks | None = None,
    ) -> None:
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"the model's config has sliding_window={sliding_window}; expected 1 or more, or null")
        self.q = Linear("D -> N H", sizes, bias=qkv_bias)
        self.k = Linear("D -> K H", sizes, bias=qkv_bias)
        self.v = Linear("D -> K H", sizes, bias=qkv_bias)
        self.o = Linear("N H -> D", sizes, bias=output_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.head_size = sizes["H"]
        self.rope = rope
        self.sliding_window = sliding_window
        self.scale = self.head_size**-0.5 if scale is None else scale
        self.soft_cap = soft_cap
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks

    def __call__(self, x: jax.Array, batch: RaggedBatch, pages: KVPages) -> tuple[jax.Array, KVPages]:
        """[T, D] -> [T, D], and the layer's pages with this batch's keys and values in them."""
        T, H = x.shape[0], self.head_size
        q, k, v = project(x, self.q, self.k, self.v)
        q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        q, k, v = (y.reshape(T, -1, H) for y in (q, k, v))
        if self.rope is not None:
            q, k = self.rope(q, k, batch.positions)
        out, pages = select.call(
            "attention",
            q,
            k,
            v,
            pages,
            batch,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            alibi_slopes=None if self.alibi_slopes is None else jnp.asarray(self.alibi_slopes, jnp.float32),
            sinks=None if self.sinks is None else self.sinks.bias.get_value().astype(jnp.float32),
        )
        return self.o(out.reshape(T, -1)), pages


def _normed(norm: RMSNorm | HeadNorms | None, x: jax.Array) -> jax.Array:
    """[T, n * size] with each run of the norm's size, as devices hold it, normalized."""
    if norm is None:
        return x
    return norm(x.reshape(x.shape[0], -1, norm.scale.get_value().shape[-1])).reshape(x.shape)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One for every head, a geometric series (Press et al. 2022, "ALiBi").

    Where `heads` is no power of two, those of the next smaller one come first, then every other one of the next larger.
    """
    power = 2 ** math.floor(math.log2(heads))

    def series(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    return tuple(series(power) + series(2 * power)[::2][: heads - power])
