"""The manifest of a converted checkpoint, `jetserve.json`: what it says, and reading it strictly.

Owns its fields and version. Knows nothing of where the arrays lie, nor of how they are read (`native`).
"""

import dataclasses
import functools
import json
import math
import typing
from pathlib import Path
from types import UnionType
from typing import Any

import jax.numpy as jnp

from jetserve.checkpoint.base import CheckpointError
from jetserve.quantize.qarray import INTEGER_RANGE, QuantizationConfig
from jetserve.quantize.recipe import RULES, TYPE_NAMES
from jetserve.quantize.report import TensorReport

MANIFEST = "jetserve.json"
FORMAT = "jetserve"
FORMAT_VERSION = 1
PARTIAL_SUFFIX = ".partial"
"""Of a folder whose conversion has not ended."""

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
CONVERT_AGAIN = "convert it from its source again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """What the manifest says of one tensor.

    Attributes:
      name: its Hugging Face name.
      part: the number of the part that holds it.
      shape: a matrix [K, N] or a vector.
      dtype: of the scale if it is quantized, else of the array.
      bits: 4 or 8; None for floats, as are the fields below.
      block_size: None for per-channel.
      asked_block_size: where another one was asked for.
      zero_point: "none", "integer" or "real".
      input_order: whether rows are held in another order than that of the layer's inputs (`QArray.input_order`).
      error: relative Frobenius error of rounding; None where the source's own quantization was carried over.
      output_error, fallback: see `TensorReport`.
      dequantized_from: the source's type, where that was quantized but could not be carried over.
    """

    name: str
    part: int
    shape: list[int]
    dtype: str
    bits: int | None = None
    block_size: int | None = None
    asked_block_size: int | None = None
    zero_point: str | None = None
    input_order: bool = False
    error: float | None = None
    output_error: float | None = None
    fallback: str | None = None
    dequantized_from: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an entry that contradicts itself."""
        if self.bits is None:
            ok = (
                len(self.shape) in (1, 2)
                and (self.block_size, self.zero_point) == (None, None)
                and not self.input_order
            )
        else:
            ok = len(self.shape) == 2 and self.bits in INTEGER_RANGE and self.zero_point in ("none", "integer", "real")
            ok = ok and (self.block_size is None or (self.block_size > 0 and self.shape[0] % self.block_size == 0))
        ok = ok and self.dtype in FLOAT_DTYPES and self.part >= 0 and all(size > 0 for size in self.shape)
        if not ok:
            raise ValueError(f"{self.name} is described as {self}, which contradicts itself")

    @property
    def config(self) -> QuantizationConfig | None:
        """How it is quantized; None for floats."""
        if self.bits is None:
            return None
        return QuantizationConfig(bits=self.bits, block_size=self.block_size, symmetric=self.zero_point == "none")

    @property
    def leaves(self) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        """Shape and stored dtype of each array."""
        if self.bits is None:
            return {"array": (tuple(self.shape), jnp.dtype(self.dtype))}
        K, N = self.shape
        g = self.block_size
        values: tuple[int, ...] = (K, N) if g is None else (K // g, g, N)
        side: tuple[int, ...] = (N,) if g is None else (K // g, N)
        leaves = {"values": (values, jnp.dtype(jnp.int8)), "scale": (side, jnp.dtype(self.dtype))}
        if self.zero_point != "none":
            leaves["zero_point"] = leaves["scale"]
        if self.input_order:
            leaves["input_order"] = ((K,), jnp.dtype(jnp.int32))
        return leaves

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays as stored, before compression."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.leaves.values())

    @property
    def report(self) -> TensorReport:
        config = self.config
        bits = sum(
            math.prod(shape) * (self.bits if name == "values" and self.bits else dtype.itemsize * 8)
            for name, (shape, dtype) in self.leaves.items()
        )
        return TensorReport(
            name=self.name,
            type_name=self.dtype if config is None else config.name,
            weights=math.prod(self.shape),
            bits=bits,
            block_size=self.block_size,
            asked_block_size=self.asked_block_size,
            error=self.error,
            output_error=self.output_error,
            fallback=self.fallback,
            dequantized_from=self.dequantized_from,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartEntry:
    """One Orbax item, with the number, size and SHA-256 of its files, by which a damaged copy is recognized."""

    files: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """What a checkpoint was converted from."""

    name: str
    kind: str
    fingerprint: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationEntry:
    """How the weights were asked to be quantized: `type` is one of `recipe.TYPE_NAMES`, the others its settings.

    Where a recipe file decided, `type` is `recipe.RULES`, `rules` what stood in it as JSON, and the settings those of
    the tensors that it left.
    `method`: name and settings of the method, the digest of its calibration tokens among them; None is plain rounding.
    """

    type: str
    block_size: int | None
    symmetric: bool | None
    rules: str | None = None
    method: dict | None = None

    def __post_init__(self) -> None:
        if self.type not in (*TYPE_NAMES, RULES):
            raise ValueError(f"quantization type is {self.type!r}; expected one of {', '.join(TYPE_NAMES)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `jetserve.json`."""

    format: str
    format_version: int
    package_version: str
    hf_config: dict
    quantization: QuantizationEntry
    source: SourceEntry
    parts: list[PartEntry]
    tensors: list[TensorEntry]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def from_json(cls: type, data: Any, where: str) -> Any:
    """An instance of a dataclass from parsed JSON, refusing missing and unknown keys and values of another type."""
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} is {type(data).__name__}; expected an object. The file is damaged")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if data.keys() - fields.keys() or required - data.keys():
        raise CheckpointError(
            f"{where} has the keys {sorted(data)}; expected {sorted(fields)}. The file is damaged: {CONVERT_AGAIN}"
        )
    hints = _hints(cls)
    try:
        return cls(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in data.items()})
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}. The file is damaged: {CONVERT_AGAIN}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) is list and isinstance(value, list):
        return [_value(typing.get_args(hint)[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    allowed = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if not any(type(value) is kind for kind in allowed):
        raise CheckpointError(f"{where} is {value!r}; expected {hint}. The file is damaged: {CONVERT_AGAIN}")
    return value


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in a folder.

    Raises:
      CheckpointError: if it is damaged, of a newer version, or the conversion has not ended.
    """
    file = path / MANIFEST
    if path.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(
            f"{path} is an unfinished conversion; run the same conversion again, and it will go on from there to make"
            f" {path.name.removesuffix(PARTIAL_SUFFIX)}"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}); the file is damaged: {CONVERT_AGAIN}") from error
    found = (data.get("format"), data.get("format_version")) if isinstance(data, dict) else (None, None)
    if found[0] != FORMAT or not isinstance(found[1], int) or found[1] < 1:
        raise CheckpointError(
            f"{file} is of format {found[0]!r}, version {found[1]!r}; expected {FORMAT!r}, version {FORMAT_VERSION}"
        )
    if found[1] > FORMAT_VERSION:
        raise CheckpointError(
            f"{file} is of format version {found[1]}, made by jetserve {data.get('package_version')}; this jetserve"
            f" reads up to version {FORMAT_VERSION}: install a newer one, or {CONVERT_AGAIN}"
        )
    return from_json(Manifest, data, str(file))
