"""Llama 1, 2, 3 and the many models of its shape (SmolLM2 among them)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.attention import Attention
from jetserve.layers.block import Block
from jetserve.layers.mlp import GatedMLP
from jetserve.layers.norm import RMSNorm
from jetserve.layers.rope import Rope
from jetserve.models import decoder

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
class Config(decoder.Config):
    """The shape of a model of this family.

    `windows` and `ropes`: the sliding window and the rotation of every layer, None where it has none.
    """

    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    residual_multiplier: float = 1.0
    attention_scale: float | None = None

    @classmethod
    def rotary_share(cls, hf: Mapping[str, Any]) -> float:
        """Of a head's channels, those that are rotated."""
        return 1.0

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = decoder.shape(hf, tied=False, **decoder.grouped_heads(hf), norm_epsilon=hf.get("rms_norm_eps", 1e-6))
        layers = fields["num_layers"]
        return {
            **fields,
            "activation": hf.get("hidden_act", "silu"),
            "ropes": (decoder.rope(hf, fields["head_size"], partial=cls.rotary_share(hf)),) * layers,
            "windows": (None,) * layers,
            "qkv_bias": hf.get("attention_bias", False),
            "output_bias": hf.get("attention_bias", False),
            "mlp_bias": hf.get("mlp_bias", False),
        }


class Model(decoder.Decoder):
    """See `base.Model`."""

    def __init__(self, config: Config) -> None:
        layers = [self.layer(config, i) for i in range(config.num_layers)]
        super().__init__(config, layers, norm=self.rms_norm(config))

    def layer(self, config: Config, i: int) -> Block:
        """Layer i."""
        return Block(
            attention_norm=self.rms_norm(config),
            attention=self.attention(config, i),
            mlp_norm=self.rms_norm(config),
            mlp=self.mlp(config, i),
            multiplier=config.residual_multiplier,
        )

    def attention(self, config: Config, i: int, **others: Any) -> Attention:
        """Of layer i; `others` are further arguments of `Attention`."""
        return Attention(
            config.sizes,
            rope=config.ropes[i],
            sliding_window=config.windows[i],
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            scale=config.attention_scale,
            **others,
        )

    def mlp(self, config: Config, i: int) -> GatedMLP:
        """Of layer i."""
        return GatedMLP(config.sizes, activation=config.activation, bias=config.mlp_bias)

    def rms_norm(self, config: Config, size: int | None = None) -> RMSNorm:
        """Over the hidden size unless given."""
        return RMSNorm(size or config.hidden_size, epsilon=config.norm_epsilon)
