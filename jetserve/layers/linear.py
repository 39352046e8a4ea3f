"""A linear layer that declares its axes once; its weight may be plain or quantized."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetserve.kernels import select
from jetserve.parallel.rules import Axes

Observer = Callable[[jax.Array, tuple["Linear", ...], jax.Array | None], list[jax.Array] | None]

_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("observer", default=None)


@contextlib.contextmanager
def observe(observer: Observer | None) -> Iterator[None]:
    """Shows `observer` the input and the layers of every `project` and `Experts` that is run or traced within.

    Of experts it is also shown how many rows of the input each of them has. What it returns, if anything, takes the
    place of the outputs.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def shown(x: jax.Array, linears: tuple["Linear", ...], group_sizes: jax.Array | None = None) -> list[jax.Array] | None:
    """Shows the observer, if there is one, what layers meet, and returns the outputs that it has for them."""
    observer = _observer.get()
    return None if observer is None else observer(x, linears, group_sizes)


class Linear(nnx.Module):
    """`x [..., K] @ weight [K, N] + bias [N]`.

    Constructed without memory: parameters are `jax.ShapeDtypeStruct`s until a checkpoint's arrays take their place.
    """

    def __init__(self, axes: str, sizes: Mapping[str, int], *, bias: bool = False) -> None:
        self.axes = Axes.parse(axes, sizes)
        self.weight: nnx.Param[Any] = nnx.Param(jax.ShapeDtypeStruct(self.axes.shape, jnp.float32))
        self.bias: nnx.Param[Any] | None = (
            nnx.Param(jax.ShapeDtypeStruct(self.axes.shape[1:], jnp.float32)) if bias else None
        )
        self.input_order: nnx.Variable[Any] | None = nnx.data(None)
        """Of a weight with such an order (`QArray.input_order`), which its kernel knows nothing of."""

    def __call__(self, x: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """[..., K] -> [..., N]."""
        return project(x, self, out_dtype=out_dtype)[0]


def project(x: jax.Array, *linears: Linear, out_dtype: jnp.dtype | None = None) -> list[jax.Array]:
    """x [..., K] through several layers at once: [..., N] of each.

    Layers that share the very variable of their input order, or have none, take one gather and one call.
    """
    if (outputs := shown(x, linears)) is not None:
        return outputs
    order = linears[0].input_order
    if any(linear.input_order is not order for linear in linears):
        return [project(x, linear, out_dtype=out_dtype)[0] for linear in linears]
    if order is not None:
        x = jnp.take(x, order.get_value(), axis=-1)
    weights = [linear.weight.get_value() for linear in linears]
    biases = [None if linear.bias is None else linear.bias.get_value() for linear in linears]
    return select.call("projections", x, weights, biases, out_dtype=out_dtype)
