"""Falcon (Almazrouei et al. 2023): parallel layers, one or a few KV heads; its first and small models with ALiBi."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.attention import alibi_slopes
from jetserve.layers.block import Block, ParallelBlock
from jetserve.layers.rope import Rope
from jetserve.models import decoder
from jetserve.models.base import Source

KINDS = ("weight", "bias")
NORMS = {"attention_norm": ("input_layernorm", "ln_attn"), "mlp_norm": ("post_attention_layernorm", "ln_mlp")}
"""Names of the older and of the newer models."""

WEIGHTS = {
    "embed.weight": "transformer.word_embeddings.weight",
    **{
        f"layers.{{i}}.attention.{name}.{kind}": Source(
            f"transformer.h.{{i}}.self_attention.query_key_value.{kind}", part=part, per="K"
        )
        for part, name in enumerate("qkv")
        for kind in KINDS
    },
    **{
        f"layers.{{i}}.{ours}.{kind}": f"transformer.h.{{i}}.{theirs}.{kind}"
        for ours, theirs in {
            "attention.o": "self_attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        }.items()
        for kind in KINDS
    },
    **{
        f"layers.{{i}}.{norm}.{ours}": Source(
            f"transformer.h.{{i}}.{older}.{kind}", alias=f"transformer.h.{{i}}.{newer}.{kind}"
        )
        for norm, (older, newer) in NORMS.items()
        for ours, kind in {"scale": "weight", "bias": "bias"}.items()
    },
    "norm.scale": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """The shape of a Falcon.

    Attributes:
      rope: None for models with ALiBi.
      parallel: whether both layers take the residual stream as it was before.
      own_mlp_norm: whether the feed-forward layer has a norm of its own.
      bias: whether linear layers have one.
    """

    rope: Rope | None
    parallel: bool
    own_mlp_norm: bool
    bias: bool

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        newer = hf.get("new_decoder_architecture", False)
        parallel = hf.get("parallel_attn", True)
        if newer and not parallel:
            raise ValueError("the model's config asks for new_decoder_architecture without parallel_attn: not built")
        fields = decoder.shape(
            hf,
            tied=True,
            mlp_size=hf.get("ffn_hidden_size") or 4 * hf["hidden_size"],
            norm_epsilon=hf.get("layer_norm_epsilon", 1e-5),
        )
        heads = fields["num_heads"]
        few = (hf.get("num_kv_heads") or heads) if newer else 1
        return {
            **fields,
            "num_kv_heads": few if newer or hf.get("multi_query", True) else heads,
            "activation": hf.get("activation", "gelu"),
            "rope": None if hf.get("alibi", False) else decoder.rope(hf, fields["head_size"]),
            "parallel": parallel,
            "own_mlp_norm": not parallel or (newer and hf.get("num_ln_in_parallel_attn") in (None, 2)),
            "bias": hf.get("bias", False),
        }


class Model(decoder.LayerNormDecoder):
    """See `base.Model`."""

    def __init__(self, config: Config) -> None:
        # Falcon scales the scores after the bias of distance is added, BLOOM before.
        slopes = tuple(slope * config.head_size**-0.5 for slope in alibi_slopes(config.num_heads))
        attention = {
            "rope": config.rope,
            "qkv_bias": config.bias,
            "output_bias": config.bias,
            "alibi_slopes": slopes if config.rope is None else None,
        }
        block = ParallelBlock if config.parallel else Block
        super().__init__(
            config, attention=attention, mlp_bias=config.bias, block=block, own_mlp_norm=config.own_mlp_norm
        )
