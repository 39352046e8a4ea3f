"""Meta's own Llama folders: `consolidated.NN.pth`, one file for every chip of the original set-up, and `params.json`.

Owns along which axis the files' parts of a weight are joined. What a .pth is belongs to `torch_file`, names and config
to `meta_llama`.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jetserve.checkpoint.base import CheckpointError, SourceKind, TensorInfo
from jetserve.checkpoint.files import check_rows, fingerprint, listing, read_json, side_files, some, tokenizer_in
from jetserve.checkpoint.meta_llama import EMBEDDING, PARAMS_FILE, hf_config, hugging_face_names, size
from jetserve.checkpoint.rope_layout import half_split_order
from jetserve.checkpoint.torch_file import TorchFile
from jetserve.quantize.qarray import QArray
from jetserve.tokenizer import Tokenizer

_PATTERN = "consolidated.*.pth"
_NAME = re.compile(r"consolidated\.(\d\d)\.pth")
_ROW_PARALLEL = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
REPLICA_TOLERANCE = 1e-6
"""Between the files' copies of a norm, absolute; those of some early releases differ in their last bits."""


def matches(path: Path) -> bool:
    """Whether `path` is a folder with Meta's files."""
    return path.is_dir() and any(path.glob(_PATTERN))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Joined:
    """One weight: its name in the files, and the axis along which their parts are joined (None: all hold all of it)."""

    source: str
    axis: int | None
    shape: tuple[int, ...]


class MetaReader:
    """A `CheckpointReader` over Meta's files; see `open_reader`."""

    def __init__(self, path: Path, params: Mapping[str, Any], files: list[TorchFile]) -> None:
        self.path = path
        self._files = files
        names = hugging_face_names(files[0].tensors, str(path))
        columns = size(params, "dim", str(path))
        self._joined = {name: _join(path, name, source, columns, files) for name, source in names.items()}
        shapes = {name: joined.shape for name, joined in self._joined.items()}
        self.hf_config: Mapping[str, Any] = hf_config(params, shapes, str(path))
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                shape=joined.shape,
                type_name=files[0].tensors[joined.source].dtype.name,
                nbytes=sum(file.tensors[joined.source].nbytes for file in files),
            )
            for name, joined in self._joined.items()
        }

    @property
    def kind(self) -> SourceKind:
        return SourceKind.FLOAT

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        joined = self._joined[name]
        check_rows(name, start, stop, joined.shape[0])
        parts = [file.read(joined.source) for file in self._files]
        if joined.axis is None:
            self._check_replicas(joined.source, parts)
            return parts[0][start:stop]
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            return _take(parts, half_split_order(joined.shape[0], self.hf_config["head_dim"])[start:stop])
        if joined.axis == 1:
            return _concatenated([part[start:stop] for part in parts], axis=1)
        height = len(parts[0])
        cuts = [(max(start - i * height, 0), min(stop - i * height, height)) for i in range(len(parts))]
        return _concatenated([part[a:b] for part, (a, b) in zip(parts, cuts, strict=True) if a < b] or [parts[0][:0]])

    def _check_replicas(self, source: str, parts: list[np.ndarray]) -> None:
        for file, part in zip(self._files[1:], parts[1:], strict=True):
            if not np.allclose(part.astype(np.float32), parts[0].astype(np.float32), rtol=0, atol=REPLICA_TOLERANCE):
                raise CheckpointError(
                    f"{source} in {file.path} differs from that in {self._files[0].path.name}; expected the same in all"
                    " files. They belong to different models"
                )

    def read_quantized(self, name: str) -> QArray | None:
        if name not in self.tensors:
            raise KeyError(name)
        return None

    def quantized_bits(self, name: str) -> int | None:
        if name not in self.tensors:
            raise KeyError(name)
        return None

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_in(self.path)

    def fingerprint(self) -> str:
        return fingerprint([self.path / PARAMS_FILE, *(file.path for file in self._files), *side_files(self.path)])


def open_reader(path: Path) -> MetaReader:
    """Opens a folder with `consolidated.00.pth`, `consolidated.01.pth`, … and `params.json`.

    Raises:
      CheckpointError: if a file is missing, damaged, of another model, or its pickle asks for anything but tensors.
    """
    found = sorted(path.glob(_PATTERN))
    numbers = [int(match[1]) for file in found if (match := _NAME.fullmatch(file.name))]
    if not found or len(numbers) != len(found) or numbers != list(range(len(found))):
        raise CheckpointError(
            f"{path} holds {some([file.name for file in found], 20) or listing(path)}; expected consolidated.00.pth,"
            " consolidated.01.pth and so on without a gap. Get the missing files"
        )
    params = read_json(path / PARAMS_FILE)
    files = [TorchFile(file) for file in found]
    for file in files[1:]:
        difference = file.tensors.keys() ^ files[0].tensors.keys()
        if difference:
            raise CheckpointError(
                f"{file.path} and {files[0].path.name} do not hold the same tensors ({some(difference)} in one of"
                " them); expected a part of each in every file"
            )
    return MetaReader(path, params, files)


def _join(path: Path, name: str, source: str, embedding_columns: int, files: list[TorchFile]) -> _Joined:
    """How the files' parts of a weight make up the whole."""
    shapes = {file.tensors[source].shape for file in files}
    dtypes = {file.tensors[source].dtype for file in files}
    shape = files[0].tensors[source].shape
    expected_rank = 1 if name.endswith("norm.weight") else 2
    if len(shapes) > 1 or len(dtypes) > 1 or len(shape) != expected_rank:
        raise CheckpointError(
            f"{path}: {source} has the shapes {sorted(shapes)} and dtypes {some(dtype.name for dtype in dtypes)}"
            f" in {len(files)} files; expected one of each, with {expected_rank} axes"
        )
    if expected_rank == 1:
        return _Joined(source=source, axis=None, shape=shape)
    axis = 1 if name.endswith(_ROW_PARALLEL) else 0
    if name == EMBEDDING:
        # Llama 2 splits it over the embedding axis, Llama 3 over the vocabulary.
        axis = 0 if shape[1] == embedding_columns else 1
    whole = (shape[0] * len(files), shape[1]) if axis == 0 else (shape[0], shape[1] * len(files))
    if name == EMBEDDING and whole[1] != embedding_columns:
        raise CheckpointError(
            f"{path}: {source} is {list(shape)} in each of {len(files)} files, which makes {list(whole)}; expected"
            f" {embedding_columns} columns, the dim in {PARAMS_FILE}. A file is missing, or it belongs to another model"
        )
    return _Joined(source=source, axis=axis, shape=whole)


def _concatenated(parts: list[np.ndarray], axis: int = 0) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


def _take(parts: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """The given rows of parts that are stacked on axis 0."""
    height = len(parts[0])
    out = np.empty((len(rows), *parts[0].shape[1:]), parts[0].dtype)
    for i, part in enumerate(parts):
        here = rows // height == i
        out[here] = part[rows[here] - i * height]
    return out
