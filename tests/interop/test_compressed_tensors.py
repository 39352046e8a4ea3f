"""The compressed-tensors library: what it packs loads here, what is written here loads there (and in transformers)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from interop_parts import TOKENS, TOLERANCE, float_logits, make_source, our_logits
from safetensors.torch import load_file, save_file

from jetserve.checkpoint import huggingface
from jetserve.convert import export

pytest.importorskip("compressed_tensors", reason="the library is not installed (pip install compressed-tensors)")

from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

pytestmark = pytest.mark.slow

FORMS: list[dict[str, Any]] = [
    {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
    {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    {"num_bits": 4, "strategy": "channel", "symmetric": False},
    {"num_bits": 8, "strategy": "channel", "symmetric": True},
    {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


def scheme_of(weights: dict[str, Any]) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="int", **weights))


def parameters(w: torch.Tensor, form: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The scale and zero point that span each group of a weight."""
    groups = w.reshape(len(w), -1, form.get("group_size", w.shape[1]))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    top = 2 ** form["num_bits"] - 1
    if form["symmetric"]:
        return {"weight_scale": groups.abs().amax(-1) / (top / 2)}
    scale = (high - low) / top
    zero_point = torch.round(-low / scale).clamp(0, top) - (top + 1) // 2
    return {"weight_scale": scale, "weight_zero_point": zero_point.to(torch.int8)}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_what_it_packs_loads(source: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    scheme, tensors, expected = scheme_of(form), {}, {}
    for name, w in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = w
            continue
        packed = PackedQuantizationCompressor.compress({"weight": w, **parameters(w, form)}, scheme)
        stem = name.removesuffix("weight")
        tensors |= {stem + key: tensor.contiguous() for key, tensor in packed.items()}
        expected[name] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reader = huggingface.open_reader(tmp_path)
    for name, w in expected.items():
        np.testing.assert_array_equal(reader.read(name), w.numpy())
    np.testing.assert_allclose(our_logits(tmp_path), float_logits(source, expected), atol=TOLERANCE)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("quantize_type", ["int4_blockwise", "int4_per_channel", "int8_blockwise"])
def test_what_is_written_here_loads_there(source: Path, tmp_path: Path, quantize_type: str, symmetric: bool) -> None:
    folder = tmp_path / "out"
    export(source, folder, "compressed-tensors", quantize_type=quantize_type, symmetric=symmetric, progress=list)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in tensors:
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("weight_packed")
            packed = {key.removeprefix(stem): tensor for key, tensor in tensors.items() if key.startswith(stem)}
            expected[stem + "weight"] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    assert len(expected) == 14
    reader = huggingface.open_reader(folder)
    for name, w in expected.items():
        np.testing.assert_array_equal(reader.read(name), w.numpy())
    floats = {
        name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float32 and "_proj." not in name
    }
    np.testing.assert_allclose(our_logits(folder), float_logits(source, expected | floats), atol=TOLERANCE)


def test_transformers_loads_what_is_written_here(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "out", "compressed-tensors", quantize_type="int4_blockwise", progress=list)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    np.testing.assert_allclose(our_logits(tmp_path / "out"), expected, atol=TOLERANCE)
