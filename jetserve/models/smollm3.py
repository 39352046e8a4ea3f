"""SmolLM3 (Bakouch et al. 2025): Llama's shape in which every fourth layer rotates nothing."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.models import decoder, llama
from jetserve.models.llama import WEIGHTS, Model

__all__ = ["WEIGHTS", "Config", "Model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's; `no_rope_layers` says, against its name, 1 for layers that rotate."""

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().fields({"rope_theta": 2_000_000.0, "tie_word_embeddings": True, **hf})
        layers = fields["num_layers"]
        interval = hf.get("no_rope_layer_interval", 4)
        rotates = hf.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
        slides = hf.get("use_sliding_window", False)
        kinds = ["full_attention" if not slides or rotate else "sliding_attention" for rotate in rotates]
        window = hf.get("sliding_window") if slides else None
        return {
            **fields,
            "ropes": tuple(rope if rotate else None for rope, rotate in zip(fields["ropes"], rotates, strict=True)),
            "windows": decoder.windows(hf, window=window, layer_types=kinds, num_layers=layers),
        }
