"""What Meta's Llama files and those made from them share: tensor names, `params.json`, and what both mean.

Owns the table from Meta's names to Hugging Face's and the config made of `params.json`. Knows nothing of files.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.files import some

PARAMS_FILE = "params.json"
EMBEDDING = "model.embed_tokens.weight"

_DERIVED = "rope.freqs"
"""Follows from rope_theta; the one tensor of such files that is not a weight."""
_TOP_NAMES = {
    "tok_embeddings.weight": EMBEDDING,
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER_NAME = re.compile(r"layers\.(\d+)\.([\w.]+)\.weight")

_SCALED_CONTEXT = 131072
_LLAMA_3_VOCABULARY = 128000
_LLAMA_3_CONTEXT = 8192
_CODE_LLAMA_CONTEXT = 16384
_LLAMA_2_CONTEXT = 4096


def hugging_face_names(names: Iterable[str], source: str) -> dict[str, str]:
    """Every weight's Hugging Face name -> Meta's name.

    Raises:
      CheckpointError: for names that are unknown, and for layers that lack a weight.
    """
    found: dict[str, str] = {}
    unknown = []
    layers = set()
    for name in names:
        match = _LAYER_NAME.fullmatch(name)
        if name in _TOP_NAMES:
            found[_TOP_NAMES[name]] = name
        elif match and match[2] in _LAYER_NAMES:
            layers.add(int(match[1]))
            found[_hf_layer_name(int(match[1]), match[2])] = name
        elif name != _DERIVED:
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{source} has {len(unknown)} tensors that no Llama has: {some(unknown)}. Only Llama is read from this"
            " format; use the model's Hugging Face checkpoint"
        )
    expected = {_hf_layer_name(i, name): f"layers.{i}.{name}.weight" for i in layers for name in _LAYER_NAMES}
    expected |= {hf: name for name, hf in _TOP_NAMES.items() if hf != "lm_head.weight"}
    missing = [name for hf, name in expected.items() if hf not in found]
    if missing:
        raise CheckpointError(f"{source} lacks {len(missing)} tensors: {some(missing)}. Get the files again")
    return found


def _hf_layer_name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{_LAYER_NAMES[name]}.weight"


def hf_config(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], source: str) -> dict[str, Any]:
    """The config under Hugging Face's keys.

    The size of the MLP and of the vocabulary is that of the tensors: `params.json` has the former only as a rule with
    which some files disagree, and -1 for the latter. The context length, of which it says nothing, is that of the model
    family which the other values point to.

    Args:
      params: the content of `params.json`.
      shapes: of every weight by its Hugging Face name, whole and in Hugging Face's layout.
      source: for errors.

    Raises:
      CheckpointError: if a value is missing or does not fit the tensors.
    """
    hidden, layers, heads = (size(params, key, source) for key in ("dim", "n_layers", "n_heads"))
    kv_heads = heads if params.get("n_kv_heads") is None else size(params, "n_kv_heads", source)
    head_dim = hidden // heads if params.get("head_dim") is None else size(params, "head_dim", source)
    vocabulary = shapes[EMBEDDING][0]
    theta = _number(params, "rope_theta", 10000.0, source)
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": shapes["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _number(params, "norm_eps", None, source),
        "rope_theta": theta,
        "vocab_size": vocabulary,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }
    scaled = params.get("use_scaled_rope", False)
    if params.get("max_seq_len") is not None:
        config["max_position_embeddings"] = size(params, "max_seq_len", source)
    elif scaled:
        config["max_position_embeddings"] = _SCALED_CONTEXT
    elif vocabulary >= _LLAMA_3_VOCABULARY:
        config["max_position_embeddings"] = _LLAMA_3_CONTEXT
    else:
        config["max_position_embeddings"] = _CODE_LLAMA_CONTEXT if theta > 10000 else _LLAMA_2_CONTEXT
    if scaled:
        config["rope_scaling"] = _rope_scaling(params, hidden, source)
    if params.get("sliding_window") is not None:
        config["model_type"] = "mistral"  # Hugging Face's Llama has no window
        config["sliding_window"] = size(params, "sliding_window", source)
    _check_shapes(config, shapes, source)
    return config


def _rope_scaling(params: Mapping[str, Any], hidden: int, source: str) -> dict[str, Any]:
    """Llama 3.1's scaling. `params.json` does not tell its factor, which is 32 for the small models of Llama 3.2."""
    factor = _number(params, "rope_scaling_factor", 32.0 if hidden < 4096 else 8.0, source)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": _number(params, "rope_high_freq_factor", 4.0, source),
        "original_max_position_embeddings": 8192,
    }


def _check_shapes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """What must hold before query and key rows are permuted by heads, and whether all files are there."""
    layers = 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("model.layers."))
    if layers != config["num_hidden_layers"]:
        raise CheckpointError(
            f"{source} has {layers} layers, but its {PARAMS_FILE} says n_layers = {config['num_hidden_layers']}"
        )
    rows = {
        "self_attn.q_proj": config["num_attention_heads"] * config["head_dim"],
        "self_attn.k_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    for name, shape in shapes.items():
        expected = next((count for module, count in rows.items() if module in name), shape[0])
        if shape[0] != expected:
            raise CheckpointError(
                f"{source}: {name} has {shape[0]} rows over all files; expected {expected} by the heads in"
                f" {PARAMS_FILE}. A file is missing, or it belongs to another model"
            )


def size(params: Mapping[str, Any], key: str, source: str) -> int:
    """A positive integer in `params.json`. Raises CheckpointError if it is anything else, or missing."""
    value = params.get(key)
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{source}: {key} in {PARAMS_FILE} is {value!r}; expected a positive integer")
    return value


def _number(params: Mapping[str, Any], key: str, default: float | None, source: str) -> float:
    value = default if params.get(key) is None else params[key]
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise CheckpointError(f"{source}: {key} in {PARAMS_FILE} is {value!r}; expected a number")
    return float(value)
