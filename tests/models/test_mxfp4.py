"""gpt-oss as it is published, in MXFP4: decoded as transformers does, and carried over exactly."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from replay import Replay
from safetensors.numpy import load_file, save_file
from tiny_models import make, make_texts
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.detect import open_checkpoint

BLOCK = 32


def publish(folder: Path) -> None:
    """Puts random codes in the place of the experts' weights: blocks and scales, and the settings that say so."""
    rng = np.random.default_rng(0)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        E, K, N = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (E, N, K // BLOCK, BLOCK // 2), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(122, 126, (E, N, K // BLOCK), np.uint8)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def decoded(model: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    """The model with the experts that stand in the folder."""
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"{name}_blocks" in tensors:
                parts = (torch.tensor(tensors[f"{name}_{part}"]) for part in ("blocks", "scales"))
                parameter.copy_(convert_moe_packed_tensors(*parts, dtype=torch.float32))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("quantize_type", ["keep", "none"])
def test_logits_are_those_of_the_decoded_weights(quantize_type: str, tmp_path: Path) -> None:
    model = make("gpt_oss-plain", tmp_path)
    publish(tmp_path)
    texts = make_texts()[1:2]
    with torch.no_grad():
        expected = decoded(model, tmp_path)(torch.tensor(texts[0][None])).logits[0].numpy()
    found = Replay(tmp_path, texts, quantize_type=quantize_type).whole()[0]
    assert np.std(expected) > 0.5
    assert np.abs(found - expected).max() < 1e-3


@pytest.mark.slow
def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    make("gpt_oss-plain", tmp_path)
    publish(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_scales"][1, 2, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="down_proj_blocks: a scale of the layer is NaN"):
        open_checkpoint(tmp_path).read_quantized(f"{name}.weight")
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][..., :-1].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_scales is U8 \[4, 64, 2\]; expected U8 \[4, 64, 3\]"):
        open_checkpoint(tmp_path)
