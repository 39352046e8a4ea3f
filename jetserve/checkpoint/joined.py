"""A model's parameters put together into the tensors of Hugging Face's checkpoints: what `parts` takes apart.

Owns which parameters make up a tensor, and in what order their outputs stand in it. Knows no format.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.source import HostWeight
from jetserve.models.base import Parameter, Role
from jetserve.quantize.qarray import QArray

Array = QArray | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor by its Hugging Face name.

    Attributes:
      array: a matrix [K, N], a vector, or a QArray of numpy arrays.
      bits: of the values of a QArray, else None.
      role: of the parameters in it.
      transposed: whether Hugging Face's floats stand as [K, N] too.
    """

    name: str
    array: Array
    bits: int | None
    role: Role
    transposed: bool


class Joiner:
    """Gathers parameters until all of a tensor are there."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[np.ndarray, Array, int | None]]] = collections.defaultdict(list)
        """By tensor: the rows of it, in Hugging Face's layout, that are the columns of an array."""

    def add(self, parameter: Parameter, weight: HostWeight) -> Iterator[Tensor]:
        """The tensors that a parameter completes.

        Raises:
          CheckpointError: if the parameters of one tensor are quantized in different ways, naming it.
        """
        origin = parameter.origin
        rows = origin.rows(0, parameter.shape[-1])
        for number, name in enumerate(origin.names):
            mine = np.flatnonzero(rows // origin.height == number)
            pieces = self._pieces[name]
            pieces.append((rows[mine] - number * origin.height, _columns(weight.array, mine), weight.bits))
            if sum(len(found) for found, _, _ in pieces) == origin.height:
                array, bits = _joined(self._pieces.pop(name), name)
                yield Tensor(name=name, array=array, bits=bits, role=parameter.role, transposed=origin.transposed)


def _columns(array: Array, index: np.ndarray) -> Array:
    if len(index) == array.shape[-1]:
        return array
    return array.columns(index) if isinstance(array, QArray) else array[..., index]


def _joined(pieces: list[tuple[np.ndarray, Array, int | None]], name: str) -> tuple[Array, int | None]:
    forms = {_form(array, bits) for _, array, bits in pieces}
    if len(forms) > 1:
        raise CheckpointError(
            f"{name} holds several of the model's weights, which are quantized in {len(forms)} different ways; expected"
            " one. Give them one type, or convert to jetserve's format"
        )
    arrays: list[Any] = [array for _, array, _ in pieces]
    order = np.argsort(np.concatenate([rows for rows, _, _ in pieces]))
    if not isinstance(arrays[0], QArray):
        return (np.concatenate(arrays, -1) if len(arrays) > 1 else arrays[0])[..., order], None
    input_order = arrays[0].input_order
    arrays = [dataclasses.replace(array, input_order=None) for array in arrays]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves, -1)[..., order], *arrays)
    return dataclasses.replace(whole, input_order=input_order), pieces[0][2]


def _form(array: Array, bits: int | None) -> tuple:
    """What arrays must have in common to be parts of one."""
    if not isinstance(array, QArray):
        return (array.ndim,)
    order = None if array.input_order is None else np.asarray(array.input_order).tobytes()
    return bits, array.block_size, array.zero_point is None, order
