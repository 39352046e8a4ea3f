"""Llama 1, 2, 3 and the many models of its shape (SmolLM2 among them)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.layers.attention import Attention
from jetserve.layers.embed import Embed
from jetserve.layers.linear import Linear
from jetserve.layers.mlp import GatedMLP
from jetserve.layers.norm import RMSNorm
from jetserve.layers.rope import Rope
from jetserve.layers.stack import traced_once
from jetserve.models import base

WEIGHTS = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.scale": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.o.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attention.q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.attention.k.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.attention.v.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.attention.o.bias": "model.layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.mlp_norm.scale": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.mlp.gate.bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers.{i}.mlp.up.bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers.{i}.mlp.down.bias": "model.layers.{i}.mlp.down_proj.bias",
    "norm.scale": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a model of this family."""

    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    norm_epsilon: float
    tied: bool
    rope: Rope
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """From a Hugging Face config.json.

        Raises:
          ValueError: for a missing key, or a switch that is not built.
        """
        base.check_switches(hf, {"hidden_act": "silu", "partial_rotary_factor": 1.0})
        # transformers 5 writes rope_parameters in place of rope_theta and rope_scaling
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        base.check_switches(rope, {"partial_rotary_factor": 1.0})
        try:
            heads = hf["num_attention_heads"]
            head_size = hf.get("head_dim") or hf["hidden_size"] // heads
            theta = rope.get("rope_theta") or hf.get("rope_theta", 10000.0)
            config = cls(
                hidden_size=hf["hidden_size"],
                mlp_size=hf["intermediate_size"],
                num_layers=hf["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=hf.get("num_key_value_heads") or heads,
                head_size=head_size,
                vocab_size=hf["vocab_size"],
                max_position=hf.get("max_position_embeddings", 2048),
                norm_epsilon=hf.get("rms_norm_eps", 1e-6),
                tied=hf.get("tie_word_embeddings", False),
                rope=Rope.from_hf(head_size, theta, rope),
                attention_bias=hf.get("attention_bias", False),
                mlp_bias=hf.get("mlp_bias", False),
            )
        except KeyError as missing:
            raise ValueError(f"the model's config has no {missing}; expected every key of a llama config") from None
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({config.num_heads}) is not a multiple of num_key_value_heads"
                f" ({config.num_kv_heads})"
            )
        return config

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every letter."""
        return {
            "D": self.hidden_size,
            "F": self.mlp_size,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_size,
            "V": self.vocab_size,
        }


class Layer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: Config) -> None:
        sizes = config.sizes
        self.attention_norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.attention = Attention(
            sizes,
            rope=config.rope,
            sliding_window=config.sliding_window,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.mlp = GatedMLP(sizes, bias=config.mlp_bias)

    def __call__(self, x: jax.Array, batch: RaggedBatch, pages: KVPages) -> tuple[jax.Array, KVPages]:
        attended, pages = self.attention(self.attention_norm(x), batch, pages)
        x += attended
        return x + self.mlp(self.mlp_norm(x)), pages


class Model(base.Model):
    """See `base.Model`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.embed = Embed(config.sizes)
        self.layers = nnx.List([Layer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.head = None if config.tied else Linear("D -> V", config.sizes)

    def __call__(
        self, batch: RaggedBatch, cache: tuple[KVPages, ...], *, dtype: jnp.dtype
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        x = self.embed.lookup(batch.tokens, dtype)
        updated = []
        for layer, pages in zip(self.layers, cache, strict=True):
            x, pages = traced_once(layer, x, batch, pages)
            updated.append(pages)
        return self.norm(x), tuple(updated)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return (self.head or self.embed)(hidden, out_dtype=jnp.float32)
