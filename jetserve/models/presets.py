"""Published models by name and size: the configs that their authors published, as far as they say what is computed.

For benchmarks of sizes whose weights are not at hand, and for plans of hardware. Not a model itself.
"""

from collections.abc import Mapping
from typing import Any

Preset = Mapping[str, Any]
"""A Hugging Face config."""


def _llama(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocabulary: int = 32000,
    positions: int = 4096,
    theta: float = 10000.0,
    epsilon: float = 1e-5,
    model_type: str = "llama",
    **others: Any,
) -> Preset:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rms_norm_eps": epsilon,
        "tie_word_embeddings": False,
        **others,
    }


def _llama_3(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **others: Any) -> Preset:
    shape = {"vocabulary": 128256, "positions": 8192, "theta": 500000.0, **others}
    return _llama(hidden, mlp, layers, heads, kv_heads, **shape)


def _llama_3_1(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, factor: float, **others: Any
) -> Preset:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _llama_3(hidden, mlp, layers, heads, kv_heads, positions=131072, rope_scaling=scaling, **others)


def _bloom(hidden: int, layers: int, heads: int) -> Preset:
    return {
        "model_type": "bloom",
        "hidden_size": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": 250880,
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
    }


PRESETS: Mapping[str, Mapping[str, Preset]] = {
    "llama-2": {
        "7b": _llama(4096, 11008, 32, 32, 32),
        "13b": _llama(5120, 13824, 40, 40, 40),
        "70b": _llama(8192, 28672, 80, 64, 8),
    },
    "llama-3": {
        "8b": _llama_3(4096, 14336, 32, 32, 8),
        "70b": _llama_3(8192, 28672, 80, 64, 8),
    },
    "llama-3.1": {
        "8b": _llama_3_1(4096, 14336, 32, 32, 8, factor=8.0),
        "70b": _llama_3_1(8192, 28672, 80, 64, 8, factor=8.0),
        "405b": _llama_3_1(16384, 53248, 126, 128, 8, factor=8.0),
    },
    "llama-3.2": {
        "1b": _llama_3_1(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tie_word_embeddings=True),
        "3b": _llama_3_1(3072, 8192, 28, 24, 8, factor=32.0, head_dim=128, tie_word_embeddings=True),
    },
    "mistral": {
        "7b": _llama(4096, 14336, 32, 32, 8, positions=32768, model_type="mistral", sliding_window=4096),
    },
    "bloom": {
        "560m": _bloom(1024, 24, 16),
        "1b1": _bloom(1536, 24, 16),
        "1b7": _bloom(2048, 24, 16),
        "3b": _bloom(2560, 30, 32),
        "7b1": _bloom(4096, 30, 32),
        "176b": _bloom(14336, 70, 112),
    },
}


def preset(model_name: str, size: str) -> Preset:
    """The Hugging Face config of a published model, such as ("bloom", "176b").

    Raises:
      ValueError: for a name or a size that is not listed, naming those that are.
    """
    if model_name not in PRESETS:
        raise ValueError(f"the model's name is {model_name!r}; expected one of {', '.join(PRESETS)}")
    sizes = PRESETS[model_name]
    if size not in sizes:
        raise ValueError(f"the size of {model_name} is {size!r}; expected one of {', '.join(sizes)}")
    return sizes[size]
