"""From the letters of a weight's axes to its sharding.

A linear layer declares its axes once, as in "D -> N H": D is contracted, N and H are output axes, each side flattened
to one array axis. A side is sharded by its *first* letter, so a shard holds whole heads. "D -> E F" is a matrix
"D -> F" of every expert: on devices E is an axis of its own, ahead of the matrix, and sharded too.

Where a letter's size does not divide, a `Layout` gives it another one: mlp channels and the vocabulary get zeros, KV
heads are repeated. Neither changes a result. Blocks of a quantized weight are never cut.

Letters: D embed, N query heads, K KV heads, H head size, F mlp, V vocabulary, E experts, T tokens, S sequences,
P learned positions.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jetserve.quantize.qarray import QArray, Weight

MESH_AXIS = {"N": "tensor", "K": "tensor", "F": "tensor", "V": "tensor", "E": "expert"}
PADDED = frozenset("FV")
"""Letters whose channels may be zeros: nothing is read from them, or what is read counts nothing."""

Side = tuple[tuple[str, int], ...]
"""Letters with their sizes, flattened to one array axis."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of one weight with their sizes: `contracted` -> `output`, each a tuple of (letter, size)."""

    contracted: Side
    output: Side

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

    @property
    def columns(self) -> Side:
        """Of one expert's matrix, or of the only one: its outputs."""
        return self.output if self.experts is None else self.output[1:]

    def __str__(self) -> str:
        return " -> ".join(" ".join(letter for letter, _ in side) for side in (self.contracted, self.output))


def kv_heads(num_heads: int, num_kv_heads: int, devices: int) -> int:
    """KV heads as `devices` hold them: each repeated until the devices divide them, where the query heads allow it.

    Query head n reads KV head n // (num_heads / kv_heads), which is a copy of the one that it would have read.
    """
    repeated = math.lcm(num_kv_heads, devices)
    return repeated if num_heads % repeated == 0 else num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model's letters lie over a mesh.

    Attributes:
      mesh: with the axes of `mesh.AXES`.
      sizes: (letter, size) -> the size that the devices hold together, where it is another one.
    """

    mesh: Mesh
    sizes: Mapping[tuple[str, int], int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, weights: Iterable[tuple[Axes, int | None]], mesh: Mesh) -> "Layout":
        """The layout of a model whose matrices have these axes and block sizes (None for those without blocks)."""
        unit: dict[tuple[str, int], int] = {}
        for axes, block_size in weights:
            unit |= {letter: unit.get(letter, 1) for letter in (*axes.contracted, *axes.output)}
            # A side of several letters holds whole heads: padding one would not bring its blocks to an end.
            if block_size is not None and len(axes.contracted) == 1:
                unit[axes.contracted[0]] = math.lcm(unit[axes.contracted[0]], block_size)
        query_heads = [size for letter, size in unit if letter == "N"]
        sizes = {}
        for (letter, size), multiple in unit.items():
            devices = mesh.shape[MESH_AXIS[letter]] if letter in MESH_AXIS else 1
            if letter in PADDED:
                held = -(-size // (multiple * devices)) * multiple * devices
            elif letter == "K" and len({kv_heads(heads, size, devices) for heads in query_heads}) == 1:
                held = kv_heads(query_heads[0], size, devices)
            else:
                held = size
            if devices > 1 and held != size:
                sizes[letter, size] = held
        return cls(mesh=mesh, sizes=sizes)

    def held(self, side: Side) -> Side:
        """A side with the sizes that the devices hold together."""
        return tuple((letter, self.sizes.get((letter, size), size)) for letter, size in side)

    def shape(self, axes: Axes) -> tuple[int, int]:
        """(K, N) of a matrix as the devices hold it together."""
        return Axes(self.held(axes.contracted), self.held(axes.output)).shape

    def mesh_axis(self, side: Side) -> str | None:
        """The mesh axis that shards a side, or None where it has none or does not divide it."""
        letter, size = self.held(side)[0]
        axis = MESH_AXIS.get(letter)
        return axis if axis is not None and size % self.mesh.shape[axis] == 0 else None

    def row_axis(self, axes: Axes, block_size: int | None) -> str | None:
        """The mesh axis that shards what a matrix contracts: none where that would cut a block."""
        axis = self.mesh_axis(axes.contracted)
        if axis is None or block_size is None:
            return axis
        return axis if self.shape(axes)[0] // self.mesh.shape[axis] % block_size == 0 else None


def weight_sharding(axes: Axes, weight: Weight, layout: Layout) -> Weight:
    """The shardings of a weight's leaves, in a tree of the weight's own structure.

    A side that the mesh does not divide into whole heads, or whole blocks, is replicated.
    """
    ahead = () if axes.experts is None else (layout.mesh_axis(axes.output),)
    contracted = layout.row_axis(axes, weight.block_size if isinstance(weight, QArray) else None)
    output = layout.mesh_axis(axes.columns)

    def named(*spec: str | None) -> Any:
        return NamedSharding(layout.mesh, PartitionSpec(*ahead, *spec))

    if not isinstance(weight, QArray):
        return named(contracted, output)
    if not weight.blockwise:
        values, side = named(contracted, output), named(output)
    else:
        values, side = named(contracted, None, output), named(contracted, output)
    return dataclasses.replace(
        weight,
        values=values,
        scale=side,
        zero_point=None if weight.zero_point is None else side,
        input_order=None if weight.input_order is None else named(),
    )


def vector_sharding(axes: Side, layout: Layout) -> NamedSharding:
    """Of a bias (the output axes of its linear layer) or a norm's scale."""
    return NamedSharding(layout.mesh, PartitionSpec(layout.mesh_axis(axes)))


def fit_weight(axes: Axes, weight: Weight, layout: Layout) -> Weight:
    """A weight on the host in the size that the devices hold: with channels and blocks of zeros, and heads repeated."""
    if layout.held(axes.contracted) == axes.contracted and layout.held(axes.output) == axes.output:
        return weight
    rows = layout.shape(axes)[0] - axes.shape[0]

    def fit(leaf: Any, extra: int, fill: int) -> Any:
        """`extra` rows, or blocks, at the end of the first axis, and the last axis as it is held."""
        leaf = _fit_output(leaf, axes.output, layout, fill)
        return np.pad(leaf, [(0, extra)] + [(0, 0)] * (leaf.ndim - 1), constant_values=fill) if extra else leaf

    if not isinstance(weight, QArray):
        return fit(weight, rows, 0)
    blocks = rows // weight.block_size if weight.block_size is not None else 0
    return dataclasses.replace(
        weight,
        values=fit(weight.values, blocks if weight.blockwise else rows, 0),
        scale=fit(weight.scale, blocks, 1),
        zero_point=None if weight.zero_point is None else fit(weight.zero_point, blocks, 0),
        input_order=None if weight.input_order is None else _fit_order(weight.input_order, rows),
    )


def _fit_order(order: Any, rows: int) -> Any:
    """With rows at the end that stay there."""
    return np.concatenate([order, np.arange(len(order), len(order) + rows, dtype=order.dtype)])


def fit_vector(axes: Side, vector: np.ndarray, layout: Layout) -> np.ndarray:
    """The same of a bias."""
    return _fit_output(vector, axes, layout, 0)


def _fit_output(array: Any, side: Side, layout: Layout, fill: int) -> Any:
    if layout.held(side) == side:
        return array
    lead = array.shape[:-1]
    split = array.reshape(*lead, *(size for _, size in side))
    for i, ((letter, size), (_, held)) in enumerate(zip(side, layout.held(side), strict=True), start=len(lead)):
        if letter in PADDED:
            split = np.pad(
                split, [(0, held - size if axis == i else 0) for axis in range(split.ndim)], constant_values=fill
            )
        else:
            split = np.repeat(split, held // size, axis=i)
    return split.reshape(*lead, -1)


def bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Of an array, or its shape, with a sharding; two int4 values are a byte."""
    assert leaf.sharding is not None
    bits = 4 if leaf.dtype == jnp.int4 else leaf.dtype.itemsize * 8
    return -(-math.prod(leaf.sharding.shard_shape(leaf.shape)) * bits // 8)
