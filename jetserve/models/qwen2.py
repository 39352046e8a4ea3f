"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's shape with biases of queries, keys and values."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jetserve.models import decoder, llama
from jetserve.models.llama import WEIGHTS, Model

__all__ = ["WEIGHTS", "Config", "Model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's, with biases, and with windows in the upper layers where the config turns them on."""

    FOREIGN: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().fields(hf)
        return {
            **fields,
            "windows": sliding_windows(hf, fields["num_layers"]),
            "qkv_bias": True,
        }


def sliding_windows(hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Of every layer: those from `max_window_layers` on slide, where `use_sliding_window` is set."""
    slides = hf.get("use_sliding_window", False)
    first = hf.get("max_window_layers", 28)
    kinds = ["sliding_attention" if slides and i >= first else "full_attention" for i in range(num_layers)]
    window = hf.get("sliding_window", 4096) if slides else None
    return decoder.windows(hf, window=window, layer_types=kinds, num_layers=num_layers)
