"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama's shape with fused projections."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jetserve.models import decoder, llama
from jetserve.models.base import Source
from jetserve.models.llama import Model

__all__ = ["WEIGHTS", "Config", "Model"]

WEIGHTS = {
    **llama.WEIGHTS,
    **{
        f"layers.{{i}}.attention.{name}.weight": Source("model.layers.{i}.self_attn.qkv_proj.weight", part=part)
        for part, name in enumerate("qkv")
    },
    "layers.{i}.mlp.gate.weight": Source("model.layers.{i}.mlp.gate_up_proj.weight", part=0),
    "layers.{i}.mlp.up.weight": Source("model.layers.{i}.mlp.gate_up_proj.weight", part=1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's, with a window, and heads of which a share is rotated."""

    FOREIGN: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    @classmethod
    def rotary_share(cls, hf: Mapping[str, Any]) -> float:
        return decoder.partial_rotary_factor(hf, 1.0)

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().fields({"rms_norm_eps": 1e-5, **hf})
        return {**fields, "windows": (hf.get("sliding_window"),) * fields["num_layers"]}
