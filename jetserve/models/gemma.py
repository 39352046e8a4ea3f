"""Gemma (Gemma Team 2024): Llama's shape with wide heads, a tanh GELU, scaled embeddings, norms stored as scale - 1."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from jetserve.layers.norm import RMSNorm
from jetserve.models import base, llama
from jetserve.models.llama import WEIGHTS

__all__ = ["WEIGHTS", "Config", "Model"]

TANH = "gelu_pytorch_tanh"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's with the family's own numbers."""

    FOREIGN: ClassVar[tuple[str, ...]] = ("mlp_bias",)

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        base.check_switches(hf, {"use_bidirectional_attention": False})
        # Heads of 256 and a tied head are what transformers takes where the config says nothing.
        fields = super().fields({"head_dim": 256, "tie_word_embeddings": True, **hf})
        activation = hf.get("hidden_act", TANH)
        return {
            **fields,
            # "gelu" in the first files was a mistake: the models were trained with the tanh form.
            "activation": TANH if activation == "gelu" else activation,
            "embedding_multiplier": math.sqrt(fields["hidden_size"]),
        }


class Model(llama.Model):
    """See `base.Model`."""

    def rms_norm(self, config: llama.Config, size: int | None = None) -> RMSNorm:
        return RMSNorm(size or config.hidden_size, epsilon=config.norm_epsilon, offset=1.0)
