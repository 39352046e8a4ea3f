"""OPT (Zhang et al. 2022): learned positions, layer norms, biases, ReLU."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.embed import LearnedPositions
from jetserve.models import base, decoder

UNUSED_POSITIONS = 2
"""Rows of the table of positions before that of the first token."""

WEIGHTS = {
    "embed.weight": "model.decoder.embed_tokens.weight",
    "positions.weight": "model.decoder.embed_positions.weight",
    "norm.scale": "model.decoder.final_layer_norm.weight",
    "norm.bias": "model.decoder.final_layer_norm.bias",
    "head.weight": "lm_head.weight",
    **{
        f"layers.{{i}}.{ours}.{kind}": f"model.decoder.layers.{{i}}.{theirs}.{kind}"
        for ours, theirs in {
            "attention.q": "self_attn.q_proj",
            "attention.k": "self_attn.k_proj",
            "attention.v": "self_attn.v_proj",
            "attention.o": "self_attn.out_proj",
            "mlp.up": "fc1",
            "mlp.down": "fc2",
        }.items()
        for kind in ("weight", "bias")
    },
    **{
        f"layers.{{i}}.{ours}.{kind}": f"model.decoder.layers.{{i}}.{theirs}.{kind.replace('scale', 'weight')}"
        for ours, theirs in {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}.items()
        for kind in ("scale", "bias")
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """The shape of an OPT; `bias`: whether linear layers have one."""

    bias: bool

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        switches = {
            "do_layer_norm_before": True,
            "word_embed_proj_dim": hf["hidden_size"],
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
        }
        base.check_switches(hf, switches)
        return decoder.shape(
            hf,
            tied=True,
            mlp_size=hf["ffn_dim"],
            norm_epsilon=1e-5,
            activation=hf.get("activation_function", "relu"),
            bias=hf.get("enable_bias", True),
        )


class Model(decoder.LayerNormDecoder):
    """See `base.Model`."""

    def __init__(self, config: Config) -> None:
        attention = {"rope": None, "qkv_bias": config.bias, "output_bias": config.bias}
        positions = LearnedPositions(config.sizes, max_position=config.max_position, unused=UNUSED_POSITIONS)
        super().__init__(config, attention=attention, mlp_bias=config.bias, positions=positions)
