"""Gemma 2 (Gemma Team 2024): norms before and after layers, soft caps, a window in every other layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.attention import Attention
from jetserve.layers.block import Block
from jetserve.models import decoder, gemma, llama

WEIGHTS = {
    **llama.WEIGHTS,
    "layers.{i}.attention_post_norm.scale": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_norm.scale": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.mlp_post_norm.scale": "model.layers.{i}.post_feedforward_layernorm.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gemma.Config):
    """A Gemma's; `attention_cap` is the soft cap of the scores."""

    attention_cap: float | None = None

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().fields(hf)
        layers = fields["num_layers"]
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        return {
            **fields,
            "activation": hf.get("hidden_activation", gemma.TANH),
            "windows": decoder.windows(hf, window=hf.get("sliding_window", 4096), layer_types=kinds, num_layers=layers),
            "attention_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5,
            "attention_cap": hf.get("attn_logit_softcapping", 50.0),
            "logit_cap": hf.get("final_logit_softcapping", 30.0),
        }


class Model(gemma.Model):
    """See `base.Model`."""

    def layer(self, config: llama.Config, i: int) -> Block:
        return Block(
            attention_norm=self.rms_norm(config),
            attention=self.attention(config, i),
            attention_post_norm=self.rms_norm(config),
            mlp_norm=self.rms_norm(config),
            mlp=self.mlp(config, i),
            mlp_post_norm=self.rms_norm(config),
        )

    def attention(self, config: llama.Config, i: int, **others: Any) -> Attention:
        assert isinstance(config, Config)
        return super().attention(config, i, soft_cap=config.attention_cap, **others)
