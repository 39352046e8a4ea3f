"""A packer of quantized layers in other projects' formats, written from their description and slow on purpose."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
"""Field i of a word holds this column of its eight."""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Of the model in the fixture `tiny`."""

INPUTS = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp"}
"""Layers that share an input."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """q unsigned [K, N], z [G, N], scale [G, N], group [K]: `W = (q - z) * scale` by the group of each row."""

    q: np.ndarray
    z: np.ndarray
    scale: np.ndarray
    group: np.ndarray
    bits: int

    @property
    def weight(self) -> np.ndarray:
        """float32 [N, K]."""
        rows = [
            (self.q[k].astype(np.float32) - self.z[g].astype(np.float32)) * self.scale[g].astype(np.float32)
            for k, g in enumerate(self.group)
        ]
        return np.stack(rows).T


def rounded(
    w: np.ndarray,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = False,
    order: np.ndarray | None = None,
    dtype: Any = np.float16,
) -> Layer:
    """A weight [N, K], each group of its columns rounded; with an order, groups are of columns in that order."""
    N, K = w.shape
    size = K if group_size == -1 else group_size
    group = np.empty(K, np.int32)
    group[np.arange(K) if order is None else order] = np.arange(K) // size
    q, z, scale = np.zeros((K, N), np.uint8), np.zeros((K // size, N), np.uint8), np.zeros((K // size, N), dtype)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    for g in range(K // size):
        rows = w.T[group == g]
        low, high = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
        span = np.abs(rows).max(0) / (middle - 1) if symmetric else (high - low) / top
        scale[g] = span.astype(dtype)
        stored = scale[g].astype(np.float32)
        z[g] = middle if symmetric else np.clip(np.round(-low / stored), 0, top)
        q[group == g] = np.clip(np.round(rows / stored) + z[g], 0, top)
    return Layer(q=q, z=z, scale=scale, group=group, bits=bits)


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """[..., 32 / bits] fields, the least significant first -> int32 [...]."""
    shifts = np.arange(fields.shape[-1], dtype=np.uint64) * np.uint64(bits)
    return (fields.astype(np.uint64) << shifts).sum(-1).astype(np.uint32).view(np.int32)


def along_rows(a: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] -> int32 [R b / 32, C]."""
    count = 32 // bits
    padded = np.concatenate([a, np.zeros((-len(a) % count, a.shape[1]), a.dtype)])
    return words(padded.reshape(-1, count, a.shape[1]).swapaxes(1, 2), bits)


def along_columns(a: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] -> int32 [R, C b / 32]."""
    return along_rows(a.T, bits).T.copy()


Pack = Callable[[str, Layer], Mapping[str, np.ndarray]]


def gptq(stem: str, layer: Layer, *, v1: bool = True, with_groups: bool = True) -> dict[str, np.ndarray]:
    """v1 stores the zeros minus one, subtracted from whole words."""
    zeros = along_columns(layer.z, layer.bits).view(np.uint32)
    if v1:
        zeros = zeros - np.uint32(0x11111111 if layer.bits == 4 else 0x01010101)
    tensors = {"qweight": along_rows(layer.q, layer.bits), "qzeros": zeros.view(np.int32), "scales": layer.scale}
    if with_groups:
        tensors["g_idx"] = layer.group
    return {f"{stem}.{name}": tensor for name, tensor in tensors.items()}


def awq(stem: str, layer: Layer) -> dict[str, np.ndarray]:
    """Packed along the columns, interleaved."""

    def interleaved(a: np.ndarray) -> np.ndarray:
        return words(a.reshape(len(a), -1, 8)[..., AWQ_COLUMNS], 4)

    return {
        f"{stem}.qweight": interleaved(layer.q),
        f"{stem}.qzeros": interleaved(layer.z),
        f"{stem}.scales": layer.scale,
    }


def compressed(stem: str, layer: Layer, *, symmetric: bool = False, with_groups: bool = False) -> dict[str, np.ndarray]:
    """pack-quantized."""
    K, N = layer.q.shape
    tensors = {
        "weight_packed": along_columns(layer.q.T, layer.bits),
        "weight_scale": layer.scale.T.copy(),
        "weight_shape": np.array([N, K], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = along_rows(layer.z.T, layer.bits)
    if with_groups:
        tensors["weight_g_idx"] = layer.group
    return {f"{stem}.{name}": tensor for name, tensor in tensors.items()}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_folder(
    folder: Path,
    weights: Mapping[str, np.ndarray],
    pack: Pack,
    settings: Mapping[str, Any] | None,
    *,
    act_order: bool = False,
    config: Mapping[str, Any] = CONFIG,
    **how: Any,
) -> dict[str, np.ndarray]:
    """A Hugging Face folder whose linear layers are rounded and packed; returns what all its weights are, float32.

    With act-order, layers of one input have one order.
    """
    orders: dict[str, np.ndarray | None] = {}
    tensors: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    for name, w in weights.items():
        if is_linear(name):
            module = name.split(".")[-2]
            order = np.random.default_rng(len(orders)).permutation(w.shape[1]) if act_order else None
            layer = rounded(w, order=orders.setdefault(INPUTS.get(module, module), order), **how)
            tensors.update(pack(name.removesuffix(".weight"), layer))
            expected[name] = layer.weight
        else:
            tensors[name] = w.astype(bfloat16)
            expected[name] = tensors[name].astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    said = {} if settings is None else {"quantization_config": dict(settings)}
    (folder / "config.json").write_text(json.dumps({**config, **said}))
    return expected
