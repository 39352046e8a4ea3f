"""Mixtral (Jiang et al. 2024): Mistral's attention with two of eight experts a token."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jetserve.layers.moe import GatedExperts, MoE
from jetserve.models import llama
from jetserve.models.base import Source

EXPERTS = "model.layers.{i}.block_sparse_moe.experts.{e}"
WEIGHTS = {
    **llama.WEIGHTS,
    "layers.{i}.mlp.router.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
    "layers.{i}.mlp.experts.gate.weight": Source(f"{EXPERTS}.w1.weight"),
    "layers.{i}.mlp.experts.up.weight": Source(f"{EXPERTS}.w3.weight"),
    "layers.{i}.mlp.experts.down.weight": Source(f"{EXPERTS}.w2.weight"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's, with the window of Mistral and experts; `mlp_size` is that of each."""

    FOREIGN: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    num_experts: int
    experts_per_token: int

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().fields({"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, **hf})
        return {
            **fields,
            "windows": (hf.get("sliding_window"),) * fields["num_layers"],
            "num_experts": hf["num_local_experts"],
            "experts_per_token": hf["num_experts_per_tok"],
        }

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "E": self.num_experts}


class Model(llama.Model):
    """See `base.Model`."""

    def mlp(self, config: llama.Config, i: int) -> MoE:  # type: ignore[override]
        assert isinstance(config, Config)
        return MoE(
            config.sizes,
            experts=GatedExperts(config.sizes, activation=config.activation),
            experts_per_token=config.experts_per_token,
            normalized=True,
        )
