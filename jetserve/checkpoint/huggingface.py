"""Hugging Face folders: `config.json` and one or many safetensors shards, in floating point.

Owns which files make up such a checkpoint and their consistency. Presents every tensor of the shards as it stands
there; which of them a model wants is not known here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jetserve.checkpoint.base import CheckpointError, SourceKind, TensorInfo
from jetserve.checkpoint.files import (
    check_rows,
    fingerprint,
    listing,
    read_json,
    side_files,
    some,
    tokenizer_in,
)
from jetserve.checkpoint.safetensors_file import SafetensorsFile
from jetserve.quantize.qarray import QArray
from jetserve.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_PATTERN = "model-*-of-*.safetensors"

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")


def matches(path: Path) -> bool:
    """Whether `path` is a folder of weights in Hugging Face's manner (with faults or without)."""
    if not path.is_dir():
        return False
    weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", INDEX_FILE, *_PICKLES))
    return weights and ((path / CONFIG_FILE).is_file() or not (path / "params.json").is_file())


class HuggingFaceReader:
    """A `CheckpointReader` over safetensors shards; see `open_reader`."""

    def __init__(self, path: Path, hf_config: Mapping[str, Any], shards: list[SafetensorsFile]) -> None:
        self.path = path
        self.hf_config: Mapping[str, Any] = hf_config
        self._shards = shards
        self._shard_of = {name: shard for shard in shards for name in shard.entries}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape=entry.shape, type_name=entry.type_name, nbytes=entry.nbytes)
            for shard in shards
            for name, entry in shard.entries.items()
        }

    @property
    def kind(self) -> SourceKind:
        return SourceKind.FLOAT

    def read(self, name: str) -> np.ndarray:
        shard = self._shard_of[name]
        type_name = shard.entries[name].type_name
        if type_name not in _FLOAT_TYPES:
            raise CheckpointError(
                f"{shard.path}: {name} has dtype {type_name}; expected a weight in {', '.join(_FLOAT_TYPES)}. Quantized"
                " checkpoints need a quantization_config that is supported"
            )
        return shard.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        tensor = self.read(name)
        check_rows(name, start, stop, len(tensor))
        return tensor[start:stop]

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
        return fingerprint([self.path / CONFIG_FILE, *(shard.path for shard in self._shards), *side_files(self.path)])


def open_reader(path: Path) -> HuggingFaceReader:
    """Opens a folder, checking every shard's header and that shards and index agree.

    Raises:
      CheckpointError: if a file is missing, damaged, or of a kind that is not read (pickles, quantized weights).
    """
    hf_config = _read_config(path)
    index = _read_index(path)
    names = sorted(set(index.values())) if index is not None else [_only_file(path)]
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        held = [] if index is None else [tensor for tensor, shard in index.items() if shard == missing[0]]
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the {len(names)} shards that {INDEX_FILE} names: {some(missing)};"
            f" {missing[0]} holds {some(held)}. Get the missing files"
        )
    shards = [SafetensorsFile(path / name) for name in names]
    _check_unique(shards)
    if index is not None:
        _check_index(path, index, shards)
    return HuggingFaceReader(path, hf_config, shards)


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path / CONFIG_FILE)
    for key in _QUANTIZATION_KEYS:
        if config.get(key) is not None:
            method = config[key].get("quant_method", "unknown") if isinstance(config[key], dict) else config[key]
            raise CheckpointError(
                f"{path / CONFIG_FILE} has a {key} of method {method!r}: weights quantized by {method} are not read"
                " yet. Use the unquantized checkpoint of this model"
            )
    for name in _QUANTIZATION_FILES:
        if (path / name).is_file():
            raise CheckpointError(
                f"{path} has a {name}: its weights are quantized (GPTQ or AWQ), which is not read yet. Use the"
                " unquantized checkpoint of this model"
            )
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{path / CONFIG_FILE} has the model_type {config.get('model_type')!r}; expected a name such as 'llama'"
        )
    return config


def _read_index(path: Path) -> dict[str, str] | None:
    """The shard's file name of every tensor, or None if there is no index."""
    if not (path / INDEX_FILE).is_file():
        return None
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if (
        weight_map is None
        or not shards
        or not all(isinstance(name, str) and Path(name).name == name for name in shards)
    ):
        raise CheckpointError(f"{path / INDEX_FILE} has no weight_map from tensor names to file names; get it again")
    if (path / SINGLE_FILE).is_file() and SINGLE_FILE not in shards:
        raise CheckpointError(
            f"{path} has {SINGLE_FILE} and also {INDEX_FILE}, which names other files; remove the one that is outdated"
        )
    return weight_map


def _only_file(path: Path) -> str:
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if SINGLE_FILE in names:
        return SINGLE_FILE
    if len(names) == 1:
        return names[0]
    if names:
        raise CheckpointError(
            f"{path} has {len(names)} safetensors files ({some(names)}) but no {INDEX_FILE}, without which it cannot be"
            " seen whether they are all there. Get the index"
        )
    if any(any(path.glob(pattern)) for pattern in _PICKLES):
        raise CheckpointError(
            f"{path} holds its weights in pytorch_model.bin, a pickle that can run code when it is read; expected"
            " safetensors. Convert it with transformers: `model.save_pretrained(folder, safe_serialization=True)`"
        )
    raise CheckpointError(f"{path} has no *.safetensors files; found {listing(path)}")


def _check_unique(shards: list[SafetensorsFile]) -> None:
    seen: dict[str, SafetensorsFile] = {}
    for shard in shards:
        for name in shard.entries:
            if name in seen:
                raise CheckpointError(
                    f"{name} stands both in {seen[name].path} and in {shard.path.name}; expected it once. Get the"
                    " shards again"
                )
            seen[name] = shard


def _check_index(path: Path, index: dict[str, str], shards: list[SafetensorsFile]) -> None:
    strangers = {file.name for file in path.glob(SHARD_PATTERN)} - set(index.values())
    if strangers:
        raise CheckpointError(
            f"{path} has shards that {INDEX_FILE} does not name: {some(strangers)}. Remove them, or get their index"
        )
    for shard in shards:
        expected = {name for name, file in index.items() if file == shard.path.name}
        for names, fault in (
            (expected - shard.entries.keys(), "lacks tensors that the index places there"),
            (shard.entries.keys() - expected, "has tensors that the index does not place there"),
        ):
            if names:
                raise CheckpointError(
                    f"{shard.path} {fault}: {some(names)}. {path / INDEX_FILE} belongs to other files; get both again"
                )
