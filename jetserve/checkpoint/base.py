"""What every reader of a checkpoint format offers: Hugging Face names and layouts, whatever the file holds.

Owns the protocol and its plain types. Knows nothing of jax devices, models or of any one format.
"""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jetserve.quantize.qarray import QArray
from jetserve.tokenizer import Tokenizer


class CheckpointError(ValueError):
    """A checkpoint cannot be read: says which file, what was found, what was expected and what to do."""


class SourceKind(enum.Enum):
    """What a source holds, which decides what `--quantize_type` unset means: `keep` or `none`."""

    FLOAT = "float"
    QUANTIZED = "quantized"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a source before it is read.

    `shape` is the logical one in Hugging Face's layout ([out features, in features] for a linear layer), whatever the
    packing; `type_name` is the source's own ("BF16", "Q4_1"); `nbytes` what it takes in the file.
    """

    shape: tuple[int, ...]
    type_name: str
    nbytes: int
    quantized: bool = False


class CheckpointReader(Protocol):
    """An open checkpoint. Reading one tensor never holds another in memory."""

    path: Path
    hf_config: Mapping[str, Any]
    """The model's configuration with Hugging Face's keys, `model_type` among them."""
    tensors: Mapping[str, TensorInfo]
    """Every weight, under its Hugging Face name."""

    @property
    def kind(self) -> SourceKind: ...

    def read(self, name: str) -> np.ndarray:
        """The tensor in floating point, in Hugging Face's layout; quantized ones dequantized to float32.

        Floats keep their dtype (bfloat16 as `ml_dtypes.bfloat16`). May be a read-only view of a memory map.

        Raises:
          CheckpointError: if the file is damaged.
          KeyError: if there is no such tensor.
        """
        ...

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of `read(name)`, without reading the rest where the format allows."""
        ...

    def read_quantized(self, name: str) -> QArray | None:
        """The source's own quantization carried over exactly, or None if it has none that a QArray can hold.

        Leaves are numpy arrays in the matmul's form ([K, N] or [G, g, N], K in features, N out features): values int8
        even for 4 bits (see `quantized_bits`), scale and zero point float32, an input order int32.
        """
        ...

    def quantized_bits(self, name: str) -> int | None:
        """4 or 8 where `read_quantized` returns an array, else None."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that comes with the checkpoint, or None if there is none beside it."""
        ...

    def fingerprint(self) -> str:
        """A hexadecimal digest that changes whenever the source does: of names, sizes and the files' heads."""
        ...
