"""Converted checkpoints: a folder that describes itself, so that loading it takes no flags.

  jetserve.json        the manifest: format version, model config, how every tensor is quantized, where it came from
  weights/part-00000   Orbax PyTree items, many tensors in each: Hugging Face name -> {values, scale, zero_point,
                       input_order} of which the last two may be missing, or {array} for floats
  tokenizer/           as `Tokenizer.save` writes it

Matrices are in the matmul's form ([K, N] or [G, g, N]); int4 stands in int8 containers, which Orbax compresses to less
than four bits a weight. Owns reading them; `manifest` is what the folder says of itself, and `native_writer` writes.
Knows nothing of models.

Orbax keeps its arrays with TensorStore (OCDBT, Zarr), and they are read by that here: importing Orbax and restoring
hundreds of small arrays by it takes about a second longer, a fifth of what a warm server may take to start.
"""

import collections
import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.manifest import CONVERT_AGAIN, MANIFEST, PARTIAL_SUFFIX, PartEntry, TensorEntry, read_manifest
from jetserve.quantize.qarray import QArray
from jetserve.quantize.report import WeightReport
from jetserve.tokenizer import Tokenizer

WEIGHTS = "weights"
TOKENIZER = "tokenizer"

READ_AHEAD = 64 * 2**20
"""Bytes of arrays that are being read and decompressed while an earlier one is put to use."""
INDEX_CACHE_BYTES = 16 * 2**20


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


class NativeCheckpoint:
    """An open converted checkpoint. Opening reads the manifest and checks that every part has its files in full.

    Raises:
      CheckpointError: for a manifest that is damaged or newer than this program, and for parts missing or cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
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
