"""Checkpoints that others quantized: every format exact, however it is spelt, and what is refused by name."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import foreign
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from jetserve.checkpoint import huggingface
from jetserve.checkpoint.base import CheckpointError, SourceKind
from jetserve.checkpoint.load import LoadedModel, load_model
from jetserve.checkpoint.packed import pack, to_floats, unpack
from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.convert import convert
from jetserve.engine.runner import Runner
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.qarray import QArray, dequantize

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
V2 = functools.partial(foreign.gptq, v1=False)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
Q_PROJ, DOWN_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def compressed_settings(bits: int = 4, **weights: Any) -> dict[str, Any]:
    said = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "version": "0.12.0",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": said}},
        "ignore": ["lm_head"],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint as some tool writes it: `how` its layers are rounded, `pack`ed, and what its settings say."""

    pack: foreign.Pack
    settings: dict[str, Any] | None
    how: dict[str, Any] = dataclasses.field(default_factory=dict)
    bits: int = 4
    block_size: int | None = 32
    file: str | None = None


CASES = {
    "gptq": Case(pack=foreign.gptq, settings=GPTQ),
    "gptq-v2": Case(pack=V2, settings=GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-8": Case(pack=foreign.gptq, settings=GPTQ | {"bits": 8}, how={"bits": 8}, bits=8),
    "gptq-v2-8": Case(pack=V2, settings=GPTQ | {"bits": 8, "format": "gptq_v2"}, how={"bits": 8}, bits=8),
    "gptq-symmetric": Case(pack=foreign.gptq, settings=GPTQ | {"sym": True}, how={"symmetric": True}),
    "gptq-act-order": Case(pack=foreign.gptq, settings=GPTQ | {"desc_act": True}, how={"act_order": True}),
    "gptq-per-channel": Case(
        pack=foreign.gptq, settings=GPTQ | {"group_size": -1}, how={"group_size": -1}, block_size=None
    ),
    "gptq-bfloat16": Case(pack=foreign.gptq, settings=GPTQ, how={"dtype": bfloat16}),
    "gptq-without-groups": Case(pack=functools.partial(foreign.gptq, with_groups=False), settings=GPTQ),
    "gptq-in-a-file": Case(
        pack=foreign.gptq, settings={"wbits": 4, "groupsize": 32, "sym": False}, file="quantize_config.json"
    ),
    "gptq-by-names": Case(pack=foreign.gptq, settings=None),
    "gptq-by-shapes": Case(pack=functools.partial(foreign.gptq, with_groups=False), settings=None),
    "awq": Case(pack=foreign.awq, settings=AWQ),
    "awq-in-a-file": Case(
        pack=foreign.awq,
        settings={"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        file="quant_config.json",
    ),
    "awq-by-shapes": Case(pack=foreign.awq, settings=None),
    "compressed": Case(pack=foreign.compressed, settings=compressed_settings()),
    "compressed-8": Case(pack=foreign.compressed, settings=compressed_settings(8), how={"bits": 8}, bits=8),
    "compressed-symmetric": Case(
        pack=functools.partial(foreign.compressed, symmetric=True),
        settings=compressed_settings(symmetric=True),
        how={"symmetric": True},
    ),
    "compressed-channel": Case(
        pack=foreign.compressed,
        settings=compressed_settings(strategy="channel", group_size=None),
        how={"group_size": -1},
        block_size=None,
    ),
    "compressed-act-order": Case(
        pack=functools.partial(foreign.compressed, with_groups=True),
        settings=compressed_settings(actorder="group"),
        how={"act_order": True},
    ),
    "compressed-by-names": Case(pack=foreign.compressed, settings=None),
}


def write(case: Case, folder: Path, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    settings = case.settings if case.file is None else None
    expected = foreign.write_folder(folder, weights, case.pack, settings, **case.how)
    if case.file is not None:
        (folder / case.file).write_text(json.dumps(case.settings))
    return expected


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_formats_formula_bit_for_bit(tiny, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    expected = write(case, tmp_path, tiny.weights)
    reader = huggingface.open_reader(tmp_path)
    assert reader.kind is SourceKind.QUANTIZED
    assert reader.tensors.keys() == expected.keys()
    assert "quantization_config" not in reader.hf_config
    for key, w in expected.items():
        np.testing.assert_array_equal(reader.read(key).astype(np.float32), w)
        assert reader.quantized_bits(key) == (case.bits if foreign.is_linear(key) else None)
        kept = reader.read_quantized(key)
        assert (kept is not None) == foreign.is_linear(key) == reader.tensors[key].quantized
        if kept is None:
            continue
        kept.check()
        assert kept.block_size == case.block_size
        assert (kept.zero_point is None) == bool(case.how.get("symmetric"))
        assert (kept.input_order is None) == (not case.how.get("act_order"))
        np.testing.assert_array_equal(to_floats(kept), w)
        np.testing.assert_array_equal(reader.read_rows(key, 3, 21), w[3:21])


def test_int4_values_stay_in_their_range(tiny, tmp_path: Path) -> None:
    write(CASES["awq"], tmp_path, tiny.weights)
    kept = huggingface.open_reader(tmp_path).read_quantized(f"{Q_PROJ}.weight")
    assert kept is not None
    assert kept.values.dtype == np.int8
    assert (kept.values.min(), kept.values.max()) == (-8, 7)


def logits(loaded: LoadedModel) -> np.ndarray:
    config = EngineConfig(
        max_sequences=1, max_length=32, max_step_tokens=32, cache=CacheConfig(), mesh=MeshConfig(tensor=1)
    )
    tokens = np.random.default_rng(1).integers(0, 128, 24).tolist()
    runner = Runner(loaded.model, config, make_mesh(config.mesh))
    return np.concatenate([np.asarray(rows)[:count] for count, rows in runner.evaluate(tokens)])


def load(path: Path, **settings: Any) -> LoadedModel:
    return load_model(path, mesh=make_mesh(MeshConfig(tensor=1)), dtype=jnp.dtype("float32"), **settings)


def test_dequantizing_puts_rows_back_in_their_order(tiny, tmp_path: Path) -> None:
    expected = write(CASES["gptq-act-order"], tmp_path, tiny.weights)
    kept = huggingface.open_reader(tmp_path).read_quantized(f"{Q_PROJ}.weight")
    assert kept is not None
    np.testing.assert_array_equal(np.asarray(dequantize(kept)).T, expected[f"{Q_PROJ}.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "compressed"])
def test_the_model_computes_what_its_dequantized_weights_do(tiny, tmp_path: Path, name: str) -> None:
    expected = write(CASES[name], tmp_path / "packed", tiny.weights)
    (tmp_path / "floats").mkdir()
    save_file({key: np.ascontiguousarray(w) for key, w in expected.items()}, tmp_path / "floats" / "model.safetensors")
    (tmp_path / "floats" / "config.json").write_text(json.dumps(foreign.CONFIG))
    reference = logits(load(tmp_path / "floats"))
    kept = load(tmp_path / "packed")
    assert kept.quantize_type == "keep"
    np.testing.assert_allclose(logits(kept), reference, atol=1e-4)
    np.testing.assert_allclose(logits(load(tmp_path / "packed", quantize_type="none")), reference, atol=1e-5)
    convert(tmp_path / "packed", tmp_path / "native", progress=list)
    converted = load(tmp_path / "native")
    np.testing.assert_array_equal(logits(converted), logits(kept))
    assert converted.report.bits == kept.report.bits


def test_layers_of_one_input_share_one_order(tiny, tmp_path: Path) -> None:
    write(CASES["gptq-act-order"], tmp_path, tiny.weights)
    model: Any = load(tmp_path).model
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    assert attention.q.input_order is attention.k.input_order is attention.v.input_order is not None
    assert mlp.gate.input_order is mlp.up.input_order is not None
    assert attention.o.input_order is not attention.q.input_order


def test_words_and_fields() -> None:
    rng = np.random.default_rng(0)
    for bits in (4, 8):
        for axis in (0, 1):
            fields = rng.integers(0, 2**bits, (16, 24)).astype(np.uint8)
            packed = pack(fields, bits, axis=axis)
            np.testing.assert_array_equal(packed, (foreign.along_columns if axis else foreign.along_rows)(fields, bits))
            np.testing.assert_array_equal(unpack(packed, bits, axis=axis), fields)


def test_rows_of_words_that_padding_fills_are_stripped(tiny, tmp_path: Path) -> None:
    layer = foreign.rounded(np.random.default_rng(0).standard_normal((13, 70), np.float32), group_size=-1)
    write(CASES["compressed-channel"], tmp_path, tiny.weights)
    edit_tensors(tmp_path, **foreign.compressed("odd", layer))
    reader = huggingface.open_reader(tmp_path)
    np.testing.assert_array_equal(reader.read("odd.weight"), layer.weight)


def test_groups_that_no_block_can_hold_are_dequantized(tiny, tmp_path: Path) -> None:
    settings = GPTQ | {"group_size": 16}
    expected = foreign.write_folder(tmp_path, tiny.weights, foreign.gptq, settings, group_size=16)
    reader = huggingface.open_reader(tmp_path)
    assert reader.kind is SourceKind.FLOAT
    key = f"{Q_PROJ}.weight"
    assert reader.read_quantized(key) is None
    np.testing.assert_array_equal(reader.read(key), expected[key])
    assert load(tmp_path).report.dequantized() == {"gptq int4": 14}


def test_scales_of_an_activation_go_into_the_layer_after_it(tiny, tmp_path: Path) -> None:
    expected = write(CASES["awq"], tmp_path, tiny.weights)
    scales = np.linspace(0.5, 2, 96).astype(np.float16)
    edit_tensors(tmp_path, **{"model.layers.0.mlp.act.scales": scales})
    reader, key = huggingface.open_reader(tmp_path), f"{DOWN_PROJ}.weight"
    np.testing.assert_array_equal(reader.read(key), expected[key] / scales.astype(np.float32))
    np.testing.assert_array_equal(reader.read_rows(key, 3, 9), reader.read(key)[3:9])
    assert reader.quantized_bits(key) is None
    assert reader.quantized_bits(f"{Q_PROJ}.weight") == 4
    assert load(tmp_path).report.dequantized() == {"awq int4": 1}


def test_groups_whose_scale_is_zero_hold_zeros(tiny, tmp_path: Path) -> None:
    write(CASES["gptq"], tmp_path, tiny.weights)
    scales = load_file(tmp_path / "model.safetensors")[f"{Q_PROJ}.scales"].copy()
    scales[1, 3] = 0
    edit_tensors(tmp_path, **{f"{Q_PROJ}.scales": scales})
    kept = huggingface.open_reader(tmp_path).read_quantized(f"{Q_PROJ}.weight")
    assert isinstance(kept, QArray)
    assert kept.scale[1, 3] == 1
    assert not to_floats(kept)[3, 32:].any()


def test_a_bias_of_zeros_that_the_model_has_no_place_for_is_left_out(tiny, tmp_path: Path) -> None:
    write(CASES["gptq"], tmp_path, tiny.weights)
    edit_tensors(tmp_path, **{f"{Q_PROJ}.bias": np.zeros(64, np.float16)})
    assert load(tmp_path).quantize_type == "keep"
    edit_tensors(tmp_path, **{f"{Q_PROJ}.bias": np.ones(64, np.float16)})
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        load(tmp_path)


def test_dynamic_settings_of_single_layers(tiny, tmp_path: Path) -> None:
    """GPTQModel's overrides: the first that matches counts; those with "-:" leave a layer in floats."""
    layer = foreign.rounded(tiny.weights[f"{Q_PROJ}.weight"], bits=8, group_size=-1)
    dynamic = {r"-:.*lm_head": {}, r"+:.*layers\.0\..*q_proj": {"bits": 8, "group_size": -1}}
    foreign.write_folder(tmp_path, tiny.weights, foreign.gptq, GPTQ | {"dynamic": dynamic})
    edit_tensors(tmp_path, **foreign.gptq(Q_PROJ, layer))
    reader = huggingface.open_reader(tmp_path)
    assert reader.quantized_bits(f"{Q_PROJ}.weight") == 8
    np.testing.assert_array_equal(reader.read(f"{Q_PROJ}.weight"), layer.weight)


def test_the_fingerprint_follows_the_settings(tiny, tmp_path: Path) -> None:
    write(CASES["awq-in-a-file"], tmp_path, tiny.weights)
    before = huggingface.open_reader(tmp_path).fingerprint()
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "version": "gemm"}))
    assert huggingface.open_reader(tmp_path).fingerprint() != before


def edit_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    """Replaces tensors, or removes those that are None."""
    tensors: dict[str, Any] = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def edit_settings(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | changes
    (folder / "config.json").write_text(json.dumps(config))


Change = Callable[[Path], None]
REFUSED: dict[str, tuple[str, Change, str]] = {
    "method": ("gptq", lambda f: edit_settings(f, quant_method="bitsandbytes"), "method 'bitsandbytes'.*expected gptq"),
    "marlin": ("gptq", lambda f: edit_settings(f, checkpoint_format="marlin"), "format 'marlin', which is not read"),
    "marlin flag": ("gptq", lambda f: edit_settings(f, is_marlin_format=True), "is_marlin_format"),
    "gemv": ("awq", lambda f: edit_settings(f, version="gemv"), "format 'gemv', which is not read"),
    "gemv_fast": ("awq", lambda f: edit_settings(f, version="gemv_fast"), "format 'gemv_fast'"),
    "int-quantized": ("compressed", lambda f: edit_settings(f, format="int-quantized"), "format 'int-quantized'"),
    "sparse": ("compressed", lambda f: edit_settings(f, sparsity_config={"format": "x"}), "sparsity_config"),
    "2 bits": ("gptq", lambda f: edit_settings(f, bits=2), "says 2 bits.*expected 4 or 8"),
    "3 bits": ("gptq", lambda f: edit_settings(f, wbits=3, bits=None), "says 3 bits"),
    "other bits": ("gptq", lambda f: edit_settings(f, bits=8), "packed as for 4 bits; expected 8"),
    "pack_dtype": ("gptq", lambda f: edit_settings(f, pack_dtype="int64"), "pack_dtype 'int64'"),
    "two spellings": ("gptq", lambda f: edit_settings(f, w_bit=8), "bits twice, as 4 and 8"),
    "no object": (
        "gptq",
        lambda f: (f / "config.json").write_text(json.dumps(foreign.CONFIG | {"quantization_config": "gptq"})) and None,
        "expected an object",
    ),
    "group size": ("gptq", lambda f: edit_settings(f, group_size=64), "96 input features.* 64 .*does not divide"),
    "other group size": ("awq", lambda f: edit_settings(f, group_size=16), "has 3 groups; expected 6"),
    "group size 0": ("gptq", lambda f: edit_settings(f, group_size=0), "group_size 0"),
    "group size of compressed": (
        "compressed",
        lambda f: edit_settings(f, **compressed_settings(group_size=48)),
        "3 groups for 96 input features; expected groups of 48",
    ),
    "float type": ("compressed", lambda f: edit_settings(f, **compressed_settings(type="float")), "type 'float'"),
    "strategy": ("compressed", lambda f: edit_settings(f, **compressed_settings(strategy="block")), "strategy 'block'"),
    "num_bits": ("compressed", lambda f: edit_settings(f, **compressed_settings(2)), "num_bits 2"),
    "v1 words under v2": (
        "gptq-symmetric",
        lambda f: edit_settings(f, checkpoint_format="gptq_v2"),
        "0x77777777 everywhere.*format gptq,.*say format gptq_v2",
    ),
    "v2 words under v1": (
        "gptq",
        lambda f: (
            edit_settings(f, sym=None),
            edit_tensors(f, **{f"{DOWN_PROJ}.qzeros": np.full((3, 8), 0x88888888, np.uint32).view(np.int32)}),
        )[0],
        "0x88888888 everywhere.*format gptq_v2,.*say format gptq ",
    ),
    "not symmetric": ("gptq", lambda f: edit_settings(f, sym=True), "expected 0x77777777 everywhere"),
    "no tensors": (
        "gptq",
        lambda f: save_file({"norm": np.ones(3, np.float32)}, f / "model.safetensors"),
        "no tensor of .* is",
    ),
    "no scales": ("gptq", lambda f: edit_tensors(f, **{f"{Q_PROJ}.scales": None}), r"no tensor .*q_proj\.scales"),
    "shape": (
        "awq",
        lambda f: edit_tensors(f, **{f"{Q_PROJ}.qzeros": np.zeros((2, 4), np.int32)}),
        r"qzeros is I32 \[2, 4\]; expected I32 \[2, 8\]",
    ),
    "twice": (
        "gptq",
        lambda f: edit_tensors(f, **{f"{Q_PROJ}.weight": np.zeros((64, 64), np.float32)}),
        "both quantized and not",
    ),
    "activation scales without a layer": (
        "awq",
        lambda f: edit_tensors(f, **{"model.layers.0.self_attn.act.scales": np.ones(96, np.float16)}),
        r"act\.scales divides an activation, .* none is there",
    ),
    "activation scales of another size": (
        "awq",
        lambda f: edit_tensors(f, **{"model.layers.0.mlp.act.scales": np.ones(64, np.float16)}),
        r"act\.scales is F16 \[64\]; expected .* \[96\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_at_the_start(tiny, tmp_path: Path, name: str) -> None:
    case, change, message = REFUSED[name]
    write(CASES[case], tmp_path, tiny.weights)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        huggingface.open_reader(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("g_idx", lambda groups: np.where(groups == 1, -1, groups), "groups from -1 to 0; expected 0 to 1"),
        ("g_idx", lambda groups: groups + 1, "groups from 1 to 2"),
        ("g_idx", lambda groups: np.zeros_like(groups), "have from 0 to 64 of the 64 input features; expected 32"),
        ("scales", lambda scales: scales * np.float16(np.nan), "NaN or infinite"),
    ],
)
def test_damage_is_named_when_a_layer_is_read(
    tiny, tmp_path: Path, part: str, change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    write(CASES["gptq"], tmp_path, tiny.weights)
    tensor = load_file(tmp_path / "model.safetensors")[f"{Q_PROJ}.{part}"]
    edit_tensors(tmp_path, **{f"{Q_PROJ}.{part}": change(tensor)})
    reader = huggingface.open_reader(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        reader.read_quantized(f"{Q_PROJ}.weight")


def test_compressed_groups_of_minus_one_are_not_used(tiny, tmp_path: Path) -> None:
    expected = write(CASES["compressed"], tmp_path, tiny.weights)
    edit_tensors(tmp_path, **{f"{Q_PROJ}.weight_g_idx": np.full(64, -1, np.int32)})
    kept = huggingface.open_reader(tmp_path).read_quantized(f"{Q_PROJ}.weight")
    assert kept is not None
    assert kept.input_order is None
    np.testing.assert_array_equal(to_floats(kept), expected[f"{Q_PROJ}.weight"])
