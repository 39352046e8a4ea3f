"""OLMo 2 (OLMo et al. 2024): Llama's layers with norms after them, and over all queries and all keys together."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jetserve.layers.attention import Attention
from jetserve.layers.block import Block
from jetserve.models import llama, qwen3

WEIGHTS = {
    **qwen3.WEIGHTS,
    "layers.{i}.attention_post_norm.scale": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_post_norm.scale": "model.layers.{i}.post_feedforward_layernorm.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's."""

    FOREIGN: ClassVar[tuple[str, ...]] = ("mlp_bias",)

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields({"rms_norm_eps": 1e-5, **hf})


class Model(llama.Model):
    """See `base.Model`."""

    def layer(self, config: llama.Config, i: int) -> Block:
        return Block(
            attention=self.attention(config, i),
            attention_post_norm=self.rms_norm(config),
            mlp=self.mlp(config, i),
            mlp_post_norm=self.rms_norm(config),
        )

    def attention(self, config: llama.Config, i: int, **others: Any) -> Attention:
        q_norm = self.rms_norm(config, config.num_heads * config.head_size)
        k_norm = self.rms_norm(config, config.num_kv_heads * config.head_size)
        return super().attention(config, i, q_norm=q_norm, k_norm=k_norm, **others)
