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

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
OTHER = {"hidden_act": "gelu", "rms_norm_eps": 1e-3}
"""Than families have by themselves."""


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
                "hidden_act": "gelu",
            },
            "mha-linear_rope": {"num_key_value_heads": 8, "rope_parameters": LINEAR_ROPE},
            "biases-head_dim": {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "num_key_value_heads": 2},
            "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
        },
    ),
    "mistral": Family(
        SHAPE,
        {
            "window": {"sliding_window": 11},
            "no_window-head_dim-linear_rope": {"sliding_window": None, "head_dim": 16, "rope_parameters": LINEAR_ROPE},
            "tied-mqa-gelu": {
                "sliding_window": 30,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "hidden_act": "gelu",
                "rms_norm_eps": 1e-3,
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
    "qwen2": Family(
        SHAPE,
        {
            "plain": {},
            "window-tied": {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 1,
                "tie_word_embeddings": True,
            },
            "mha-yarn-head_dim": {
                "num_key_value_heads": 8,
                "rope_parameters": YARN,
                "head_dim": 12,
                **OTHER,
            },
        },
    ),
    "qwen3": Family(
        {**SHAPE, "head_dim": 16},
        {
            "plain": {},
            "biases-tied-mqa": {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
            "window-llama3_rope": {
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 0,
                "head_dim": 8,
                "rope_parameters": LLAMA3_ROPE,
                **OTHER,
            },
        },
    ),
    "gemma": Family(
        {**SHAPE, "head_dim": 16, "tie_word_embeddings": True},
        {
            "plain": {},
            "mqa-untied": {"num_key_value_heads": 1, "tie_word_embeddings": False, **OTHER, "hidden_act": "silu"},
            "biases-mha-linear_rope": {
                "attention_bias": True,
                "num_key_value_heads": 8,
                "head_dim": 8,
                "rope_parameters": LINEAR_ROPE,
            },
        },
    ),
    "gemma2": Family(
        {**SHAPE, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 9, "query_pre_attn_scalar": 24},
        {
            "plain": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
            "uncapped-mqa-untied": {
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "num_key_value_heads": 1,
                "tie_word_embeddings": False,
                "hidden_activation": "silu",
                "rms_norm_eps": 1e-3,
            },
            "layer_types-biases-linear_rope": {
                "layer_types": ["full_attention", "sliding_attention"],
                "attention_bias": True,
                "sliding_window": 30,
                "query_pre_attn_scalar": 8,
                "head_dim": 8,
                "rope_parameters": LINEAR_ROPE,
            },
        },
    ),
    "gemma3_text": Family(
        {**SHAPE, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 9, "query_pre_attn_scalar": 24},
        {
            "plain": {"layer_types": ["sliding_attention", "full_attention"]},
            "pattern-mqa-biases": {
                "num_hidden_layers": 3,
                "sliding_window_pattern": 2,
                "num_key_value_heads": 1,
                "attention_bias": True,
                "hidden_activation": "silu",
                "rms_norm_eps": 1e-3,
            },
            "scaled_rope-untied-capped": {
                "tie_word_embeddings": False,
                "head_dim": 8,
                "sliding_window": 30,
                "query_pre_attn_scalar": 8,
                "final_logit_softcapping": 5.0,
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                },
            },
        },
    ),
    "phi3": Family(
        {**SHAPE, "pad_token_id": 0},
        {
            "plain": {},
            "window-mha-head_dim": {"sliding_window": 9, "num_key_value_heads": 8, "head_dim": 12, **OTHER},
            "partial_rotary-tied": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
                "tie_word_embeddings": True,
                "hidden_size": 128,
            },
        },
    ),
    "smollm3": Family(
        {**SHAPE, "pad_token_id": 0, "no_rope_layers": [1, 0]},
        {
            "plain": {},
            "tied-biases-mqa-head_dim": {
                "tie_word_embeddings": True,
                "attention_bias": True,
                "mlp_bias": True,
                "num_key_value_heads": 1,
                "head_dim": 12,
            },
            "interval-window-linear_rope": {
                "rope_parameters": LINEAR_ROPE,
                **OTHER,
                "no_rope_layers": None,
                "no_rope_layer_interval": 2,
                "use_sliding_window": True,
                "sliding_window": 9,
            },
        },
    ),
    "olmo2": Family(
        {**SHAPE, "pad_token_id": 0},
        {
            "plain": {},
            "tied-mha-linear_rope": {
                "tie_word_embeddings": True,
                "num_key_value_heads": 8,
                "rope_parameters": LINEAR_ROPE,
            },
            "mqa-biases-head_dim": {"num_key_value_heads": 1, "attention_bias": True, "head_dim": 12, **OTHER},
        },
    ),
    "granite": Family(
        SHAPE,
        {
            "plain": {
                "embedding_multiplier": 3.0,
                "logits_scaling": 2.0,
                "residual_multiplier": 0.4,
                "attention_multiplier": 0.2,
            },
            "tied-biases-linear_rope": {
                "tie_word_embeddings": True,
                "attention_bias": True,
                "mlp_bias": True,
                "rope_parameters": LINEAR_ROPE,
            },
            "mqa-head_dim": {"num_key_value_heads": 1, "attention_multiplier": 0.1, "head_dim": 12, **OTHER},
        },
    ),
    "starcoder2": Family(
        SHAPE,
        {
            "plain": {},
            "window-tied-linear_rope": {
                "sliding_window": 9,
                "tie_word_embeddings": True,
                "rope_parameters": LINEAR_ROPE,
            },
            "no_bias-mqa-head_dim": {
                "use_bias": False,
                "num_key_value_heads": 1,
                "head_dim": 12,
                "hidden_act": "silu",
                "norm_epsilon": 1e-3,
            },
        },
    ),
    "stablelm": Family(
        SHAPE,
        {
            "head_norms-parallel": {"qk_layernorm": True, "use_parallel_residual": True},
            "biases-tied-mqa-gelu": {
                "use_qkv_bias": True,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-2,
            },
            "head_norms-biases-mha-half_rotary": {
                "qk_layernorm": True,
                "use_qkv_bias": True,
                "num_key_value_heads": 8,
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "partial_rotary_factor": 0.5,
                },
            },
            "parallel-mqa": {"use_parallel_residual": True, "num_key_value_heads": 1},
        },
    ),
    "opt": Family(
        {
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 64,
            "pad_token_id": None,
        },
        {
            "plain": {},
            "untied-gelu": {"tie_word_embeddings": False, "activation_function": "gelu"},
            "no_bias": {"enable_bias": False, "num_attention_heads": 4},
        },
    ),
    "gpt2": Family(
        {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 128, "vocab_size": VOCABULARY},
        {
            "plain": {},
            "untied-inner": {"tie_word_embeddings": False, "n_inner": 96, "layer_norm_epsilon": 1e-3},
            "unscaled-relu": {"scale_attn_weights": False, "activation_function": "relu", "n_head": 4},
        },
    ),
    "gpt_neox": Family(
        {**{key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}, "num_attention_heads": 4},
        {
            "plain": {},
            "sequential-tied-half_rotary": {
                "use_parallel_residual": False,
                "tie_word_embeddings": True,
                "rotary_pct": 0.5,
                "rotary_emb_base": 500.0,
                "layer_norm_eps": 1e-3,
            },
            "whole_rotary-no_bias": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
                "attention_bias": False,
                "hidden_act": "gelu_new",
            },
        },
    ),
    "falcon": Family(
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": VOCABULARY},
        {
            "plain": {"max_position_embeddings": 128},
            "newer-untied-linear_rope": {
                "new_decoder_architecture": True,
                "num_kv_heads": 2,
                "tie_word_embeddings": False,
                "ffn_hidden_size": 96,
                "activation": "silu",
                "layer_norm_epsilon": 1e-3,
                "rope_parameters": LINEAR_ROPE,
            },
            "newer-one_norm": {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
            "alibi-sequential-biases": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        },
    ),
    "mixtral": Family(
        {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "plain": {},
            "window-mha-one_expert": {
                "sliding_window": 9,
                "num_key_value_heads": 8,
                "num_local_experts": 1,
                "num_experts_per_tok": 1,
                "rope_parameters": LINEAR_ROPE,
            },
            "tied-eight-one-head_dim": {
                "tie_word_embeddings": True,
                "num_local_experts": 8,
                "num_experts_per_tok": 1,
                "head_dim": 16,
                **OTHER,
            },
        },
    ),
    "gpt_oss": Family(
        {**SHAPE, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
        {
            "plain": {},
            "tied-mqa-no_bias-cut_off-linear_rope": {
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "attention_bias": False,
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 30,
                "swiglu_limit": 0.5,
                "swiglu_alpha": 1.0,
                "rms_norm_eps": 1e-3,
                "rope_parameters": LINEAR_ROPE,
            },
            "mha-eight-one": {
                "num_key_value_heads": 8,
                "head_dim": 8,
                "num_local_experts": 8,
                "num_experts_per_tok": 1,
                "rope_parameters": {**YARN, "attention_factor": 1.5},
            },
        },
    ),
    "qwen2_moe": Family(
        {
            **SHAPE,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        {
            "plain": {},
            "window-tied-mqa-no_bias": {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 2,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "qkv_bias": False,
                "rope_parameters": LINEAR_ROPE,
                **OTHER,
            },
            "normalized-dense_layer-head_dim": {
                "norm_topk_prob": True,
                "mlp_only_layers": [0],
                "num_experts": 4,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 64,
                "head_dim": 12,
            },
        },
    ),
    "qwen3_moe": Family(
        {**SHAPE, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
        {
            "plain": {"norm_topk_prob": True},
            "not_normalized-dense_layer-biases": {
                "norm_topk_prob": False,
                "mlp_only_layers": [0],
                "attention_bias": True,
                "num_experts": 4,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 64,
                "rope_parameters": LINEAR_ROPE,
            },
            "sparse_step-tied-mqa-window": {
                "decoder_sparse_step": 2,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "use_sliding_window": True,
                "sliding_window": 9,
                "head_dim": 8,
                **OTHER,
            },
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
