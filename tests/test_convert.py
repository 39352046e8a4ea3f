"""Conversion: what is loaded from the result is what is loaded on the fly, to the bit, from every kind of source."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jetserve import convert as convert_module
from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.load import load_model
from jetserve.checkpoint.native import NativeCheckpoint
from jetserve.config import ConvertConfig, MeshConfig, ModelSource
from jetserve.convert import ConversionReport, convert
from jetserve.kernels import select
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.qarray import QUANTIZE_TYPES, QArray, QuantizationConfig, dequantize, quantize
from jetserve.quantize.recipe_file import parse_rules, read_rules
from jetserve.testing import make_tiny_checkpoint

TYPES = [{"quantize_type": name, "symmetric": symmetric} for name in QUANTIZE_TYPES for symmetric in (True, False)]


def list_only(work: Any) -> Any:
    return work


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module", params=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = request.param == "tied"
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("hf") / "tiny", intermediate_size=96, tie_word_embeddings=tied, dtype="bfloat16"
    )


def write_gguf(path: Path, *, down: str = "Q5_0") -> Path:
    """A Llama of one layer whose matrices are Q4_1, but for one Q4_0 and one of type `down`, with a Q8_0 embedding."""
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    for add, key, value in (
        (writer.add_uint32, "context_length", 256),
        (writer.add_uint32, "embedding_length", 64),
        (writer.add_uint32, "block_count", 1),
        (writer.add_uint32, "feed_forward_length", 96),
        (writer.add_uint32, "attention.head_count", 4),
        (writer.add_uint32, "attention.head_count_kv", 2),
        (writer.add_float32, "attention.layer_norm_rms_epsilon", 1e-5),
        (writer.add_uint32, "rope.dimension_count", 16),
    ):
        add(f"llama.{key}", value)
    rng = np.random.default_rng(0)
    for name, shape, kind in (
        ("token_embd", (128, 64), types.Q8_0),
        ("output_norm", (64,), types.F32),
        ("blk.0.attn_norm", (64,), types.F32),
        ("blk.0.ffn_norm", (64,), types.F32),
        ("blk.0.attn_q", (64, 64), types.Q4_1),
        ("blk.0.attn_k", (32, 64), types.Q4_1),
        ("blk.0.attn_v", (32, 64), types.Q4_0),
        ("blk.0.attn_output", (64, 64), types.Q4_1),
        ("blk.0.ffn_gate", (96, 64), types.Q4_1),
        ("blk.0.ffn_up", (96, 64), types.Q4_1),
        ("blk.0.ffn_down", (64, 96), types[down]),
    ):
        w = rng.standard_normal(shape, np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(w, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_weights(source: Path, output: Path, mesh: Mesh, dtype: str, **settings: Any) -> None:
    """What the conversion loads is what the source loads with the same settings."""
    with select.choose(quantized_matmul="xla"):
        found = load_model(output, mesh=mesh, dtype=jnp.dtype(dtype))
        expected = load_model(source, mesh=mesh, dtype=jnp.dtype(dtype), **settings)

    def same(a: jax.Array, b: jax.Array) -> None:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(same, nnx.state(found.model), nnx.state(expected.model))
    assert found.report.as_dict() == expected.report.as_dict()
    assert found.tokenizer == expected.tokenizer
    assert found.config == expected.config


@pytest.mark.parametrize(
    "settings", [*TYPES, {"quantize_type": "none"}, {}], ids=lambda s: "-".join(map(str, s.values()))
)
def test_converted_is_what_is_made_on_the_fly(source: Path, tmp_path: Path, mesh: Mesh, settings: dict) -> None:
    report = convert(source, tmp_path / "out", **settings, progress=list_only)
    assert_same_weights(source, tmp_path / "out", mesh, "float32", **settings)
    assert report.quantize_type == settings.get("quantize_type", "none")


def test_floats_keep_the_dtype_of_the_source(source: Path, tmp_path: Path, mesh: Mesh) -> None:
    report = convert(source, tmp_path / "out", progress=list_only)
    assert report.weights.by_type().keys() == {"bfloat16"}
    assert report.weights.bits_per_weight == 16
    assert_same_weights(source, tmp_path / "out", mesh, "bfloat16")


def test_floats_are_rounded_to_bfloat16_alike(tmp_path: Path, mesh: Mesh) -> None:
    source = make_tiny_checkpoint(tmp_path / "hf")
    convert(source, tmp_path / "out", quantize_type="int8_blockwise", progress=list_only)
    assert_same_weights(source, tmp_path / "out", mesh, "bfloat16", quantize_type="int8_blockwise")


@pytest.mark.parametrize("settings", [{}, {"quantize_type": "keep"}])
def test_a_quantized_source_is_carried_over_exactly(tmp_path: Path, mesh: Mesh, settings: dict) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    report = convert(source, tmp_path / "out", **settings, progress=list_only)
    assert_same_weights(source, tmp_path / "out", mesh, "float32", **settings)
    assert report.quantize_type == "keep"
    assert report.weights.dequantized() == {"Q5_0": 1}
    assert "Q5_0, which cannot be carried over, became floats" in report.as_text()
    entries = NativeCheckpoint(tmp_path / "out").tensors
    assert entries["model.layers.0.mlp.up_proj.weight"].zero_point == "real"
    assert entries["model.layers.0.mlp.up_proj.weight"].error is None
    assert entries["model.layers.0.self_attn.v_proj.weight"].zero_point in ("none", "integer")
    assert entries["model.embed_tokens.weight"].bits == 8
    assert entries["model.layers.0.mlp.down_proj.weight"].dtype == "float32"


@pytest.mark.parametrize("name", ["int4_blockwise", "none"])
def test_a_quantized_source_is_rounded_anew_where_asked(tmp_path: Path, mesh: Mesh, name: str) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    convert(source, tmp_path / "out", quantize_type=name, progress=list_only)
    assert_same_weights(source, tmp_path / "out", mesh, "float32", quantize_type=name)


def test_weights_carried_over_are_also_of_the_type_that_they_all_have(tmp_path: Path, mesh: Mesh) -> None:
    convert(write_gguf(tmp_path / "one.gguf", down="Q4_1"), tmp_path / "one", progress=list_only)
    convert(write_gguf(tmp_path / "mixed.gguf"), tmp_path / "mixed", progress=list_only)
    dtype = jnp.dtype("float32")
    loaded = load_model(tmp_path / "one", quantize_type="int4_blockwise", block_size=32, mesh=mesh, dtype=dtype)
    assert loaded.quantize_type == "keep"
    with pytest.raises(ValueError, match=r"is int8_blockwise, but .* quantize_type int4_blockwise or keep"):
        load_model(tmp_path / "one", quantize_type="int8_blockwise", mesh=mesh, dtype=dtype)
    with pytest.raises(ValueError, match=r"is int4_blockwise, but .* quantize_type keep"):
        load_model(tmp_path / "mixed", quantize_type="int4_blockwise", mesh=mesh, dtype=dtype)


def test_report_says_what_happened(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", quantize_type="int4_blockwise", block_size=64, progress=list_only)
    assert isinstance(report, ConversionReport)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert report.output_bytes == sum(file.stat().st_blocks * 512 for file in files)
    summary = report.as_dict()
    assert summary["types"]["int4_blockwise"]["tensors"] == 14
    assert summary["block_sizes_changed"] == [{"asked": 64, "used": 32, "tensors": 2}]
    assert len(summary["worst"]) == 5
    text = report.as_text()
    assert "block size 64 does not divide 2 tensors, which got 32" in text
    assert "MB before" in text
    assert text.count("rounding error") == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize_type": "int4_blockwise", "block_size": 0}, "block_size is 0"),
        ({"quantize_type": "int4_blockwise", "block_size": 7}, "block_size is 7"),
        ({"quantize_type": "int4_blockwise", "block_size": 96}, r"\.weight has 64 .* block size 96"),
        ({"quantize_type": "int2"}, "int2"),
    ],
)
def test_refusals_leave_nothing_behind(source: Path, tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", **settings, progress=list_only)
    assert not list(tmp_path.iterdir())


def test_a_size_that_no_block_divides_is_refused_before_reading(tmp_path: Path) -> None:
    source = make_tiny_checkpoint(tmp_path / "hf", intermediate_size=100)
    with pytest.raises(ValueError, match=r"down_proj\.weight: no block size .* divides"):
        convert(source, tmp_path / "out", quantize_type="int4_blockwise", progress=list_only)


def test_nan_in_a_weight_names_it(source: Path, tmp_path: Path) -> None:
    tensors: dict[str, Any] = dict(load_file(source / "model.safetensors"))
    folder = make_tiny_checkpoint(tmp_path / "nan", intermediate_size=96, tie_word_embeddings=len(tensors) == 20)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 3] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for quantize_type in ("int4_blockwise", "none"):
        with pytest.raises(ValueError, match=f"{name} holds NaN or infinite values"):
            convert(folder, tmp_path / "out", quantize_type=quantize_type, progress=list_only)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantize_type", [None, "int8_blockwise", "none"])
def test_a_converted_checkpoint_is_not_converted_to_as_many_bits(
    source: Path, tmp_path: Path, quantize_type: str | None
) -> None:
    convert(source, tmp_path / "int8", quantize_type="int8_per_channel", progress=list_only)
    with pytest.raises(CheckpointError, match=r"converted checkpoint already, of type int8_per_channel.* fewer bits"):
        convert(tmp_path / "int8", tmp_path / "again", quantize_type=quantize_type)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("wide", ["int8_per_channel", "int8_blockwise", "none"])
def test_int8_becomes_int4_by_its_own_groups(
    source: Path, tmp_path: Path, mesh: Mesh, wide: str, symmetric: bool
) -> None:
    """Converted or on the fly: what rounding the dequantized weights gives. The embedding stays the int8 that it is."""
    convert(source, tmp_path / "wide", quantize_type=wide, progress=list_only)
    settings: dict[str, Any] = {"quantize_type": "int4_blockwise", "symmetric": symmetric, "block_size": 32}
    report = convert(tmp_path / "wide", tmp_path / "int4", **settings, progress=list_only)
    assert report.quantize_type == "int4_blockwise"
    before, after = NativeCheckpoint(tmp_path / "wide"), NativeCheckpoint(tmp_path / "int4")
    for name in before.tensors:
        was, found = before.read_tensor(name), after.read_tensor(name)
        if name.endswith("_proj.weight"):
            plain = dequantize(was) if isinstance(was, QArray) else was
            expected = quantize(jnp.asarray(plain), QuantizationConfig(bits=4, block_size=32, symmetric=symmetric))
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        elif wide != "none":
            jax.tree.map(np.testing.assert_array_equal, found, was)
    assert_same_weights(tmp_path / "wide", tmp_path / "int4", mesh, "float32", **settings)


def test_a_recipe_decides_tensor_by_tensor_and_is_recorded(source: Path, tmp_path: Path, mesh: Mesh) -> None:
    patterns = {"down_proj": {"type": "int8_per_channel"}, "*.layers.0.*gate_proj": "skip"}
    settings: dict[str, Any] = {
        "quantize_type": "int4_blockwise",
        "rules": parse_rules({"patterns": patterns}, "recipe"),
    }
    convert(source, tmp_path / "out", **settings, progress=list_only)
    made = NativeCheckpoint(tmp_path / "out")
    assert made.manifest.quantization.type == "rules"
    assert made.manifest.quantization.rules is not None
    assert "down_proj" in made.manifest.quantization.rules
    types = {name: entry.report.type_name for name, entry in made.tensors.items()}
    assert types["model.layers.1.mlp.down_proj.weight"] == "int8_per_channel"
    assert types["model.layers.0.mlp.gate_proj.weight"] == "bfloat16"
    assert types["model.layers.1.mlp.gate_proj.weight"] == "int4_blockwise"
    assert_same_weights(source, tmp_path / "out", mesh, "float32", **settings)
    with pytest.raises(ValueError, match="a recipe cannot change"):
        load_model(tmp_path / "out", rules=settings["rules"], mesh=mesh, dtype=jnp.dtype("float32"))


def test_a_dry_run_says_what_would_be_and_writes_nothing(source: Path, tmp_path: Path, capsys) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"patterns": {"down_proj": {"type": "int8_blockwise", "block_size": 32, "symmetric": false}}}')
    wanted = ModelSource(
        checkpoint_path=str(source), quantize_type="int4_per_channel", quantize_recipe=recipe, cache_dir=tmp_path
    )
    assert convert_module.run(ConvertConfig(source=wanted, output=None)) == 0
    shown = capsys.readouterr().out
    down = next(line for line in shown.splitlines() if "layers.1.mlp.down_proj" in line)
    assert "int8_blockwise, block 32, asymmetric" in down
    assert "rtn" in down
    assert "10.000" in down  # bits a weight: a scale and a zero point for every 32
    convert(source, tmp_path / "out", quantize_type="int4_per_channel", rules=read_rules(recipe), progress=list_only)
    made = NativeCheckpoint(tmp_path / "out").report
    assert f"{made.nbytes / 1e6:.1f} MB of weights" in shown
    assert f"{made.bits_per_weight:.3f}" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "recipe.json"]


def test_the_command_prints_the_report(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ModelSource(checkpoint_path=str(source), quantize_type="int4_per_channel", cache_dir=tmp_path)
    assert convert_module.run(ConvertConfig(source=wanted, output=tmp_path / "out")) == 0
    captured = capsys.readouterr()
    assert "int4_per_channel" in captured.out
    assert "Converting" in captured.err


SLOW_CONVERSION = """
import sys, time
from pathlib import Path
from jetserve.checkpoint import native_writer
from jetserve.convert import convert

native_writer.PART_BYTES = 30_000

def progress(work):
    for item in work:
        time.sleep(0.05)
        yield item

convert(Path(sys.argv[1]), Path(sys.argv[2]), quantize_type="int4_blockwise", progress=progress)
"""


@pytest.mark.slow
def test_sigkill_and_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    command = [sys.executable, "-c", SLOW_CONVERSION, str(source), str(output)]
    process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    wait_for(lambda: (partial / "weights" / "part-00001").is_dir() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="unfinished"):
        NativeCheckpoint(partial)
    monkeypatch.setattr("jetserve.checkpoint.native_writer.PART_BYTES", 30_000)
    report = convert(source, output, quantize_type="int4_blockwise", progress=list_only)
    assert report.resumed > 0
    convert(source, tmp_path / "at once", quantize_type="int4_blockwise", progress=list_only)
    for (a, x), (b, y) in zip(
        NativeCheckpoint(output).read(), NativeCheckpoint(tmp_path / "at once").read(), strict=True
    ):
        assert a == b
        jax.tree.map(np.testing.assert_array_equal, x, y)


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_the_default_model_is_carried_over_and_loads_the_same(default_gguf: Path, tmp_path: Path, mesh: Mesh) -> None:
    report = convert(default_gguf, tmp_path / "keep", progress=list_only)
    assert_same_weights(default_gguf, tmp_path / "keep", mesh, "float32")
    assert report.weights.by_type()["int4_blockwise"].weights == 106_168_320
    assert report.output_bytes < 110e6
