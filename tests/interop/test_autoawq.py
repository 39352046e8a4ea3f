"""AutoAWQ: layers that its own code packs load here."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from interop_parts import TOLERANCE, float_logits, make_source, our_logits
from safetensors.torch import load_file, save_file

from jetserve.checkpoint import huggingface

gemm = pytest.importorskip(
    "awq.modules.linear.gemm", reason="takes an environment of its own; see tests/interop/README.md"
)

pytestmark = pytest.mark.slow

GROUP = 64


def packed(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight [N, K] rounded with zero points, in AutoAWQ's layer."""
    groups = w.reshape(len(w), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).half()
    zero_point = torch.round(-low / scale.float()).clamp(0, 15)
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    # It packs what is exactly a multiple of the scale.
    q = torch.round(groups / scale.float()[..., None] + zero_point[..., None]).clamp(0, 15)
    linear.weight.data = ((q - zero_point[..., None]) * scale.float()[..., None]).reshape(w.shape)
    layer = gemm.WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scale.T.contiguous(), zeros=zero_point.T.contiguous()
    )
    return {name: tensor.contiguous() for name, tensor in layer.state_dict().items()}


def test_what_it_packs_loads(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    tensors, expected = {}, {}
    for name, w in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = w
            continue
        layer = packed(w)
        tensors |= {name.removesuffix("weight") + key: tensor for key, tensor in layer.items()}
        expected[name] = gemm.dequantize_gemm(layer["qweight"], layer["qzeros"], layer["scales"].float(), 4, GROUP).T
    folder = tmp_path / "awq"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    reader = huggingface.open_reader(folder)
    for name, w in expected.items():
        np.testing.assert_array_equal(reader.read(name), w.float().numpy())
    np.testing.assert_allclose(our_logits(folder), float_logits(source, expected), atol=TOLERANCE)
