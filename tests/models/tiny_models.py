"""Random models of every family, made and saved by transformers: the rows of the shared test.

A new model adds a family here. Its shape is as small as its switches allow; a window is shorter than the texts.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCABULARY = 130

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One model_type: the shape of its models, and what each of them has in its place or besides."""

    shape: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]


FAMILIES: dict[str, Family] = {
    "llama": Family(
        SHAPE,
        {
            "plain": {},
            "tied-mqa-theta": {
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
                "rms_norm_eps": 1e-3,
            },
            "mha-linear_rope": {
                "num_key_value_heads": 8,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
            "biases-head_dim": {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "num_key_value_heads": 2},
            "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
        },
    ),
    "mistral": Family(
        SHAPE,
        {
            "window": {"sliding_window": 11},
            "no_window-head_dim": {"sliding_window": None, "head_dim": 16},
            "tied-mqa-gelu": {
                "sliding_window": 30,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "hidden_act": "gelu",
            },
        },
    ),
    "bloom": Family(
        {"hidden_size": 64, "n_layer": 2, "n_head": 8, "vocab_size": VOCABULARY},
        {
            "plain": {},
            "untied-heads_of_another_count": {"hidden_size": 48, "n_head": 6, "tie_word_embeddings": False},
            "epsilon": {"layer_norm_epsilon": 1e-2, "n_layer": 1, "n_head": 4},
        },
    ),
}

MODELS = {
    f"{model_type}-{name}": (model_type, name) for model_type, family in FAMILIES.items() for name in family.models
}
FIRST = [f"{model_type}-{next(iter(family.models))}" for model_type, family in FAMILIES.items()]
"""One model of each family."""


def make(name: str, folder: Path) -> transformers.PreTrainedModel:
    """A model of `MODELS`, saved in a folder. The same name gives the same weights."""
    model_type, variant = MODELS[name]
    family = FAMILIES[model_type]
    config = transformers.AutoConfig.for_model(model_type, **{**family.shape, **family.models[variant]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("weight") and parameter.ndim == 1:  # of norms
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3 if parameter.ndim == 1 else 1.5 / 8)
    model.save_pretrained(folder)
    return model


def make_texts() -> list[np.ndarray]:
    """Three texts of different lengths."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length) for length in (90, 29, 3)]
