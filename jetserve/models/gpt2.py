"""GPT-2 (Radford et al. 2019): learned positions, layer norms, transposed tensors, one of them fused."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.embed import LearnedPositions
from jetserve.models import base, decoder
from jetserve.models.base import Source

KINDS = ("weight", "bias")
WEIGHTS = {
    "embed.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    **{
        f"layers.{{i}}.attention.{name}.{kind}": Source(
            f"transformer.h.{{i}}.attn.c_attn.{kind}", part=i, transposed=True
        )
        for i, name in enumerate("qkv")
        for kind in KINDS
    },
    **{
        f"layers.{{i}}.{ours}.{kind}": Source(f"transformer.h.{{i}}.{theirs}.{kind}", transposed=True)
        for ours, theirs in {"attention.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}.items()
        for kind in KINDS
    },
    "layers.{i}.attention_norm.scale": "transformer.h.{i}.ln_1.weight",
    "layers.{i}.attention_norm.bias": "transformer.h.{i}.ln_1.bias",
    "layers.{i}.mlp_norm.scale": "transformer.h.{i}.ln_2.weight",
    "layers.{i}.mlp_norm.bias": "transformer.h.{i}.ln_2.bias",
    "norm.scale": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """The shape of a GPT-2; `attention_scale`: of the scores, None for 1 / sqrt(H)."""

    attention_scale: float | None

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        base.check_switches(hf, {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False})
        return decoder.shape(
            hf,
            tied=True,
            names={
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "max_position_embeddings": "n_positions",
            },
            mlp_size=hf.get("n_inner") or 4 * hf["n_embd"],
            norm_epsilon=hf.get("layer_norm_epsilon", 1e-5),
            activation=hf.get("activation_function", "gelu_new"),
            attention_scale=None if hf.get("scale_attn_weights", True) else 1.0,
        )


class Model(decoder.LayerNormDecoder):
    """See `base.Model`."""

    def __init__(self, config: Config) -> None:
        attention = {"rope": None, "qkv_bias": True, "output_bias": True, "scale": config.attention_scale}
        positions = LearnedPositions(config.sizes, max_position=config.max_position)
        super().__init__(config, attention=attention, mlp_bias=True, positions=positions)
