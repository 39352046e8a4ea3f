"""Which dimensions of a program's arrays can only be split together, told by its jaxpr.

A matmul's free dimensions go on into its result, an addition's operands have theirs in common, a reshape's first factor
is split with what it is split from. What comes of joining all that is the letters of a model that has none: its heads,
its mlp channels, the width of its residual stream. Of each it is known how many sums over devices splitting it costs,
and whether something needs it whole. Knows nothing of meshes, or of what is worth splitting.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


@dataclasses.dataclass(eq=False)
class Dimension:
    """Of one or more arrays.

    Attributes:
      sizes: of all of them; heads and their channels flattened are one dimension of several sizes.
      sums: over devices that splitting it takes.
      whole: whether something needs it undivided.
    """

    sizes: set[int]
    sums: int = 0
    whole: bool = False
    joined: "Dimension | None" = None

    @property
    def root(self) -> "Dimension":
        """The one that stands for all that were joined with it."""
        found = self
        while found.joined is not None:
            found = found.joined
        if self is not found:
            self.joined = found
        return found

    def join(self, other: "Dimension") -> "Dimension":
        mine, its = self.root, other.root
        if mine is not its:
            its.joined = mine
            mine.sizes |= its.sizes
            mine.sums += its.sums
            mine.whole |= its.whole
        return mine

    def keep_whole(self) -> None:
        self.root.whole = True

    def count_sum(self, times: int) -> None:
        self.root.sums += times


Array = tuple[Dimension, ...]
Rule = Callable[["Program", Any, list[Array], int], list[Array]]
"""Of a primitive: the program, the equation, its operands and how often it runs, to its results."""


class Program:
    """The arrays of a program that was walked through."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []

    def array(self, shape: Sequence[int]) -> Array:
        """A new one, that has nothing in common with others yet."""
        return self.keep(tuple(Dimension({size}) for size in shape))

    def keep(self, array: Array) -> Array:
        self.arrays.append(array)
        return array

    def walk(self, jaxpr: Jaxpr, operands: Sequence[Array], times: int = 1) -> list[Array]:
        """The results of a jaxpr that runs so many times."""
        known: dict[Any, Array] = dict(zip(jaxpr.invars, operands, strict=True))
        known |= {var: self.array(_shape(var)) for var in jaxpr.constvars}

        def read(var: Any) -> Array:
            return self.array(_shape(var)) if isinstance(var, Literal) else known[var]

        for equation in jaxpr.eqns:
            rule = _RULES.get(equation.primitive.name) or (_call if _body(equation) is not None else _aligned)
            results = rule(self, equation, [read(var) for var in equation.invars], times)
            known |= zip(equation.outvars, map(self.keep, results), strict=True)
        return [read(var) for var in jaxpr.outvars]


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _body(equation: Any) -> Jaxpr | None:
    """Of what only calls another program once, on its own operands."""
    if equation.primitive.name in ("while", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = equation.params.get(name)
        body = body.jaxpr if isinstance(body, ClosedJaxpr) else body
        if isinstance(body, Jaxpr) and [*map(_shape, body.invars)] == [*map(_shape, equation.invars)]:
            return body
    return None


def _call(program: Program, equation: Any, operands: list[Array], times: int) -> list[Array]:
    body = _body(equation)
    assert body is not None
    return program.walk(body, operands, times)


def _aligned(program: Program, equation: Any, operands: list[Array], _times: int) -> list[Array]:
    """Of elementwise operations, and all that are not known better: dimensions of equal sizes at the same place.

    Where sizes differ, or where the operation is said to run along, it needs them whole.
    """
    results = [program.array(_shape(var)) for var in equation.outvars]
    along = [equation.params.get(name) for name in ("axis", "dimension")]
    for result in results:
        for operand, var in zip(operands, equation.invars, strict=True):
            if len(operand) != len(result):
                _keep_whole([operand])
                continue
            for i, (mine, its) in enumerate(zip(operand, result, strict=True)):
                if _shape(var)[i] in its.root.sizes and i not in along:
                    its.join(mine)
                else:
                    _keep_whole([(mine, its)])
    return results


def _keep_whole(arrays: Sequence[Array]) -> None:
    for array in arrays:
        for dimension in array:
            dimension.keep_whole()


def _opaque(program: Program, equation: Any, operands: list[Array], _times: int) -> list[Array]:
    results = [program.array(_shape(var)) for var in equation.outvars]
    _keep_whole([*operands, *results])
    return results


def _dot_general(_program: Program, equation: Any, operands: list[Array], times: int) -> list[Array]:
    (contracted, batch), (left, right) = equation.params["dimension_numbers"], operands
    for i, j in zip(*contracted, strict=True):
        left[i].join(right[j]).count_sum(times)
    shared = [left[i].join(right[j]) for i, j in zip(*batch, strict=True)]
    free = [
        dimension
        for side, array in enumerate(operands)
        for i, dimension in enumerate(array)
        if i not in contracted[side] and i not in batch[side]
    ]
    return [(*shared, *free)]


def _reduce(_program: Program, equation: Any, operands: list[Array], times: int) -> list[Array]:
    axes = equation.params["axes"]
    for array in operands:
        for axis in axes:
            array[axis].count_sum(times)
    kept = [[d for i, d in enumerate(array) if i not in axes] for array in operands]
    return [tuple(kept[min(i, len(kept) - 1)]) for i in range(len(equation.outvars))]


def _transpose(_program: Program, equation: Any, operands: list[Array], _times: int) -> list[Array]:
    return [tuple(operands[0][i] for i in equation.params["permutation"])]


def _squeeze(_program: Program, equation: Any, operands: list[Array], _times: int) -> list[Array]:
    return [tuple(d for i, d in enumerate(operands[0]) if i not in equation.params["dimensions"])]


def _broadcast(program: Program, equation: Any, operands: list[Array], _times: int) -> list[Array]:
    shape = equation.params["shape"]
    result = list(program.array(shape))
    for i, place in enumerate(equation.params["broadcast_dimensions"]):
        if _shape(equation.invars[0])[i] == shape[place]:
            result[place] = operands[0][i]
    return [tuple(result)]


def _reshape(program: Program, equation: Any, operands: list[Array], _times: int) -> list[Array]:
    """Of factors that are joined or parted, the first stands for all, and the others are whole."""
    before, after = _shape(equation.invars[0]), _shape(equation.outvars[0])
    result = program.array(after)
    i = j = 0
    while i < len(before) and j < len(after):
        first, other = i, j
        i, j = i + 1, j + 1
        while (a := math.prod(before[first:i])) != (b := math.prod(after[other:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        mine = [d for d, size in zip(operands[0][first:i], before[first:i], strict=True) if size > 1]
        its = [d for d, size in zip(result[other:j], after[other:j], strict=True) if size > 1]
        if mine and its:
            its[0].join(mine[0])
        _keep_whole([tuple(mine[1:]), tuple(its[1:])])
    return [result]


def _gather(program: Program, equation: Any, operands: list[Array], times: int) -> list[Array]:
    """A lookup: what is looked up by can be split at the cost of a sum, what is taken as it is at none."""
    table, indices = operands
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    result = list(program.array(_shape(equation.outvars[0])))
    taken = [i for i in range(len(table)) if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    for i, place in zip(taken, numbers.offset_dims, strict=True):
        if sizes[i] == _shape(equation.invars[0])[i]:
            result[place] = table[i]
        else:
            _keep_whole([(table[i], result[place])])
    for i in numbers.collapsed_slice_dims:
        table[i].count_sum(times)
    _keep_whole([tuple(table[i] for i in numbers.operand_batching_dims)])
    places = [place for place in range(len(result)) if place not in numbers.offset_dims]
    for place, dimension in zip(places, indices[:-1], strict=True):
        result[place] = dimension
    return [tuple(result)]


def _scan(program: Program, equation: Any, operands: list[Array], times: int) -> list[Array]:
    p = equation.params
    constants, carried = p["num_consts"], p["num_carry"]
    stacked = operands[constants + carried :]
    _keep_whole([array[:1] for array in stacked])
    starts = operands[: constants + carried]
    results = program.walk(p["jaxpr"].jaxpr, [*starts, *(array[1:] for array in stacked)], times * p["length"])
    for start, end in zip(starts[constants:], results[:carried], strict=True):
        for mine, its in zip(start, end, strict=True):
            mine.join(its)
    lengths = [Dimension({p["length"]}, whole=True) for _ in results[carried:]]
    return results[:carried] + [(length, *array) for length, array in zip(lengths, results[carried:], strict=True)]


_RULES: dict[str, Rule] = {
    "dot_general": _dot_general,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "gather": _gather,
    "scan": _scan,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys(("while", "cond", "conv_general_dilated", "fft", "scatter", "scatter-add"), _opaque),
}
