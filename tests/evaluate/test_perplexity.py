"""Perplexity and divergence against transformers and plain formulas, and what cannot be evaluated."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jetserve import offline
from jetserve.config import CacheConfig, EngineConfig, ModelSource, OfflineConfig, SamplingDefaults
from jetserve.default_model import default_cache_dir
from jetserve.evaluate import perplexity
from jetserve.testing import make_tiny_checkpoint

WINDOW = 48
LIMITS = EngineConfig(max_sequences=4, max_step_tokens=32)  # a window takes two chunks, the second one padded
TEXT = "The river is over the hill, <unk> and the fox jumps; what is the sum of all the parts?\n" * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape and tokenizer, with other weights."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(
    model: Path, text: Path, *, max_tokens: int | None = None, limits: EngineConfig = LIMITS, **changes: Any
) -> dict[str, Any]:
    config = OfflineConfig(
        task="perplexity",
        text_file=text,
        window=changes.pop("window", WINDOW),
        reference_checkpoint=changes.pop("reference", None),
        sampling=SamplingDefaults(max_tokens=max_tokens),
    )
    max_length = changes.pop("max_length", None)
    source = ModelSource(checkpoint_path=str(model), cache_dir=default_cache_dir(), **changes)
    return perplexity.run(config, source, limits, max_length=max_length)


def logits_of(model: Path, windows: list[list[int]]) -> list[np.ndarray]:
    """float64 [T, V] of each window, by transformers."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return [reference(torch.tensor([window])).logits[0].double().numpy() for window in windows]


def windows_of(model: Path, count: int | None = None) -> list[list[int]]:
    ids = transformers.AutoTokenizer.from_pretrained(model)(TEXT, add_special_tokens=False)["input_ids"][:count]
    return [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def nll_of(logits: list[np.ndarray], windows: list[list[int]]) -> np.ndarray:
    losses = [-log_softmax(row)[np.arange(len(w) - 1), w[1:]] for row, w in zip(logits, windows, strict=True)]
    return np.concatenate(losses)


@pytest.mark.parametrize("max_step_tokens", [16, 512])
def test_perplexity_is_that_of_transformers(model: Path, text: Path, max_step_tokens: int) -> None:
    windows = windows_of(model)
    assert len(windows) > 3
    nll = nll_of(logits_of(model, windows), windows)
    found = run(model, text, limits=EngineConfig(max_sequences=4, max_step_tokens=max_step_tokens))
    assert found["task"] == "perplexity"
    assert found["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-4)
    expected_error = found["perplexity"] * nll.std(ddof=1) / len(nll) ** 0.5
    assert found["standard_error"] == pytest.approx(expected_error, rel=1e-3)
    assert (found["windows"], found["tokens"], found["predictions"]) == (
        len(windows),
        len(windows) * WINDOW,
        len(windows) * (WINDOW - 1),
    )
    assert (found["quantize_type"], found["bits_per_weight"]) == ("none", 32)
    assert "kl_divergence" not in found


def test_max_tokens_takes_the_first_tokens(model: Path, text: Path) -> None:
    windows = windows_of(model, 2 * WINDOW + 5)
    found = run(model, text, max_tokens=2 * WINDOW + 5)
    assert (found["tokens"], found["windows"]) == (2 * WINDOW, 2)
    nll = nll_of(logits_of(model, windows), windows)
    assert found["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-4)


def test_a_text_shorter_than_a_window_is_one_window(model: Path, text: Path) -> None:
    found = run(model, text, max_tokens=7)
    assert (found["tokens"], found["windows"], found["predictions"]) == (7, 1, 6)
    windows = [windows_of(model)[0][:7]]
    nll = nll_of(logits_of(model, windows), windows)
    assert found["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-4)
    assert run(model, text, max_tokens=2)["standard_error"] is None


def test_a_model_against_itself_does_not_diverge(model: Path, text: Path) -> None:
    found = run(model, text, reference=str(model))
    assert found["kl_divergence"] == pytest.approx(0, abs=1e-6)
    assert found["top1_agreement"] == 1
    assert found["reference_perplexity"] == found["perplexity"]
    assert found["reference_quantize_type"] == "none"


def test_divergence_is_kl_of_the_reference_from_the_model(model: Path, other: Path, text: Path) -> None:
    windows = windows_of(model)
    q = [log_softmax(row)[:-1] for row in logits_of(model, windows)]
    p = [log_softmax(row)[:-1] for row in logits_of(other, windows)]
    kl = np.concatenate([(np.exp(a) * (a - b)).sum(-1) for a, b in zip(p, q, strict=True)])
    agreement = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in zip(p, q, strict=True)])
    found = run(model, text, reference=str(other))
    assert found["kl_divergence"] == pytest.approx(kl.mean(), rel=1e-4)
    assert found["kl_divergence_p99"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
    assert found["top1_agreement"] == pytest.approx(agreement.mean())
    nll = nll_of(logits_of(other, windows), windows)
    assert found["reference_perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-4)


def test_quantized_weights_diverge_more_the_fewer_bits_they_have(model: Path, text: Path) -> None:
    found = {
        name: run(model, text, reference=str(model), quantize_type=name)
        for name in ("int8_per_channel", "int4_per_channel")
    }
    assert 1e-4 < found["int8_per_channel"]["kl_divergence"] < found["int4_per_channel"]["kl_divergence"] / 10
    assert 0 < found["int4_per_channel"]["top1_agreement"] < found["int8_per_channel"]["top1_agreement"] < 1
    assert 4 < found["int4_per_channel"]["bits_per_weight"] < found["int8_per_channel"]["bits_per_weight"] < 9
    assert found["int4_per_channel"]["reference_perplexity"] == pytest.approx(
        found["int8_per_channel"]["reference_perplexity"], rel=1e-6
    )


def test_a_quantized_cache_is_used_and_reported(model: Path, text: Path) -> None:
    found = run(
        model, text, limits=EngineConfig(max_sequences=1, cache=CacheConfig(quantize=True)), reference=str(model)
    )
    assert found["quantize_kv_cache"] is True
    plain = run(model, text)["perplexity"]
    assert found["perplexity"] != plain
    assert found["perplexity"] == pytest.approx(plain, rel=0.2)


def test_the_summary_is_the_last_line_of_standard_output(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = OfflineConfig(task="perplexity", text_file=text, window=WINDOW)
    source = ModelSource(checkpoint_path=str(model), cache_dir=default_cache_dir())
    assert offline.run(config, source, LIMITS, max_length=None) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1
    assert json.loads(out[0]).keys() >= {"task", "perplexity", "tokens"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"caf\xe9", "not UTF-8: byte 0xe9 at offset 3"), (b"a", "has 1 tokens; expected at least 2")],
)
def test_a_text_that_cannot_be_evaluated(model: Path, text: Path, content: bytes, message: str) -> None:
    text.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run(model, text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 1}, "--window is 1; expected at least 2"),
        ({"max_tokens": 1}, "--max_tokens is 1; expected at least 2"),
        ({"window": 513}, "--window is 513, but the model was made for up to 512"),
        ({"window": 64, "max_length": 32}, "--window is 64, but --max_cache_length is 32"),
    ],
)
def test_settings_that_cannot_be_used(model: Path, text: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(model, text, **changes)


def test_files_that_are_not_there(model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"--text_file .* does not exist"):
        run(model, tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="--text_file is not set"):
        perplexity.run(OfflineConfig(task="perplexity"), ModelSource(cache_dir=tmp_path), LIMITS, max_length=None)
    with pytest.raises(ValueError, match="missing"):
        run(model, text, reference=str(tmp_path / "missing"))


def test_models_that_do_not_speak_of_the_same_tokens(model: Path, text: Path, tmp_path: Path) -> None:
    larger = make_tiny_checkpoint(tmp_path / "larger", vocab_size=384)
    with pytest.raises(ValueError, match=r"has a vocabulary of 384 tokens, the model one of 320"):
        run(model, text, reference=str(larger))
    renamed = make_tiny_checkpoint(tmp_path / "renamed")
    tokenizer = renamed / "tokenizer.json"
    swapped = json.loads(tokenizer.read_text())
    vocab = swapped["model"]["vocab"]
    vocab["e"], vocab["x"] = vocab["x"], vocab["e"]
    tokenizer.write_text(json.dumps(swapped))
    with pytest.raises(ValueError, match="has another tokenizer"):
        run(model, text, reference=str(renamed))


def test_logits_that_overflow_are_an_error_not_a_number(text: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = make_tiny_checkpoint(tmp_path / "huge")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= np.float32(3e37)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"nll is NaN or infinite in window 1 of \d+"):
        run(folder, text)


@pytest.mark.slow
def test_the_default_model_in_float32_is_that_of_transformers(
    default_gguf: Path, evaluation_text: Path, tmp_path: Path
) -> None:
    count, window = 1024, 512
    text = tmp_path / "text.txt"
    text.write_text(evaluation_text.read_text("utf-8")[:6_000], "utf-8")
    folder, file = str(default_gguf.parent), default_gguf.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    ids = tokenizer(text.read_text("utf-8"), add_special_tokens=False)["input_ids"][:count]
    assert len(ids) == count
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(torch.tensor([part])).logits[0, :-1], torch.tensor(part[1:]))
            for part in (ids[:window], ids[window:])
        ]
    expected = float(torch.stack(losses).mean().exp())
    found = run(default_gguf, text, quantize_type="none", window=window, max_tokens=count, limits=EngineConfig())
    assert found["perplexity"] == pytest.approx(expected, rel=1e-3)
