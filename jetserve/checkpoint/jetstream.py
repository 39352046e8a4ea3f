"""jetstream-pytorch's folders: one `model.safetensors` in Meta's names, float or quantized, and `params.json`.

Owns how that project stores quantized weights (its `layers.py` and `quantize.py`): int8 containers also for 4 bits, a
`weight_scaler` beside a `weight`, zero points multiplied by the scale. Names and config are `meta_llama`'s.

Letters: N output channels, K contracted axis, G blocks of g along K, V vocabulary, D embedding.
"""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jetserve.checkpoint.base import CheckpointError, SourceKind, TensorInfo
from jetserve.checkpoint.files import check_rows, fingerprint, read_json, side_files, some, tokenizer_in
from jetserve.checkpoint.meta_llama import EMBEDDING, PARAMS_FILE, hf_config, hugging_face_names
from jetserve.checkpoint.rope_layout import half_split_order
from jetserve.checkpoint.safetensors_file import SafetensorsFile
from jetserve.quantize.qarray import INTEGER_RANGE, QUANTIZE_TYPES, QArray, QuantizationConfig
from jetserve.tokenizer import Tokenizer

NAME = "jetstream"
WEIGHTS_FILE = "model.safetensors"

_FLOAT_TYPES = ("F32", "F16", "BF16")
_SCALER, _ZERO_POINT = "weight_scaler", "zero_point"


def matches(path: Path) -> bool:
    """Whether `path` is a folder that jetstream-pytorch's converter wrote."""
    files = (path / WEIGHTS_FILE, path / PARAMS_FILE)
    return all(file.is_file() for file in files) and not (path / "config.json").is_file()


class _Form(enum.Enum):
    """How a weight is stored."""

    FLOAT = "float"
    PER_CHANNEL = "per_channel"  # int8 [N, K], scaler [N]
    BLOCKWISE = "blockwise"  # int8 [G, g, N], scaler [G, N]
    EMBEDDING = "embedding"  # int8 [V, D], scaler [D]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    """One weight: its name and those of what belongs to it in the file, and its shape in Hugging Face's layout."""

    source: str
    form: _Form
    shape: tuple[int, ...]
    scaler: str | None = None
    zero_point: str | None = None


class JetstreamReader:
    """A `CheckpointReader` over jetstream-pytorch's files; see `open_reader`.

    The embedding has a scale for every element of D, shared by all tokens, which no QArray [D, V] can hold: it is
    `quantized`, but `read_quantized` gives None for it and `read` dequantizes it.
    """

    def __init__(self, path: Path, params: Mapping[str, Any], file: SafetensorsFile) -> None:
        self.path = path
        self._file = file
        self._stored = _classify(file)
        shapes = {name: stored.shape for name, stored in self._stored.items()}
        self.hf_config: Mapping[str, Any] = hf_config(params, shapes, str(path))
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                shape=stored.shape,
                type_name=file.entries[stored.source].type_name,
                nbytes=sum(file.entries[part].nbytes for part in _parts(stored)),
                quantized=stored.form is not _Form.FLOAT,
            )
            for name, stored in self._stored.items()
        }
        self._bits = 8

    @property
    def kind(self) -> SourceKind:
        return SourceKind.QUANTIZED if self._quantized_linears() else SourceKind.FLOAT

    def _quantized_linears(self) -> list[str]:
        forms = (_Form.PER_CHANNEL, _Form.BLOCKWISE)
        return sorted(name for name, stored in self._stored.items() if stored.form in forms)

    def decide_bits(self, quantize_type: str | None) -> None:
        """Settles whether the linear layers are int4 or int8: both stand in int8 containers.

        Raises:
          CheckpointError: if the file contradicts the type, or cannot tell and no type is given.
        """
        linears = self._quantized_linears()
        named = quantize_type in QUANTIZE_TYPES
        if not linears:
            return
        if not named or quantize_type is None:
            if all(self._fits_int4(name) for name in linears):
                if quantize_type == "none":
                    return  # dequantized, 4 bits and 8 are the same
                raise CheckpointError(
                    f"{self._file.path} holds {len(linears)} quantized weights, all within -8 and 7: the file does not"
                    " tell whether they are int4 or int8. Say so: --quantize_type=int4_per_channel, int4_blockwise, …"
                )
            return
        config = QuantizationConfig.from_name(quantize_type)
        form = _Form.PER_CHANNEL if config.block_size is None else _Form.BLOCKWISE
        others = [name for name in linears if self._stored[name].form is not form]
        if others:
            raise CheckpointError(
                f"{self._file.path} is quantized {self._stored[others[0]].form.value} ({some(others)}), but the"
                f" quantize type is {quantize_type}; expected one that agrees, or a float checkpoint to quantize"
            )
        # One weight proves it: the largest value of an int8 channel is 127. The others are checked as they are read.
        if config.bits == 4 and not self._fits_int4(linears[0]):
            raise self._not_int4(linears[0])
        self._bits = config.bits

    def _fits_int4(self, name: str) -> bool:
        low, high = INTEGER_RANGE[4]
        values = self._file.read(self._stored[name].source)
        return bool(values.min() >= low and values.max() <= high)

    def _not_int4(self, name: str) -> CheckpointError:
        stored = self._stored[name]
        values = self._file.read(stored.source)
        return CheckpointError(
            f"{self._file.path}: {stored.source} holds values from {values.min()} to {values.max()}, so that it is"
            f" int8, but the quantize type is int4; give --quantize_type=int8_{stored.form.value}"
        )

    def _rows(self, name: str, start: int, stop: int) -> slice | np.ndarray:
        """Where rows of Hugging Face's layout stand in the file's."""
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            return half_split_order(self._stored[name].shape[0], self.hf_config["head_dim"])[start:stop]
        return slice(start, stop)

    def _float32(self, name: str | None) -> np.ndarray | None:
        return None if name is None else self._file.read(name).astype(np.float32)

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        stored = self._stored[name]
        check_rows(name, start, stop, stored.shape[0])
        rows = self._rows(name, start, stop)
        values = self._file.read(stored.source)
        if stored.form is _Form.FLOAT:
            return values[rows]
        scale, offset = self._scale_and_offset(stored)
        if stored.form is _Form.BLOCKWISE:
            w = values[..., rows] * scale[:, None, rows]
            w = w if offset is None else w - offset[:, None, rows]
            return w.reshape(stored.shape[1], -1).T
        if stored.form is _Form.PER_CHANNEL:
            scale, offset = scale[rows, None], None if offset is None else offset[rows, None]
        w = values[rows] * scale
        return w if offset is None else w - offset

    def read_quantized(self, name: str) -> QArray | None:
        stored = self._stored[name]
        if stored.form in (_Form.FLOAT, _Form.EMBEDDING):
            return None
        if self._bits == 4 and not self._fits_int4(name):
            raise self._not_int4(name)
        rows = self._rows(name, 0, stored.shape[0])
        values: Any = self._file.read(stored.source)
        scale: Any
        scale, offset = self._scale_and_offset(stored)
        zero_point: Any = None if offset is None else (offset / scale)[..., rows]
        block_size = None
        if stored.form is _Form.BLOCKWISE:
            values, block_size = values[..., rows], values.shape[1]
        else:
            values = np.ascontiguousarray(values[rows].T)
        return QArray(values=values, scale=scale[..., rows], zero_point=zero_point, block_size=block_size)

    def _scale_and_offset(self, stored: _Stored) -> tuple[np.ndarray, np.ndarray | None]:
        """The scaler and the zero point, which is one times the scale: W = scale * values - offset."""
        scale, offset = self._float32(stored.scaler), self._float32(stored.zero_point)
        assert scale is not None
        finite = np.isfinite(scale).all() and (offset is None or np.isfinite(offset).all())
        if not finite or not scale.all():
            raise CheckpointError(
                f"{self._file.path}: {stored.scaler} or its zero point holds values that are zero or not finite;"
                " expected usable scales. Convert the checkpoint again"
            )
        return scale, offset

    def quantized_bits(self, name: str) -> int | None:
        return self._bits if self._stored[name].form in (_Form.PER_CHANNEL, _Form.BLOCKWISE) else None

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_in(self.path)

    def fingerprint(self) -> str:
        return fingerprint([self.path / PARAMS_FILE, self._file.path, *side_files(self.path)])


def open_reader(path: Path, quantize_type: str | None = None) -> JetstreamReader:
    """Opens a folder with `model.safetensors` and `params.json`.

    Args:
      path: of the folder.
      quantize_type: what the weights are said to be. One of `QUANTIZE_TYPES` must agree with a quantized file; anything
        else says nothing, which is refused where int4 and int8 cannot be told apart ("none", for floats, excepted).

    Raises:
      CheckpointError: if a file is missing or damaged, of another model than Llama, or contradicts the type.
    """
    file = SafetensorsFile(path / WEIGHTS_FILE)
    reader = JetstreamReader(path, read_json(path / PARAMS_FILE), file)
    reader.decide_bits(quantize_type)
    return reader


def _parts(stored: _Stored) -> list[str]:
    return [part for part in (stored.source, stored.scaler, stored.zero_point) if part is not None]


def _classify(file: SafetensorsFile) -> dict[str, _Stored]:
    """Every weight with what belongs to it, by its Hugging Face name."""
    sides = {name for name in file.entries if name.rsplit(".", 1)[-1] in (_SCALER, _ZERO_POINT)}
    names = hugging_face_names(file.entries.keys() - sides, str(file.path))
    found = {name: _stored(file, name, source) for name, source in names.items()}
    orphans = sides - {part for stored in found.values() for part in _parts(stored)}
    if orphans:
        raise CheckpointError(
            f"{file.path} has scales or zero points of weights that are not quantized: {some(orphans)}. Convert the"
            " checkpoint again"
        )
    return found


def _stored(file: SafetensorsFile, name: str, source: str) -> _Stored:
    entry = file.entries[source]
    if entry.type_name in _FLOAT_TYPES:
        return _Stored(source=source, form=_Form.FLOAT, shape=entry.shape)
    stem = source.removesuffix("weight")
    scaler = file.entries.get(stem + _SCALER)
    if entry.type_name != "I8" or scaler is None or scaler.type_name not in _FLOAT_TYPES:
        raise CheckpointError(
            f"{file.path}: {source} has dtype {entry.type_name} and {'no' if scaler is None else scaler.type_name}"
            f" {stem}{_SCALER}; expected {', '.join(_FLOAT_TYPES)}, or I8 with a float scaler"
        )
    zero_point = file.entries.get(stem + _ZERO_POINT)
    if zero_point is not None and (zero_point.shape != scaler.shape or zero_point.type_name not in _FLOAT_TYPES):
        raise CheckpointError(
            f"{file.path}: {stem}{_ZERO_POINT} is {zero_point.type_name} {list(zero_point.shape)}; expected floats of"
            f" shape {list(scaler.shape)}, that of the scaler"
        )
    shape = entry.shape
    if name == EMBEDDING and len(shape) == 2 and scaler.shape == shape[1:]:
        form = _Form.EMBEDDING
    elif name != EMBEDDING and len(shape) == 2 and scaler.shape == shape[:1]:
        form = _Form.PER_CHANNEL
    elif name != EMBEDDING and len(shape) == 3 and scaler.shape == (shape[0], shape[2]):
        form, shape = _Form.BLOCKWISE, (shape[2], shape[0] * shape[1])
    else:
        raise CheckpointError(
            f"{file.path}: {source} is int8 {list(shape)} with a scaler {list(scaler.shape)}; expected [N, K] with [N],"
            " [G, g, N] with [G, N], or for the embedding [V, D] with [D]"
        )
    return _Stored(
        source=source,
        form=form,
        shape=shape,
        scaler=stem + _SCALER,
        zero_point=None if zero_point is None else stem + _ZERO_POINT,
    )
