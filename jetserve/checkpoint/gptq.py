"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them: v1 and v2, 4 and 8 bits, act-order or not.

| X.qweight | int32 [K b / 32, N] | along K, unsigned                     |
| X.qzeros  | int32 [G, N b / 32] | along N; v1 stores the zero minus one |
| X.scales  | float [G, N]        |                                       |
| X.g_idx   | int32 [K]           | the group of each row; may be absent  |

`W[k, n] = scales[g, n] (q[k, n] - z[g, n])` with g = g_idx[k]. Owns this format; the settings' spelling is
`quantization_settings`'.
"""

import collections
import dataclasses
import re
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

METHOD = "gptq"
V1, V2 = "gptq", "gptq_v2"
ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""What v1 subtracted from every word. Whole words: borrows cross the fields."""
MIDDLE = {4: np.uint32(0x88888888), 8: np.uint32(0x80808080)}
"""A word of the zeros of symmetric weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptqLayer(PackedLayer):
    """See the module. `format` is that of the zeros, `V1` or `V2`; `symmetric` as the settings say, or None."""

    format: str
    symmetric: bool | None

    def values(self, start: int, stop: int) -> np.ndarray:
        words = self.shards.read(f"{self.stem}.qweight")[:, start:stop]
        return signed(unpack(words, self.bits, axis=0), self.bits)

    def scale(self, start: int, stop: int) -> np.ndarray:
        return self.shards.read(f"{self.stem}.scales")[:, start:stop]

    def zero_point(self, start: int, stop: int) -> np.ndarray | None:
        words = self.zero_words()
        chosen, within = span(start, stop, self.bits)
        return signed(unpack(words[:, chosen], self.bits, axis=1)[:, within], self.bits)

    def zero_words(self) -> np.ndarray:
        """The words of the zeros, uint32 [G, N b / 32], as v2 stores them.

        Raises:
          CheckpointError: if they contradict the settings.
        """
        words = np.ascontiguousarray(self.shards.read(f"{self.stem}.qzeros")).view(np.uint32)
        middle, ones = MIDDLE[self.bits], ONES[self.bits]
        sentinels = {V1: middle - ones, V2: middle}
        other = V2 if self.format == V1 else V1
        where = self.shards.where(f"{self.stem}.qzeros")
        if self.symmetric is not False and (words == sentinels[other]).all():
            raise CheckpointError(
                f"{where} holds {words.flat[0]:#010x} everywhere, the zeros of symmetric weights in format {other}, but"
                f" its settings say format {self.format} ({sentinels[self.format]:#010x}); set checkpoint_format to"
                f" {other} if the file is right"
            )
        if self.symmetric and (words != sentinels[self.format]).any():
            found = words[words != sentinels[self.format]][0]
            raise CheckpointError(
                f"{where} holds {found:#010x}; expected {sentinels[self.format]:#010x} everywhere, for its settings say"
                f" sym, format {self.format}. Set sym to false if the file is right"
            )
        return words + ones if self.format == V1 else words

    def group_of_row(self) -> np.ndarray | None:
        name = f"{self.stem}.g_idx"
        return self.shards.read(name) if name in self.parts else None


def layers(shards: Shards, settings: Settings) -> Mapping[str, PackedLayer]:
    """Every layer that has a `qweight`, by its name; one's zeros are read, to see that the settings are the file's.

    Raises:
      CheckpointError: for settings and tensors that are not read, or contradict each other.
    """
    settings.expect_only("format", (V1, V2), absent=V1)
    settings.expect_only("pack_dtype", ("int32",), absent="int32")
    found = {stem: _layer(shards, settings, stem) for stem in stems(shards, ".qweight")}
    if found:
        next(iter(found.values())).zero_words()
    return found


def _layer(shards: Shards, settings: Settings, stem: str) -> GptqLayer:
    weight, zeros, scales, groups = (f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    parts = expect(shards, weight, ("I32",), (None, None)) + expect(shards, scales, FLOAT_TYPES, (None, None))
    (packed, N), G = shards.entries[weight].shape, shards.entries[scales].shape[0]
    parts += expect(shards, scales, FLOAT_TYPES, (G, N))[1:] + expect(shards, zeros, ("I32",), (G, None))
    bits = settings.layer_bits(stem, shards.entries[zeros].shape[1] * 32 / N, shards.where(zeros))
    K = packed * 32 // bits
    settings.check_group_size(stem, K, G, shards.where(scales))
    parts += expect(shards, groups, ("I32",), (K,), optional=True)
    return GptqLayer(
        shards=shards,
        stem=stem,
        type_name=f"gptq int{bits}",
        shape=(N, K),
        bits=bits,
        groups=G,
        parts=parts,
        format=settings.text("format", V1),
        symmetric=settings.symmetric,
    )


def write_layer(stem: str, layer: Stored) -> dict[str, np.ndarray]:
    """The tensors of a layer in v2, by their names.

    Raises:
      CheckpointError: if the words do not divide its sides.
    """
    K, N = layer.values.shape
    bits = layer.form.bits
    count = 32 // bits
    if K % count or N % count:
        raise CheckpointError(
            f"{stem} is [{N}, {K}], which words of {count} do not divide; expected multiples of {count}, which GPTQ's"
            " format takes. Use compressed-tensors"
        )
    return {
        f"{stem}.qweight": pack(unsigned(layer.values, bits), bits, axis=0),
        f"{stem}.qzeros": pack(unsigned(layer.zero_point, bits), bits, axis=1),
        f"{stem}.scales": layer.scale,
        f"{stem}.g_idx": layer.group_of_row,
    }


def write_settings(layers: Mapping[str, Form], floats: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of these layers, and of others that stay floats. What most have is said once."""
    symmetric = all(form.symmetric for form in layers.values())
    ordered = any(form.ordered for form in layers.values())
    sizes = {stem: (form.bits, form.group_size) for stem, form in layers.items()}
    bits, group_size = collections.Counter(sizes.values()).most_common(1)[0][0]
    dynamic: dict[str, dict[str, int]] = {f"-:^{re.escape(stem)}$": {} for stem in floats}
    for stem, size in sizes.items():
        if size != (bits, group_size):
            dynamic[f"+:^{re.escape(stem)}$"] = {"bits": size[0], "group_size": size[1]}
    return {
        "quant_method": METHOD,
        "checkpoint_format": V2,
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": ordered,
        "lm_head": False,
        "pack_dtype": "int32",
        "dynamic": dynamic,
    }
