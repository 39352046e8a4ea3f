"""BLOOM (BigScience 2022): ALiBi in place of positions, a norm after the embedding, queries, keys and values fused."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.attention import alibi_slopes
from jetserve.models import base, decoder
from jetserve.models.base import Source

WEIGHTS = {
    "embed.weight": "transformer.word_embeddings.weight",
    "embed_norm.scale": "transformer.word_embeddings_layernorm.weight",
    "embed_norm.bias": "transformer.word_embeddings_layernorm.bias",
    "layers.{i}.attention_norm.scale": "transformer.h.{i}.input_layernorm.weight",
    "layers.{i}.attention_norm.bias": "transformer.h.{i}.input_layernorm.bias",
    **{
        f"layers.{{i}}.attention.{name}.{kind}": Source(
            f"transformer.h.{{i}}.self_attention.query_key_value.{kind}", part=part, per="N"
        )
        for part, name in enumerate("qkv")
        for kind in ("weight", "bias")
    },
    "layers.{i}.attention.o.weight": "transformer.h.{i}.self_attention.dense.weight",
    "layers.{i}.attention.o.bias": "transformer.h.{i}.self_attention.dense.bias",
    "layers.{i}.mlp_norm.scale": "transformer.h.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_norm.bias": "transformer.h.{i}.post_attention_layernorm.bias",
    "layers.{i}.mlp.up.weight": "transformer.h.{i}.mlp.dense_h_to_4h.weight",
    "layers.{i}.mlp.up.bias": "transformer.h.{i}.mlp.dense_h_to_4h.bias",
    "layers.{i}.mlp.down.weight": "transformer.h.{i}.mlp.dense_4h_to_h.weight",
    "layers.{i}.mlp.down.bias": "transformer.h.{i}.mlp.dense_4h_to_h.bias",
    "norm.scale": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """The shape of a BLOOM. Nothing in it limits the length of a text; it was trained with 2048 tokens."""

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        base.check_switches(hf, {"apply_residual_connection_post_layernorm": False})
        older = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        names = {usual: name for usual, name in older.items() if name in hf}
        return decoder.shape(
            hf,
            tied=True,
            names={**names, "max_position_embeddings": "seq_length"},
            mlp_size=4 * hf[names.get("hidden_size", "hidden_size")],
            norm_epsilon=hf.get("layer_norm_epsilon", 1e-5),
            activation="gelu_new",
        )


class Model(decoder.LayerNormDecoder):
    """See `base.Model`."""

    def __init__(self, config: Config) -> None:
        slopes = alibi_slopes(config.num_heads)
        attention = {"rope": None, "qkv_bias": True, "output_bias": True, "alibi_slopes": slopes}
        super().__init__(config, attention=attention, mlp_bias=True, normed_embedding=True)
