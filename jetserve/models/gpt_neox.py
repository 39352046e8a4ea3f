"""GPT-NeoX and Pythia (Black et al. 2022): parallel layers, heads rotated in part, fused queries, keys and values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.block import Block, ParallelBlock
from jetserve.layers.rope import Rope
from jetserve.models import decoder
from jetserve.models.base import Source

KINDS = ("weight", "bias")
WEIGHTS = {
    "embed.weight": "gpt_neox.embed_in.weight",
    **{
        f"layers.{{i}}.attention.{name}.{kind}": Source(
            f"gpt_neox.layers.{{i}}.attention.query_key_value.{kind}", part=part, per="N"
        )
        for part, name in enumerate("qkv")
        for kind in KINDS
    },
    **{
        f"layers.{{i}}.{ours}.{kind}": f"gpt_neox.layers.{{i}}.{theirs}.{kind}"
        for ours, theirs in {
            "attention.o": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        }.items()
        for kind in KINDS
    },
    "layers.{i}.attention_norm.scale": "gpt_neox.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention_norm.bias": "gpt_neox.layers.{i}.input_layernorm.bias",
    "layers.{i}.mlp_norm.scale": "gpt_neox.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_norm.bias": "gpt_neox.layers.{i}.post_attention_layernorm.bias",
    "norm.scale": "gpt_neox.final_layer_norm.weight",
    "norm.bias": "gpt_neox.final_layer_norm.bias",
    "head.weight": "embed_out.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """The shape of a GPT-NeoX.

    `parallel`: whether both layers take the residual stream as it was; `attention_bias`: of all four projections.
    """

    rope: Rope
    parallel: bool
    attention_bias: bool

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = decoder.shape(hf, tied=False, norm_epsilon=hf.get("layer_norm_eps", 1e-5))
        theta = hf.get("rotary_emb_base", 10000.0)
        partial = decoder.partial_rotary_factor(hf, hf.get("rotary_pct", 0.25))
        return {
            **fields,
            "activation": hf.get("hidden_act", "gelu"),
            "rope": decoder.rope(hf, fields["head_size"], theta=theta, partial=partial),
            "parallel": hf.get("use_parallel_residual", True),
            "attention_bias": hf.get("attention_bias", True),
        }


class Model(decoder.LayerNormDecoder):
    """See `base.Model`."""

    def __init__(self, config: Config) -> None:
        bias = config.attention_bias
        attention = {"rope": config.rope, "qkv_bias": bias, "output_bias": bias}
        block = ParallelBlock if config.parallel else Block
        super().__init__(config, attention=attention, mlp_bias=True, block=block)
