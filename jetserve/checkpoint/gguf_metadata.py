"""What a GGUF file says about its model, in Hugging Face's words: the config and the tensors' names.

Owns the metadata keys (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and the name table of the
architecture "llama", under which llama.cpp also files Mistral and everything else of Llama's shape. Knows nothing of
tensors' bytes.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import gguf

from jetserve.checkpoint.base import CheckpointError

ARCHITECTURES = {"llama": "llama"}
"""GGUF architecture -> Hugging Face model_type."""

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: what every rotary frequency is divided by (Llama 3.1's scaling, precomputed)."""

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_UNSUPPORTED_UNLESS_ZERO = (
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
)


class Metadata:
    """Typed look-ups of metadata keys, each under the file's architecture unless it has a full name.

    Raises:
      CheckpointError: at construction, if the architecture is not a supported one; by the look-ups, if a value is
        missing or of another type.
    """

    def __init__(self, fields: Mapping[str, gguf.ReaderField], source: str) -> None:
        self._fields = fields
        self.source = source
        self.architecture = ""
        architecture = self._value("general.architecture")
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{source} has the architecture {architecture!r}; expected one of {', '.join(ARCHITECTURES)}. Use the"
                " model's Hugging Face checkpoint"
            )
        self.architecture = architecture

    def _value(self, key: str) -> Any:
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def _full(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.", "split.")) else f"{self.architecture}.{key}"

    def integer(self, key: str) -> int | None:
        value = self._value(self._full(key))
        if value is not None and type(value) is not int:
            found = "differs from layer to layer" if isinstance(value, list) else f"is {value!r}"
            raise CheckpointError(f"{self.source}: {self._full(key)} {found}; expected one integer")
        return value

    def number(self, key: str) -> float | None:
        value = self._value(self._full(key))
        if value is not None and type(value) not in (int, float):
            raise CheckpointError(f"{self.source}: {self._full(key)} is {value!r}; expected a number")
        return value

    def text(self, key: str) -> str | None:
        value = self._value(self._full(key))
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.source}: {self._full(key)} is {value!r}; expected text")
        return value

    def size(self, key: str) -> int:
        value = self.integer(key)
        if value is None or value <= 0:
            raise CheckpointError(f"{self.source}: {self._full(key)} is {value!r}; expected a positive integer")
        return value


def hugging_face_names(names: Iterable[str], source: str) -> dict[str, str]:
    """Every tensor's Hugging Face name -> its GGUF name, without the rotary factors.

    Raises:
      CheckpointError: for names that a Llama has no place for, naming them.
    """
    found: dict[str, str] = {}
    unknown = []
    for name in names:
        match = _LAYER_NAME.fullmatch(name)
        if name in _TOP_NAMES:
            found[_TOP_NAMES[name]] = name
        elif match and match[2] in _LAYER_MODULES:
            found[f"model.layers.{int(match[1])}.{_LAYER_MODULES[match[2]]}.{match[3]}"] = name
        elif name != ROPE_FACTORS:
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{source} has {len(unknown)} tensors that no Llama has, such as {unknown[0]}; its architecture is not"
            " supported although it goes by the name llama. Use the model's Hugging Face checkpoint"
        )
    return found


def hf_config(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: list[float] | None
) -> dict[str, Any]:
    """The config of a Llama under Hugging Face's keys.

    Args:
      metadata: the file's.
      shapes: of every tensor by its Hugging Face name, in Hugging Face's layout.
      rope_factors: the values of `ROPE_FACTORS`, [H / 2].

    Raises:
      CheckpointError: if a value is missing, or asks for a computation that is not Llama's.
    """
    for key in _UNSUPPORTED_UNLESS_ZERO:
        if metadata.number(key):
            raise CheckpointError(
                f"{metadata.source}: {metadata.architecture}.{key} is {metadata.number(key)!r}, which changes what the"
                " model computes and is not supported; use the model's Hugging Face checkpoint"
            )
    if "model.embed_tokens.weight" not in shapes:
        raise CheckpointError(f"{metadata.source} has no token_embd.weight; expected a whole model. Get the file again")
    heads, hidden = metadata.size("attention.head_count"), metadata.size("embedding_length")
    epsilon = metadata.number("attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise CheckpointError(
            f"{metadata.source}: llama.attention.layer_norm_rms_epsilon is missing; expected a number"
        )
    theta = metadata.number("rope.freq_base")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[metadata.architecture],
        "hidden_size": hidden,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv") or heads,
        "head_dim": _head_dim(metadata, hidden, heads),
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        "rope_theta": 10000.0 if theta is None else theta,
        "max_position_embeddings": metadata.size("context_length"),
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": any(name.endswith("_proj.bias") and ".self_attn." in name for name in shapes),
        "mlp_bias": any(name.endswith("_proj.bias") and ".mlp." in name for name in shapes),
    }
    optional = {
        "rope_scaling": _rope_scaling(metadata, config["head_dim"], rope_factors),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
    }
    if optional["sliding_window"] is not None:
        config["model_type"] = "mistral"  # Hugging Face's Llama has no window; llama.cpp knows both as llama
    return config | {key: value for key, value in optional.items() if value is not None}


def _head_dim(metadata: Metadata, hidden: int, heads: int) -> int:
    head_dim = metadata.integer("attention.key_length")
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(
                f"{metadata.source} has an embedding_length of {hidden} and {heads} heads, which do not divide it, and"
                " no attention.key_length; expected one of the two to give the head size"
            )
        head_dim = hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        value = metadata.integer(key)
        if value not in (None, head_dim):
            raise CheckpointError(
                f"{metadata.source}: {metadata.architecture}.{key} is {value} where the head size is {head_dim};"
                " expected the same, for queries, keys and values that are rotated whole"
            )
    return head_dim


def _rope_scaling(metadata: Metadata, head_dim: int, factors: list[float] | None) -> dict[str, Any] | None:
    kind = metadata.text("rope.scaling.type") or "none"
    factor = metadata.number("rope.scaling.factor")
    legacy = metadata.number("rope.scale_linear")
    if legacy not in (None, 0, 1):
        kind, factor = "linear", legacy
    if kind not in ("none", "linear"):
        raise CheckpointError(
            f"{metadata.source}: the rope scaling is {kind!r}; expected none, linear or a {ROPE_FACTORS} tensor. Use"
            " the model's Hugging Face checkpoint"
        )
    if factors is not None:
        if kind != "none" or len(factors) != head_dim // 2:
            raise CheckpointError(
                f"{metadata.source} has {len(factors)} factors in {ROPE_FACTORS} and rope scaling {kind!r}; expected"
                f" {head_dim // 2} factors and no other scaling"
            )
        return {"rope_type": "precomputed", "factors": factors}
    if kind == "none":
        return None
    if factor is None or factor <= 0:
        raise CheckpointError(
            f"{metadata.source}: rope scaling is linear with the factor {factor}; expected it above 0"
        )
    return {"rope_type": "linear", "factor": factor}
