"""What loading would put on a mesh, in shapes: how each weight is quantized, told without reading them.

Serves loading, random weights and plans alike, so that all three lay a model out the same way.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jetserve.checkpoint.base import CheckpointReader
from jetserve.checkpoint.native import NativeCheckpoint
from jetserve.checkpoint.placement import held_shape, shardings
from jetserve.models.base import Parameter, Role
from jetserve.parallel.rules import Layout
from jetserve.quantize.qarray import QArray, QuantizationConfig, by_expert
from jetserve.quantize.recipe import Action, Target

Quantization = Mapping[str, QuantizationConfig | None]
"""By a parameter's path: how it is quantized, None for floats."""


def planned_quantization(plan: Mapping[str, Target]) -> Quantization:
    """Of weights that a recipe rounds."""
    return {path: target.config for path, target in plan.items()}


def native_quantization(source: NativeCheckpoint, parameters: Sequence[Parameter]) -> Quantization:
    """Of a converted checkpoint, by its manifest."""
    return {p.path: source.tensors[p.source].config for p in parameters}


def with_activations(quantization: Quantization, parameters: Sequence[Parameter]) -> Quantization:
    """With linear layers that quantize their other operand as they run."""

    def change(parameter: Parameter) -> QuantizationConfig | None:
        config = quantization[parameter.path]
        if config is None or parameter.role is not Role.LINEAR:
            return config
        return dataclasses.replace(config, quantize_activation=True)

    return {p.path: change(p) for p in parameters}


def source_quantization(
    source: CheckpointReader, parameters: Sequence[Parameter], plan: Mapping[str, Target]
) -> Quantization:
    """Of another format's. What is carried over shows itself in one tensor of each type and shape, which is read."""
    seen: dict[tuple[str, tuple[int, ...]], QuantizationConfig | None] = {}

    def kept(name: str) -> QuantizationConfig | None:
        bits = source.quantized_bits(name)
        if bits is None:
            return None
        info = source.tensors[name]
        key = info.type_name, info.shape
        if key not in seen:
            found = source.read_quantized(name)
            seen[key] = (
                None
                if found is None
                else QuantizationConfig(bits=bits, block_size=found.block_size, symmetric=found.zero_point is None)
            )
        return seen[key]

    return {
        p.path: kept(p.source)
        if plan[p.path].action is Action.KEEP and p.role is not Role.FLOAT
        else plan[p.path].config
        for p in parameters
    }


def abstract_weight(
    shape: tuple[int, ...], config: QuantizationConfig | None, dtype: jnp.dtype
) -> QArray | jax.ShapeDtypeStruct:
    """A weight's leaves as shapes, scales in float32."""
    if config is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    *lead, K, N = shape
    g = config.block_size
    side = jax.ShapeDtypeStruct((*lead, N) if g is None else (*lead, K // g, N), jnp.float32)
    values = (*lead, K, N) if g is None else (*lead, K // g, g, N)
    return QArray(
        values=jax.ShapeDtypeStruct(values, jnp.int4 if config.bits == 4 else jnp.int8),  # type: ignore[arg-type]
        scale=side,  # type: ignore[arg-type]
        zero_point=None if config.symmetric else side,  # type: ignore[arg-type]
        block_size=g,
        quantize_activation=config.quantize_activation,
    )


def abstract_weights(
    parameters: Sequence[Parameter], quantization: Quantization, layout: Layout, dtype: jnp.dtype
) -> dict[str, QArray | jax.ShapeDtypeStruct]:
    """Every parameter's shapes and shardings by its path, before kernels lay weights out."""
    weights = {}
    for parameter in parameters:
        weight = abstract_weight(held_shape(parameter, layout), quantization[parameter.path], dtype)
        if parameter.axes is not None and parameter.axes.experts is not None:
            weight = jax.eval_shape(functools.partial(by_expert, experts=parameter.axes.experts), weight)
        weight = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            weight,
            shardings(parameter, weight, layout),
        )
        weights[parameter.path] = weight
    return weights


def ideal_bits(parameter: Parameter, config: QuantizationConfig | None, dtype: jnp.dtype) -> int:
    """Of a parameter without padding, repetition or replication."""
    weight = abstract_weight(parameter.shape, config, dtype)
    return weight.size_in_bits if isinstance(weight, QArray) else math.prod(parameter.shape) * dtype.itemsize * 8
