"""Every model against transformers: random ones of each shape, loaded from what `save_pretrained` writes.

A new model adds a family to `tiny_models.FAMILIES`; the bodies are the same for all.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from replay import Piece, Replay
from tiny_models import FIRST, MODELS, make, make_texts

from jetserve.convert import convert
from jetserve.quantize.qarray import QUANTIZE_TYPES, QuantizationConfig, dequantize, quantize
from jetserve.quantize.recipe import EMBEDDING_CONFIG

QUICK = "llama-plain"
"""What runs with every change; the others are slow together."""


def names(*wanted: str) -> list[object]:
    return [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in wanted]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """A model saved by transformers, texts, and transformers' own logits of them."""

    folder: Path
    texts: list[np.ndarray]
    logits: list[np.ndarray]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @functools.cache
    def made(name: str) -> Reference:
        folder, texts = tmp_path_factory.mktemp(name), make_texts()
        model = make(name, folder)
        with torch.no_grad():
            logits = [model(torch.tensor(text[None])).logits[0].numpy() for text in texts]
        return Reference(folder=folder, texts=texts, logits=logits)

    return made


@pytest.mark.parametrize("name", names(*MODELS))
def test_logits_are_those_of_transformers(name: str, reference: Callable[[str], Reference]) -> None:
    expected = reference(name)
    assert np.std(expected.logits[0]) > 0.5
    replay = Replay(expected.folder, expected.texts)
    lengths = [len(text) for text in expected.texts]
    chunks = [
        [Piece(sequence=0, start=start, stop=min(start + 17, lengths[0]))] for start in range(0, lengths[0], 17)
    ] + [[Piece(sequence=s, start=0, stop=lengths[s])] for s in (1, 2)]
    for way, found in {"whole": replay.whole(), "chunked": replay.run(chunks), "mixed": replay.mixed()}.items():
        for text, logits in enumerate(found):
            worst = np.abs(logits - expected.logits[text]).max()
            assert worst < 1e-3, f"{way}, text {text}: off by {worst}"


def test_token_by_token_is_prefill(reference: Callable[[str], Reference]) -> None:
    expected = reference("llama-plain")
    replay = Replay(expected.folder, expected.texts[1:])
    steps = [[Piece(sequence=s, start=t, stop=t + 1)] for s, text in enumerate(replay.texts) for t in range(len(text))]
    for found, logits in zip(replay.run(steps), expected.logits[1:], strict=True):
        assert np.abs(found - logits).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_a_converted_model_is_the_model(name: str, reference: Callable[[str], Reference], tmp_path: Path) -> None:
    """Of each family: what is converted gives the numbers of what is quantized on the fly, and these are close."""
    plain = reference(name)
    texts = plain.texts[1:2]
    for quantize_type, bound in (("none", 1e-4), ("int8_per_channel", 0.2), ("int4_blockwise", 1.0)):
        settings = {"quantize_type": quantize_type, "symmetric": False if quantize_type != "none" else None}
        convert(plain.folder, tmp_path / quantize_type, **settings, progress=lambda work: work)
        found = Replay(tmp_path / quantize_type, texts).whole()[0]
        np.testing.assert_array_equal(found, Replay(plain.folder, texts, **settings).whole()[0])
        error = np.linalg.norm(found - plain.logits[1]) / np.linalg.norm(plain.logits[1])
        assert error < bound, quantize_type
        assert quantize_type == "none" or error > 1e-4


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
    model = transformers.AutoModelForCausalLM.from_pretrained(plain.folder).eval()
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


@pytest.mark.slow
def test_sharded_models_are_the_models(run_on_eight_devices: Callable[[Path], None]) -> None:
    run_on_eight_devices(Path(__file__).with_name("models_on_eight_devices.py"))
