"""Small helpers over files that several checkpoint formats share: JSON, row ranges, fingerprints, tokenizers.

Knows nothing of tensors or of any one format.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jetserve.checkpoint.base import CheckpointError
from jetserve.tokenizer import Tokenizer

FINGERPRINT_BYTES = 64 * 1024

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_SIDE_FILES = (
    *_TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
_LFS_POINTER = b"version https://git-lfs"


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dict; raises ValueError where a key stands twice (`json` would keep the last)."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      CheckpointError: if there is no such file, or it does not hold a JSON object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; found {listing(path.parent)}. Get the missing file")
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=reject_duplicate_keys)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); get the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def listing(folder: Path, limit: int = 20) -> str:
    """The names in a folder, for error messages."""
    names = sorted(entry.name for entry in folder.iterdir())
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + more) or "an empty folder"


def some(names: Iterable[str], limit: int = 3) -> str:
    """A few names in order and how many more there are, for error messages."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def check_is_weights(path: Path) -> None:
    """Refuses what stands in for a weight file that was never downloaded.

    Raises:
      CheckpointError: if the file is empty or a Git LFS pointer.
    """
    with path.open("rb") as file:
        head = file.read(len(_LFS_POINTER))
    if not head:
        raise CheckpointError(f"{path} is empty; get the file again")
    if head == _LFS_POINTER:
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` or download the file")


def map_bytes(path: Path, start: int, stop: int) -> np.ndarray:
    """Bytes [start, stop) of a file as a read-only memory map of their own.

    Memory that was read through a map counts as the process's until the map is gone, so each tensor gets one: a map of
    the whole file would grow to the size of the file.
    """
    if start == stop:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, "r", offset=start, shape=(stop - start,)))


def check_rows(name: str, start: int, stop: int, rows: int) -> None:
    """Raises ValueError unless [start, stop) lies within a tensor's rows."""
    if not 0 <= start <= stop <= rows:
        raise ValueError(f"rows {start} to {stop} of {name} were asked for; it has {rows}")


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder, or None if it holds none. Raises ValueError if one is malformed."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return Tokenizer.from_folder(folder)


def fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 in hexadecimal of every file's name, size, first and last 64 KiB, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(FINGERPRINT_BYTES)
            file.seek(max(size - FINGERPRINT_BYTES, 0))
            tail = file.read(FINGERPRINT_BYTES)
        for part in (path.name.encode(), str(size).encode(), head, tail):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def side_files(folder: Path) -> list[Path]:
    """The files beside the weights that change what a conversion holds: tokenizer, chat template, generation config."""
    return [folder / name for name in _SIDE_FILES if (folder / name).is_file()]
