"""Conversion by GPTQ: layer by layer, the same after a kill, and everything that it cannot do told at once."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.load import LoadedModel, load_model, open_model
from jetserve.checkpoint.native import NativeCheckpoint
from jetserve.checkpoint.scaled import CARRIED_OVER
from jetserve.config import EngineConfig, MeshConfig
from jetserve.convert import convert, export
from jetserve.engine.runner import Runner
from jetserve.evaluate.perplexity import measure
from jetserve.gptq import GPTQQuantizer, load_quantized_model
from jetserve.method_config import AWQConfig, CalibratedMethod, CalibrationConfig, Clip, GPTQConfig, Scaling
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.dataset import calibration_windows
from jetserve.quantize.methods import awq, gptq
from jetserve.quantize.recipe_file import parse_rules
from jetserve.testing import make_tiny_checkpoint
from jetserve.types import Request, SamplingParams

TEXTS = tuple(f"In the year {n} the river {n % 7} rose over the hill and the sea; what is {n * n}?" for n in range(120))
CALIBRATION = CalibrationConfig(texts=TEXTS, samples=12, length=64)
METHOD = GPTQConfig(calibration=CALIBRATION)
LINEARS = 14


def list_only(work: Any) -> Any:
    return work


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", hidden_size=64, num_key_value_heads=2)


def load(path: Path) -> LoadedModel:
    return load_model(path, mesh=make_mesh(MeshConfig(), jax.devices()[:1]), dtype=jnp.dtype("float32"))


@pytest.mark.slow
def test_the_model_says_nearer_to_what_it_said(source: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"quantize_type": "int4_per_channel", "progress": list_only}
    convert(source, tmp_path / "rtn", **settings)
    report = convert(source, tmp_path / "gptq", method=METHOD, **settings)
    made = [tensor for tensor in report.weights.tensors if tensor.output_error is not None]
    assert len(made) == LINEARS
    assert report.weights.fallbacks() == {}
    assert "of what its layer computes, squared" in report.as_text()
    config = EngineConfig(max_sequences=1, max_length=64, max_step_tokens=64)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    runners = {n: Runner(load(p).model, config, mesh) for n, p in (("float", source), ("gptq", tmp_path / "gptq"))}
    rtn = Runner(load(tmp_path / "rtn").model, config, mesh)
    windows = np.random.default_rng(0).permutation(_windows(source)).tolist()
    divergence = {
        name: float(np.mean(measure(runner, windows, reference=runners["float"]).kl_divergence))
        for name, runner in (("rtn", rtn), ("gptq", runners["gptq"]))
    }
    assert divergence["gptq"] < 0.8 * divergence["rtn"]


def _windows(source: Path) -> np.ndarray:
    tokenizer = open_model(source).source.tokenizer()
    assert tokenizer is not None
    texts = tuple(text.replace("river", "road") for text in TEXTS)
    config = CalibrationConfig(texts=texts, samples=4, length=64)
    return calibration_windows(config, tokenizer, max_length=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [METHOD, dataclasses.replace(METHOD, scaling=Scaling.AWQ), AWQConfig(calibration=CALIBRATION)],
    ids=["gptq", "both", "awq"],
)
def test_goes_on_after_the_layers_that_a_stopped_run_finished(
    method: CalibratedMethod, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"quantize_type": "int4_blockwise", "symmetric": False, "method": method}
    convert(source, tmp_path / "at once", **settings, progress=list_only)

    def stop_in_the_second_layer(work: Any) -> Iterator[Any]:
        for number, item in enumerate(work):
            if number == 15:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", **settings, progress=stop_in_the_second_layer)
    counted: list[str] = []
    for module, name in ((gptq, "factorize"), (awq, "search")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, name=name, original=original, **others: (counted.append(name), original(*args, **others))[1],
        )
    report = convert(source, tmp_path / "out", **settings, progress=list_only)
    assert report.resumed == 12  # embedding, norm and head, and a layer of nine
    assert counted.count("factorize") == (4 if isinstance(method, GPTQConfig) else 0)
    assert counted.count("search") == (0 if method.scaling is Scaling.NONE else 4)
    for (a, x), (b, y) in zip(
        NativeCheckpoint(tmp_path / "out").read(), NativeCheckpoint(tmp_path / "at once").read(), strict=True
    ):
        assert dataclasses.replace(a, part=0) == dataclasses.replace(b, part=0)
        jax.tree.map(np.testing.assert_array_equal, x, y)
    other = dataclasses.replace(method, clip=Clip.MSE)
    assert convert(source, tmp_path / "other", **{**settings, "method": other}, progress=list_only).resumed == 0


@pytest.mark.slow
@pytest.mark.parametrize("poison", ["hessian", "weights"])
def test_what_cannot_be_done_is_rounded_and_told_or_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: str
) -> None:
    function = {"hessian": "factorize", "weights": "quantize_matrix"}[poison]
    monkeypatch.setattr(gptq, function, lambda *args: None)
    report = convert(source, tmp_path / "out", quantize_type="int8_per_channel", method=METHOD, progress=list_only)
    assert sum(report.weights.fallbacks().values()) == LINEARS
    assert f"{LINEARS} tensors were rounded to nearest: " in report.as_text()
    convert(source, tmp_path / "rtn", quantize_type="int8_per_channel", progress=list_only)
    rtn = NativeCheckpoint(tmp_path / "rtn")
    expected = {entry.name: array for entry, array in rtn.read()}
    for entry, array in NativeCheckpoint(tmp_path / "out").read():
        jax.tree.map(np.testing.assert_array_equal, array, expected[entry.name])
    strict = dataclasses.replace(METHOD, strict=True)
    with pytest.raises(ValueError, match=r"q_proj\.weight cannot be done by gptq"):
        convert(source, tmp_path / "strict", quantize_type="int8_per_channel", method=strict, progress=list_only)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize_type": "none"}, "method gptq rounds linear layers, but none of them"),
        ({"quantize_type": "int4_blockwise", "block_size": 96}, "block size 96"),
        ({"quantize_type": "int4_blockwise", "method": "long"}, "enough for .* samples"),
    ],
)
def test_refusals_come_first_and_leave_nothing_behind(
    source: Path, tmp_path: Path, settings: dict, message: str
) -> None:
    method = METHOD
    if settings.pop("method", None):
        method = GPTQConfig(calibration=dataclasses.replace(CALIBRATION, samples=10**6))
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", **settings, method=method, progress=list_only)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_from_python_in_the_shape_that_users_know(source: Path, tmp_path: Path) -> None:
    quantizer = GPTQQuantizer(
        bits=4,
        dataset=TEXTS,
        group_size=32,
        desc_act=True,
        sym=False,
        mse=True,
        sweeps=1,
        scale_inputs=Scaling.AWQ,
        nsamples=6,
        model_seqlen=64,
    )
    with pytest.raises(ValueError, match="call quantize_model first"):
        quantizer.save(tmp_path / "out")
    report = quantizer.quantize_model(source)
    assert report.weights.by_type()["int4_blockwise"].bits_per_weight == 4 + 64 / 32
    quantizer.save(tmp_path / "out")
    told = NativeCheckpoint(tmp_path / "out").manifest.quantization.method
    assert told is not None
    assert (told["sweeps"], told["scaling"], told["act_order"]) == (1, "awq", True)
    engine = load_quantized_model(tmp_path / "out", EngineConfig(max_sequences=1))
    request = Request(
        request_id="r", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=4, ignore_eos=True)
    )
    assert len([token for output in engine.run([request]) for token in output.token_ids]) == 4
    with pytest.raises(CheckpointError, match="exists already"):
        quantizer.save(tmp_path / "out")


@pytest.mark.slow
def test_what_is_carried_over_keeps_its_scales_and_those_beside_it(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "gptq", "gptq", quantize_type="int8_per_channel", progress=list_only)
    rules = parse_rules({"patterns": {"up_proj": {"type": "keep"}}}, "recipe")
    settings: dict[str, Any] = {"quantize_type": "int4_per_channel", "rules": rules, "progress": list_only}
    report = convert(tmp_path / "gptq", tmp_path / "out", method=AWQConfig(calibration=CALIBRATION), **settings)
    told = {tensor.name.split(".", 3)[3] for tensor in report.weights.tensors if tensor.fallback == CARRIED_OVER}
    assert told == {"mlp.gate_proj.weight", "mlp.down_proj.weight"}
    assert sum(report.weights.fallbacks().values()) == 4
    made = NativeCheckpoint(tmp_path / "out")
    before = open_model(tmp_path / "gptq").source
    for name in made.tensors:
        if "up_proj" in name:
            jax.tree.map(np.testing.assert_array_equal, made.read_tensor(name), before.read_quantized(name))
        elif "input_layernorm" in name:
            assert not np.array_equal(made.read_tensor(name), before.read(name))
        elif "post_attention_layernorm" in name:
            np.testing.assert_array_equal(made.read_tensor(name), before.read(name))
