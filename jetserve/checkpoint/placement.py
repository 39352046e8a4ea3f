"""From weights on the host to weights on a mesh: each shard straight to its device, as its kernel wants it.

Knows nothing of where weights come from.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as DeviceLayout
from jax.sharding import Mesh

from jetserve.kernels import select
from jetserve.models.base import Parameter, Role
from jetserve.parallel.rules import Layout, fit_vector, fit_weight, vector_sharding, weight_sharding
from jetserve.quantize.qarray import INTEGER_RANGE, QArray, QuantizationConfig, by_expert, cast_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where weights go, what floats are cast to, and whether their kernels must leave activations as they are."""

    layout: Layout
    dtype: jnp.dtype
    exact_activations: bool


def layout_of(
    parameters: Sequence[Parameter], quantization: Mapping[str, QuantizationConfig | None], mesh: Mesh
) -> Layout:
    """How a model lies over a mesh, by how each parameter, by its path, is quantized."""
    matrices = [(p.axes, quantization[p.path]) for p in parameters if p.axes is not None]
    return Layout.of([(axes, None if config is None else config.block_size) for axes, config in matrices], mesh)


def place(parameter: Parameter, array: QArray | np.ndarray, bits: int | None, placement: Placement) -> None:
    """Puts a weight of the host onto the mesh, each shard straight to its device, as its kernel wants it.

    Args:
      parameter: takes the result.
      array: of numpy arrays, with int4 values in int8 containers.
      bits: of quantized values; None for floats.
      placement: where it goes, and as what.

    Raises:
      ValueError: if values do not fit their integer type, naming the tensor.
    """
    layout = placement.layout
    array = fit(parameter, array, layout)
    if isinstance(array, QArray) and bits == 4 and layout.mesh.devices.flat[0].platform == "cpu":
        array = _cast_on_host(array)
    if parameter.axes is not None and parameter.axes.experts is not None:
        array = by_expert(array, parameter.axes.experts)

    def put(leaf: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        # A shard is cut out, and cast, one by one: a view of a memory map is never copied whole.
        to = placement.dtype if bits is None else leaf.dtype
        return jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: np.ascontiguousarray(leaf[index]).astype(to, copy=False)
        )

    placed = jax.tree.map(put, array, shardings(parameter, array, layout))
    if bits is not None:
        placed = cast_values(placed, bits, name=parameter.source)
    give(parameter, placed, exact_activations=placement.exact_activations)


def fit(parameter: Parameter, weight: Any, layout: Layout) -> Any:
    """A weight on the host in the size that the devices hold together."""
    if parameter.axes is None:
        return fit_vector(parameter.output_axes, weight, layout)
    return fit_weight(parameter.axes, weight, layout)


def shardings(parameter: Parameter, weight: Any, layout: Layout) -> Any:
    """Of each leaf of a weight, in its own structure."""
    if parameter.axes is None:
        return vector_sharding(parameter.output_axes, layout)
    return weight_sharding(parameter.axes, weight, layout)


def held_shape(parameter: Parameter, layout: Layout) -> tuple[int, ...]:
    """The shape of a parameter in the size that the devices hold together."""
    if parameter.axes is None:
        return (math.prod(size for _, size in layout.held(parameter.output_axes)),)
    return layout.shape(parameter.axes)


def give(parameter: Parameter, placed: Any, *, exact_activations: bool = True) -> None:
    """Lays a weight that is on the mesh out for its kernel, and gives it to the model; its input order to its layer."""
    if parameter.linear is not None and parameter.axes is not None:
        if isinstance(placed, QArray) and placed.input_order is not None:
            parameter.linear.input_order = nnx.Variable(placed.input_order)
            placed = dataclasses.replace(placed, input_order=None)
        if parameter.role is Role.EMBEDDING and select.current_platform() == "tpu":
            placed = _columns_together(placed)
        operation = "quantized_matmul" if parameter.axes.experts is None else "grouped_matmul"
        placed = select.prepare(operation, placed, exact_activations=exact_activations)
    parameter.variable.set_value(placed)


def _columns_together(weight: Any) -> Any:
    """An embedding [D, V] whose columns lie in one piece each: a TPU would turn all of it around for every lookup."""

    def turn(leaf: Any) -> Any:
        if leaf.ndim != 2:
            return leaf
        form = Format(DeviceLayout(major_to_minor=(1, 0)), leaf.sharding)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=form)
        return jax.device_put(leaf, form)

    return jax.tree.map(turn, weight)


def share_input_orders(parameters: Sequence[Parameter]) -> None:
    """Gives layers of one module that take their inputs in the same order one variable of it, for one gather."""
    found: dict[tuple[str, bytes], nnx.Variable] = {}
    for parameter in parameters:
        if parameter.linear is not None and parameter.linear.input_order is not None:
            order = parameter.linear.input_order
            module = parameter.path.rsplit(".", 2)[0]
            parameter.linear.input_order = found.setdefault((module, np.asarray(order.get_value()).tobytes()), order)


def _cast_on_host(qarray: QArray) -> QArray:
    """With int4 values if they all fit. XLA's cast takes 15 times as long on a CPU; elsewhere it is the faster way."""
    low, high = INTEGER_RANGE[4]
    values = np.asarray(qarray.values)
    if values.min() < low or values.max() > high:
        return qarray
    return dataclasses.replace(qarray, values=values.astype(ml_dtypes.int4))  # type: ignore[arg-type]
