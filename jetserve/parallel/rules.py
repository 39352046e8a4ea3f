"""From the letters of a weight's axes to its sharding.

A linear layer declares its axes once, as in "D -> N H": D is contracted, N and H are output axes, each side flattened
to one array axis. A side is sharded by its *first* letter, so a shard holds whole heads. "D -> E F" is a matrix
"D -> F" of every expert: on devices E is an axis of its own, ahead of the matrix, and sharded too.

Letters: D embed, N query heads, K KV heads, H head size, F mlp, V vocabulary, E experts, T tokens, S sequences,
P learned positions.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jetserve.quantize.qarray import QArray, Weight

MESH_AXIS = {"N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor", "E": "expert"}


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of one weight with their sizes: `contracted` -> `output`, each a tuple of (letter, size)."""

    contracted: tuple[tuple[str, int], ...]
    output: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, int]) -> "Axes":
        """From "D -> N H" and the size of every letter."""
        left, arrow, right = text.partition("->")
        if not arrow or not left.split() or not right.split():
            raise ValueError(f"axes are {text!r}; expected letters on both sides of '->', such as 'D -> N H'")
        return cls(*(tuple((letter, sizes[letter]) for letter in side.split()) for side in (left, right)))

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N) of the matrix."""
        return math.prod(size for _, size in self.contracted), math.prod(size for _, size in self.output)

    @property
    def is_router(self) -> bool:
        """Whether its outputs are scores of the experts."""
        return [letter for letter, _ in self.output] == ["E"]

    @property
    def experts(self) -> int | None:
        """How many experts have a matrix each; None for a matrix of its own."""
        letter, size = self.output[0]
        return size if letter == "E" and not self.is_router else None

    def __str__(self) -> str:
        return " -> ".join(" ".join(letter for letter, _ in side) for side in (self.contracted, self.output))


def _mesh_axis(side: tuple[tuple[str, int], ...], mesh: Mesh) -> str | None:
    """The mesh axis that shards a side, or None where it has none or does not divide it."""
    letter, size = side[0]
    axis = MESH_AXIS.get(letter)
    return axis if axis is not None and size % mesh.shape[axis] == 0 else None


def weight_sharding(axes: Axes, weight: Weight, mesh: Mesh) -> Weight:
    """The shardings of a weight's leaves, in a tree of the weight's own structure.

    A side that the mesh does not divide into whole heads, or whole blocks, is replicated.
    """
    ahead = () if axes.experts is None else (_mesh_axis(axes.output, mesh),)
    contracted, output = _mesh_axis(axes.contracted, mesh), _mesh_axis(axes.output[len(ahead) :], mesh)

    def named(*spec: str | None) -> Any:
        return NamedSharding(mesh, PartitionSpec(*ahead, *spec))

    if not isinstance(weight, QArray):
        return named(contracted, output)
    if not weight.blockwise:
        values, side = named(contracted, output), named(output)
    else:
        if contracted is not None and weight.values.shape[-3] % mesh.shape[contracted]:
            contracted = None
        values, side = named(contracted, None, output), named(contracted, output)
    return dataclasses.replace(
        weight,
        values=values,
        scale=side,
        zero_point=None if weight.zero_point is None else side,
        input_order=None if weight.input_order is None else named(),
    )


def vector_sharding(axes: tuple[tuple[str, int], ...], mesh: Mesh) -> NamedSharding:
    """Of a bias (the output axes of its linear layer) or a norm's scale."""
    return NamedSharding(mesh, PartitionSpec(_mesh_axis(axes, mesh)))
