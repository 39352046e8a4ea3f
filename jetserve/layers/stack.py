"""Layers that are alike, traced once for all of them."""

import functools
from typing import Any

import jax
from flax import nnx

from jetserve.kernels import select


def traced_once(layer: nnx.Module, *args: Any) -> Any:
    """`layer(*args)`, in a program that traces and lowers layers of equal structure and shapes only once.

    The compiler inlines the calls, so the compiled program is that of a plain call; only making it is faster, by as
    much as there are layers.
    """
    graph, state = nnx.split(layer)
    # The selection is a key, because it decides what is traced.
    return _call(graph, select.selection(), state, args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(graph: nnx.GraphDef, selection: select.Selection, state: nnx.State, args: tuple) -> Any:
    return nnx.merge(graph, state)(*args)
