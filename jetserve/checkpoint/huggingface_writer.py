"""Writes Hugging Face folders with quantized layers in another project's format, for its tools to load.

Owns the shards, their index and the config. How a layer is packed is the formats' own (`gptq`, `compressed_tensors`).
The folder gets its name when all of it is there.
"""

import enum
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jetserve.checkpoint import compressed_tensors, gptq
from jetserve.checkpoint.huggingface import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from jetserve.checkpoint.joined import Joiner, Tensor
from jetserve.checkpoint.manifest import PARTIAL_SUFFIX
from jetserve.checkpoint.native_writer import check_output
from jetserve.checkpoint.packed import Form, Stored, to_floats
from jetserve.checkpoint.source import HostWeight
from jetserve.models.base import Parameter, Role
from jetserve.quantize.qarray import QArray
from jetserve.tokenizer import Tokenizer

SHARD_BYTES = 512 * 2**20
"""Of tensors in one file; a larger tensor has one of its own."""


class ExportFormat(enum.Enum):
    """A format of others."""

    GPTQ = gptq.METHOD
    COMPRESSED_TENSORS = compressed_tensors.METHOD

    @property
    def module(self) -> ModuleType:
        return {ExportFormat.GPTQ: gptq, ExportFormat.COMPRESSED_TENSORS: compressed_tensors}[self]


class HuggingFaceWriter:
    """A folder being written; a context manager. One that is left by an error leaves nothing behind."""

    def __init__(self, path: Path, form: ExportFormat) -> None:
        check_output(path)
        self.path = path
        self._form = form
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._layers: dict[str, Form] = {}
        self._floats: list[str] = []
        self._joiner = Joiner()
        self._pending: dict[str, np.ndarray] = {}
        self._shards: list[list[str]] = []
        self._bytes = 0

    def __enter__(self) -> "HuggingFaceWriter":
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, parameter: Parameter, weight: HostWeight) -> None:
        """Takes one parameter; tensors that hold several are written when all of theirs are there.

        Raises:
          CheckpointError: for a layer that the format cannot hold, and as `Joiner.add` does.
        """
        for tensor in self._joiner.add(parameter, weight):
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        """Embeddings and heads become float32, for these formats quantize linear layers alone."""
        name, array = tensor.name, tensor.array
        stem = name.removesuffix(".weight")
        if isinstance(array, QArray) and tensor.bits is not None and tensor.role is Role.LINEAR:
            layer = Stored.of(array, tensor.bits, name)
            written = self._form.module.write_layer(stem, layer)
            self._layers[stem] = layer.form
        else:
            floats = to_floats(array) if isinstance(array, QArray) else array.T
            written = {name: floats.T if tensor.transposed else floats}
            if tensor.role is Role.LINEAR or name == "lm_head.weight":
                self._floats.append(stem)
        for key, found in written.items():
            if self._pending and self._bytes + found.nbytes > SHARD_BYTES:
                self._write_shard()
            self._pending[key] = np.ascontiguousarray(found)
            self._bytes += found.nbytes

    def _write_shard(self) -> None:
        file = self._partial / _shard(len(self._shards))
        save_file(self._pending, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the library leaves it to its owner alone
        self._shards.append([*self._pending])
        self._pending, self._bytes = {}, 0

    def finish(self, hf_config: Mapping[str, Any], tokenizer: Tokenizer | None) -> None:
        """Writes what is left, and gives the folder its name."""
        if self._pending:
            self._write_shard()
        count = len(self._shards)
        names = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            os.rename(self._partial / _shard(i), self._partial / name)
        if count > 1:
            weight_map = {key: name for keys, name in zip(self._shards, names, strict=True) for key in keys}
            size = sum((self._partial / name).stat().st_size for name in names)
            self._write_json(INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
        settings = self._form.module.write_settings(self._layers, self._floats)
        self._write_json(CONFIG_FILE, {**hf_config, "quantization_config": settings})
        if tokenizer is not None:
            tokenizer.save(self._partial)
        check_output(self.path)
        os.rename(self._partial, self.path)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        (self._partial / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _shard(number: int) -> str:
    """Until it is known how many there are."""
    return f"{number:05}.safetensors"
