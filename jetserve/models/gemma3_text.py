"""Gemma 3, text only (Gemma Team 2025): Gemma 2 with norms over heads, no caps, and a full layer after five windows."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.attention import Attention
from jetserve.models import base, decoder, gemma2, llama, qwen3

WEIGHTS = {**qwen3.WEIGHTS, **gemma2.WEIGHTS}

GLOBAL_THETA = 1_000_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gemma2.Config):
    """A Gemma 2's. Layers with a window rotate faster than those without."""

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        base.check_switches(hf, {"attn_logit_softcapping": None})  # transformers has the key and leaves it out
        layers = hf["num_hidden_layers"]
        period = hf.get("sliding_window_pattern") or 6
        kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
        uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        # The parent's rotation, one for all layers, is replaced.
        one_rope = {"rope_parameters": None, "rope_scaling": None}
        fields = super().fields({**uncapped, **hf, **one_rope, "layer_types": hf.get("layer_types") or kinds})
        size = fields["head_size"]
        whole = decoder.rope(hf, size, theta=GLOBAL_THETA, layer_type="full_attention")
        local = decoder.rope(_local_rope(hf), size, layer_type="sliding_attention")
        return {**fields, "ropes": tuple(whole if window is None else local for window in fields["windows"])}


def _local_rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config as layers with a window read it: older files have a theta of their own, which is never scaled."""
    if hf.get("rope_parameters"):
        return hf
    return {"rope_theta": hf.get("rope_local_base_freq", 10000.0)}


class Model(gemma2.Model):
    """See `base.Model`."""

    def attention(self, config: llama.Config, i: int, **others: Any) -> Attention:
        q_norm, k_norm = (self.rms_norm(config, config.head_size) for _ in "qk")
        return super().attention(config, i, q_norm=q_norm, k_norm=k_norm, **others)
