"""GGUF files: one file with weights, config and tokenizer, memory-mapped; quantized blocks carried over exactly.

Owns opening and checking such a file, and the way from its tensors to Hugging Face's layout. The meaning of metadata is
`gguf_metadata`'s, that of blocks `gguf_blocks`' and, for types that are only dequantized, the gguf package's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jetserve.checkpoint.base import CheckpointError, SourceKind, TensorInfo
from jetserve.checkpoint.files import check_is_weights, check_rows, fingerprint, map_bytes, some
from jetserve.checkpoint.gguf_blocks import CARRIED_BITS, carry_over
from jetserve.checkpoint.gguf_metadata import ROPE_FACTORS, Metadata, hf_config, hugging_face_names
from jetserve.checkpoint.rope_layout import half_split_order
from jetserve.quantize.qarray import QArray
from jetserve.tokenizer import Tokenizer

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_OLDER_MAGICS = {b"lmgg": "GGML", b"fmgg": "GGMF", b"tjgg": "GGJT", b"algg": "GGLA"}
_VERSIONS = (2, 3)
_SPLIT_NAME = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_FLOAT_TYPES = {
    GGMLQuantizationType.F64,
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
}


def matches(path: Path) -> bool:
    """Whether `path` is a GGUF file, by its name or first bytes, or a folder with exactly one *.gguf."""
    if path.is_dir():
        return len(list(path.glob(f"*{SUFFIX}"))) == 1
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == SUFFIX or file.read(len(_MAGIC)) == _MAGIC


class _FileReader(gguf.GGUFReader):
    """The package's reader over a plain array: it slices for every token, and slices of a np.memmap are slow.

    A vocabulary of 49,152 is parsed in 1.8 s this way instead of 4.6.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)


class GgufReader:
    """A `CheckpointReader` over one GGUF file; see `open_reader`.

    `TensorInfo.quantized` is true for every type that is not floating point, also for those that can only be read
    dequantized, for which `quantized_bits` and `read_quantized` give None.
    """

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self._reader = reader
        by_name = {tensor.name: tensor for tensor in reader.tensors}
        factors = by_name.get(ROPE_FACTORS)
        metadata = Metadata(reader.fields, str(path))
        names = hugging_face_names(by_name, str(path))
        self._sources: dict[str, gguf.ReaderTensor] = {name: by_name[source] for name, source in names.items()}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                shape=tuple(reversed(tensor.shape.tolist())),
                type_name=tensor.tensor_type.name,
                nbytes=tensor.n_bytes,
                quantized=tensor.tensor_type not in _FLOAT_TYPES,
            )
            for name, tensor in self._sources.items()
        }
        self.hf_config: Mapping[str, Any] = hf_config(
            metadata,
            {name: info.shape for name, info in self.tensors.items()},
            None if factors is None else _to_floats(factors.data, factors.tensor_type).tolist(),
        )
        self._check_heads()

    def _check_heads(self) -> None:
        """Query and key rows must be the config's heads: they are permuted by them."""
        head_dim = self.hf_config["head_dim"]
        heads = {"q_proj": self.hf_config["num_attention_heads"], "k_proj": self.hf_config["num_key_value_heads"]}
        for name, info in self.tensors.items():
            expected = heads.get(name.split(".")[-2], 0) * head_dim
            if expected and info.shape[0] != expected:
                raise CheckpointError(
                    f"{self.path}: {self._sources[name].name} has {info.shape[0]} rows; expected {expected} for heads"
                    f" of {head_dim}. Its metadata belongs to another model"
                )

    @property
    def kind(self) -> SourceKind:
        carried = any(self.quantized_bits(name) is not None for name in self.tensors)
        return SourceKind.QUANTIZED if carried else SourceKind.FLOAT

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows in Hugging Face's order, in the file's own bytes or dtype; a view unless rows must be permuted."""
        tensor = self._sources[name]
        raw = map_bytes(self.path, tensor.data_offset, tensor.data_offset + tensor.n_bytes)
        data = raw.view(tensor.data.dtype).reshape(tensor.data.shape)
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            return data[half_split_order(len(data), self.hf_config["head_dim"])[start:stop]]
        return data[start:stop]

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        check_rows(name, start, stop, self.tensors[name].shape[0])
        return _to_floats(self._rows(name, start, stop), self._sources[name].tensor_type)

    def read_quantized(self, name: str) -> QArray | None:
        if self.quantized_bits(name) is None:
            return None
        rows = self._rows(name, 0, self.tensors[name].shape[0])
        return carry_over(rows, self._sources[name].tensor_type, name=f"{self.path}: {self._sources[name].name}")

    def quantized_bits(self, name: str) -> int | None:
        if len(self.tensors[name].shape) != 2:
            return None
        return CARRIED_BITS.get(self._sources[name].tensor_type)

    def tokenizer(self) -> Tokenizer | None:
        if "tokenizer.ggml.model" not in self._reader.fields:
            return None
        return Tokenizer.from_gguf(self._reader)

    def fingerprint(self) -> str:
        return fingerprint([self.path])


def open_reader(path: Path) -> GgufReader:
    """Opens a GGUF file, or the only one in a folder.

    Raises:
      CheckpointError: if it is damaged, split over several files, of another version or byte order, or holds a model or
        tensor type that is not supported.
    """
    file = _only_file(path) if path.is_dir() else path
    check_is_weights(file)
    _check_head(file)
    try:
        reader = _FileReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f"{file} ({file.stat().st_size} bytes) is truncated or damaged: {error}. Get the file again"
        ) from error
    _check_not_split(file, reader)
    _check_tensors(file, reader)
    return GgufReader(file, reader)


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) != 1:
        raise CheckpointError(
            f"{folder} has {len(files)} {SUFFIX} files ({some(file.name for file in files)}); expected one. Give the"
            " path of the file"
        )
    return files[0]


def _check_head(path: Path) -> None:
    """Magic, version and byte order, which the package's reader tells apart less clearly."""
    with path.open("rb") as file:
        magic, version = file.read(4), file.read(4)
    if magic in _OLDER_MAGICS:
        raise CheckpointError(
            f"{path} is a {_OLDER_MAGICS[magic]} file, which GGUF replaced in 2023; convert the model again with"
            " llama.cpp"
        )
    if magic != _MAGIC:
        raise CheckpointError(f"{path} starts with {magic!r}; expected {_MAGIC!r}. It is not a GGUF file")
    little, big = int.from_bytes(version, "little"), int.from_bytes(version, "big")
    if len(version) == 4 and big in (1, *_VERSIONS):
        raise CheckpointError(f"{path} is a big-endian GGUF file; expected a little-endian one. Convert it again")
    if little not in _VERSIONS:
        raise CheckpointError(
            f"{path} is a GGUF file of version {little}; expected 2 or 3. Convert the model again with llama.cpp"
        )


def _check_not_split(path: Path, reader: gguf.GGUFReader) -> None:
    field = reader.fields.get("split.count")
    name = _SPLIT_NAME.search(path.name)
    count = int(field.contents()) if field is not None else int(name[1]) if name else 1
    if count > 1:
        raise CheckpointError(
            f"{path} is one of {count} parts of a split GGUF file; expected a whole one. Merge the parts:"
            f" llama-gguf-split --merge {path.name} merged.gguf"
        )


def _check_tensors(path: Path, reader: gguf.GGUFReader) -> None:
    """Types that can be read, known at open rather than halfway through; tensors that do not overlap."""
    names_of_type: dict[GGMLQuantizationType, list[str]] = {}
    for tensor in reader.tensors:
        names_of_type.setdefault(tensor.tensor_type, []).append(tensor.name)
    for tensor_type, names in names_of_type.items():
        if not _is_readable(tensor_type):
            raise CheckpointError(
                f"{path} has {len(names)} tensors of type {tensor_type.name} ({some(names)}), which cannot be"
                " dequantized. Use a file of another type, such as Q4_1 or Q8_0"
            )
    position = 0
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
        if tensor.data_offset < position:
            raise CheckpointError(f"{path}: {tensor.name} overlaps the tensor before it; get the file again")
        position = tensor.data_offset + tensor.n_bytes


def _is_readable(tensor_type: GGMLQuantizationType) -> bool:
    if tensor_type in _FLOAT_TYPES:
        return True
    _, block_bytes = GGML_QUANT_SIZES[tensor_type]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), tensor_type)
    except NotImplementedError:
        return False
    return True


def _to_floats(data: np.ndarray, tensor_type: GGMLQuantizationType) -> np.ndarray:
    """Floats in their own dtype (float64 as float32), everything else dequantized to float32."""
    if tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return data
    if tensor_type == GGMLQuantizationType.F64:
        return data.astype(np.float32)
    if tensor_type == GGMLQuantizationType.BF16:
        return data.view(ml_dtypes.bfloat16)
    return gguf.quants.dequantize(data, tensor_type)
