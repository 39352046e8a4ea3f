"""Automatic tensor parallelism, told to people: how each weight of a model lies over the devices, and why.

The rules are `rules.py`'s; this says what they did.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Iterable

import jax

from jetserve.parallel.rules import MESH_AXIS, PADDED, Axes, Layout, Side, bytes_per_device
from jetserve.quantize.qarray import QArray


class Split(enum.Enum):
    """What of a weight is split: its outputs, its inputs (and results are summed), or none of it."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"
    REPLICATED = "replicated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """How one weight, or the same one of several layers, lies over the devices.

    Attributes:
      name: its path, with `{i}` for the layer.
      count: layers that have it.
      axes: "D -> N H"; of a vector its letters.
      split: what of it is.
      shards: devices that hold different parts of it.
      bytes_per_device: of one layer's, scales and zero points too.
      reason: why.
    """

    name: str
    count: int
    axes: str
    split: Split
    shards: int
    bytes_per_device: int
    reason: str


def explain(
    weights: Iterable[tuple[str, Axes | Side, QArray | jax.ShapeDtypeStruct]], layout: Layout
) -> list[WeightPlan]:
    """Every weight's plan, layers that are alike in one line.

    Args:
      weights: path, axes (of a vector its output's), and the weight as shapes with shardings.
      layout: that they were laid out by.
    """
    found: dict[WeightPlan, int] = {}
    for path, axes, weight in weights:
        leaves = jax.tree.leaves(weight)
        if layout.mesh.size == 1:
            split, reason = Split.REPLICATED, "there is one device"
        elif isinstance(axes, Axes):
            split, reason = _matrix(axes, weight, layout)
        else:
            split, reason = _vector(axes, layout)
        plan = WeightPlan(
            name=re.sub(r"\.\d+\.", ".{i}.", path),
            count=1,
            axes=str(axes) if isinstance(axes, Axes) else " ".join(letter for letter, _ in axes),
            split=split,
            shards=round(leaves[0].size / _size(leaves[0])),
            bytes_per_device=sum(bytes_per_device(leaf) for leaf in leaves),
            reason=reason,
        )
        found[plan] = found.get(plan, 0) + 1
    return [dataclasses.replace(plan, count=count) for plan, count in found.items()]


def _size(leaf: jax.ShapeDtypeStruct) -> int:
    """Elements that a device holds."""
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _matrix(axes: Axes, weight: QArray | jax.ShapeDtypeStruct, layout: Layout) -> tuple[Split, str]:
    block_size = weight.block_size if isinstance(weight, QArray) else None
    if axes.experts is not None and layout.mesh.shape[MESH_AXIS["E"]] > 1 and layout.mesh_axis(axes.output) is not None:
        return Split.EXPERTS, _divided(axes.output, layout)
    if layout.mesh_axis(axes.columns) is not None:
        split = Split.VOCABULARY if axes.columns[0][0] == "V" else Split.COLUMN
        return split, _divided(axes.columns, layout)
    if layout.row_axis(axes, block_size) is not None:
        scales = "; a scale for all of its inputs, on every device" if _has_channel_scales(weight) else ""
        return Split.ROW, _divided(axes.contracted, layout) + scales
    for side in (axes.columns, axes.contracted):
        letter, size = layout.held(side)[0]
        if letter in MESH_AXIS:
            devices = layout.mesh.shape[MESH_AXIS[letter]]
            if size % devices:
                return Split.REPLICATED, f"{letter} = {size} is no multiple of the {devices} devices"
            return (
                Split.REPLICATED,
                f"{layout.shape(axes)[0] // devices} inputs a device would cut blocks of {block_size}",
            )
    return Split.REPLICATED, "no letter that is split"


def _has_channel_scales(weight: QArray | jax.ShapeDtypeStruct) -> bool:
    return isinstance(weight, QArray) and not weight.blockwise


def _vector(axes: Side, layout: Layout) -> tuple[Split, str]:
    if layout.mesh_axis(axes) is not None:
        return Split.COLUMN, _divided(axes, layout)
    return Split.REPLICATED, "every device adds all of it"


def _divided(side: Side, layout: Layout) -> str:
    (letter, size), (_, held) = side[0], layout.held(side)[0]
    devices = layout.mesh.shape[MESH_AXIS[letter]]
    share = f"{letter} / {devices} = {held // devices} a device"
    if held == size:
        return share
    return f"{share}, {held - size} of zeros" if letter in PADDED else f"{share}, each of {size} {held // size} times"
