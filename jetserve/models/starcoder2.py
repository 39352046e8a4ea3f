"""StarCoder2 (Lozhkov et al. 2024): Llama's attention with layer norms, biases and no gate."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.layers.rope import Rope
from jetserve.models import decoder, llama

WEIGHTS = {
    **llama.WEIGHTS,
    "layers.{i}.attention_norm.bias": "model.layers.{i}.input_layernorm.bias",
    "layers.{i}.mlp_norm.bias": "model.layers.{i}.post_attention_layernorm.bias",
    "layers.{i}.mlp.up.weight": "model.layers.{i}.mlp.c_fc.weight",
    "layers.{i}.mlp.up.bias": "model.layers.{i}.mlp.c_fc.bias",
    "layers.{i}.mlp.down.weight": "model.layers.{i}.mlp.c_proj.weight",
    "layers.{i}.mlp.down.bias": "model.layers.{i}.mlp.c_proj.bias",
    "norm.bias": "model.norm.bias",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """The shape of a StarCoder2; `bias`: whether linear layers have one."""

    rope: Rope
    bias: bool
    sliding_window: int | None

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = decoder.shape(hf, tied=True, **decoder.grouped_heads(hf), norm_epsilon=hf.get("norm_epsilon", 1e-5))
        return {
            **fields,
            "activation": hf.get("hidden_act", "gelu_pytorch_tanh"),
            "rope": decoder.rope(hf, fields["head_size"]),
            "bias": hf.get("use_bias", True),
            "sliding_window": hf.get("sliding_window"),
        }


class Model(decoder.LayerNormDecoder):
    """See `base.Model`."""

    def __init__(self, config: Config) -> None:
        attention = {
            "rope": config.rope,
            "sliding_window": config.sliding_window,
            "qkv_bias": config.bias,
            "output_bias": config.bias,
        }
        super().__init__(config, attention=attention, mlp_bias=config.bias)
