"""Qwen3 with experts (Yang et al. 2025): Qwen3's attention, eight of 128 small experts a token."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.mlp import GatedMLP
from jetserve.layers.moe import GatedExperts, MoE
from jetserve.models import llama, qwen3
from jetserve.models.base import Source

WEIGHTS = {
    **qwen3.WEIGHTS,
    "layers.{i}.mlp.router.weight": "model.layers.{i}.mlp.gate.weight",
    **{
        f"layers.{{i}}.mlp.experts.{name}.weight": Source(f"model.layers.{{i}}.mlp.experts.{{e}}.{name}_proj.weight")
        for name in ("gate", "up", "down")
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(qwen3.Config):
    """A Qwen3's, with experts.

    Attributes:
      expert_size: the letter F of every expert; `mlp_size` is that of layers without experts.
      normalized: whether the weights of the chosen experts add up to 1.
      sparse: whether each layer has experts.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    normalized: bool
    sparse: tuple[bool, ...]

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().fields({"head_dim": hf["hidden_size"] // hf["num_attention_heads"], **hf})
        layers = fields["num_layers"]
        dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
        window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
        return {
            **fields,
            "windows": (window,) * layers,
            "num_experts": hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"],
            "experts_per_token": hf["num_experts_per_tok"],
            "expert_size": hf["moe_intermediate_size"],
            "normalized": hf.get("norm_topk_prob", False),
            "sparse": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        }

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "E": self.num_experts}


class Model(qwen3.Model):
    """See `base.Model`."""

    def mlp(self, config: llama.Config, i: int) -> GatedMLP | MoE:  # type: ignore[override]
        assert isinstance(config, Config)
        if not config.sparse[i]:
            return super().mlp(config, i)
        sizes = {**config.sizes, "F": config.expert_size}
        return MoE(
            sizes,
            experts=GatedExperts(sizes, activation=config.activation),
            experts_per_token=config.experts_per_token,
            normalized=config.normalized,
        )
