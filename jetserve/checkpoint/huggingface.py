"""Hugging Face folders: `config.json` and one or many safetensors shards, in floating point or quantized by others.

Owns which files make up such a checkpoint and their consistency. Presents every float tensor of the shards as it stands
there, and every quantized layer by its weight; which of them a model wants is not known here, nor how layers are packed
(`gptq`, `awq`, `compressed_tensors`, `mxfp4`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jetserve.checkpoint import awq, compressed_tensors, gptq, mxfp4
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
from jetserve.checkpoint.packed import FLOAT_TYPES, PackedLayer, Shards
from jetserve.checkpoint.quantization_settings import FILES, Settings, find_settings, without_settings
from jetserve.checkpoint.safetensors_file import SafetensorsFile
from jetserve.quantize.qarray import QArray
from jetserve.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_PATTERN = "model-*-of-*.safetensors"

_PACKED_FORMATS = {module.METHOD: module for module in (gptq, awq, compressed_tensors, mxfp4)}
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")


def matches(path: Path) -> bool:
    """Whether `path` is a folder of weights in Hugging Face's manner (with faults or without)."""
    if not path.is_dir():
        return False
    weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", INDEX_FILE, *_PICKLES))
    return weights and ((path / CONFIG_FILE).is_file() or not (path / "params.json").is_file())


class HuggingFaceReader:
    """A `CheckpointReader` over safetensors shards; see `open_reader`.

    `layers` are the quantized ones by their weight's name. One whose groups no QArray can hold is only dequantized.
    """

    def __init__(
        self, path: Path, hf_config: Mapping[str, Any], shards: Shards, layers: Mapping[str, PackedLayer]
    ) -> None:
        self.path = path
        self.hf_config: Mapping[str, Any] = hf_config
        self._shards = shards
        self._layers = layers
        packed = {part for layer in layers.values() for part in layer.parts}
        floats = {
            name: TensorInfo(shape=entry.shape, type_name=entry.type_name, nbytes=entry.nbytes)
            for name, entry in shards.entries.items()
            if name not in packed
        }
        self.tensors: Mapping[str, TensorInfo] = floats | {
            name: TensorInfo(shape=layer.shape, type_name=layer.type_name, nbytes=layer.nbytes, quantized=True)
            for name, layer in layers.items()
        }

    @property
    def kind(self) -> SourceKind:
        carried = any(layer.fits for layer in self._layers.values())
        return SourceKind.QUANTIZED if carried else SourceKind.FLOAT

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        info = self.tensors[name]
        check_rows(name, start, stop, info.shape[0])
        if name in self._layers:
            return self._layers[name].floats(start, stop)
        if info.type_name not in FLOAT_TYPES:
            raise CheckpointError(
                f"{self._shards.where(name)} has dtype {info.type_name}; expected a weight in {', '.join(FLOAT_TYPES)}."
                " Quantized checkpoints need a quantization_config that is supported"
            )
        return self._shards.read(name)[start:stop]

    def read_quantized(self, name: str) -> QArray | None:
        return self._layers[name].read() if self.quantized_bits(name) is not None else None

    def quantized_bits(self, name: str) -> int | None:
        if name not in self.tensors:
            raise KeyError(name)
        layer = self._layers.get(name)
        return layer.bits if layer is not None and layer.fits else None

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_in(self.path)

    def fingerprint(self) -> str:
        settings = [self.path / name for name in (CONFIG_FILE, *FILES) if (self.path / name).is_file()]
        return fingerprint([*settings, *(file.path for file in self._shards.files), *side_files(self.path)])


def open_reader(path: Path) -> HuggingFaceReader:
    """Opens a folder, checking every shard's header and that shards and index agree.

    Raises:
      CheckpointError: if a file is missing, damaged, or of a kind that is not read (pickles, quantized weights).
    """
    config = _read_config(path)
    index = _read_index(path)
    names = sorted(set(index.values())) if index is not None else [_only_file(path)]
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        held = [] if index is None else [tensor for tensor, shard in index.items() if shard == missing[0]]
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the {len(names)} shards that {INDEX_FILE} names: {some(missing)};"
            f" {missing[0]} holds {some(held)}. Get the missing files"
        )
    files = [SafetensorsFile(path / name) for name in names]
    _check_unique(files)
    if index is not None:
        _check_index(path, index, files)
    shards = Shards(files)
    layers = _quantized_layers(path, find_settings(path, config), shards)
    return HuggingFaceReader(path, without_settings(config), shards, layers)


def _quantized_layers(path: Path, settings: Settings | None, shards: Shards) -> dict[str, PackedLayer]:
    """The layers that others quantized, by the name of their weight: what the settings say, or the tensors' names.

    Raises:
      CheckpointError: if settings or tensors are of a method or a layout that is not read.
    """
    method = _method_of(shards) if settings is None or settings.method is None else settings.method
    if method is None and settings is None:
        return {}
    if settings is None:
        settings = Settings(where=f"{path} (which has no quantization_config)")
    if method not in _PACKED_FORMATS:
        raise CheckpointError(
            f"{settings.where} is of method {method or 'unknown'!r}, which is not read; expected"
            f" {', '.join(_PACKED_FORMATS)}. Use the unquantized checkpoint of this model"
        )
    layers = {f"{stem}.weight": layer for stem, layer in _PACKED_FORMATS[method].layers(shards, settings).items()}
    if not layers:
        raise CheckpointError(
            f"{settings.where} says that weights are quantized by {method}, but no tensor of {path} is; expected some."
            " Remove the settings if the weights are floats"
        )
    twice = layers.keys() & shards.entries.keys()
    if twice:
        raise CheckpointError(f"{path} holds {some(twice)} both quantized and not; expected one of them")
    return layers


def _method_of(shards: Shards) -> str | None:
    """By the tensors' names, and between GPTQ and AWQ by their shapes; None if there are no quantized ones."""
    names = shards.entries
    if any(name.endswith(".weight_packed") for name in names):
        return compressed_tensors.METHOD
    weight = next((name for name in names if name.endswith(".qweight")), None)
    if weight is None:
        return None
    scales = names.get(f"{weight.removesuffix('.qweight')}.scales")
    packed = names[weight].shape
    interleaved = scales is not None and len(packed) == 2 and packed[1] * 8 == scales.shape[-1]
    return awq.METHOD if interleaved else gptq.METHOD


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path / CONFIG_FILE)
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
