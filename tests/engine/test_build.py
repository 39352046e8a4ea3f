"""Presets: random weights where there is no checkpoint, a check where there is one."""

from pathlib import Path

import jax
import pytest

from jetserve import default_model, making
from jetserve.config import EngineConfig, ModelSource
from jetserve.engine.build import load_source, make_engine, model_name, use_cache_dir
from jetserve.kernels import native
from jetserve.models import presets
from jetserve.testing import make_tiny_checkpoint
from jetserve.types import Request, SamplingParams

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 320,
}


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"plain": TINY, "wider": {**TINY, "intermediate_size": 256, "num_hidden_layers": 3}}
    monkeypatch.setattr(presets, "PRESETS", {"tiny": small})


def test_a_preset_runs_with_random_weights(tmp_path: Path) -> None:
    source = ModelSource(model_name="tiny", size="plain", quantize_type="int8_per_channel", cache_dir=tmp_path)
    assert model_name(source) == "tiny-plain"
    loaded = load_source(source, EngineConfig(), devices=jax.devices()[:1])
    assert loaded.quantize_type == "int8_per_channel"
    engine = make_engine(loaded, EngineConfig(max_sequences=1, max_step_tokens=16), max_length=64)
    prompt = tuple(engine.tokenizer.encode("a text", add_special_tokens=True))
    request = Request(request_id="0", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4, ignore_eos=True))
    assert sum(len(output.token_ids) for output in engine.run([request])) == 4


def test_programs_and_kernels_are_kept_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cache_dir", None)
    before = jax.config.jax_compilation_cache_dir
    use_cache_dir(tmp_path)
    try:
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
        assert native.library_folder() == tmp_path / "kernels"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.slow
def test_the_default_model_is_converted_once_and_what_a_killed_process_left_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = make_tiny_checkpoint(tmp_path / "fetched")
    monkeypatch.setattr(default_model, "fetch", lambda cache_dir: fetched)
    (tmp_path / f"{making.ROOM_PREFIX}killed").mkdir()
    source = ModelSource(quantize_type="int8_per_channel", cache_dir=tmp_path)
    written = []
    for _ in range(2):
        assert load_source(source, EngineConfig(), devices=jax.devices()[:1]).quantize_type == "int8_per_channel"
        (made,) = (path for path in tmp_path.iterdir() if path.name not in ("fetched", making.LOCK))
        written.append((made.name, made.stat().st_mtime_ns))
    assert written[0] == written[1]


def test_a_checkpoint_must_agree_with_the_preset_that_is_named(tmp_path: Path) -> None:
    folder = str(make_tiny_checkpoint(tmp_path / "model"))
    agrees = ModelSource(checkpoint_path=folder, model_name="tiny", size="plain", cache_dir=tmp_path)
    assert load_source(agrees, EngineConfig(), devices=jax.devices()[:1]).config.mlp_size == 128
    differs = ModelSource(checkpoint_path=folder, model_name="tiny", size="wider", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="is no tiny-wider: F is 128, expected 256, layers is 2, expected 3"):
        load_source(differs, EngineConfig(), devices=jax.devices()[:1])


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_name is llama-2 and size is None; expected both"):
        ModelSource(model_name="llama-2", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="quantize_recipe is for checkpoints"):
        ModelSource(model_name="llama-2", size="7b", quantize_recipe=tmp_path / "recipe.json", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="size of tiny is '7b'; expected one of plain, wider"):
        load_source(ModelSource(model_name="tiny", size="7b", cache_dir=tmp_path), EngineConfig())
