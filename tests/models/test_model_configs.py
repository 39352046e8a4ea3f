"""What a model makes of its config: what is not built is refused by name, and old and new spellings mean the same."""

from typing import Any

import pytest
from tiny_models import FAMILIES, LLAMA3_ROPE, SHAPE

from jetserve.models import base

LLAMA = {"model_type": "llama", **SHAPE}


ROPE = [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
]
WHOLE_ROPE = [
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
]
GATED = [
    ({"hidden_act": "mish"}, "activation is 'mish'"),
    ({"num_key_value_heads": 3}, r"num_attention_heads \(8\) is not a multiple of num_key_value_heads \(3\)"),
    ({"head_dim": 7}, "head_dim is 7"),
]
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": ROPE + WHOLE_ROPE + GATED,
    "mistral": ROPE + WHOLE_ROPE + GATED,
    "qwen2": [
        *ROPE,
        *WHOLE_ROPE,
        *GATED,
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
    "qwen3": [
        *ROPE,
        *WHOLE_ROPE,
        *GATED,
        ({"layer_types": ["full_attention"]}, "1 entries; expected one for each of the 2"),
    ],
    "gemma": [*ROPE, *WHOLE_ROPE, ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True")],
    "gemma2": [*ROPE, *WHOLE_ROPE, ({"hidden_activation": "mish"}, "activation is 'mish'")],
    "gemma3_text": [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
    "phi3": [*ROPE, *GATED],
    "smollm3": [*ROPE, *WHOLE_ROPE, *GATED],
    "olmo2": [*ROPE, *WHOLE_ROPE, *GATED],
    "granite": [*ROPE, *WHOLE_ROPE, *GATED],
    "starcoder2": [*ROPE, *WHOLE_ROPE, *GATED],
    "stablelm": [
        *ROPE,
        ({"hidden_act": "mish"}, "activation is 'mish'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(8\) is not a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 16}, "head_dim=16"),
    ],
    "opt": [
        ({"do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ({"word_embed_proj_dim": 32}, "word_embed_proj_dim=32"),
        ({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
        ({"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True"),
        ({"activation_function": "swish"}, "activation is 'swish'"),
    ],
    "gpt2": [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"activation_function": "quick_gelu"}, "activation is 'quick_gelu'"),
    ],
    "gpt_neox": [*ROPE, ({"hidden_act": "mish"}, "activation is 'mish'")],
    "falcon": [
        *ROPE,
        *WHOLE_ROPE,
        ({"new_decoder_architecture": True, "parallel_attn": False}, "new_decoder_architecture without parallel_attn"),
        ({"activation": "mish"}, "activation is 'mish'"),
    ],
    "mixtral": [*ROPE, *WHOLE_ROPE, *GATED],
    "qwen3_moe": [*ROPE, *WHOLE_ROPE, *GATED],
    "bloom": [({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True")],
}


def test_every_model_has_something_that_it_refuses() -> None:
    assert set(REFUSED) == set(FAMILIES) == set(base.supported())


@pytest.mark.parametrize(
    ("model_type", "change", "named"),
    [(model_type, change, named) for model_type, cases in REFUSED.items() for change, named in cases],
)
def test_what_is_not_built_is_refused_by_name(model_type: str, change: dict[str, Any], named: str) -> None:
    config = {**FAMILIES[model_type].shape, "model_type": model_type}
    assert base.find(model_type).Config.from_hf(config)
    with pytest.raises(ValueError, match=named):
        base.find(model_type).Config.from_hf({**config, **change})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_missing_keys_are_named(key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(ValueError, match=f"no '{key}'"):
        base.find("llama").Config.from_hf(config)


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"architecture is 'mamba'; supported are bloom, .*llama, .*mistral"):
        base.find("mamba")
    for shared in base.SHARED:
        with pytest.raises(ValueError, match=f"architecture is '{shared}'"):
            base.find(shared)


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    find = base.find("llama").Config.from_hf
    new = find({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    old = find({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    assert new == old
    assert new != find({**LLAMA, "rope_theta": 5e5})
    assert find({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}) == find(
        {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    )


def test_only_mistral_has_a_window() -> None:
    """transformers ignores the key in a Llama's config, and gives a Mistral that lacks it 4096."""
    window = {**LLAMA, "sliding_window": 16}
    assert base.find("llama").Config.from_hf(window).windows == (None, None)
    assert base.find("mistral").Config.from_hf(window).windows == (16, 16)
    assert base.find("mistral").Config.from_hf({**LLAMA, "sliding_window": None}).windows == (None, None)
    assert base.find("mistral").Config.from_hf(LLAMA).windows == (4096, 4096)
