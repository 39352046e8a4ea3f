"""compressed-tensors checkpoints in the "pack-quantized" format, as llm-compressor writes them, 4 and 8 bits.

| X.weight_packed     | int32 [N, ceil(K b / 32)]             | along K, stored q + 2^(b - 1)            |
| X.weight_scale      | float [N, G], [N, 1] or [1]           | per group, channel or tensor             |
| X.weight_zero_point | int32 [ceil(N b / 32), G] or int8 [N, G] | along N, stored the same; if asymmetric |
| X.weight_shape      | int64 [2]                             | (N, K)                                   |
| X.weight_g_idx      | int32 [K]                             | the group of each column, for act-order  |

`W = (q - z) scale`. Owns this format; the settings' spelling is `quantization_settings`'.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.packed import (
    FLOAT_TYPES,
    Form,
    PackedLayer,
    Shards,
    Stored,
    expect,
    pack,
    signed,
    span,
    stems,
    unpack,
    unsigned,
)
from jetserve.checkpoint.quantization_settings import Settings

METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
STRATEGIES = ("group", "channel", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedLayer(PackedLayer):
    """See the module."""

    def values(self, start: int, stop: int) -> np.ndarray:
        words = self.shards.read(f"{self.stem}.weight_packed")[start:stop]
        rows = unpack(words, self.bits, axis=1)[:, : self.shape[1]]
        return signed(np.ascontiguousarray(rows.T), self.bits)

    def scale(self, start: int, stop: int) -> np.ndarray:
        scale = self.shards.read(f"{self.stem}.weight_scale")
        if scale.size == 1:  # of the whole tensor
            scale = np.broadcast_to(scale.reshape(1, 1), (self.shape[0], 1))
        return scale[start:stop].T

    def zero_point(self, start: int, stop: int) -> np.ndarray | None:
        name = f"{self.stem}.weight_zero_point"
        if name not in self.parts:
            return None
        stored = self.shards.read(name)
        if stored.dtype == np.int8:
            if stored.size == 1:
                stored = np.broadcast_to(stored.reshape(1, 1), (self.shape[0], 1))
            return stored[start:stop].T
        chosen, within = span(start, stop, self.bits)
        return signed(unpack(stored[chosen], self.bits, axis=0)[within].T.copy(), self.bits)

    def group_of_row(self) -> np.ndarray | None:
        name = f"{self.stem}.weight_g_idx"
        if name not in self.parts:
            return None
        groups = self.shards.read(name)
        return None if (groups == -1).any() else groups  # -1 says that it is not used


def layers(shards: Shards, settings: Settings) -> Mapping[str, PackedLayer]:
    """Every layer that has a `weight_packed`, by its name.

    Raises:
      CheckpointError: for settings and tensors that are not read, or contradict each other.
    """
    said = _check(settings)
    return {stem: _layer(shards, settings, stem, said) for stem in stems(shards, ".weight_packed")}


def _check(settings: Settings) -> set[tuple[int, int | None]]:
    """(bits, group size or None) of every group of layers that the settings speak of."""
    settings.expect_only("format", (FORMAT,), absent=FORMAT)
    for key in ("sparsity_config", "kv_cache_scheme"):
        if settings.fields.get(key) not in (None, {}):
            raise CheckpointError(
                f"{settings.where} has a {key}, which is not read; expected weights in {FORMAT} alone"
            )
    found = set()
    groups: Mapping[str, Any] = settings.fields.get("config_groups") or {}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        for key, expected in (
            ("num_bits", (4, 8)),
            ("type", ("int",)),
            ("strategy", STRATEGIES),
            ("dynamic", (False,)),
        ):
            if weights.get(key, expected[0]) not in expected:
                raise CheckpointError(
                    f"{settings.where}: weights of {name} have the {key} {weights[key]!r}, which is not read; expected"
                    f" {' or '.join(str(value) for value in expected)}"
                )
        if group.get("format", FORMAT) not in (FORMAT, None):
            raise CheckpointError(f"{settings.where}: {name} has the format {group['format']!r}; expected {FORMAT!r}")
        size = weights.get("group_size")
        found.add((weights.get("num_bits", 8), None if size == -1 else size))
    return found


def _layer(shards: Shards, settings: Settings, stem: str, said: set[tuple[int, int | None]]) -> CompressedLayer:
    packed, scale, zeros, shape, groups = (
        f"{stem}.weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx")
    )
    parts = expect(shards, packed, ("I32",), (None, None)) + expect(shards, shape, ("I64",), (2,))
    N, K = (int(size) for size in shards.read(shape))
    rows, words = shards.entries[packed].shape
    bits = next((bits for bits in (4, 8) if rows == N and words == -(-K * bits // 32)), None)
    if bits is None or (said and all(bits != other for other, _ in said)):
        expected_bits = " or ".join(str(other) for other in sorted({other for other, _ in said} or {4, 8}))
        raise CheckpointError(
            f"{shards.where(packed)} has shape {[rows, words]} for a weight {[N, K]}; expected {expected_bits} bits in"
            " words of 32 along its input features. Others are not read"
        )
    entry = shards.entries.get(scale)
    whole = entry is not None and entry.shape in ((1,), (1, 1))
    parts += expect(shards, scale, FLOAT_TYPES, entry.shape if whole and entry is not None else (N, None))
    G = 1 if whole else shards.entries[scale].shape[1]
    sizes = {size or K for other, size in said if other == bits}
    if sizes and all(size * G != K for size in sizes):
        raise CheckpointError(
            f"{shards.where(scale)} has {G} groups for {K} input features; expected groups of"
            f" {' or '.join(map(str, sorted(sizes)))}, which divide them, by {settings.where}"
        )
    zero_entry = shards.entries.get(zeros)
    if zero_entry is not None:
        unpacked = zero_entry.type_name == "I8"
        expected = shards.entries[scale].shape if unpacked else (-(-N * bits // 32), G)
        parts += expect(shards, zeros, ("I8", "I32"), expected)
    parts += expect(shards, groups, ("I32", "I64"), (K,), optional=True)
    return CompressedLayer(
        shards=shards,
        stem=stem,
        type_name=f"{FORMAT} int{bits}",
        shape=(N, K),
        bits=bits,
        groups=G,
        parts=parts,
    )


def write_layer(stem: str, layer: Stored) -> dict[str, np.ndarray]:
    """The tensors of a layer, by their names."""
    (K, N), bits = layer.values.shape, layer.form.bits
    tensors = {
        "weight_packed": pack(unsigned(layer.values.T, bits), bits, axis=1),
        "weight_scale": layer.scale.T,
        "weight_shape": np.array([N, K], np.int64),
    }
    if not layer.form.symmetric:
        tensors["weight_zero_point"] = pack(unsigned(layer.zero_point.T, bits), bits, axis=0)
    if layer.form.ordered:
        tensors["weight_g_idx"] = layer.group_of_row
    return {f"{stem}.{name}": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def write_settings(layers: Mapping[str, Form], floats: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of these layers, a group for each form they have, and of others that stay floats."""
    forms = list(dict.fromkeys(layers.values()))
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if len(forms) == 1 else [stem for stem in layers if layers[stem] == form],
                "weights": {
                    "num_bits": form.bits,
                    "type": "int",
                    "symmetric": form.symmetric,
                    "strategy": "channel" if form.group_size == -1 else "group",
                    "group_size": None if form.group_size == -1 else form.group_size,
                    "actorder": "group" if form.ordered else None,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
            for i, form in enumerate(forms)
        },
        "ignore": [*floats],
        "kv_cache_scheme": None,
    }
