"""jetstream-pytorch's folders in all the forms its converter writes, and types that contradict them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jetserve.checkpoint import jetstream
from jetserve.checkpoint.base import CheckpointError, SourceKind
from jetserve.quantize.qarray import dequantize

PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "vocab_size": 128}
BLOCK_SIZE = 32  # 128 in their converter; the reader takes it from the shapes
MAX_ERROR = 1e-5


def quantized(w: torch.Tensor, axis: int, bits: int, *, symmetric: bool = True) -> list[torch.Tensor | None]:
    """[values int8, scale bfloat16, zero point times scale bfloat16], by the formulas of jetstream_pt/quantize.py."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if symmetric:
        scale = w.abs().amax(axis, keepdim=True).clamp(min=1e-5) / high
        zero_point = torch.zeros_like(scale)
    else:
        scale = (w.amax(axis, keepdim=True) - w.amin(axis, keepdim=True)).clamp(min=1e-5) / (high - low)
        zero_point = low - torch.round(w.amin(axis, keepdim=True) / scale)
    values = torch.clamp(torch.round(w / scale) + zero_point, low, high).to(torch.int8)
    offset = None if symmetric else (zero_point * scale).squeeze(axis).to(torch.bfloat16)
    return [values, scale.squeeze(axis).to(torch.bfloat16), offset]


def blockwise(w: torch.Tensor, bits: int, *, symmetric: bool = True) -> list[torch.Tensor | None]:
    values, scale, offset = quantized(w.reshape(len(w), -1, BLOCK_SIZE), 2, bits, symmetric=symmetric)
    assert values is not None
    assert scale is not None
    return [values.permute(1, 2, 0), scale.T, None if offset is None else offset.T]


@pytest.fixture
def write(tiny, tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny Llama with its linear layers in a form, or in float."""

    def write(
        form: Callable[[torch.Tensor], list[torch.Tensor | None]] | None = None,
        *,
        extra: dict[str, torch.Tensor] | None = None,
        drop: tuple[str, ...] = (),
        **params: object,
    ) -> Path:
        tensors = {"rope.freqs": torch.ones(8)}
        for name, array in tiny.meta_weights().items():
            w = torch.from_numpy(array.copy())
            parts = [w, None, None]
            if form is not None and w.ndim == 2:
                parts = quantized(w, 0, 8) if name.startswith("tok_") else form(w)
            stem = name.removesuffix("weight")
            named = zip((name, f"{stem}weight_scaler", f"{stem}zero_point"), parts, strict=True)
            tensors |= {key: part.contiguous() for key, part in named if part is not None}
        folder = tmp_path / "jetstream"
        folder.mkdir(exist_ok=True)
        (folder / "params.json").write_text(json.dumps(PARAMS | params))
        kept = {name: tensor for name, tensor in (tensors | (extra or {})).items() if name not in drop}
        save_file(kept, folder / "model.safetensors")
        return folder

    return write


def per_channel(bits: int, *, symmetric: bool = True) -> Callable[[torch.Tensor], list[torch.Tensor | None]]:
    return lambda w: quantized(w, 1, bits, symmetric=symmetric)


FORMS = {
    "int8_per_channel": (per_channel(8), 0.006),
    "int4_per_channel": (per_channel(4), 0.1),
    "int8_blockwise": (lambda w: blockwise(w, 8), 0.006),
    "int4_blockwise": (lambda w: blockwise(w, 4), 0.1),
    "int8_per_channel asymmetric": (per_channel(8, symmetric=False), 0.006),
    "int4_blockwise asymmetric": (lambda w: blockwise(w, 4, symmetric=False), 0.1),
}


def test_float_checkpoints_come_back_in_hugging_faces_layout(write, tiny) -> None:
    reader = jetstream.open_reader(write())
    assert reader.kind is SourceKind.FLOAT
    assert reader.tensors.keys() == tiny.weights.keys()
    for name, w in tiny.weights.items():
        np.testing.assert_array_equal(reader.read(name), w)
        np.testing.assert_array_equal(reader.read_rows(name, 5, 21), w[5:21])
        assert reader.read_quantized(name) is None
        assert not reader.tensors[name].quantized
    # A type is no claim about a float checkpoint: it is what to make of it.
    assert jetstream.open_reader(write(), "int4_blockwise").kind is SourceKind.FLOAT


@pytest.mark.parametrize("form", FORMS)
def test_quantized_checkpoints_are_carried_over(write, tiny, form: str) -> None:
    quantizer, tolerance = FORMS[form]
    quantize_type = form.split()[0]
    reader = jetstream.open_reader(write(quantizer), quantize_type)
    assert reader.kind is SourceKind.QUANTIZED
    for name, w in tiny.weights.items():
        found = reader.read(name)
        assert reader.tensors[name].shape == found.shape == w.shape
        np.testing.assert_array_equal(reader.read_rows(name, 5, 21), found[5:21])
        if w.ndim == 1:
            np.testing.assert_array_equal(found, w)
            continue
        assert reader.tensors[name].quantized
        limit = 0.006 if name == "model.embed_tokens.weight" else tolerance
        assert np.abs(found - w).max() <= 1.3 * limit * np.abs(w).max()
        qarray = reader.read_quantized(name)
        if name == "model.embed_tokens.weight":
            assert qarray is None
            assert reader.quantized_bits(name) is None
            continue
        assert qarray is not None
        qarray.check()
        assert reader.quantized_bits(name) == int(quantize_type[3])
        assert qarray.shape == w.shape[::-1]
        assert qarray.block_size == (BLOCK_SIZE if "blockwise" in form else None)
        assert (qarray.zero_point is not None) == ("asymmetric" in form)
        assert np.abs(np.asarray(dequantize(qarray)).T - found).max() <= MAX_ERROR * np.abs(found).max()


def test_int8_needs_no_type(write) -> None:
    reader = jetstream.open_reader(write(per_channel(8)))
    assert reader.quantized_bits("lm_head.weight") == 8


def test_values_that_could_be_either_need_a_type(write) -> None:
    folder = write(per_channel(4))
    for quantize_type in (None, "keep"):
        with pytest.raises(CheckpointError, match=r"int4 or int8.*--quantize_type"):
            jetstream.open_reader(folder, quantize_type)
    assert jetstream.open_reader(folder, "int8_per_channel").quantized_bits("lm_head.weight") == 8
    jetstream.open_reader(folder, "none").read("lm_head.weight")


def refused(folder: Path, quantize_type: str | None, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        jetstream.open_reader(folder, quantize_type)
    for word in words:
        assert word in str(caught.value)


def test_int8_under_an_int4_name_is_refused(write) -> None:
    refused(write(per_channel(8)), "int4_per_channel", "-127 to 127", "it is int8", "int8_per_channel")


def test_a_single_int8_weight_under_an_int4_name_is_refused_when_it_is_read(write) -> None:
    values = torch.full((64, 64), 100, dtype=torch.int8)
    extra = {"layers.1.attention.wq.weight": values}
    reader = jetstream.open_reader(write(per_channel(4), extra=extra), "int4_per_channel")
    reader.read_quantized("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"layers.1.attention.wq.weight holds values from 100 to 100"):
        reader.read_quantized("model.layers.1.self_attn.q_proj.weight")


def test_the_other_form_is_refused(write) -> None:
    refused(write(per_channel(8)), "int8_blockwise", "per_channel", "int8_blockwise")
    refused(write(lambda w: blockwise(w, 8)), "int8_per_channel", "blockwise", "int8_per_channel")


WQ = "layers.0.attention.wq."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drop": (WQ + "weight_scaler",)}, [WQ, "no layers.0"]),
        ({"drop": (WQ + "weight", WQ + "weight_scaler")}, ["lacks 1", WQ]),
        ({"extra": {"norm.weight_scaler": torch.ones(64)}}, ["norm.weight_scaler", "not quantized"]),
        ({"extra": {WQ + "weight_scaler": torch.ones(63)}}, [WQ, "[63]"]),
        ({"extra": {WQ + "zero_point": torch.ones(63)}}, [WQ + "zero_point", "[63]"]),
        ({"extra": {WQ + "weight": torch.ones(64, 64, dtype=torch.int16)}}, [WQ, "I16"]),
        ({"extra": {"layers.0.self_attn.wq.weight": torch.ones(2)}}, ["layers.0.self_attn.wq.weight", "Only Llama"]),
        ({"n_heads": 8, "n_kv_heads": 8}, ["k_proj", "32 rows", "expected 64"]),
    ],
)
def test_what_does_not_fit_is_refused(write, changes: dict[str, object], words: list[str]) -> None:
    refused(write(per_channel(8), **changes), None, *words)


def test_blocks_in_the_other_order_are_refused(write) -> None:
    values = torch.ones(2, 64, BLOCK_SIZE, dtype=torch.int8)  # [G, N, g]
    refused(write(lambda w: blockwise(w, 8), extra={WQ + "weight": values}), None, WQ, "[G, g, N]")


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_unusable_scales_are_refused_when_read(write, value: float) -> None:
    scale = torch.ones(64, dtype=torch.bfloat16)
    scale[3] = value
    reader = jetstream.open_reader(write(per_channel(8), extra={WQ + "weight_scaler": scale}))
    for read in (reader.read, reader.read_quantized):
        with pytest.raises(CheckpointError, match="zero or not finite"):
            read("model.layers.0.self_attn.q_proj.weight")


def test_missing_and_truncated_files_are_refused(write) -> None:
    folder = write(per_channel(8))
    before = jetstream.open_reader(folder).fingerprint()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refused(folder, None, "truncated")
    assert jetstream.open_reader(write(per_channel(8), rope_theta=3.0)).fingerprint() != before
    (folder / "params.json").write_text("{")
    refused(folder, None, "params.json", "not valid JSON")
