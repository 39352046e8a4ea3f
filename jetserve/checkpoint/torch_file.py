"""Files that `torch.save` wrote, read without torch and without running what a pickle asks for.

Owns the container (a zip file with a pickle and one uncompressed entry a storage, memory-mapped here) and the few names
that such a pickle may use. Everything else in it is refused by name. Knows nothing of models.
"""

import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.files import check_is_weights, map_bytes

_STORAGE_DTYPES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}
_ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, RuntimeError, ValueError)
"""What zipfile raises for a damaged file, according to where the damage is."""

# Tuples rather than dataclasses: a pickle's BUILD instruction could change the fields of a dataclass.


class _StorageType(NamedTuple):
    dtype: np.dtype


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    size: int


class StoredTensor(NamedTuple):
    """A tensor that was not read yet: elements of a storage, at `offset` and then by `strides`, in elements."""

    storage: str
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _RebuildTensor:
    """Stands for `torch._utils._rebuild_tensor_v2`; without attributes that a pickle could set."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
        if not isinstance(storage, _Storage) or not _are_sizes((offset, shape, strides), shape, strides):
            raise pickle.UnpicklingError(f"a tensor has offset {offset!r}, shape {shape!r} and strides {strides!r}")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and last >= storage.size:
            raise pickle.UnpicklingError(
                f"a tensor of shape {shape} ends beyond its storage of {storage.size} elements"
            )
        return StoredTensor(storage.key, storage.dtype, offset, shape, strides)


def _are_sizes(values: tuple[Any, Any, Any], shape: Any, strides: Any) -> bool:
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) != len(strides):
        return False
    return all(type(value) is int and value >= 0 for value in (values[0], *shape, *strides))


class _Unpickler(pickle.Unpickler):
    """Builds nothing but dictionaries, numbers, text and `StoredTensor`s."""

    def __init__(self, file: Any, source: str) -> None:
        super().__init__(file)
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _RebuildTensor()
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGE_DTYPES:
            return _StorageType(_STORAGE_DTYPES[name])
        raise CheckpointError(
            f"{self._source} asks for {module}.{name}, which is not part of a checkpoint of float tensors and could"
            " run code; it was not run. Use safetensors, or load a file that you trust with torch and save its tensors"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        valid = isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], _StorageType)
        if not valid or not isinstance(pid[2], str) or type(pid[4]) is not int:
            raise pickle.UnpicklingError(f"a storage is described by {pid!r}")
        return _Storage(pid[2], pid[1].dtype, pid[4])


class TorchFile:
    """An open file that holds one flat dictionary of tensors. `tensors` describes them; `read` gives views.

    Raises:
      CheckpointError: at construction, if it is not such a file, damaged, or its pickle asks for anything else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_is_weights(path)
        _check_container(path)
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries, root = _entries(path, archive)
                self.tensors = _unpickle(path, archive, root)
        except CheckpointError:
            raise
        except _ZIP_ERRORS as error:
            raise CheckpointError(f"{path} is truncated or damaged: {error}. Get the file again") from error
        with path.open("rb") as file:
            self._places = {tensor.storage: self._place(tensor, file) for tensor in self.tensors.values()}
        for name, tensor in self.tensors.items():
            start, stop = self._places[tensor.storage]
            end = tensor.offset + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
            if math.prod(tensor.shape) and end * tensor.dtype.itemsize > stop - start:
                raise CheckpointError(f"{path}: {name} ends beyond its storage of {stop - start} bytes; get it again")

    def _place(self, tensor: StoredTensor, file: BinaryIO) -> tuple[int, int]:
        """Where a storage's bytes lie in the file: [start, stop)."""
        entry = self._entries.get(tensor.storage)
        if entry is None:
            raise CheckpointError(f"{self.path} lacks the storage data/{tensor.storage}; get the file again")
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
        if header[:4] != _ZIP_MAGIC:
            raise CheckpointError(f"{self.path} is damaged: {entry.filename} is not where its index says. Get it again")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = entry.header_offset + _LOCAL_HEADER_BYTES + lengths
        if start + entry.file_size > self.path.stat().st_size:
            raise CheckpointError(f"{self.path} is truncated: {entry.filename} lies beyond its end. Get the file again")
        return start, start + entry.file_size

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file. Raises KeyError if there is no such tensor."""
        tensor = self.tensors[name]
        start, stop = self._places[tensor.storage]
        itemsize = tensor.dtype.itemsize
        data = map_bytes(self.path, start, start + (stop - start) // itemsize * itemsize)
        if start % itemsize:
            data = data.copy()
        elements = data.view(tensor.dtype)[tensor.offset :]
        return np.lib.stride_tricks.as_strided(
            elements, tensor.shape, [stride * itemsize for stride in tensor.strides], writeable=False
        )


def _check_container(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(257)
        is_tar = file.read(5) == b"ustar"
    if head == _ZIP_MAGIC:
        return
    kind = (
        "a tar file of torch before 0.2"
        if is_tar
        else "a legacy pickle of torch before 1.6"
        if head[:1] == b"\x80"
        else ""
    )
    if not kind:
        raise CheckpointError(f"{path} starts with {head!r}; expected a zip file that torch.save wrote")
    raise CheckpointError(
        f"{path} is {kind}; expected the zip file that torch.save writes since. If you trust it, load it with torch and"
        " save it again"
    )


def _entries(path: Path, archive: zipfile.ZipFile) -> tuple[dict[str, zipfile.ZipInfo], str]:
    """(the zip entry of every storage by its key, the folder that the archive's names start with)."""
    roots = [name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise CheckpointError(
            f"{path} is a zip file with {len(roots)} data.pkl in it; expected one that torch.save wrote"
        )
    root = roots[0]
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise CheckpointError(f"{path} holds big-endian tensors; expected little-endian ones. Save it again")
    prefix = f"{root}data/"
    entries = {
        info.filename.removeprefix(prefix): info for info in archive.infolist() if info.filename.startswith(prefix)
    }
    for info in entries.values():
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointError(
                f"{path}: {info.filename} is compressed or encrypted; expected it as torch.save stores it"
            )
    return entries, root


def _unpickle(path: Path, archive: zipfile.ZipFile, root: str) -> dict[str, StoredTensor]:
    try:
        with archive.open(f"{root}data.pkl") as file:
            found = _Unpickler(file, str(path)).load()
    except CheckpointError:
        raise
    except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a pickle that cannot be read: {error}. Get the file again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; expected a dictionary of tensors")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
            raise CheckpointError(
                f"{path}: {name!r} is a {type(tensor).__name__}; expected named tensors and nothing else"
            )
    return dict(found)
