"""Mistral: Llama's shape with a sliding window over the attention (Jiang et al. 2023, "Mistral 7B")."""

from jetserve.models.llama import WEIGHTS, Config, Model

__all__ = ["WEIGHTS", "Config", "Model"]
