"""Checkpoints that name a model's parameters otherwise, fuse them or cut them up, presented with a tensor for each.

Owns the usual names, the cutting of rows out of fused tensors and the joining of experts'. A row is one output with all
its inputs, and every kind of quantization has its scales within rows, so both are exact whatever the tensors hold.
Knows no format.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jetserve.checkpoint.base import CheckpointError, CheckpointReader, SourceKind, TensorInfo
from jetserve.models.base import Origin, Parameter, Source, Weights
from jetserve.quantize.qarray import QArray
from jetserve.tokenizer import Tokenizer


def in_parts(reader: CheckpointReader, parameters: Sequence[Parameter]) -> CheckpointReader:
    """The source with every parameter under its own name, `Parameter.source`. It must have passed `check_tensors`."""
    if all(parameter.whole for parameter in parameters):
        return reader
    return _PartsReader(reader, parameters)


def stored_transposed(reader: CheckpointReader, name: str, origin: Origin) -> bool:
    """Whether a tensor stands as [K, N]: quantized ones never do, for their formats say what is an output."""
    return origin.transposed and len(reader.tensors[name].shape) == 2 and not reader.tensors[name].quantized


def renamed(reader: CheckpointReader, weights: Weights) -> CheckpointReader:
    """The source with the names that a model's `WEIGHTS` gives its tensors.

    Checkpoints saved without their output head lack the first word of all names; some tensors have an alias. Those of
    all experts are shown as matrices, each expert's rows after those of the one before.
    """
    sources = [Source(entry) if isinstance(entry, str) else entry for entry in weights.values()]
    embedding = next(source.name for path, source in zip(weights, sources, strict=True) if path == "embed.weight")
    prefix, _, bare = embedding.partition(".")
    prefixed = bare not in reader.tensors
    known = {source.name for source in sources if not source.name.startswith(f"{prefix}.")}
    usual = {name: name if prefixed or name in known else f"{prefix}.{name}" for name in reader.tensors}
    for source in sources:
        if source.alias is not None:
            for name, found in usual.items():
                if match := _pattern(source.alias).fullmatch(found):
                    usual[name] = source.name.replace("{i}", match[1])
    if any(name != found for name, found in usual.items()):
        reader = _RenamedReader(reader, {found: name for name, found in usual.items()})
    patterns = [_pattern(source.name) for source in sources if source.stacked]
    stacked = {name for name in reader.tensors if any(p.fullmatch(name) for p in patterns)}
    return _FlatReader(reader, stacked) if stacked else reader


def _pattern(name: str) -> re.Pattern[str]:
    """Matches a name of a `WEIGHTS` table in any layer."""
    return re.compile(re.escape(name).replace(r"\{i\}", r"(\d+)"))


class ReaderOver:
    """What a `CheckpointReader` over another has of it."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self.path: Path = reader.path
        self.hf_config: Mapping[str, Any] = reader.hf_config

    @property
    def kind(self) -> SourceKind:
        return self._reader.kind

    def tokenizer(self) -> Tokenizer | None:
        return self._reader.tokenizer()

    def fingerprint(self) -> str:
        return self._reader.fingerprint()


class Replaced(ReaderOver):
    """The source with other floats in place of some of its tensors: arrays in Hugging Face's layout, by name."""

    def __init__(self, reader: CheckpointReader, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(reader)
        self.tensors: Mapping[str, TensorInfo] = reader.tensors
        self._arrays = arrays

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name] if name in self._arrays else self._reader.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._arrays[name][start:stop] if name in self._arrays else self._reader.read_rows(name, start, stop)

    def read_quantized(self, name: str) -> QArray | None:
        return None if name in self._arrays else self._reader.read_quantized(name)

    def quantized_bits(self, name: str) -> int | None:
        return None if name in self._arrays else self._reader.quantized_bits(name)


class _RenamedReader(ReaderOver):
    """See `renamed`; `names` are the other reader's by those that are shown."""

    def __init__(self, reader: CheckpointReader, names: Mapping[str, str]) -> None:
        super().__init__(reader)
        self._names = names
        self.tensors: Mapping[str, TensorInfo] = {name: reader.tensors[found] for name, found in names.items()}

    def read(self, name: str) -> np.ndarray:
        return self._reader.read(self._names[name])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._reader.read_rows(self._names[name], start, stop)

    def read_quantized(self, name: str) -> QArray | None:
        return self._reader.read_quantized(self._names[name])

    def quantized_bits(self, name: str) -> int | None:
        return self._reader.quantized_bits(self._names[name])


class _FlatReader(ReaderOver):
    """Shows some float tensors of all experts, [E, K, N] and [E, N], as [E * N, K] and [E * N]."""

    def __init__(self, reader: CheckpointReader, stacked: Set[str]) -> None:
        super().__init__(reader)
        infos = {name: reader.tensors[name] for name in stacked}
        self._stacked = {name for name, info in infos.items() if not info.quantized and len(info.shape) > 1}
        self.tensors: Mapping[str, TensorInfo] = {
            name: dataclasses.replace(info, shape=_flat(info.shape)) if name in self._stacked else info
            for name, info in reader.tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if name not in self._stacked:
            return self._reader.read_rows(name, start, stop)
        N = self._reader.tensors[name].shape[-1]
        first = start // N
        experts = self._reader.read_rows(name, first, -(-stop // N))
        rows = experts.swapaxes(1, -1).reshape(-1, *experts.shape[1:-1])
        return rows[start - first * N : stop - first * N]

    def read_quantized(self, name: str) -> QArray | None:
        return None if name in self._stacked else self._reader.read_quantized(name)

    def quantized_bits(self, name: str) -> int | None:
        return None if name in self._stacked else self._reader.quantized_bits(name)


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] * shape[-1], *shape[1:-1])


class _PartsReader(ReaderOver):
    """See `in_parts`."""

    def __init__(self, reader: CheckpointReader, parameters: Sequence[Parameter]) -> None:
        super().__init__(reader)
        self._origins = {parameter.source: parameter.origin for parameter in parameters}
        self.tensors: Mapping[str, TensorInfo] = {
            parameter.source: self._info(parameter.origin, parameter.shape[::-1]) for parameter in parameters
        }

    def _info(self, origin: Origin, shape: tuple[int, ...]) -> TensorInfo:
        infos = [self._reader.tensors[name] for name in origin.names]
        share = math.prod(shape) / sum(math.prod(info.shape) for info in infos)
        return TensorInfo(
            shape=shape,
            type_name=infos[0].type_name,
            nbytes=round(sum(info.nbytes for info in infos) * share),
            quantized=any(info.quantized for info in infos),
        )

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        pieces = [self._cut(tensor, rows, self._origins[name]) for tensor, rows in self._rows(name, start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _rows(self, name: str, start: int, stop: int) -> list[tuple[str, np.ndarray]]:
        """The tensors that hold rows [start, stop) of a parameter, each with the indices of its rows."""
        origin = self._origins[name]
        rows = origin.rows(start, stop)
        tensor = rows // origin.height
        return [(origin.names[i], rows[tensor == i] - i * origin.height) for i in range(tensor[0], tensor[-1] + 1)]

    def _cut(self, tensor: str, rows: np.ndarray, origin: Origin) -> np.ndarray:
        first, last = int(rows[0]), int(rows[-1]) + 1
        if stored_transposed(self._reader, tensor, origin):
            found = self._reader.read(tensor).T[first:last]
        else:
            found = self._reader.read_rows(tensor, first, last)
        return found if len(found) == len(rows) else found[rows - first]

    def read_quantized(self, name: str) -> QArray | None:
        if self.quantized_bits(name) is None:
            return None
        pieces = []
        for tensor, rows in self._rows(name, 0, self.tensors[name].shape[0]):
            whole = self._reader.read_quantized(tensor)
            assert whole is not None
            pieces.append(whole if len(rows) == whole.shape[1] else whole.columns(rows))
        forms = {(piece.block_size, piece.zero_point is None) for piece in pieces}
        if len(pieces) > 1 and any(piece.input_order is not None for piece in pieces):
            return None  # experts take one input, but each would want it in an order of its own
        if len(forms) > 1:
            raise CheckpointError(
                f"{self.path}: the experts of {name} are quantized in different ways ({len(forms)} of them); expected"
                " one. Use the model's unquantized checkpoint"
            )
        return pieces[0] if len(pieces) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves, -1), *pieces)

    def quantized_bits(self, name: str) -> int | None:
        bits = {self._reader.quantized_bits(tensor) for tensor in self._origins[name].names}
        return bits.pop() if len(bits) == 1 else None
