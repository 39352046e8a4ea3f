"""Every model against transformers: random ones of each shape, loaded from what `save_pretrained` writes.

A new model adds rows to `MODELS`; the body is the same for all.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jetserve.cache.kv_cache import make_cache
from jetserve.checkpoint.load import load_model
from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.kernels.attention import RaggedBatch
from jetserve.models import base
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.qarray import QUANTIZE_TYPES, QuantizationConfig, dequantize, quantize
from jetserve.quantize.recipe import EMBEDDING_CONFIG

TOKENS, SEQUENCES, PAGE, PAGES = 96, 3, 8, 12
"""Of every batch here, so that each model compiles two programs: one for any batch, one for decoding."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    f"llama-{name}": (transformers.LlamaConfig, transformers.LlamaForCausalLM, overrides)
    for name, overrides in {
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
    }.items()
} | {
    "mistral-window": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 11}),
    "mistral-no_window": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
}
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 130,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens [start, stop) of the text of one sequence."""

    sequence: int
    start: int
    stop: int


class Replay:
    """Runs a model over pieces of known texts and collects the logits of every token."""

    def __init__(self, folder: Path, texts: list[np.ndarray], **settings: Any) -> None:
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        loaded = load_model(folder, mesh=mesh, dtype=jnp.float32, **settings)
        self.texts = texts
        self._graph, self._params = nnx.split(loaded.model)
        cache = CacheConfig(page_size=PAGE, num_pages=SEQUENCES * PAGES)
        self._config = EngineConfig(max_length=PAGE * PAGES, max_step_tokens=TOKENS, cache=cache)
        self._cache = functools.partial(make_cache, loaded.config, self._config, mesh)
        self._tables = np.random.default_rng(0).permutation(SEQUENCES * PAGES).reshape(SEQUENCES, PAGES) + 1
        self._forward = jax.jit(self._logits)

    def _logits(self, params: nnx.State, cache: Any, batch: RaggedBatch) -> tuple[jax.Array, Any]:
        model = nnx.merge(self._graph, params)
        hidden, cache = model(batch, cache, dtype=jnp.float32)
        return model.logits(hidden), cache

    def run(self, steps: list[list[Piece]]) -> list[np.ndarray]:
        """The logits of every text, [length, V], computed in these steps from empty pages."""
        cache, out = self._cache(), [[] for _ in self.texts]
        for pieces in steps:
            decode = all(piece.stop - piece.start == 1 for piece in pieces)
            logits, cache = self._forward(self._params, cache, self._batch(pieces, decode))
            start = 0
            for piece in pieces:
                stop = start + piece.stop - piece.start
                out[piece.sequence].append(np.asarray(logits[start:stop]))
                start = stop
        return [np.concatenate(parts) for parts in out]

    def _batch(self, pieces: list[Piece], decode: bool) -> RaggedBatch:
        T = SEQUENCES if decode else TOKENS
        tokens, positions = np.zeros(T, np.int32), np.zeros(T, np.int32)
        starts, lengths = np.zeros(SEQUENCES + 1, np.int32), np.zeros(SEQUENCES, np.int32)
        table = np.zeros((SEQUENCES, PAGES), np.int32)
        start = 0
        for i, piece in enumerate(pieces):
            stop = start + piece.stop - piece.start
            tokens[start:stop] = self.texts[piece.sequence][piece.start : piece.stop]
            positions[start:stop] = np.arange(piece.start, piece.stop)
            starts[i + 1 :], lengths[i], table[i] = stop, piece.stop, self._tables[piece.sequence]
            start = stop
        return RaggedBatch(
            tokens=tokens,
            positions=positions,
            query_starts=starts,
            kv_lengths=lengths,
            page_table=table,
            max_query_length=1 if decode else T,
        )

    def whole(self) -> list[np.ndarray]:
        return self.run([[Piece(sequence=s, start=0, stop=len(text))] for s, text in enumerate(self.texts)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """A model saved by transformers, texts, and transformers' own logits of them."""

    folder: Path
    texts: list[np.ndarray]
    logits: list[np.ndarray]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @functools.cache
    def make(name: str) -> Reference:
        config_class, model_class, overrides = MODELS[name]
        torch.manual_seed(0)
        model = model_class(config_class(**{**SHAPE, **overrides})).eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "norm" in path:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=1.5 / 8 if parameter.ndim == 2 else 0.3)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        rng = np.random.default_rng(0)
        texts = [rng.integers(0, SHAPE["vocab_size"], length) for length in (90, 29, 3)]
        with torch.no_grad():
            logits = [model(torch.tensor(text[None])).logits[0].numpy() for text in texts]
        return Reference(folder=folder, texts=texts, logits=logits)

    return make


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, reference: Callable[[str], Reference]) -> None:
    expected = reference(name)
    assert np.std(expected.logits[0]) > 0.5
    replay = Replay(expected.folder, expected.texts)
    lengths = [len(text) for text in expected.texts]
    chunks = [
        [Piece(sequence=0, start=start, stop=min(start + 17, lengths[0]))] for start in range(0, lengths[0], 17)
    ] + [[Piece(sequence=s, start=0, stop=lengths[s])] for s in (1, 2)]
    # A batch that prefills one text while another is in the middle, then decodes all three, the texts ending in turn.
    mixed = [
        [Piece(sequence=0, start=0, stop=60), Piece(sequence=2, start=0, stop=1)],
        [Piece(sequence=2, start=1, stop=2), Piece(sequence=0, start=60, stop=80), Piece(sequence=1, start=0, stop=20)],
    ]
    done = [80, 20, 2]
    for _ in range(10):
        running = [s for s in range(3) if done[s] < lengths[s]]
        mixed.append([Piece(sequence=s, start=done[s], stop=done[s] + 1) for s in running])
        done = [min(n + 1, length) for n, length in zip(done, lengths, strict=True)]
    for way, found in {
        "whole": replay.whole(),
        "chunked": replay.run(chunks),
        "mixed": replay.run([step for step in mixed if step]),
    }.items():
        for text, logits in enumerate(found):
            worst = np.abs(logits - expected.logits[text][: len(logits)]).max()
            assert worst < 1e-3, f"{way}, text {text}: off by {worst}"
            assert len(logits) == lengths[text]


def test_token_by_token_is_prefill(reference: Callable[[str], Reference]) -> None:
    expected = reference("llama-plain")
    replay = Replay(expected.folder, expected.texts[1:])
    steps = [[Piece(sequence=s, start=t, stop=t + 1)] for s, text in enumerate(replay.texts) for t in range(len(text))]
    for found, logits in zip(replay.run(steps), expected.logits[1:], strict=True):
        assert np.abs(found - logits).max() < 1e-3


@pytest.mark.parametrize(
    ("name", "quantize_type", "symmetric"),
    [
        *(("llama-tied-mqa-theta", name, symmetric) for name in QUANTIZE_TYPES for symmetric in (True, False)),
        ("mistral-window", "int8_per_channel", True),
        ("mistral-window", "int4_blockwise", False),
    ],
)
def test_quantized_logits_are_those_of_the_rounded_weights(
    name: str, quantize_type: str, symmetric: bool, reference: Callable[[str], Reference]
) -> None:
    plain = reference(name)
    block_size = 32 if quantize_type.endswith("blockwise") else None
    settings = {"quantize_type": quantize_type, "block_size": block_size, "symmetric": symmetric}
    found = Replay(plain.folder, plain.texts[1:2], **settings).whole()[0]

    linear = QuantizationConfig.from_name(quantize_type, block_size=block_size, symmetric=symmetric)
    model = MODELS[name][1].from_pretrained(plain.folder).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():  # tied weights once
            if parameter.ndim == 2:
                config = linear if "layers" in path else EMBEDDING_CONFIG
                rounded = dequantize(quantize(jnp.asarray(parameter.numpy().T), config))
                parameter.copy_(torch.tensor(np.asarray(rounded).T))
        expected = model(torch.tensor(plain.texts[1][None])).logits[0].numpy()
    assert np.abs(found - expected).max() < 1e-3
    error = np.linalg.norm(found - plain.logits[1]) / np.linalg.norm(plain.logits[1])
    assert 1e-4 < error < (0.05 if linear.bits == 8 else 0.8)


# Configs

LLAMA = {"model_type": "llama", **SHAPE}


@pytest.mark.parametrize("model_type", base.supported())
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(8\) is not a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, "head_dim is 7"),
    ],
)
def test_what_is_not_built_is_refused_by_name(model_type: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        base.find(model_type).Config.from_hf({**LLAMA, "model_type": model_type, **change})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_missing_keys_are_named(key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(ValueError, match=f"no '{key}'"):
        base.find("llama").Config.from_hf(config)


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="architecture is 'mamba'; supported are llama, mistral"):
        base.find("mamba")
    with pytest.raises(ValueError, match="architecture is 'base'"):
        base.find("base")


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
    assert base.find("llama").Config.from_hf(window).sliding_window is None
    assert base.find("mistral").Config.from_hf(window).sliding_window == 16
    assert base.find("mistral").Config.from_hf({**LLAMA, "sliding_window": None}).sliding_window is None
    assert base.find("mistral").Config.from_hf(LLAMA).sliding_window == 4096


def test_tables_name_every_weight_that_transformers_saves(reference: Callable[[str], Reference]) -> None:
    folder = reference("llama-biases-head_dim").folder
    config = base.find("llama").Config.from_hf(json.loads((folder / "config.json").read_text()))
    parameters = base.parameters(base.find("llama").Model(config), base.find("llama").WEIGHTS)
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert {parameter.source for parameter in parameters} == saved.keys()
    assert len(parameters) == len(saved)
