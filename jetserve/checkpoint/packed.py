"""Linear layers that others quantized, packed into 32-bit words: what all such formats share.

Owns the words, the order of rows by their groups, and the way into a QArray. Which tensors a layer is made of, and how
they are packed, is the formats' own (`gptq`, `awq`, `compressed_tensors`).

Letters: N output channels, K contracted axis, G groups of g along K.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.safetensors_file import Entry, SafetensorsFile
from jetserve.quantize.qarray import BLOCK_SIZE_MULTIPLE, INTEGER_RANGE, QArray

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class Shards:
    """The tensors of several safetensors files, as if they stood in one."""

    def __init__(self, files: Sequence[SafetensorsFile]) -> None:
        self.files = files
        self._file_of = {name: file for file in files for name in file.entries}
        self.entries: Mapping[str, Entry] = {name: file.entries[name] for name, file in self._file_of.items()}

    def read(self, name: str) -> np.ndarray:
        """A read-only view. Raises KeyError if there is no such tensor."""
        return self._file_of[name].read(name)

    def where(self, name: str) -> str:
        """The file and the tensor, for errors."""
        return f"{self._file_of[name].path}: {name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLayer(abc.ABC):
    """One quantized layer: `W[k, n] = (values[k, n] - zero_point[g, n]) * scale[g, n]` with g the group of row k.

    Attributes:
      shards: hold its tensors.
      stem: what their names begin with: that of the layer.
      type_name: for reports, such as "gptq int4".
      shape: (N, K).
      bits: 4 or 8.
      groups: G.
      parts: the tensors' names.
    """

    shards: Shards
    stem: str
    type_name: str
    shape: tuple[int, int]
    bits: int
    groups: int
    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises CheckpointError for what can be refused before anything is read."""
        if self.bits not in INTEGER_RANGE:
            raise CheckpointError(f"{self.where} has {self.bits} bits; expected 4 or 8. Others are not read")
        if self.groups < 1 or self.shape[1] % self.groups:
            raise CheckpointError(
                f"{self.where} has {self.groups} groups, which do not divide its {self.shape[1]} input features;"
                " expected groups of one size. Quantize the model again with a group size that divides them"
            )

    @property
    def where(self) -> str:
        """The file and the layer's first tensor, for errors."""
        return self.shards.where(self.parts[0])

    @property
    def nbytes(self) -> int:
        return sum(self.shards.entries[part].nbytes for part in self.parts)

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.groups

    @property
    def fits(self) -> bool:
        """Whether a QArray can hold it: its blocks are a multiple of 32, or the whole of K."""
        return self.groups == 1 or self.group_size % BLOCK_SIZE_MULTIPLE == 0

    @abc.abstractmethod
    def values(self, start: int, stop: int) -> np.ndarray:
        """int8 [K, stop - start], of these output channels, in the range of `bits`."""

    @abc.abstractmethod
    def scale(self, start: int, stop: int) -> np.ndarray:
        """Any float dtype, [G, stop - start]."""

    @abc.abstractmethod
    def zero_point(self, start: int, stop: int) -> np.ndarray | None:
        """int8 [G, stop - start]; None for 0 everywhere."""

    @abc.abstractmethod
    def group_of_row(self) -> np.ndarray | None:
        """int32 [K]; None for k // g."""

    def read(self, start: int = 0, stop: int | None = None) -> QArray:
        """Some output channels, or all.

        Returns:
          Numpy leaves: values int8, scale and zero point float32. A group whose scale is 0 holds zeros, with scale 1.

        Raises:
          CheckpointError: for scales that are not finite, and groups that rows do not fill.
        """
        stop = self.shape[0] if stop is None else stop
        values, scale = self.values(start, stop), self.scale(start, stop).astype(np.float32)
        if not np.isfinite(scale).all():
            raise CheckpointError(f"{self.where}: a scale of the layer is NaN or infinite; get the file again")
        zeros = self.zero_point(start, stop)
        zero_point = None if zeros is None or not zeros.any() else zeros.astype(np.float32)
        order = self._input_order()
        if order is not None:
            values = values[order]
        dead = scale == 0
        if dead.any():
            rest = np.int8(0) if zero_point is None or zeros is None else zeros[:, None]
            values = np.where(dead[:, None], rest, values.reshape(self.groups, -1, stop - start))
            scale = np.where(dead, np.float32(1), scale)
        per_channel = self.groups == 1
        return _qarray(
            values=values.reshape((self.shape[1], -1) if per_channel else (self.groups, self.group_size, -1)),
            scale=scale[0] if per_channel else scale,
            zero_point=None if zero_point is None else zero_point[0] if per_channel else zero_point,
            input_order=order,
            block_size=None if per_channel else self.group_size,
        )

    def floats(self, start: int, stop: int) -> np.ndarray:
        """These output channels dequantized: float32 [stop - start, K]."""
        return to_floats(self.read(start, stop))

    def _input_order(self) -> np.ndarray | None:
        """The rows by their groups, in their own order within each; None where they stand so already."""
        groups = self.group_of_row()
        if groups is None or self.groups == 1:
            return None
        K, G = self.shape[1], self.groups
        if groups.min() < 0 or groups.max() >= G:
            raise CheckpointError(
                f"{self.where}: g_idx holds groups from {groups.min()} to {groups.max()}; expected 0 to {G - 1}. Get"
                " the file again, or quantize the model again"
            )
        sizes = np.bincount(groups, minlength=G)
        if (sizes != self.group_size).any():
            raise CheckpointError(
                f"{self.where}: by g_idx, groups have from {sizes.min()} to {sizes.max()} of the {K} input features;"
                f" expected {self.group_size} in each of the {G}"
            )
        order = np.argsort(groups, kind="stable").astype(np.int32)
        return None if np.array_equal(order, np.arange(K)) else order


def _qarray(**leaves: Any) -> QArray:
    """Of numpy arrays, which the type knows nothing of."""
    return QArray(**leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a layer is quantized: `group_size` -1 is one group; `ordered` groups are not of rows that stand together."""

    bits: int
    group_size: int
    symmetric: bool
    ordered: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A QArray as such formats hold it: rows in W's order, integer zero points.

    Attributes:
      values: int8 [K, N].
      scale: [G, N]; float16 where that is exact, else as it was.
      zero_point: int8 [G, N], 0 where the form is symmetric.
      group_of_row: int32 [K].
      form: of all this.
    """

    values: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    group_of_row: np.ndarray
    form: Form

    @classmethod
    def of(cls, qarray: QArray, bits: int, name: str) -> "Stored":
        """Raises CheckpointError for zero points that such a format cannot hold."""
        (K, N), g = qarray.shape, qarray.block_size or qarray.shape[0]
        values = np.asarray(qarray.values).reshape(K, N)
        groups = (np.arange(K) // g).astype(np.int32)
        if qarray.input_order is not None:
            order = np.asarray(qarray.input_order)
            values, groups = _back(values, order), _back(groups, order)
        scale = np.asarray(qarray.scale).reshape(-1, N)
        real = np.zeros_like(scale) if qarray.zero_point is None else np.asarray(qarray.zero_point).reshape(-1, N)
        low, high = INTEGER_RANGE[bits]
        if (np.round(real) != real).any() or real.min() < low or real.max() > high:
            raise CheckpointError(
                f"{name} has zero points that are no integers from {low} to {high} (from a GGUF file, say); expected"
                " such, as the format holds them. Convert the model's source with another quantize type"
            )
        with np.errstate(over="ignore"):
            half = scale.astype(np.float16)
        return cls(
            values=values,
            scale=half if np.array_equal(half.astype(np.float32), scale.astype(np.float32)) else scale,
            zero_point=real.astype(np.int8),
            group_of_row=groups,
            form=Form(
                bits=bits,
                group_size=-1 if qarray.block_size is None else g,
                symmetric=qarray.zero_point is None,
                ordered=qarray.input_order is not None,
            ),
        )


def _back(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rows put where they were before they were taken in an order."""
    found = np.empty_like(rows)
    found[order] = rows
    return found


def to_floats(qarray: QArray) -> np.ndarray:
    """A QArray of numpy arrays as float32 [N, K], Hugging Face's layout."""
    w = np.asarray(qarray.values).astype(np.float32)
    if qarray.zero_point is not None:
        w -= np.expand_dims(np.asarray(qarray.zero_point), -2)
    w *= np.expand_dims(np.asarray(qarray.scale), -2)
    w = w.reshape(qarray.shape)
    return (w if qarray.input_order is None else _back(w, np.asarray(qarray.input_order))).T


def unpack(words: np.ndarray, bits: int, *, axis: int) -> np.ndarray:
    """32-bit words as the unsigned integers in them, the least significant first along `axis`: uint8.

    The axis grows by 32 / bits.
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    count = 32 // bits
    shape = [*words.shape]
    shape.insert(axis + 1, count)
    fields = np.empty(shape, np.uint8)
    for i in range(count):
        fields[(slice(None),) * (axis + 1) + (i,)] = (words >> np.uint32(bits * i)) & np.uint32(2**bits - 1)
    shape[axis : axis + 2] = [shape[axis] * count]
    return fields.reshape(shape)


def pack(values: np.ndarray, bits: int, *, axis: int) -> np.ndarray:
    """The inverse of `unpack`: unsigned integers as int32 words; `axis` is padded with zeros to whole words."""
    count = 32 // bits
    widths = [(0, 0)] * values.ndim
    widths[axis] = (0, -values.shape[axis] % count)
    padded = np.pad(values, widths)
    shape = [*padded.shape]
    shape[axis : axis + 1] = [shape[axis] // count, count]
    fields = padded.reshape(shape)
    words = np.zeros(shape[: axis + 1] + shape[axis + 2 :], np.uint32)
    for i in range(count):
        words |= fields[(slice(None),) * (axis + 1) + (i,)].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def signed(unsigned: np.ndarray, bits: int) -> np.ndarray:
    """0 … 2^bits - 1 as int8 from -2^(bits - 1) on. In place."""
    unsigned -= np.uint8(1 << (bits - 1))  # wraps, which is what int8 means by it
    return unsigned.view(np.int8)


def unsigned(values: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `signed`. Not in place."""
    return values.view(np.uint8) + np.uint8(1 << (bits - 1))


def span(start: int, stop: int, bits: int) -> tuple[slice, slice]:
    """The words that hold fields [start, stop), and where those lie in what is unpacked from them."""
    count = 32 // bits
    first = start // count
    return slice(first, math.ceil(stop / count)), slice(start - first * count, stop - first * count)


def stems(shards: Shards, suffix: str) -> list[str]:
    """Of all tensors with this last part of their names, what comes before it."""
    return [name.removesuffix(suffix) for name in shards.entries if name.endswith(suffix)]


def expect(
    shards: Shards, name: str, types: Sequence[str], shape: Sequence[int | None], *, optional: bool = False
) -> tuple[str, ...]:
    """Checks a tensor's dtype and shape (None for any size); its name, or nothing where it is optional and missing.

    Raises:
      CheckpointError: saying what was found and what was expected.
    """
    entry = shards.entries.get(name)
    if entry is None and optional:
        return ()
    if entry is None:
        stem = name.rsplit(".", 1)[0]
        beside = sorted(other for other in shards.entries if other.startswith(f"{stem}."))
        raise CheckpointError(f"there is no tensor {name} beside {', '.join(beside)}. Get the checkpoint again")
    fits = len(entry.shape) == len(shape) and all(b is None or a == b for a, b in zip(entry.shape, shape, strict=True))
    if entry.type_name not in types or not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise CheckpointError(
            f"{shards.where(name)} is {entry.type_name} {list(entry.shape)}; expected {' or '.join(types)} [{wanted}]."
            " Its quantization may be of another format, or the file damaged"
        )
    return (name,)
