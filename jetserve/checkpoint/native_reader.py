"""A converted checkpoint as a source: its weights dequantized by their own groups, to be rounded to fewer bits.

Owns which checkpoints may be rounded again, and what of them stays as it is. Knows nothing of how rounding is done.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jetserve.checkpoint.base import SourceKind, TensorInfo
from jetserve.checkpoint.files import check_rows
from jetserve.checkpoint.manifest import MANIFEST
from jetserve.checkpoint.native import NativeCheckpoint
from jetserve.checkpoint.packed import to_floats
from jetserve.models.base import Parameter, Role
from jetserve.quantize.qarray import QUANTIZE_TYPES, QArray, QuantizationConfig
from jetserve.quantize.recipe import Action, Target
from jetserve.tokenizer import Tokenizer


def can_be_rounded(source: NativeCheckpoint, parameters: Sequence[Parameter], quantize_type: str | None) -> bool:
    """Whether a type has fewer bits than all linear layers of a checkpoint: rounding twice to as many only loses."""
    if quantize_type not in QUANTIZE_TYPES:
        return False
    bits = QuantizationConfig.from_name(quantize_type).bits
    linears = [source.tensors[p.source] for p in parameters if p.role is Role.LINEAR and p.source in source.tensors]
    return all(entry.bits is None or entry.bits > bits for entry in linears)


class NativeReader:
    """A `CheckpointReader` over a `NativeCheckpoint`. The tensor that was read last stays in memory."""

    def __init__(self, checkpoint: NativeCheckpoint) -> None:
        self.path: Path = checkpoint.path
        self.hf_config: Mapping[str, Any] = checkpoint.hf_config
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                shape=tuple(reversed(entry.shape)),
                type_name=entry.report.type_name,
                nbytes=-(-entry.report.bits // 8),
                quantized=entry.bits is not None,
            )
            for name, entry in checkpoint.tensors.items()
        }
        self._checkpoint = checkpoint
        self._last: tuple[str, QArray | np.ndarray] | None = None

    @property
    def kind(self) -> SourceKind:
        return SourceKind.QUANTIZED if any(info.quantized for info in self.tensors.values()) else SourceKind.FLOAT

    def _array(self, name: str) -> QArray | np.ndarray:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next is read: the two may be large
            self._last = name, self._checkpoint.read_tensor(name)
        return self._last[1]

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        check_rows(name, start, stop, self.tensors[name].shape[0])
        array = self._array(name)
        if isinstance(array, QArray):
            return to_floats(array.columns(slice(start, stop)))
        return array[..., start:stop].T

    def read_quantized(self, name: str) -> QArray | None:
        array = self._array(name)
        return array if isinstance(array, QArray) else None

    def quantized_bits(self, name: str) -> int | None:
        return self._checkpoint.tensors[name].bits

    def tokenizer(self) -> Tokenizer | None:
        return self._checkpoint.tokenizer()

    def fingerprint(self) -> str:
        """Of the manifest, which has the hashes of all that there is."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()

    def unchanged(self, plan: Mapping[str, Target], parameters: Sequence[Parameter]) -> dict[str, Target]:
        """The plan, in which tensors that are already what they are to become are carried over."""
        configs = {p.path: self._checkpoint.tensors[p.source].config for p in parameters}
        return {
            path: dataclasses.replace(target, action=Action.KEEP, config=None)
            if target.config is not None and target.config == configs[path]
            else target
            for path, target in plan.items()
        }
