"""MXFP4 checkpoints (OCP Microscaling Formats 2023), as gpt-oss is published: all experts of a layer in one tensor.

| X_blocks | uint8 [E, N, G, 16] | two numbers a byte, the lower half first: 32 along K a block |
| X_scales | uint8 [E, N, G]     | 2^(s - 127); 255 is no number                                |

A number is E2M1: a sign, and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Twice that is an integer, which int8 holds exactly.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jetserve.checkpoint.packed import PackedLayer, Shards, expect, stems
from jetserve.checkpoint.quantization_settings import Settings

METHOD = "mxfp4"
BLOCK, BITS = 32, 8
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the number of every code."""
NO_NUMBER = 255


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4Layer(PackedLayer):
    """See the module; its output channels are those of every expert in turn."""

    def values(self, start: int, stop: int) -> np.ndarray:
        pairs = self.shards.read(f"{self.stem}_blocks").reshape(self.shape[0], -1)[start:stop]
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
        return np.ascontiguousarray(DOUBLED[codes].T)

    def scale(self, start: int, stop: int) -> np.ndarray:
        exponents = self.shards.read(f"{self.stem}_scales").reshape(self.shape[0], -1)[start:stop].T
        halved = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
        return np.where(exponents == NO_NUMBER, np.float32(np.nan), halved)

    def zero_point(self, start: int, stop: int) -> np.ndarray | None:
        return None

    def group_of_row(self) -> np.ndarray | None:
        return None


def layers(shards: Shards, settings: Settings) -> Mapping[str, PackedLayer]:
    """Every layer that has `_blocks`, by its name.

    Raises:
      CheckpointError: for tensors of another layout.
    """
    return {stem: _layer(shards, stem) for stem in stems(shards, "_blocks")}


def _layer(shards: Shards, stem: str) -> MXFP4Layer:
    blocks, scales = f"{stem}_blocks", f"{stem}_scales"
    parts = expect(shards, blocks, ("U8",), (None, None, None, BLOCK // 2))
    *rows, groups, _ = shards.entries[blocks].shape
    parts += expect(shards, scales, ("U8",), (*rows, groups))
    return MXFP4Layer(
        shards=shards,
        stem=stem,
        type_name=METHOD,
        shape=(math.prod(rows), groups * BLOCK),
        bits=BITS,
        groups=groups,
        parts=parts,
    )
