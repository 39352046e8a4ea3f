"""The stack of a model's layers: those that are alike are traced once for all of them."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jetserve.kernels import select

_replacement: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar("replacement", default=None)


@contextlib.contextmanager
def replaced_by(function: Callable[..., Any]) -> Iterator[None]:
    """Runs `function(layer, *args)` in place of every layer of the models that are called within, in their order."""
    token = _replacement.set(function)
    try:
        yield
    finally:
        _replacement.reset(token)


def traced_once(layer: nnx.Module, *args: Any) -> Any:
    """`layer(*args)`, in a program that traces and lowers layers of equal structure and shapes only once.

    The compiler inlines the calls, so the compiled program is that of a plain call; only making it is faster, by as
    much as there are layers.
    """
    if (replacement := _replacement.get()) is not None:
        return replacement(layer, *args)
    graph, state = nnx.split(layer)
    # The selection is a key, because it decides what is traced.
    return _call(graph, select.selection(), state, args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(graph: nnx.GraphDef, selection: select.Selection, state: nnx.State, args: tuple) -> Any:
    return nnx.merge(graph, state)(*args)
