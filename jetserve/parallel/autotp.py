"""Automatic tensor parallelism: told to people for models, chosen for any other function.

How each weight of a model lies over the devices is decided by `rules`, from the axes that it declares; `explain` says
what they did. A function that declares nothing is traced: `dimensions` finds what of its arrays can be split together,
and `shard` chooses of it.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jetserve.parallel.dimensions import Array, Dimension, Program
from jetserve.parallel.rules import MESH_AXIS, PADDED, Axes, Layout, Side, bytes_per_device
from jetserve.quantize.qarray import QArray

WORTH_OF_A_SUM = 0.5
"""Of an average weight's bytes: what is replicated rather than to wait for one more sum over the devices."""


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


def shard(function: Callable[..., Any], params: Any, *args: Any, mesh: Mesh, axis: str = "tensor") -> Any:
    """Shardings of the parameters of any function, found by tracing it.

    Results are the same whatever the shardings: XLA adds the collectives that they take. Matrices are split so that
    these are few: the first of two in a row by columns, the second by rows, attention by heads.

    Args:
      function: called with `params` and `args`; not run.
      params: a tree of arrays, or of their shapes, such as the state of an nnx module.
      args: the other arguments, or their shapes. They are taken to be whole on every device.
      mesh: whose devices share the weights.
      axis: of the mesh.

    Returns:
      A tree of `params`' structure, of `NamedSharding`s, for `jax.device_put(params, …)`.
    """
    closed, leaves = _trace(function, params, args), jax.tree.leaves(params)
    program = Program()
    operands = [program.array(var.aval.shape) for var in closed.jaxpr.invars]
    weights, others = operands[: len(leaves)], operands[len(leaves) :]
    for array in others:
        for dimension in array:
            dimension.keep_whole()
    program.walk(closed.jaxpr, operands)
    chosen = _choose(_candidates(program, list(zip(weights, leaves, strict=True)), mesh.shape[axis]))
    specs = [PartitionSpec(*(axis if d.root in chosen else None for d in array)) for array in weights]
    return jax.tree.unflatten(jax.tree.structure(params), [NamedSharding(mesh, spec) for spec in specs])


def _trace(function: Callable[..., Any], params: Any, args: tuple) -> Any:
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, args))
    return jax.make_jaxpr(function)(shapes[0], *shapes[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A dimension that may be split: its worth in bytes, and what cannot be split beside it."""

    worth: float
    rivals: frozenset[Dimension]


def _candidates(program: Program, weights: list[tuple[Array, Any]], devices: int) -> Mapping[Dimension, _Candidate]:
    matrices = [(array, math.prod(leaf.shape) * leaf.dtype.itemsize) for array, leaf in weights if len(leaf.shape) > 1]
    average = sum(size for _, size in matrices) / max(1, len(matrices))
    worth: dict[Dimension, float] = {}
    for array, size in matrices:
        for root in {dimension.root for dimension in array}:
            if not root.whole and all(one % devices == 0 for one in root.sizes):
                worth[root] = worth.get(root, -WORTH_OF_A_SUM * average * root.sums) + size
    rivals: dict[Dimension, set[Dimension]] = {root: set() for root in worth}
    for array in program.arrays:
        roots = [dimension.root for dimension in array if dimension.root in worth]
        for root in roots:
            # An array that has it twice makes it its own rival.
            rivals[root] |= set(roots) - {root} if roots.count(root) == 1 else {root}
    return {
        root: _Candidate(worth=value, rivals=frozenset(rivals[root]))
        for root, value in worth.items()
        if value > 0 and root not in rivals[root]
    }


def _choose(candidates: Mapping[Dimension, _Candidate]) -> set[Dimension]:
    """Those that are worth the most together, no two of them rivals."""
    chosen: set[Dimension] = set()
    for group in _groups(candidates):
        most = max(group, key=lambda root: len(candidates[root].rivals & group.keys()))
        rest = {root: candidate for root, candidate in group.items() if root is not most}
        if not rest:
            chosen.add(most)
            continue
        without = _choose(rest)
        within = {most} | _choose({r: c for r, c in rest.items() if r not in candidates[most].rivals})
        chosen |= max(without, within, key=lambda roots: sum(candidates[root].worth for root in roots))
    return chosen


def _groups(candidates: Mapping[Dimension, _Candidate]) -> Iterable[dict[Dimension, _Candidate]]:
    """Parts that have no rivals among each other."""
    left = dict(candidates)
    while left:
        found: dict[Dimension, _Candidate] = {}
        reached = [next(iter(left))]
        while reached:
            root = reached.pop()
            if root in left:
                found[root] = left.pop(root)
                reached += found[root].rivals
        yield found
