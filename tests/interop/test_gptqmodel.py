"""GPTQModel: what it writes loads here, and what is written here loads there."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from interop_parts import TEXTS, TOKENS, TOLERANCE, float_logits, make_source, our_logits
from safetensors.torch import load_file

from jetserve.convert import export

gptqmodel = pytest.importorskip("gptqmodel", reason="takes an environment of its own; see tests/interop/README.md")

pytestmark = pytest.mark.slow

ITS_TOLERANCE = 0.05
"""Of logits, where its scales are float16 whatever the file has, or its kernels multiply in half precision."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


def dequantized(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a quantized folder as GPTQModel reads them; its floats as they stand there."""
    model = gptqmodel.GPTQModel.load(str(path), device="cpu", backend=gptqmodel.BACKEND.GPTQ_TORCH, dtype=torch.float16)
    found = {}
    for name, module in model.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            module.scales = module.scales.float()  # its products would be rounded to float16
            found[f"{name}.weight"] = module.dequantize_weight().T.float()
    assert len(found) == 14
    stored = load_file(path / "model.safetensors")
    return found | {name: tensor for name, tensor in stored.items() if name.endswith(".weight")}


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(
    ("bits", "group_size", "act_order", "symmetric"), [(4, 32, False, True), (4, 32, True, False), (8, -1, False, True)]
)
def test_what_it_writes_loads_and_written_again_loads_there(
    source: Path, tmp_path: Path, version: str, bits: int, group_size: int, act_order: bool, symmetric: bool
) -> None:
    config = gptqmodel.QuantizeConfig(
        bits=bits,
        group_size=group_size,
        desc_act=act_order,
        act_group_aware=False,
        sym=symmetric,
        format=version,
        offload_to_disk=False,
    )
    model = gptqmodel.GPTQModel.load(str(source), config)
    model.quantize(TEXTS, batch_size=1)
    model.save(str(tmp_path / "quantized"))
    export(tmp_path / "quantized", tmp_path / "again", "gptq", progress=list)
    for folder in (tmp_path / "quantized", tmp_path / "again"):
        expected = float_logits(source, dequantized(folder))
        np.testing.assert_allclose(our_logits(folder), expected, atol=TOLERANCE)


@pytest.mark.parametrize("settings", [{"symmetric": True}, {"symmetric": False}, {"block_size": 32}], ids=str)
def test_what_is_written_here_loads_there(source: Path, tmp_path: Path, settings: dict) -> None:
    export(source, tmp_path / "out", "gptq", quantize_type="int4_blockwise", progress=list, **settings)
    expected = float_logits(source, dequantized(tmp_path / "out"))
    np.testing.assert_allclose(our_logits(tmp_path / "out"), expected, atol=ITS_TOLERANCE)


@pytest.mark.parametrize("settings", [{"symmetric": True}, {"block_size": 32, "symmetric": False}], ids=str)
def test_transformers_loads_what_is_written_here(source: Path, tmp_path: Path, settings: dict) -> None:
    pytest.importorskip("optimum", reason="transformers takes it for GPTQ (pip install --no-deps optimum)")
    folder = tmp_path / "out"
    export(source, folder, "gptq", quantize_type="int4_blockwise", progress=list, **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    with torch.no_grad():
        logits = model(torch.from_numpy(TOKENS)[None]).logits[0].float().numpy()
    np.testing.assert_allclose(our_logits(folder), logits, atol=ITS_TOLERANCE)
