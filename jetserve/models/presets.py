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


def _qwen(model_type: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **others: Any) -> Preset:
    shape = {"vocabulary": 151936, "positions": 32768, "theta": 1_000_000.0, "epsilon": 1e-6, **others}
    return _llama(hidden, mlp, layers, heads, kv_heads, model_type=model_type, **shape)


def _gemma(model_type: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **others: Any) -> Preset:
    shape = {"vocabulary": 256000, "positions": 8192, "epsilon": 1e-6, "head_dim": 256, "tie_word_embeddings": True}
    return _llama(hidden, mlp, layers, heads, kv_heads, model_type=model_type, **{**shape, **others})


def _opt(hidden: int, layers: int, heads: int) -> Preset:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
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
    "mixtral": {
        "8x7b": _llama(
            4096,
            14336,
            32,
            32,
            8,
            positions=32768,
            theta=1_000_000.0,
            model_type="mixtral",
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
    },
    "gemma": {
        "2b": _gemma("gemma", 2048, 16384, 18, 8, 1),
        "7b": _gemma("gemma", 3072, 24576, 28, 16, 16),
    },
    "gemma-2": {
        "2b": _gemma("gemma2", 2304, 9216, 26, 8, 4, query_pre_attn_scalar=256),
        "9b": _gemma("gemma2", 3584, 14336, 42, 16, 8, query_pre_attn_scalar=256),
        "27b": _gemma("gemma2", 4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
    },
    "gemma-3": {
        "1b": _gemma(
            "gemma3_text",
            1152,
            6912,
            26,
            4,
            1,
            vocabulary=262144,
            positions=32768,
            theta=1_000_000.0,
            query_pre_attn_scalar=256,
            sliding_window=512,
        ),
    },
    "qwen2.5": {
        "0.5b": _qwen("qwen2", 896, 4864, 24, 14, 2, tie_word_embeddings=True),
        "1.5b": _qwen("qwen2", 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
        "3b": _qwen("qwen2", 2048, 11008, 36, 16, 2, tie_word_embeddings=True),
        "7b": _qwen("qwen2", 3584, 18944, 28, 28, 4, vocabulary=152064),
        "14b": _qwen("qwen2", 5120, 13824, 48, 40, 8, vocabulary=152064),
        "32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, vocabulary=152064),
        "72b": _qwen("qwen2", 8192, 29568, 80, 64, 8, vocabulary=152064),
    },
    "qwen3": {
        "0.6b": _qwen("qwen3", 1024, 3072, 28, 16, 8, positions=40960, head_dim=128, tie_word_embeddings=True),
        "1.7b": _qwen("qwen3", 2048, 6144, 28, 16, 8, positions=40960, head_dim=128, tie_word_embeddings=True),
        "4b": _qwen("qwen3", 2560, 9728, 36, 32, 8, positions=40960, head_dim=128, tie_word_embeddings=True),
        "8b": _qwen("qwen3", 4096, 12288, 36, 32, 8, positions=40960, head_dim=128),
        "14b": _qwen("qwen3", 5120, 17408, 40, 40, 8, positions=40960, head_dim=128),
        "32b": _qwen("qwen3", 5120, 25600, 64, 64, 8, positions=40960, head_dim=128),
        "30b-a3b": _qwen(
            "qwen3_moe",
            2048,
            6144,
            48,
            32,
            4,
            positions=40960,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    },
    "opt": {
        "125m": _opt(768, 12, 12),
        "1.3b": _opt(2048, 24, 32),
        "2.7b": _opt(2560, 32, 32),
        "6.7b": _opt(4096, 32, 32),
        "13b": _opt(5120, 40, 40),
        "30b": _opt(7168, 48, 56),
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
