"""One safetensors file, memory-mapped: its header, checked, and its tensors as views.

Owns the file format (https://github.com/huggingface/safetensors#format) and nothing above it: names and shapes are the
file's. The library's numpy reader is not used because it refuses bfloat16.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.files import check_is_weights, map_bytes, reject_duplicate_keys

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """Where one tensor lies: bytes [start, stop) after the header."""

    type_name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> np.dtype:
        return _DTYPES[self.type_name]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class SafetensorsFile:
    """An open file. `entries` holds every tensor; `read` gives views of the memory map.

    Raises:
      CheckpointError: at construction, if the file is truncated or its header is not a valid one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_is_weights(path)
        header, self._data_start = _read_header(path)
        self.entries = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
        _check_layout(path, self.entries, path.stat().st_size - self._data_start)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file. Raises KeyError if there is no such tensor."""
        entry = self.entries[name]
        data = map_bytes(self.path, self._data_start + entry.start, self._data_start + entry.stop)
        if (self._data_start + entry.start) % entry.dtype.itemsize:
            data = data.copy()  # Writers align tensors; the format does not say that they must.
        return data.view(entry.dtype).reshape(entry.shape)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(the header's tensors, where the data starts in bytes)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        data_start = _LENGTH_BYTES + length
        if size < data_start or length > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes, but its first eight announce a header of {length}: it is truncated or not a"
                " safetensors file. Get the file again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=reject_duplicate_keys)
    except ValueError as error:
        raise CheckpointError(f"{path} has a header that is not valid JSON ({error}); get the file again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header of type {type(header).__name__}; expected a JSON object")
    header.pop("__metadata__", None)
    return header, data_start


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _parse_entry(path: Path, name: str, entry: Any) -> Entry:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{path}: {name} is described by {entry!r}; expected dtype, shape and data_offsets")
    type_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type_name not in _DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {type_name!r}; expected one of {', '.join(_DTYPES)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name} has shape {shape!r} and data_offsets {offsets!r}; expected sizes")
    expected = math.prod(shape) * _DTYPES[type_name].itemsize
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{path}: {name} takes bytes {offsets[0]} to {offsets[1]}; expected {expected} of them for"
            f" {type_name} {shape}"
        )
    return Entry(type_name=type_name, shape=tuple(shape), start=offsets[0], stop=offsets[1])


def _check_layout(path: Path, entries: dict[str, Entry], data_bytes: int) -> None:
    """Tensors must fill the file: in order of their offsets, without an overlap, a hole or a rest."""
    last = max((entry.stop for entry in entries.values()), default=0)
    if last > data_bytes:
        beyond = [name for name, entry in entries.items() if entry.stop > data_bytes]
        raise CheckpointError(
            f"{path} is truncated: {len(beyond)} of {len(entries)} tensors ({min(beyond)} among them) lie beyond its"
            f" end, where {last - data_bytes} bytes are missing. Get the file again"
        )
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            fault = "overlaps the tensor before it" if entry.start < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: {name} starts at byte {entry.start} and {fault}; expected {position}")
        position = entry.stop
    if position != data_bytes:
        raise CheckpointError(f"{path} has {data_bytes - position} bytes after its last tensor; expected none")
