"""Writes converted checkpoints (`native`), so that one that is cut short never loads and can be gone on with.

All is written in `OUT.partial`, with a record of the finished parts that is replaced atomically after each; the last
act is to rename the folder. Owns that protocol and the checks of disk space. Knows nothing of how weights are made.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import jetserve
from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    PARTIAL_SUFFIX,
    Manifest,
    PartEntry,
    QuantizationEntry,
    SourceEntry,
    TensorEntry,
    from_json,
)
from jetserve.checkpoint.native import TOKENIZER, WEIGHTS, measure, part_folder, read_tensor
from jetserve.checkpoint.source import HostWeight
from jetserve.quantize.qarray import QArray
from jetserve.tokenizer import Tokenizer

PROGRESS = "progress.json"
PART_BYTES = 256 * 2**20
"""Of arrays gathered in one part, before compression; a larger tensor has a part of its own."""

DISK_MARGIN = 16 * 2**20
"""Bytes left free beside the estimate."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The contents of `progress.json`: `digest` tells what is being made from what."""

    digest: str
    parts: list[PartEntry]
    tensors: list[TensorEntry]


class NativeWriter:
    """A conversion being written; a context manager, that holds `OUT.partial` against other processes.

    Leaving it by an error keeps what was finished for the next run.
    """

    def __init__(
        self, path: Path, *, hf_config: Mapping[str, Any], quantization: QuantizationEntry, source: SourceEntry
    ) -> None:
        self.path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._hf_config = dict(hf_config)
        self._quantization = quantization
        self._source = source
        self._pending: dict[str, HostWeight] = {}
        self._pending_bytes = 0
        self._stack = contextlib.ExitStack()
        self._progress = Progress(digest=self._digest(), parts=[], tensors=[])

    def _digest(self) -> str:
        made = [
            FORMAT_VERSION,
            jetserve.__version__,
            self._hf_config,
            dataclasses.asdict(self._quantization),
            self._source.fingerprint,
        ]
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()

    def __enter__(self) -> "NativeWriter":
        """Takes up what an earlier run finished, and clears away what it did not.

        Raises:
          CheckpointError: if the output exists, or another process is writing it.
        """
        check_output(self.path)
        self._partial.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._partial, os.O_RDONLY)
        self._stack.callback(os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._stack.close()
            raise CheckpointError(
                f"another process is converting to {self.path}; wait for it to end, or choose another output"
            ) from error
        self._resume()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _resume(self) -> None:
        found = self._earlier_progress()
        if found is not None:
            self._progress = found
            logger.info("going on after %d tensors that %s holds", len(found.tensors), self._partial)
        keep = {part_folder(self._partial, number) for number in range(len(self._progress.parts))}
        for entry in [*self._partial.iterdir(), *(self._partial / WEIGHTS).glob("*")]:
            if entry.is_file() and (entry.name != PROGRESS or not keep):
                entry.unlink()
            elif entry.is_dir() and entry.name != WEIGHTS and entry not in keep:
                shutil.rmtree(entry)

    def _earlier_progress(self) -> Progress | None:
        """What an earlier run finished of the same; None, and a warning, if that is something else or damaged."""
        file = self._partial / PROGRESS
        if not file.is_file():
            return None
        try:
            found: Progress = from_json(Progress, json.loads(file.read_text(encoding="utf-8")), str(file))
        except ValueError as error:
            logger.warning("discarding %s, which is damaged: %s", self._partial, error)
            return None
        if found.digest != self._progress.digest:
            logger.warning("discarding %s, which is of another source, settings or version", self._partial)
            return None
        for number, part in enumerate(found.parts):
            if measure(part_folder(self._partial, number)) != part:
                logger.warning("discarding %s, whose part %d is damaged", self._partial, number)
                return None
        return found

    @property
    def finished(self) -> frozenset[str]:
        """The names of tensors that need not be made again."""
        return frozenset(entry.name for entry in self._progress.tensors)

    def read(self, name: str) -> QArray | np.ndarray | None:
        """A finished tensor as it is on disk; None if it is not finished. Raises CheckpointError if it is damaged."""
        entry = next((entry for entry in self._progress.tensors if entry.name == name), None)
        return None if entry is None else read_tensor(self._partial, entry)

    def check_space(self, needed: int) -> None:
        """Raises CheckpointError if the disk has fewer bytes free than what is still to be written will need."""
        free = shutil.disk_usage(self._partial).free
        if free < needed + DISK_MARGIN:
            raise CheckpointError(
                f"{self.path.parent} has {free / 1e6:.1f} MB free; converting needs about"
                f" {(needed + DISK_MARGIN) / 1e6:.1f} MB. Free some, or choose an output on another disk"
            )

    def add(self, weight: HostWeight) -> None:
        """Takes one tensor; writes a part when enough has gathered. Raises as `_write_part` does."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(weight.array))
        if self._pending and self._pending_bytes + size > PART_BYTES:
            self._write_part()
        self._pending[weight.report.name] = weight
        self._pending_bytes += size
        if self._pending_bytes >= PART_BYTES:
            self._write_part()

    def flush(self) -> None:
        """Writes what has gathered as a part, small as it may be. Raises as `_write_part` does."""
        if self._pending:
            self._write_part()

    def _write_part(self) -> None:
        """Raises CheckpointError if the disk is full: what was finished before stays."""
        number = len(self._progress.parts)
        folder = part_folder(self._partial, number)
        with self._full_disk_explained():
            folder.parent.mkdir(exist_ok=True)
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                tree = {name: _leaves(weight) for name, weight in self._pending.items()}
                checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))
            self._progress = dataclasses.replace(
                self._progress,
                parts=[*self._progress.parts, measure(folder)],
                tensors=[*self._progress.tensors, *(_entry(weight, number) for weight in self._pending.values())],
            )
            self._write_json(PROGRESS, dataclasses.asdict(self._progress))
        self._pending = {}
        self._pending_bytes = 0

    def finish(self, tokenizer: Tokenizer | None) -> Manifest:
        """Writes what is left and the manifest, and gives the folder its name."""
        self.flush()
        manifest = Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            package_version=jetserve.__version__,
            hf_config=self._hf_config,
            quantization=self._quantization,
            source=self._source,
            parts=self._progress.parts,
            tensors=self._progress.tensors,
        )
        with self._full_disk_explained():
            if tokenizer is not None:
                tokenizer.save(self._partial / TOKENIZER)
            self._write_json(MANIFEST, dataclasses.asdict(manifest))
            for entry in [self._partial, *self._partial.rglob("*")]:
                _sync(entry)
        check_output(self.path)
        os.rename(self._partial, self.path)
        (self.path / PROGRESS).unlink(missing_ok=True)
        _sync(self.path.parent)
        return manifest

    def _write_json(self, name: str, data: Any) -> None:
        file = self._partial / f"{name}.new"
        file.write_text(json.dumps(data, indent=1), encoding="utf-8")
        _sync(file)
        os.replace(file, self._partial / name)

    @contextlib.contextmanager
    def _full_disk_explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            # The array library reports a full disk as a ValueError with the system's words in it.
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full and os.strerror(errno.ENOSPC) not in str(error):
                raise
            raise CheckpointError(
                f"the disk is full: {shutil.disk_usage(self._partial).free / 1e6:.1f} MB are free at {self._partial}."
                f" {len(self._progress.tensors)} tensors are finished; free some space and run the same conversion"
                " again to go on after them"
            ) from error


def check_output(path: Path) -> None:
    """Raises CheckpointError if something stands where a checkpoint is to be written (an empty folder may)."""
    if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise CheckpointError(f"{path} exists already; remove it, or choose another output")


def _leaves(weight: HostWeight) -> dict[str, np.ndarray]:
    array = weight.array
    if not isinstance(array, QArray):
        return {"array": np.ascontiguousarray(array)}
    leaves = {name: getattr(array, name) for name in ("values", "scale", "zero_point", "input_order")}
    return {name: np.asarray(leaf) for name, leaf in leaves.items() if leaf is not None}


def _entry(weight: HostWeight, part: int) -> TensorEntry:
    array, report = weight.array, weight.report
    zero_point = None
    if isinstance(array, QArray):
        zero_point = "none" if array.zero_point is None else "real"
        if array.zero_point is not None and np.array_equal(array.zero_point, np.round(array.zero_point)):
            zero_point = "integer"
    return TensorEntry(
        name=report.name,
        part=part,
        shape=[int(size) for size in array.shape],
        dtype=(array.scale if isinstance(array, QArray) else array).dtype.name,
        bits=weight.bits,
        block_size=report.block_size,
        asked_block_size=report.asked_block_size,
        zero_point=zero_point,
        input_order=isinstance(array, QArray) and array.input_order is not None,
        error=report.error,
        output_error=report.output_error,
        fallback=report.fallback,
        dequantized_from=report.dequantized_from,
    )


def _sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
