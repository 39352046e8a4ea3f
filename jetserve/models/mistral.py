"""Mistral: Llama's shape with a sliding window over the attention (Jiang et al. 2023, "Mistral 7B")."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jetserve.models import llama
from jetserve.models.llama import WEIGHTS, Model

__all__ = ["WEIGHTS", "Config", "Model"]

DEFAULT_WINDOW = 4096
"""Tokens, where a config says nothing; null says that there is no window."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """A Llama's, with the window."""

    FOREIGN: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `llama.Config`, which leaves the window out: transformers ignores one in a Llama's config."""
        fields = super().fields(hf)
        return {**fields, "windows": (hf.get("sliding_window", DEFAULT_WINDOW),) * fields["num_layers"]}
