"""Qwen3 (Yang et al. 2025): Qwen2 without biases, with a norm over every query and key head."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jetserve.layers.attention import Attention
from jetserve.models import llama
from jetserve.models.qwen2 import sliding_windows

WEIGHTS = {
    **llama.WEIGHTS,
    "layers.{i}.attention.q_norm.scale": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.scale": "model.layers.{i}.self_attn.k_norm.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's, with windows as Qwen2 has them."""

    FOREIGN: ClassVar[tuple[str, ...]] = ("mlp_bias",)

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().fields({"head_dim": 128, **hf})
        return {**fields, "windows": sliding_windows(hf, fields["num_layers"])}


class Model(llama.Model):
    """See `base.Model`."""

    def attention(self, config: llama.Config, i: int, **others: Any) -> Attention:
        q_norm, k_norm = (self.rms_norm(config, config.head_size) for _ in "qk")
        return super().attention(config, i, q_norm=q_norm, k_norm=k_norm, **others)
