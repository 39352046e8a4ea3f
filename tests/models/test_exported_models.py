"""Models whose tensors are fused, or stored by expert, written for other tools: read back as they were converted."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import make

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.native import NativeCheckpoint
from jetserve.checkpoint.native_reader import NativeReader
from jetserve.conversion_plan import make_conversion_plan
from jetserve.convert import convert, export
from jetserve.models.base import Role
from jetserve.quantize.recipe_file import parse_rules


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize(
    "name", ["phi3-plain", "gpt_neox-plain", "falcon-newer-untied-linear_rope", "gpt2-plain", "mixtral-plain"]
)
def test_fused_tensors_and_experts_read_back(name: str, output_format: str, tmp_path: Path) -> None:
    make(name, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "native", quantize_type="int4_blockwise", block_size=32, progress=list)
    export(tmp_path / "native", tmp_path / "out", output_format, progress=list)
    ours, plan = NativeReader(NativeCheckpoint(tmp_path / "native")), make_conversion_plan(tmp_path / "out")
    for parameter in plan.parameters:
        if parameter.role is Role.LINEAR:
            found, expected = (reader.read_quantized(parameter.source) for reader in (plan.reader, ours))
            assert found is not None
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        np.testing.assert_array_equal(plan.reader.read(parameter.source), ours.read(parameter.source))
    # Floats stand under the names and in the shapes of the model's own checkpoint.
    before, after = (load_file(next((tmp_path / folder).glob("*.safetensors"))) for folder in ("hf", "out"))
    plain = {key for key in after if key in before}
    assert any(key.endswith("norm.weight") or "ln_" in key or "layernorm" in key for key in plain)
    assert all(before[key].shape == after[key].shape for key in plain)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]


def test_parts_of_one_tensor_in_different_types_are_refused(tmp_path: Path) -> None:
    make("phi3-plain", tmp_path / "hf")
    rules = parse_rules({"patterns": {"*qkv_proj.q*": {"type": "int8_per_channel"}}}, "recipe")
    settings = {"quantize_type": "int4_blockwise", "block_size": 32, "rules": rules}
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight holds several .* in 2 different ways"):
        export(tmp_path / "hf", tmp_path / "out", "gptq", **settings, progress=list)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    make("gpt_oss-plain", tmp_path / "hf")
    with pytest.raises(ValueError, match=r"all experts in one tensor \(model.layers.0.mlp.experts.*gptq has no form"):
        export(tmp_path / "hf", tmp_path / "out", "gptq", quantize_type="int8_per_channel", progress=list)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
