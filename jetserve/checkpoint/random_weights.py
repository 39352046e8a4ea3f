"""Models with random weights, made on the devices: for benchmarks of sizes whose weights are not at hand.

Knows which weights a recipe makes; their values mean nothing, but are of a trained model's magnitude.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetserve.checkpoint.abstract import abstract_weights, ideal_bits, planned_quantization
from jetserve.checkpoint.load import LoadedModel, Progress, silent
from jetserve.checkpoint.placement import give, layout_of
from jetserve.models import base
from jetserve.models.base import Parameter
from jetserve.quantize.qarray import INTEGER_RANGE, QArray, QuantizationConfig
from jetserve.quantize.recipe import Recipe
from jetserve.quantize.report import TensorReport, WeightReport


def random_model(
    hf_config: Mapping[str, Any],
    *,
    quantize_type: str | None = None,
    block_size: int | None = None,
    symmetric: bool | None = None,
    quantize_activation: bool = False,
    mesh: Mesh,
    dtype: jnp.dtype,
    exact_activations: bool = True,
    seed: int = 0,
    progress: Progress = silent,
) -> LoadedModel:
    """A model of a Hugging Face config; the same seed gives the same weights. Settings are `load.load_model`'s.

    Raises:
      ValueError: for an architecture that is not built, and for settings that cannot be had.
    """
    module = base.find(hf_config.get("model_type"))
    recipe = Recipe.from_settings(
        quantize_type,
        block_size=block_size,
        symmetric=symmetric,
        quantize_activation=quantize_activation,
        source_quantized=False,
    )
    config = module.Config.from_hf(hf_config)
    model = module.Model(config)
    parameters = base.parameters(model, module.WEIGHTS)
    quantization = planned_quantization(recipe.plan(parameters))
    layout = layout_of(parameters, quantization, mesh)
    weights = abstract_weights(parameters, quantization, layout, jnp.dtype(dtype))
    keys = jax.random.split(jax.random.key(seed), len(parameters))
    reports = []
    for parameter, key in zip(progress(parameters), keys, strict=True):
        weight = _placed(key, weights[parameter.path])
        give(parameter, weight, exact_activations=exact_activations)
        reports.append(_report(parameter, quantization[parameter.path], jnp.dtype(dtype)))
    return LoadedModel(
        model=model,
        config=config,
        hf_config=hf_config,
        tokenizer=None,
        report=WeightReport(tensors=tuple(reports)),
        quantize_type=recipe.quantize_type,
    )


def _placed(key: jax.Array, weight: QArray | jax.ShapeDtypeStruct) -> QArray | jax.Array:
    """A weight of these shapes, each shard made on its own device; layers that are alike are compiled once."""
    leaves, structure = jax.tree.flatten(weight)
    return _compiled(tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves), structure)(key)


@functools.cache
def _compiled(leaves: tuple, structure: Any) -> Any:
    weight = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in leaves])
    out_shardings = jax.tree.unflatten(structure, [sharding for _, _, sharding in leaves])
    return jax.jit(functools.partial(_random, weight=weight), out_shardings=out_shardings)


def _random(key: jax.Array, *, weight: QArray | jax.ShapeDtypeStruct) -> QArray | jax.Array:
    """A matrix [K, N] whose rows sum to about 1 in square (one of each expert), or a vector of ones."""
    if not isinstance(weight, QArray):
        if len(weight.shape) == 1:
            return jnp.ones(weight.shape, weight.dtype)
        return jax.random.normal(key, weight.shape, weight.dtype) / math.sqrt(weight.shape[-2])
    low, high = INTEGER_RANGE[weight.bits]
    values = jax.random.randint(key, weight.values.shape, low, high + 1, jnp.int8)
    deviation = math.sqrt(((high - low + 1) ** 2 - 1) / 12)  # of integers, all equally likely
    scale = jnp.full(weight.scale.shape, 1 / (deviation * math.sqrt(weight.shape[0])), weight.scale.dtype)
    return dataclasses.replace(
        weight,
        values=values.astype(weight.values.dtype),
        scale=scale,
        zero_point=None if weight.zero_point is None else jnp.zeros_like(scale),
    )


def _report(parameter: Parameter, config: QuantizationConfig | None, dtype: jnp.dtype) -> TensorReport:
    return TensorReport(
        name=parameter.source,
        type_name=dtype.name if config is None else config.name,
        weights=math.prod(parameter.shape),
        bits=ideal_bits(parameter, config, dtype),
        block_size=None if config is None else config.block_size,
    )
