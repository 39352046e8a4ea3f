"""gpt-oss (OpenAI 2025): experts with biases and a gate that is cut off, attention with sinks and alternating windows.

Published in MXFP4, which `checkpoint.mxfp4` reads.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jetserve.layers.attention import Attention, Sinks
from jetserve.layers.moe import GatedExperts, MoE
from jetserve.models import decoder, llama
from jetserve.models.base import Source

EXPERTS = "model.layers.{i}.mlp.experts"
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gate_up(part: int, kind: str) -> Source:
    """A row of the gate and one of what it lets through, in turn."""
    name, alias = f"{EXPERTS}.gate_up_proj.{kind}", f"{EXPERTS}.gate_up_proj{_SUFFIXES[kind]}"
    return Source(name, part=part, per="EF", alias=alias, stacked=True)


def _down(kind: str) -> Source:
    return Source(f"{EXPERTS}.down_proj.{kind}", alias=f"{EXPERTS}.down_proj{_SUFFIXES[kind]}", stacked=True)


_SUFFIXES = {"weight": "", "bias": "_bias"}
WEIGHTS = {
    **llama.WEIGHTS,
    "layers.{i}.attention.sinks.bias": "model.layers.{i}.self_attn.sinks",
    "layers.{i}.mlp.router.weight": "model.layers.{i}.mlp.router.weight",
    "layers.{i}.mlp.router.bias": "model.layers.{i}.mlp.router.bias",
    **{
        f"layers.{{i}}.mlp.experts.{name}.{kind}": source
        for kind in _SUFFIXES
        for name, source in {"gate": _gate_up(0, kind), "up": _gate_up(1, kind), "down": _down(kind)}.items()
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's, with experts; `mlp_size` is that of each.

    `gate_slope` and `limit`: see `CutOffExperts`.
    """

    FOREIGN: ClassVar[tuple[str, ...]] = ("mlp_bias", "hidden_act")

    num_experts: int
    experts_per_token: int
    gate_slope: float
    limit: float

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        usual = {"head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}
        scaled = {} if hf.get("rope_parameters") or hf.get("rope_scaling") else {"rope_parameters": DEFAULT_ROPE}
        fields = super().fields({**usual, **hf, **scaled})
        layers = fields["num_layers"]
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        return {
            **fields,
            "windows": decoder.windows(hf, window=hf.get("sliding_window", 128), layer_types=kinds, num_layers=layers),
            "num_experts": hf["num_local_experts"],
            "experts_per_token": hf["num_experts_per_tok"],
            "gate_slope": hf.get("swiglu_alpha", 1.702),
            "limit": hf.get("swiglu_limit", 7.0),
        }

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "E": self.num_experts}


class CutOffExperts(GatedExperts):
    """Experts whose gate g and input u are cut off at a limit: `down(g sigmoid(slope g) (u + 1))`."""

    proportional: ClassVar[bool] = False

    def __init__(self, sizes: Mapping[str, int], *, slope: float, limit: float) -> None:
        super().__init__(sizes, activation="silu", bias=True)
        self.slope = slope
        self.limit = limit

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.slope * gate) * (up + 1)


class Model(llama.Model):
    """See `base.Model`."""

    def attention(self, config: llama.Config, i: int, **others: Any) -> Attention:
        return super().attention(config, i, sinks=Sinks(config.num_heads), **others)

    def mlp(self, config: llama.Config, i: int) -> MoE:  # type: ignore[override]
        assert isinstance(config, Config)
        return MoE(
            config.sizes,
            experts=CutOffExperts(config.sizes, slope=config.gate_slope, limit=config.limit),
            experts_per_token=config.experts_per_token,
            normalized=True,
            router_bias=True,
        )
