"""Which format a path holds, and opening it by that.

Owns the list of formats and the order in which they are asked; what makes up each of them is known to its own module,
which offers `matches(path)` and `open_reader(path)`.
"""

import importlib
from pathlib import Path
from types import ModuleType

from jetserve.checkpoint import jetstream
from jetserve.checkpoint.base import CheckpointError, CheckpointReader
from jetserve.checkpoint.files import listing

NATIVE = "native"
NATIVE_FILE = "jetserve.json"

FORMATS = ("huggingface", "gguf", "jetstream", "meta")
"""Modules of this package. The first that matches wins: hubs put a GGUF file or Meta's originals beside safetensors."""

_SUPPORTED = (
    "a folder with config.json and *.safetensors (Hugging Face), a *.gguf file or a folder with one, a folder with"
    " params.json and model.safetensors (jetstream-pytorch) or consolidated.NN.pth (Meta), or one with jetserve.json"
    " that jetserve wrote"
)


def format_of(path: Path) -> str:
    """The format of a checkpoint: one of `FORMATS`, or `NATIVE` for jetserve's own.

    Raises:
      CheckpointError: if there is nothing at `path`, or nothing that is known.
    """
    if not path.exists():
        raise CheckpointError(f"there is no file or folder {path}; expected {_SUPPORTED}")
    if (path / NATIVE_FILE).is_file():
        return NATIVE
    for name in FORMATS:
        if _module(name).matches(path):
            return name
    found = listing(path) if path.is_dir() else f"a file of {path.stat().st_size} bytes"
    files = [file.name for file in sorted(path.glob("*.gguf"))] if path.is_dir() else []
    hint = f". Give the path of one of its {len(files)} .gguf files" if len(files) > 1 else ""
    if (path / "config.json").is_file():
        hint = ". It has a config.json, so its *.safetensors are missing: get them too"
    raise CheckpointError(f"{path} holds no checkpoint that is known: found {found}; expected {_SUPPORTED}{hint}")


def open_checkpoint(path: Path, *, quantize_type: str | None = None) -> CheckpointReader:
    """Opens a checkpoint of any format but jetserve's own.

    Args:
      path: of a folder or file.
      quantize_type: what its quantized weights are said to be; used where the files do not tell (jetstream).

    Raises:
      CheckpointError: if it is of no known format, damaged or not supported.
    """
    name = format_of(path)
    if name == NATIVE:
        raise CheckpointError(f"{path} is a checkpoint that jetserve wrote: it is loaded as it is, not converted again")
    if name == jetstream.NAME:
        return jetstream.open_reader(path, quantize_type=quantize_type)
    reader: CheckpointReader = _module(name).open_reader(path)
    return reader


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"jetserve.checkpoint.{name}")
