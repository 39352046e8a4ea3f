"""What is planned: a model by a preset or a checkpoint's description, how it is quantized, how it lies over devices.

No weight is read or made: everything is shapes with shardings.
"""

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetserve.cache.kv_cache import abstract_cache
from jetserve.checkpoint import hub, load
from jetserve.checkpoint.abstract import Quantization, abstract_weights, ideal_bits, planned_quantization
from jetserve.checkpoint.placement import give, layout_of
from jetserve.config import EngineConfig
from jetserve.engine.step import Step
from jetserve.kernels import select
from jetserve.models import base, presets
from jetserve.models.base import Parameter, Role
from jetserve.parallel import autotp
from jetserve.parallel.rules import Layout, bytes_per_device
from jetserve.plan.config import PlanConfig
from jetserve.quantize.qarray import QArray
from jetserve.quantize.recipe import Recipe

Shapes = QArray | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and how it is quantized, before there are devices.

    Attributes:
      name: for people.
      module, config: of the model file.
      quantization: of every parameter, by its path.
      quantize_type: one of `recipe.TYPE_NAMES`.
    """

    name: str
    module: ModuleType
    config: Any
    quantization: Quantization
    quantize_type: str

    @classmethod
    def of(cls, config: PlanConfig) -> "Subject":
        """The model that a plan is asked for.

        Raises:
          ValueError: for a preset, an architecture or settings that cannot be had.
          CheckpointError: for a checkpoint whose description cannot be read.
        """
        settings: dict[str, Any] = {
            "quantize_type": config.quantize_type,
            "block_size": config.block_size,
            "symmetric": config.symmetric,
            "quantize_activation": config.quantize_activation,
        }
        if config.checkpoint_path is not None:
            opened = load.open_model(hub.local_path(config.checkpoint_path), quantize_type=config.quantize_type)
            _, parameters = opened.build()
            settled = load.settle(opened.source, parameters, **settings)
            return cls(
                name=config.checkpoint_path,
                module=opened.module,
                config=opened.config,
                quantization=settled.quantization,
                quantize_type=settled.quantize_type,
            )
        assert config.model_name is not None
        assert config.size is not None
        hf_config = presets.preset(config.model_name, config.size)
        module = base.find(hf_config["model_type"])
        recipe = Recipe.from_settings(**settings, source_quantized=False)
        model_config = module.Config.from_hf(hf_config)
        parameters = base.parameters(module.Model(model_config), module.WEIGHTS)
        return cls(
            name=f"{config.model_name} {config.size}",
            module=module,
            config=model_config,
            quantization=planned_quantization(recipe.plan(parameters)),
            quantize_type=recipe.quantize_type,
        )

    def over(self, mesh: Mesh, config: EngineConfig) -> "Placed":
        """The model over devices, as loading would lay it out, for the platform of the mesh."""
        model = self.module.Model(self.config)
        parameters = base.parameters(model, self.module.WEIGHTS)
        layout = layout_of(parameters, self.quantization, mesh)
        weights = abstract_weights(parameters, self.quantization, layout, jnp.dtype(config.dtype))
        with select.platform(mesh.devices.flat[0].platform):
            for parameter in parameters:
                give(parameter, weights[parameter.path])
        return Placed(
            subject=self,
            model=model,
            parameters=parameters,
            layout=layout,
            weights=weights,
            cache=abstract_cache(self.config, config, mesh),
            config=config,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A model and its cache over devices, in shapes with shardings. `weights` are by path, as they were before kernels
    laid them out.
    """

    subject: Subject
    model: base.Model
    parameters: list[Parameter]
    layout: Layout
    weights: Mapping[str, Shapes]
    cache: tuple[Any, ...]
    config: EngineConfig

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    def with_layers(self, count: int) -> "Placed":
        """The same model of so many layers."""
        config = dataclasses.replace(self.subject.config, num_layers=count)
        return dataclasses.replace(self.subject, config=config).over(self.mesh, self.config)

    def step(self) -> Step:
        return Step(self.model, self.config, self.cache)

    def explain(self) -> list[autotp.WeightPlan]:
        """How every weight is split, and why."""
        rows = ((p.path, p.output_axes if p.axes is None else p.axes, self.weights[p.path]) for p in self.parameters)
        return autotp.explain(rows, self.layout)

    @property
    def weights_bytes(self) -> int:
        """That a device holds, int4 values at half a byte, without padding of tiles."""
        return sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(dict(self.weights)))

    @property
    def ideal_weights_bytes(self) -> int:
        """A device's share if nothing were padded, repeated or replicated."""
        quantization, dtype = self.subject.quantization, jnp.dtype(self.config.dtype)
        bits = sum(ideal_bits(p, quantization[p.path], dtype) for p in self.parameters)
        return -(-bits // 8 // self.mesh.size)

    @property
    def cache_bytes(self) -> int:
        """Of all pages, that a device holds."""
        return sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(self.cache))

    @property
    def bytes_read(self) -> int:
        """By a step, of weights: all but an embedding that is looked up and not multiplied."""
        skipped = [p.path for p in self.parameters if p.role is Role.EMBEDDING][: self._has_own_head]
        return self.weights_bytes - sum(
            bytes_per_device(leaf) for path in skipped for leaf in jax.tree.leaves(self.weights[path])
        )

    @property
    def _has_own_head(self) -> int:
        return int(sum(p.role is Role.EMBEDDING for p in self.parameters) > 1)

    @property
    def matmul_weights(self) -> int:
        """Weights that each token is multiplied with, on a device, without the output head."""
        shapes = [self.weights[p.path] for p in self.parameters if p.role is Role.LINEAR]
        leaves = [shape.values if isinstance(shape, QArray) else shape for shape in shapes]
        return sum(_elements(leaf) for leaf in leaves)

    @property
    def head_weights(self) -> int:
        """Weights of the output head, on a device."""
        shape = self.weights[[p.path for p in self.parameters if p.role is Role.EMBEDDING][-1]]
        return _elements(shape.values if isinstance(shape, QArray) else shape)


def _elements(leaf: Any) -> int:
    count = 1
    for size in leaf.sharding.shard_shape(leaf.shape):
        count *= size
    return count
