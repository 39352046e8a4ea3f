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

from jetserve.checkpoint.load import LoadedModel, Progress, give, shardings, silent
from jetserve.models import base
from jetserve.models.base import Parameter
from jetserve.quantize.qarray import INTEGER_RANGE, QArray, QuantizationConfig, by_expert
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
    plan = recipe.plan(parameters)
    reports = []
    for parameter, key in zip(
        progress(parameters), jax.random.split(jax.random.key(seed), len(parameters)), strict=True
    ):
        wanted = plan[parameter.path].config
        kind = Kind(
            shape=parameter.shape,
            experts=parameter.axes.experts if parameter.axes is not None else None,
            config=wanted,
            dtype=jnp.dtype(dtype),
        )
        abstract = jax.eval_shape(kind.make, key)
        weight = _placed(key, kind, shardings(parameter, abstract, mesh))
        reports.append(_report(parameter, abstract, wanted))
        give(parameter, weight, exact_activations=exact_activations)
    return LoadedModel(
        model=model,
        config=config,
        hf_config=hf_config,
        tokenizer=None,
        report=WeightReport(tensors=tuple(reports)),
        quantize_type=recipe.quantize_type,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What a weight is to be: `shape` of a parameter, a matrix of how many `experts` it is, what rounds it."""

    shape: tuple[int, ...]
    experts: int | None
    config: QuantizationConfig | None
    dtype: jnp.dtype

    def make(self, key: jax.Array) -> QArray | jax.Array:
        """A matrix [K, N] whose rows sum to about 1 in square (one of each expert), or a vector of ones."""
        if len(self.shape) == 1:
            return jnp.ones(self.shape, self.dtype)
        matrix = self._matrix(key, *self.shape)
        return matrix if self.experts is None else by_expert(matrix, self.experts)

    def _matrix(self, key: jax.Array, K: int, N: int) -> QArray | jax.Array:
        config = self.config
        if config is None:
            return jax.random.normal(key, (K, N), self.dtype) / math.sqrt(K)
        g = config.block_size
        low, high = INTEGER_RANGE[config.bits]
        values = jax.random.randint(key, (K, N) if g is None else (K // g, g, N), low, high + 1, jnp.int8)
        deviation = math.sqrt(((high - low + 1) ** 2 - 1) / 12)  # of integers, all equally likely
        scale = jnp.full((N,) if g is None else (K // g, N), 1 / (deviation * math.sqrt(K)), jnp.float32)
        return QArray(
            values=values if config.bits == 8 else values.astype(jnp.int4),
            scale=scale,
            zero_point=None if config.symmetric else jnp.zeros_like(scale),
            block_size=g,
            quantize_activation=config.quantize_activation,
        )


def _placed(key: jax.Array, kind: Kind, out_shardings: Any) -> QArray | jax.Array:
    """A weight, each shard made on its own device; layers that are alike are compiled once."""
    leaves, structure = jax.tree.flatten(out_shardings)
    return _compiled(kind, tuple(leaves), structure)(key)


@functools.cache
def _compiled(kind: Kind, leaves: tuple, structure: Any) -> Any:
    return jax.jit(kind.make, out_shardings=jax.tree.unflatten(structure, leaves))


def _report(parameter: Parameter, abstract: Any, config: QuantizationConfig | None) -> TensorReport:
    count = math.prod(parameter.shape)
    if config is None:
        return TensorReport(
            name=parameter.source,
            type_name=abstract.dtype.name,
            weights=count,
            bits=count * abstract.dtype.itemsize * 8,
        )
    return TensorReport(
        name=parameter.source,
        type_name=config.name,
        weights=count,
        bits=abstract.size_in_bits,
        block_size=config.block_size,
    )
