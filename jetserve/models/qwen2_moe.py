"""Qwen1.5 and Qwen2 with experts (Yang et al. 2024): Qwen2's attention, and an expert that every token goes through."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jetserve.layers.mlp import GatedMLP
from jetserve.layers.moe import GatedExperts, SharedMoE
from jetserve.models import decoder, llama, qwen3_moe

SHARED = "model.layers.{i}.mlp.shared_expert"
WEIGHTS = {
    **qwen3_moe.WEIGHTS,
    "layers.{i}.mlp.shared_gate.weight": f"{SHARED}_gate.weight",
    **{f"layers.{{i}}.mlp.shared.{name}.weight": f"{SHARED}.{name}_proj.weight" for name in ("gate", "up", "down")},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(qwen3_moe.Config):
    """A Qwen3's with experts, with biases, and windows in every other lower layer.

    `shared_size` is the letter F of the shared expert.
    """

    FOREIGN: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias", "num_local_experts")

    shared_size: int

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().fields(hf)
        layers, last = fields["num_layers"], hf.get("max_window_layers", 28)
        window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
        kinds = ["full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(layers)]
        return {
            **fields,
            "windows": decoder.windows(hf, window=window, layer_types=kinds, num_layers=layers),
            "qkv_bias": hf.get("qkv_bias", True),
            "shared_size": hf["shared_expert_intermediate_size"],
        }


class Model(llama.Model):
    """See `base.Model`."""

    def mlp(self, config: llama.Config, i: int) -> GatedMLP | SharedMoE:  # type: ignore[override]
        assert isinstance(config, Config)
        if not config.sparse[i]:
            return super().mlp(config, i)
        sizes = {**config.sizes, "F": config.expert_size}
        return SharedMoE(
            sizes,
            shared=GatedMLP({**sizes, "F": config.shared_size}, activation=config.activation),
            experts=GatedExperts(sizes, activation=config.activation),
            experts_per_token=config.experts_per_token,
            normalized=config.normalized,
        )
