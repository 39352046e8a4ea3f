"""Mixtures of experts: every token goes through the few feed-forward layers that its router chooses."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jetserve.kernels import select
from jetserve.layers.linear import Linear, shown
from jetserve.layers.mlp import ACTIVATIONS, GatedMLP


class Experts(Linear):
    """A matrix of every expert, "D -> E F": rows sorted by expert, each times its own, plus its own bias."""

    def __init__(self, axes: str, sizes: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(axes, sizes, bias=bias)
        K, N = self.axes.shape
        self.weight: nnx.Param[Any] = nnx.Param(jax.ShapeDtypeStruct((sizes["E"], K, N // sizes["E"]), jnp.float32))

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:  # type: ignore[override]
        """[R, K] -> [R, N], the first `group_sizes[0]` rows by expert 0, and so on."""
        if (outputs := shown(x, (self,), group_sizes)) is not None:
            return outputs[0]
        y = select.call("grouped_matmul", x, self.weight.get_value(), group_sizes)
        if self.bias is None:
            return y
        expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
        return y + self.bias.get_value().reshape(group_sizes.shape[0], -1)[expert]


class GatedExperts(nnx.Module):
    """The `GatedMLP` of every expert.

    `proportional` says whether what they make grows as `up`'s outputs do.
    """

    proportional: ClassVar[bool] = True

    def __init__(self, sizes: Mapping[str, int], *, activation: str, bias: bool = False) -> None:
        self.activation = activation
        self.gate = Experts("D -> E F", sizes, bias=bias)
        self.up = Experts("D -> E F", sizes, bias=bias)
        self.down = Experts("F -> E D", sizes, bias=bias)

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """[R, D] -> [R, D]."""
        gate, up = self.gate(x, group_sizes), self.up(x, group_sizes)
        return self.down(self.gated(gate, up), group_sizes)

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """[R, F] of both."""
        return ACTIVATIONS[self.activation](gate) * up


class MoE(nnx.Module):
    """The weighted sum of what the best `experts_per_token` experts make of a token (Shazeer et al. 2017).

    Weights are the router's probabilities over all experts, in float32; `normalized` makes those chosen add up to 1,
    which is the softmax over their scores alone.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        experts: GatedExperts,
        experts_per_token: int,
        normalized: bool,
        router_bias: bool = False,
    ) -> None:
        self.router = Linear("D -> E", sizes, bias=router_bias)
        self.experts = experts
        self.num_experts = sizes["E"]
        if not 1 <= experts_per_token <= self.num_experts:
            raise ValueError(
                f"the model's config sends a token to {experts_per_token} experts; expected 1 to {self.num_experts}, as"
                " there are"
            )
        self.experts_per_token = experts_per_token
        self.normalized = normalized

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        scores = jax.nn.softmax(self.router(x, out_dtype=jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(scores, self.experts_per_token)  # [T, k]
        if self.normalized:
            weights /= jnp.sum(weights, axis=-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))  # of T * k rows, by expert
        group_sizes = jnp.bincount(chosen.reshape(-1), length=self.num_experts).astype(jnp.int32)
        rows = self.experts(x[order // self.experts_per_token], group_sizes)
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
        by_token = rows[back].reshape(*chosen.shape, -1)
        return jnp.einsum("tkd,tk->td", by_token, weights.astype(x.dtype))


class SharedMoE(MoE):
    """A mixture, and a feed-forward layer for every token, weighted by a sigmoid of its own (Qwen2)."""

    def __init__(self, sizes: Mapping[str, int], *, shared: GatedMLP, **others: Any) -> None:
        super().__init__(sizes, **others)
        self.shared = shared
        self.shared_gate = Linear("D -> E", {**sizes, "E": 1})

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        return super().__call__(x) + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)
