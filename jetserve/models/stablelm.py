"""StableLM 3B and StableLM 2 (Bellagente et al. 2024): Llama's shape with layer norms, heads rotated in part.

The 12B model has parallel layers, and a norm of its own for every query and key head.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.attention import Attention
from jetserve.layers.block import Block, ParallelBlock
from jetserve.layers.mlp import GatedMLP
from jetserve.layers.norm import HeadNorms, LayerNorm
from jetserve.layers.rope import Rope
from jetserve.models import base, decoder, llama
from jetserve.models.base import Source

WEIGHTS = {
    **llama.WEIGHTS,
    "layers.{i}.attention_norm.bias": "model.layers.{i}.input_layernorm.bias",
    "layers.{i}.attention.q_norm.scale": Source("model.layers.{i}.self_attn.q_layernorm.norms.{n}.weight"),
    "layers.{i}.attention.k_norm.scale": Source("model.layers.{i}.self_attn.k_layernorm.norms.{k}.weight"),
    "layers.{i}.mlp_norm.bias": "model.layers.{i}.post_attention_layernorm.bias",
    "norm.bias": "model.norm.bias",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """The shape of a StableLM.

    Attributes:
      parallel: whether both layers take the residual stream as it was, through one norm.
      qkv_bias: of queries, keys and values; no other linear layer has one.
      head_norms: whether query and key heads are normalized.
    """

    rope: Rope
    parallel: bool
    qkv_bias: bool
    head_norms: bool

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"num_key_value_heads": 32, "max_position_embeddings": 4096, **hf}
        base.check_switches(hf, {"head_dim": hf["hidden_size"] // hf["num_attention_heads"]})
        fields = decoder.shape(hf, tied=False, **decoder.grouped_heads(hf), norm_epsilon=hf.get("layer_norm_eps", 1e-5))
        partial = decoder.partial_rotary_factor(hf, 0.25)
        return {
            **fields,
            "activation": hf.get("hidden_act", "silu"),
            "rope": decoder.rope(hf, fields["head_size"], partial=partial),
            "parallel": hf.get("use_parallel_residual", False),
            "qkv_bias": hf.get("use_qkv_bias", False),
            "head_norms": hf.get("qk_layernorm", False),
        }


class Model(decoder.Decoder):
    """See `base.Model`."""

    def __init__(self, config: Config) -> None:
        def norm() -> LayerNorm:
            return LayerNorm(config.hidden_size, epsilon=config.norm_epsilon)

        block = ParallelBlock if config.parallel else Block
        layers = [
            block(
                attention_norm=norm(),
                attention=_attention(config),
                mlp_norm=None if config.parallel else norm(),
                mlp=GatedMLP(config.sizes, activation=config.activation),
            )
            for _ in range(config.num_layers)
        ]
        super().__init__(config, layers, norm=norm())


def _attention(config: Config) -> Attention:
    q_norm, k_norm = (
        HeadNorms(heads, config.head_size, epsilon=config.norm_epsilon) if config.head_norms else None
        for heads in (config.num_heads, config.num_kv_heads)
    )
    return Attention(config.sizes, rope=config.rope, qkv_bias=config.qkv_bias, q_norm=q_norm, k_norm=k_norm)
