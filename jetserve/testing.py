"""What tests and benchmarks share: a tiny random model in Hugging Face's format, and the cases of quantized matmuls.

Owns no expectation about any model's text. Importing it takes neither jax nor torch; `MatmulCase` takes jax when built.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT, MESSAGE_START, MESSAGE_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Their ids are 0, 1 and 2; the last ends a sequence."""
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_DTYPES: Mapping[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

_MERGES_FROM = (
    "The quick brown fox jumps over the lazy dog, and the capital of France is Paris. What is the answer to that? It is"
    " the sum of all the parts in the river, on the hill and over the sea; there is another one at the end of the line."
)

_LOGIT_STD = 3.0
"""Of the logits: peaked enough that rounding seldom changes the best token, flat enough that texts vary."""


def make_tiny_checkpoint(
    folder: Path,
    *,
    model_type: str = "llama",
    vocab_size: int = 320,
    tokenizer: bool = True,
    shard_bytes: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Writes a random model of two layers with its tokenizer, as a Hugging Face folder. The same arguments, same bytes.

    Args:
      folder: made if it is not there.
      model_type: "llama" or "mistral".
      vocab_size: of the model; the tokenizer has a token for every id.
      tokenizer: whether to write a tokenizer (byte-level BPE, ChatML template) beside the weights.
      shard_bytes: of tensors in one file, of several with an index; None for one file. No more than one is in memory.
      dtype: "float32", "float16" or "bfloat16", of the weights.
      seed: of the weights.
      **config_overrides: keys of config.json that replace the defaults (hidden size 64, 8 heads, 4 KV heads, mlp 128).

    Returns:
      The folder.

    Raises:
      ValueError: for a model type, dtype or vocabulary that it cannot make.
    """
    if model_type not in _ARCHITECTURES:
        raise ValueError(f"model_type is {model_type!r}; expected one of {', '.join(_ARCHITECTURES)}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL_TOKENS.index(MESSAGE_START),
        "eos_token_id": SPECIAL_TOKENS.index(MESSAGE_END),
        "torch_dtype": dtype,
        **config_overrides,
    }
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    _write_shards(folder, ((name, w.astype(_DTYPES[dtype])) for name, w in _tensors(config, rng)), shard_bytes)
    _write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", generation)
    if tokenizer:
        _write_tokenizer(folder, config["vocab_size"])
    return folder


def _tensors(config: Mapping[str, Any], rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its Hugging Face name and in its layout, [out features, in features]."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or D // heads

    def matrix(out: int, into: int, gain: float = 1.0) -> np.ndarray:
        return rng.standard_normal((out, into), np.float32) * np.float32(gain / into**0.5)

    def vector(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    yield "model.embed_tokens.weight", matrix(V, D, _LOGIT_STD)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", vector(D)
        yield f"{layer}.post_attention_layernorm.weight", vector(D)
        # Queries and keys above unit size make attention sharp, so that the text depends on every earlier token.
        for name, out, into, gain, biased in (
            ("self_attn.q_proj", heads * head_size, D, 2.0, config.get("attention_bias", False)),
            ("self_attn.k_proj", kv_heads * head_size, D, 2.0, config.get("attention_bias", False)),
            ("self_attn.v_proj", kv_heads * head_size, D, 2.0, config.get("attention_bias", False)),
            ("self_attn.o_proj", D, heads * head_size, 1.0, config.get("attention_bias", False)),
            ("mlp.gate_proj", F, D, 1.5, config.get("mlp_bias", False)),
            ("mlp.up_proj", F, D, 1.5, config.get("mlp_bias", False)),
            ("mlp.down_proj", D, F, 1.0, config.get("mlp_bias", False)),
        ):
            yield f"{layer}.{name}.weight", matrix(out, into, gain)
            if biased:
                yield f"{layer}.{name}.bias", matrix(1, out, out**0.5 / 4)[0]
    yield "model.norm.weight", vector(D)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", matrix(V, D, _LOGIT_STD)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int | None) -> None:
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}

    def flush() -> None:
        save_file(pending, folder / f"{len(shards)}.unnamed", metadata={"format": "pt"})
        shards.append([*pending])
        pending.clear()

    for name, w in tensors:
        if shard_bytes is not None and pending and sum(p.nbytes for p in pending.values()) + w.nbytes > shard_bytes:
            flush()
        pending[name] = w
    flush()
    count = len(shards)
    files = (
        [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    )
    for i, file in enumerate(files):
        (folder / f"{i}.unnamed").rename(folder / file)
    if count > 1:
        weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size is {vocab_size}; a byte-level tokenizer takes at least {SMALLEST_VOCABULARY}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    backend.train_from_iterator([_MERGES_FROM], trainer)
    backend.add_special_tokens([f"<|unused_{i}|>" for i in range(vocab_size - backend.get_vocab_size())])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": MESSAGE_START,
        "eos_token": MESSAGE_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCase:
    """One `x [*rows, K] @ w [K, N]` that every implementation of `quantized_matmul` must get right, or refuse.

    Attributes:
      bits, block_size: of w.
      zero_point: "none", "integer" (as rounding makes them) or "real" (as GGUF's Q4_1 has them).
      quantize_activation: whether x is to be rounded to int8, per token.
      dtype: of x and of the result.
      rows: leading axes of x.
      zero_row: whether x's first row is all zeros.
      padding_blocks: blocks of zeros added to w beyond x's K.
    """

    bits: int
    block_size: int | None
    zero_point: str = "none"
    quantize_activation: bool = False
    dtype: str = "float32"
    rows: tuple[int, ...] = (3,)
    K: int = 192
    N: int = 80
    zero_row: bool = False
    padding_blocks: int = 0

    @property
    def id(self) -> str:
        """For test reports, such as "int4-b32-integer-bfloat16-33x192x80-a8"."""
        form = "channel" if self.block_size is None else f"b{self.block_size}"
        shape = "x".join(str(size) for size in (*self.rows, self.K, self.N))
        parts = [f"int{self.bits}", form, self.zero_point, self.dtype, shape]
        extra = {"a8": self.quantize_activation, "zero_row": self.zero_row, "padded": self.padding_blocks > 0}
        return "-".join(parts + [name for name, present in extra.items() if present])

    def build(self) -> tuple[Any, Any, np.ndarray]:
        """x as a jax array, w as a QArray in its true integer type, and the exact result in float64.

        The result takes w as it is stored; with `quantize_activation`, x as it is rounded per token.
        """
        import jax.numpy as jnp

        from jetserve.quantize.qarray import QuantizationConfig, cast_values, quantize

        rng = np.random.default_rng(self.K * 1000 + self.N)
        config = QuantizationConfig(
            bits=self.bits,
            block_size=self.block_size,
            symmetric=self.zero_point == "none",
            quantize_activation=self.quantize_activation,
        )
        # A mean other than zero, and columns of different sizes, so that zero points and scales matter.
        plain = (rng.standard_normal((self.K, self.N)) + 0.3) * rng.uniform(0.2, 3, self.N)
        w = cast_values(quantize(jnp.asarray(plain, jnp.float32), config), self.bits)
        if self.zero_point == "real":
            shift = jnp.asarray(rng.uniform(-0.5, 0.5, w.scale.shape), w.scale.dtype)
            w = dataclasses.replace(w, zero_point=None if w.zero_point is None else w.zero_point + shift)
        rows = rng.standard_normal((*self.rows, self.K)) * rng.uniform(0.1, 10, (*self.rows, 1))
        if self.zero_row:
            rows.reshape(-1, self.K)[0] = 0
        x = jnp.asarray(rows, self.dtype)
        expected = self._expected(np.asarray(x, np.float64), w)
        return x, self._padded(w), expected

    def _expected(self, x: np.ndarray, w: Any) -> np.ndarray:
        values = np.asarray(w.values, np.float64)
        if w.zero_point is not None:
            values -= np.expand_dims(np.asarray(w.zero_point, np.float64), -2)
        plain = (values * np.expand_dims(np.asarray(w.scale, np.float64), -2)).reshape(self.K, self.N)
        if self.quantize_activation:
            x = x.astype(np.float32)
            range_ = np.abs(x).max(axis=-1, keepdims=True)
            scale = np.where(range_ == 0, np.float32(1), range_ / np.float32(127))
            x = np.round(x / scale).astype(np.float64) * scale
        return x @ plain

    def _padded(self, w: Any) -> Any:
        """w with blocks as sharding adds them: values and zero points 0, scales 1."""
        import jax.numpy as jnp

        if not self.padding_blocks:
            return w

        def pad(leaf: Any, value: int) -> Any:
            widths = [(0, self.padding_blocks)] + [(0, 0)] * (leaf.ndim - 1)
            return jnp.pad(leaf.astype(jnp.float32), widths, constant_values=value).astype(leaf.dtype)

        return dataclasses.replace(
            w,
            values=pad(w.values, 0),
            scale=pad(w.scale, 1),
            zero_point=None if w.zero_point is None else pad(w.zero_point, 0),
        )


def quantized_matmul_cases() -> list[MatmulCase]:
    """The list that every implementation is tested with.

    The four types, symmetric and not, x rounded or not, float32 and bfloat16, 1 to 33 rows, odd sizes, further leading
    axes, real zero points, rows of zeros and blocks of padding.
    """
    forms: list[dict[str, Any]] = [
        {"bits": bits, "block_size": block_size} for bits in (8, 4) for block_size in (None, 32)
    ]
    cases = []
    for form in forms:
        for zero_point in ("none", "integer", "real"):
            shared = {**form, "zero_point": zero_point}
            cases += [
                MatmulCase(**shared, rows=(rows,), quantize_activation=rounded)
                for rows in (1, 3, 33)
                for rounded in (False, True)
            ]
            cases += [
                MatmulCase(**shared, dtype="bfloat16", rows=(5,), quantize_activation=rounded)
                for rounded in (False, True)
            ]
            cases += [
                MatmulCase(**shared, K=96, N=33, rows=(2, 3)),
                MatmulCase(**shared, K=96, N=1, rows=(1,)),
                MatmulCase(**shared, rows=(4,), zero_row=True, quantize_activation=True),
            ]
        cases.append(MatmulCase(**form, K=160 if form["block_size"] else 86, N=97, rows=(7,)))
    for bits in (8, 4):
        for zero_point in ("none", "integer", "real"):
            cases.append(MatmulCase(bits=bits, block_size=32, zero_point=zero_point, padding_blocks=2))
            cases.append(MatmulCase(bits=bits, block_size=96, zero_point=zero_point, K=576, N=48))
            cases.append(MatmulCase(bits=bits, block_size=128, zero_point=zero_point, K=256, N=128))
    return cases
