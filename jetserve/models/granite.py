"""Granite 3 (Granite Team 2024): Llama's shape with multipliers of embeddings, scores, residuals and logits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetserve.models import llama
from jetserve.models.llama import WEIGHTS, Model

__all__ = ["WEIGHTS", "Config", "Model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's with the multipliers."""

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().fields(hf),
            "embedding_multiplier": hf.get("embedding_multiplier", 1.0),
            "attention_scale": hf.get("attention_multiplier", 1.0),
            "residual_multiplier": hf.get("residual_multiplier", 1.0),
            "logit_multiplier": 1 / hf.get("logits_scaling", 1.0),
        }
