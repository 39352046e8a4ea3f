"""Converted checkpoints: a folder that describes itself, so that loading it takes no flags.

  jetserve.json        the manifest: format version, model config, how every tensor is quantized, where it came from
  weights/part-00000   Orbax PyTree items, many tensors in each: Hugging Face name -> {values, scale, zero_point,
                       input_order} of which the last two may be missing, or {array} for floats
  tokenizer/           as `Tokenizer.save` writes it

Matrices are in the matmul's form ([K, N] or [G, g, N]); int4 stands in int8 containers, which Orbax compresses to less
than four bits a weight. Owns the manifest and reading; `native_writer` writes. Knows nothing of models.

Orbax keeps its arrays with TensorStore (OCDBT, Zarr), and they are read by that here: importing Orbax and restoring
hundreds of small arrays by it takes about a second longer, a fifth of what a warm server may take to start.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore

from jetserve.checkpoint.base import CheckpointError
from jetserve.quantize.qarray import INTEGER_RANGE, QArray, QuantizationConfig
from jetserve.quantize.recipe import RULES, TYPE_NAMES
from jetserve.quantize.report import TensorReport, WeightReport
from jetserve.tokenizer import Tokenizer

MANIFEST = "jetserve.json"
WEIGHTS = "weights"
TOKENIZER = "tokenizer"
PARTIAL_SUFFIX = ".partial"
FORMAT = "jetserve"
FORMAT_VERSION = 1

READ_AHEAD = 64 * 2**20
"""Bytes of arrays that are being read and decompressed while an earlier one is put to use."""
INDEX_CACHE_BYTES = 16 * 2**20

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


def is_native(path: Path) -> bool:
    """Whether `path` is a folder that a conversion wrote, finished or not."""
    return (path / MANIFEST).is_file() or (path.name.endswith(PARTIAL_SUFFIX) and (path / WEIGHTS).is_dir())


def part_folder(path: Path, number: int) -> Path:
    return path / WEIGHTS / f"part-{number:05}"


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _sizes(folder: Path) -> tuple[int, int]:
    """How many files a part has, and their bytes together."""
    sizes = [file.stat().st_size for file in _files(folder)]
    return len(sizes), sum(sizes)


def measure(folder: Path) -> PartEntry:
    """A part as it is on disk, read in full."""
    digest = hashlib.sha256()
    for path in _files(folder):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    files, size = _sizes(folder)
    return PartEntry(files=files, bytes=size, sha256=digest.hexdigest())


def _read_manifest(path: Path) -> Manifest:
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


class NativeCheckpoint:
    """An open converted checkpoint. Opening reads the manifest and checks that every part has its files in full.

    Raises:
      CheckpointError: for a manifest that is damaged or newer than this program, and for parts missing or cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _read_manifest(path)
        self.hf_config: Mapping[str, Any] = self.manifest.hf_config
        self.tensors: dict[str, TensorEntry] = {}
        self._checked: set[int] = set()
        for entry in self.manifest.tensors:
            if entry.name in self.tensors:
                raise CheckpointError(f"{path / MANIFEST} lists {entry.name} twice; {CONVERT_AGAIN}")
            if entry.part >= len(self.manifest.parts):
                raise CheckpointError(
                    f"{path / MANIFEST} places {entry.name} in part {entry.part}, but lists"
                    f" {len(self.manifest.parts)} parts; {CONVERT_AGAIN}"
                )
            self.tensors[entry.name] = entry
        for number, expected in enumerate(self.manifest.parts):
            folder = part_folder(path, number)
            if not folder.is_dir():
                raise CheckpointError(f"{folder} is missing; copy the checkpoint again, or {CONVERT_AGAIN}")
            files, size = _sizes(folder)
            if (files, size) != (expected.files, expected.bytes):
                raise CheckpointError(
                    f"{folder} has {files} files of {size} bytes together; expected {expected.files} of"
                    f" {expected.bytes}: copy the checkpoint again, or {CONVERT_AGAIN}"
                )

    @property
    def report(self) -> WeightReport:
        return WeightReport(tensors=tuple(entry.report for entry in self.manifest.tensors))

    def tokenizer(self) -> Tokenizer | None:
        """None if the source had none."""
        folder = self.path / TOKENIZER
        return Tokenizer.from_folder(folder) if folder.is_dir() else None

    def read(self) -> Iterator[tuple[TensorEntry, QArray | np.ndarray]]:
        """Every tensor in the manifest's order, in host memory, with int4 values in int8 containers.

        Holds little more than `READ_AHEAD` bytes and the largest tensor at once.

        Raises:
          CheckpointError: if a part is damaged, or holds other arrays than the manifest says.
        """
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": INDEX_CACHE_BYTES}})
        started: collections.deque[tuple[TensorEntry, dict[str, tensorstore.Future]]] = collections.deque()
        ahead = 0
        for entry in self.manifest.tensors:
            self._check_part(entry.part)
            started.append((entry, _start(self.path, entry, context)))
            ahead += entry.nbytes
            while ahead > READ_AHEAD:
                ahead -= started[0][0].nbytes
                yield self._take(*started.popleft())
        while started:
            yield self._take(*started.popleft())

    def _take(
        self, entry: TensorEntry, reads: Mapping[str, tensorstore.Future]
    ) -> tuple[TensorEntry, QArray | np.ndarray]:
        return entry, _finish(self.path, entry, reads)

    def read_tensor(self, name: str) -> QArray | np.ndarray:
        """One of them. Raises as `read` does."""
        entry = self.tensors[name]
        self._check_part(entry.part)
        return read_tensor(self.path, entry)

    def _check_part(self, number: int) -> None:
        if number in self._checked:
            return
        folder = part_folder(self.path, number)
        if (found := measure(folder)) != self.manifest.parts[number]:
            raise CheckpointError(
                f"{folder} is damaged: its files have SHA-256 {found.sha256}; expected"
                f" {self.manifest.parts[number].sha256}. Copy the checkpoint again, or {CONVERT_AGAIN}"
            )
        self._checked.add(number)


def read_tensor(path: Path, entry: TensorEntry) -> QArray | np.ndarray:
    """One tensor of a checkpoint's folder, finished or not. Raises CheckpointError if it is damaged."""
    return _finish(path, entry, _start(path, entry, tensorstore.Context()))


def _start(path: Path, entry: TensorEntry, context: tensorstore.Context) -> dict[str, tensorstore.Future]:
    folder = part_folder(path, entry.part)
    reads = {}
    for leaf, expected in entry.leaves.items():
        with _damage_explained(folder, entry.name):
            array = tensorstore.open(
                {
                    "driver": "zarr",
                    "kvstore": {
                        "driver": "ocdbt",
                        "base": {"driver": "file", "path": f"{folder.absolute()}/"},
                        "path": f"{entry.name}.{leaf}/",
                    },
                },
                open=True,
                read=True,
                context=context,
            ).result()
            found = tuple(array.shape), array.dtype.numpy_dtype
            if found != expected:
                raise ValueError(f"its {leaf} are {found[1]} {found[0]}; expected {expected[1]} {expected[0]}")
            reads[leaf] = array.read()
    return reads


def _finish(path: Path, entry: TensorEntry, reads: Mapping[str, tensorstore.Future]) -> QArray | np.ndarray:
    with _damage_explained(part_folder(path, entry.part), entry.name):
        leaves = {leaf: read.result() for leaf, read in reads.items()}
    return QArray(**leaves, block_size=entry.block_size) if entry.bits else leaves["array"]


@contextlib.contextmanager
def _damage_explained(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # the latter for all that TensorStore finds wrong
        raise CheckpointError(
            f"{name} cannot be read from {folder}: {error}. Copy the checkpoint again, or {CONVERT_AGAIN}"
        ) from error
