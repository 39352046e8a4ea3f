"""Checkpoints written for other projects' tools: read back bit for bit, and refused where a format cannot hold them."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint import foreign
from safetensors.numpy import load_file

from jetserve.checkpoint import huggingface, huggingface_writer
from jetserve.checkpoint.base import CheckpointError, CheckpointReader
from jetserve.checkpoint.native import NativeCheckpoint
from jetserve.checkpoint.native_reader import NativeReader
from jetserve.convert import convert, export
from jetserve.method_config import CalibrationConfig, Clip, GPTQConfig, Scaling
from jetserve.quantize.qarray import QArray
from jetserve.quantize.recipe_file import parse_rules
from jetserve.testing import make_tiny_checkpoint

FORMATS = ("gptq", "compressed-tensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linear layers of 64 and 96 inputs."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("source"), intermediate_size=96)


def kept(reader: CheckpointReader, name: str) -> QArray:
    found = reader.read_quantized(name)
    assert found is not None
    return found


def check_same(native: Path, exported: Path) -> None:
    """Linear layers have the same integers, scales and zero points; all others the same floats."""
    ours, theirs = NativeReader(NativeCheckpoint(native)), huggingface.open_reader(exported)
    assert theirs.tensors.keys() == ours.tensors.keys()
    for name in ours.tensors:
        if foreign.is_linear(name) and ours.quantized_bits(name) is not None:
            assert theirs.quantized_bits(name) == ours.quantized_bits(name)
            jax.tree.map(np.testing.assert_array_equal, kept(theirs, name), kept(ours, name))
            assert kept(theirs, name).block_size == kept(ours, name).block_size
        np.testing.assert_array_equal(theirs.read(name), ours.read(name))


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize(
    "settings",
    [
        {"quantize_type": "int4_blockwise", "block_size": 32},
        {"quantize_type": "int4_blockwise", "block_size": 32, "symmetric": False},
        {"quantize_type": "int4_per_channel"},
        {"quantize_type": "int8_per_channel", "symmetric": False},
        {"quantize_type": "int8_blockwise", "block_size": 32},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_what_was_exported_reads_back(source: Path, tmp_path: Path, settings: dict, output_format: str) -> None:
    convert(source, tmp_path / "native", **settings, progress=list)
    export(tmp_path / "native", tmp_path / "out", output_format, progress=list)
    check_same(tmp_path / "native", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == output_format
    assert config["model_type"] == "llama"
    reader = huggingface.open_reader(tmp_path / "out")
    assert reader.tokenizer() == huggingface.open_reader(source).tokenizer()


@pytest.mark.parametrize("output_format", FORMATS)
def test_an_order_of_inputs_and_shards(
    tiny, tmp_path: Path, output_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_writer, "SHARD_BYTES", 20_000)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    foreign.write_folder(tmp_path / "gptq", tiny.weights, foreign.gptq, settings, act_order=True)
    convert(tmp_path / "gptq", tmp_path / "native", progress=list)
    export(tmp_path / "native", tmp_path / "out", output_format, progress=list)
    check_same(tmp_path / "native", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2


def test_gptq_comes_out_as_it_went_in(tiny, tmp_path: Path) -> None:
    """But for the format of the zeros, which is v2 now."""
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    foreign.write_folder(tmp_path / "gptq", tiny.weights, foreign.gptq, settings)
    export(tmp_path / "gptq", tmp_path / "out", "gptq", progress=list)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("gptq", "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if not name.endswith("qzeros"):
            np.testing.assert_array_equal(after[name], tensor)
            assert after[name].dtype == tensor.dtype


@pytest.mark.parametrize("output_format", FORMATS)
def test_several_forms_in_one_checkpoint(source: Path, tmp_path: Path, output_format: str) -> None:
    patterns = {"down_proj": {"type": "int8_per_channel"}, "gate_proj": "skip"}
    rules = parse_rules({"patterns": patterns}, "recipe")
    settings: dict[str, Any] = {"quantize_type": "int4_blockwise", "block_size": 32, "rules": rules}
    convert(source, tmp_path / "native", **settings, progress=list)
    export(tmp_path / "native", tmp_path / "out", output_format, progress=list)
    check_same(tmp_path / "native", tmp_path / "out")


def test_what_a_format_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = make_tiny_checkpoint(tmp_path / "source", intermediate_size=100)
    with pytest.raises(CheckpointError, match=r"down_proj is \[64, 100\], which words of 8 do not divide"):
        export(source, tmp_path / "out", "gptq", quantize_type="int4_per_channel", progress=list)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    export(source, tmp_path / "out", "compressed-tensors", quantize_type="int4_per_channel", progress=list)
    with pytest.raises(CheckpointError, match="exists already"):
        export(source, tmp_path / "out", "compressed-tensors", progress=list)


def test_a_model_without_quantized_layers_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no linear layer"):
        export(source, tmp_path / "out", "gptq", progress=list)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [Scaling.NONE, Scaling.AWQ], ids=["gptq", "awq, then gptq"])
@pytest.mark.parametrize("output_format", FORMATS)
def test_what_gptq_made_reads_back(source: Path, tmp_path: Path, output_format: str, scaling: Scaling) -> None:
    method = GPTQConfig(
        calibration=CalibrationConfig(
            texts=("What the river said to the sea is not known. " * 40,), length=32, samples=4
        ),
        clip=Clip.MSE,
        act_order=True,
        sweeps=1,
        scaling=scaling,
    )
    settings: dict[str, Any] = {"quantize_type": "int4_blockwise", "block_size": 32, "symmetric": False}
    convert(source, tmp_path / "native", **settings, method=method, progress=list)
    export(tmp_path / "native", tmp_path / "out", output_format, progress=list)
    check_same(tmp_path / "native", tmp_path / "out")
    export(source, tmp_path / "at once", output_format, **settings, method=method, progress=list)
    check_same(tmp_path / "native", tmp_path / "at once")
