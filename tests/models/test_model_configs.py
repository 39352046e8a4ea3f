"""What a model makes of its config: what is not built is refused by name, and old and new spellings mean the same."""

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import FAMILIES, LLAMA3_ROPE, MODELS, SHAPE

from jetserve.models import base

LLAMA = {"model_type": "llama", **SHAPE}


ROPE = [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "no 'original_max_position_embeddings'"),
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
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
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
    "gpt_oss": [*ROPE, *WHOLE_ROPE, *GATED[1:]],
    "mixtral": [*ROPE, *WHOLE_ROPE, *GATED],
    "qwen2_moe": [*ROPE, *WHOLE_ROPE, *GATED],
    "qwen3_moe": [*ROPE, *WHOLE_ROPE, *GATED],
    "bloom": [({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True")],
}


SWITCHES: dict[str, Any] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "qkv_bias", "use_qkv_bias", "alibi", "qk_layernorm"), True),
    **dict.fromkeys(("use_bias", "enable_bias", "multi_query", "parallel_attn", "scale_attn_weights"), False),
    **dict.fromkeys(("use_sliding_window", "use_parallel_residual", "norm_topk_prob"), True),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation", "activation_function"), "relu"),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "norm_epsilon"), 0.5),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 3.0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), 3.0),
    **dict.fromkeys(("rotary_emb_base", "rope_local_base_freq"), 7.0),
    **dict.fromkeys(("rotary_pct", "rope_pct"), 0.5),
    **dict.fromkeys(("head_dim", "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_head", "n_layer"), 2),
    **dict.fromkeys(("n_embd", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size"), 40),
    **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_pattern", "max_window_layers", "no_rope_layer_interval"), 1),
}
"""What some model reads, with values that none has otherwise."""


def own_switches(model_type: str) -> set[str]:
    """Those that the source of transformers' model names."""
    configuration = Path(inspect.getfile(transformers.CONFIG_MAPPING[model_type]))
    modeling = configuration.with_name(configuration.name.replace("configuration", "modeling"))
    source = configuration.read_text(encoding="utf-8") + modeling.read_text(encoding="utf-8")
    return {key for key in SWITCHES if re.search(rf'config\.{key}\b|"{key}"|^    {key}:', source, re.MULTILINE)}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_switches_of_other_models_change_nothing(model_type: str) -> None:
    shape = {**FAMILIES[model_type].shape, "model_type": model_type}
    read = base.find(model_type).Config.from_hf
    for key in SWITCHES.keys() - own_switches(model_type) - shape.keys():
        assert read({**shape, key: SWITCHES[key]}) == read(shape), key


SIZES = {"intermediate_size", "ffn_dim", "n_embd", "n_head", "n_layer"}
OTHERWISE = {
    "gemma3_text": {"layer_norm_eps", "attn_logit_softcapping", "rope_local_base_freq"},
    "mixtral": {"num_experts"},
    "gpt_oss": {"num_experts", "hidden_act"},
    "qwen3_moe": {"num_local_experts"},
    **{model_type: {"head_dim"} for model_type in ("stablelm", "gpt_neox", "falcon")},
}
"""What a source names that is no switch: of the vision tower, refused, another name, or what follows from others."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_shared_test_turns_every_switch(model_type: str) -> None:
    family = FAMILIES[model_type]
    assert len(family.models) >= 3
    for key in {*own_switches(model_type), "tie_word_embeddings"} - SIZES - OTHERWISE.get(model_type, set()):
        assert len({str({**family.shape, **model}.get(key)) for model in family.models.values()}) > 1, key


@pytest.mark.parametrize("name", MODELS)
def test_keys_that_are_missing_stand_for_what_transformers_takes(name: str) -> None:
    model_type, variant = MODELS[name]
    given = {**FAMILIES[model_type].shape, **FAMILIES[model_type].models[variant]}
    written = transformers.CONFIG_MAPPING[model_type](**given).to_dict()
    read = base.find(model_type).Config.from_hf
    assert read({**given, "model_type": model_type}) == read(written)


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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"is_causal": False}, "is_causal=False, which is not built"),
        ({"hidden_size": "96"}, "hidden_size='96'; expected an integer of 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2"),
        ({"num_hidden_layers": 3.0}, "num_hidden_layers=3.0"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"max_position_embeddings": None}, "null where its max_position is meant"),
        ({"rms_norm_eps": None}, "null where its norm_epsilon is meant"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'; expected a number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'; expected true or false"),
        ({"rope_parameters": [1]}, r"rope parameters \[1\]; expected an object"),
        ({"rope_parameters": {"rope_theta": "10000"}}, "rope_theta='10000'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2}}, "factor=-2 for its rotation"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor=0 for its rotation"),
        (
            {
                "rope_parameters": {
                    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
                    **{"low_freq_factor": 4.0, "high_freq_factor": 4.0},
                }
            },
            "low_freq_factor is 4.0 and its high_freq_factor 4.0",
        ),
    ],
)
def test_impossible_values_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        base.find("llama").Config.from_hf({**LLAMA, **change})


@pytest.mark.parametrize("window", [0, -3])
def test_impossible_windows_are_refused(window: int) -> None:
    mistral = base.find("mistral")
    config = mistral.Config.from_hf({**LLAMA, "model_type": "mistral", "sliding_window": window})
    with pytest.raises(ValueError, match=f"sliding_window={window}; expected 1 or more, or null"):
        mistral.Model(config)


@pytest.mark.parametrize("chosen", [0, 5])
def test_more_experts_than_there_are_are_refused(chosen: int) -> None:
    model = base.find("mixtral")
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": chosen}
    with pytest.raises(ValueError, match=f"to {chosen} experts; expected 1 to 4"):
        model.Model(model.Config.from_hf(config))


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
