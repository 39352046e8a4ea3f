"""Loads any checkpoint onto a mesh, tensor by tensor: read, quantized on the way where asked for, sharded, laid out.

Owns the order of these steps. The whole of a checkpoint is never on the host, and no tensor is put on one device to be
spread from there. Knows nothing of flags or of how tokens are generated.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jetserve.checkpoint.base import CheckpointReader
from jetserve.checkpoint.detect import open_checkpoint
from jetserve.checkpoint.source import check_tensors, make_weight
from jetserve.kernels import select
from jetserve.models import base
from jetserve.models.base import Parameter
from jetserve.parallel.rules import vector_sharding, weight_sharding
from jetserve.quantize.qarray import QArray, cast_values
from jetserve.quantize.recipe import Recipe
from jetserve.quantize.report import TensorReport, WeightReport
from jetserve.tokenizer import Tokenizer

Progress = Callable[[Sequence[Any]], Iterable[Any]]
"""Wraps the sequence of what is to be done, as `tqdm` does."""


def silent(work: Sequence[Any]) -> Iterable[Any]:
    """No progress shown."""
    return work


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      model: with its arrays on the mesh, as the kernels want them.
      config: of the model file, such as `models.llama.Config`.
      hf_config: with Hugging Face's keys.
      tokenizer: None if the checkpoint has none.
      report: of the weights as they were made, before kernels laid them out.
      quantize_type: how they are quantized, one of `recipe.TYPE_NAMES`.
    """

    model: nnx.Module
    config: Any
    hf_config: Mapping[str, Any]
    tokenizer: Tokenizer | None
    report: WeightReport
    quantize_type: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A checkpoint whose description was read, but none of its weights."""

    source: CheckpointReader
    module: ModuleType
    config: Any

    @property
    def hf_config(self) -> Mapping[str, Any]:
        return self.source.hf_config

    def build(self) -> tuple[nnx.Module, list[Parameter]]:
        """The model without memory, and its parameters."""
        model = self.module.Model(self.config)
        return model, base.parameters(model, self.module.WEIGHTS)


def open_model(path: str | Path, *, quantize_type: str | None = None) -> OpenModel:
    """Reads what a checkpoint says of itself.

    Args:
      path: of any format.
      quantize_type: needed by formats whose files do not tell int4 from int8.

    Raises:
      CheckpointError: if it cannot be read.
      ValueError: for an architecture that is not built, naming those that are.
    """
    source = open_checkpoint(Path(path), quantize_type=quantize_type)
    module = base.find(source.hf_config.get("model_type"))
    return OpenModel(source=source, module=module, config=module.Config.from_hf(source.hf_config))


def load_model(
    path: str | Path,
    *,
    quantize_type: str | None = None,
    block_size: int | None = None,
    symmetric: bool | None = None,
    quantize_activation: bool = False,
    mesh: Mesh,
    dtype: jnp.dtype,
    progress: Progress = silent,
) -> LoadedModel:
    """Loads a checkpoint of any format.

    Args:
      path: a folder or a file.
      quantize_type: one of `recipe.TYPE_NAMES`; None is `keep` for a quantized source, `none` for a float one.
      block_size: of blockwise types; None for the default.
      symmetric: None for the default, True.
      quantize_activation: whether linear layers quantize their other operand as they run.
      mesh: where the weights go.
      dtype: of the weights that stay floats.
      progress: wraps the sequence of tensors.

    Raises:
      CheckpointError: for what is wrong with the files.
      ValueError: for settings that cannot be had, before any weight is read.
    """
    opened = open_model(path, quantize_type=quantize_type)
    recipe = Recipe.from_settings(
        quantize_type,
        block_size=block_size,
        symmetric=symmetric,
        quantize_activation=quantize_activation,
        source_kind=opened.source.kind,
    )
    model, parameters = opened.build()
    plan = recipe.plan(parameters)
    check_tensors(opened.source, parameters)
    tokenizer = opened.source.tokenizer()
    reports: list[TensorReport] = []
    for parameter in progress(parameters):
        weight = make_weight(opened.source, parameter, recipe, plan[parameter.path])
        place(parameter, weight.array, weight.bits, mesh, dtype)
        reports.append(weight.report)
    return LoadedModel(
        model=model,
        config=opened.config,
        hf_config=opened.hf_config,
        tokenizer=tokenizer,
        report=WeightReport(tensors=tuple(reports)),
        quantize_type=recipe.quantize_type,
    )


def shardings(parameter: Parameter, array: Any, mesh: Mesh) -> Any:
    """Of each leaf of a weight, in its own structure."""
    if parameter.axes is None:
        return vector_sharding(parameter.output_axes, mesh)
    return weight_sharding(parameter.axes, array, mesh)


def place(parameter: Parameter, array: QArray | np.ndarray, bits: int | None, mesh: Mesh, dtype: jnp.dtype) -> None:
    """Puts a weight of the host onto the mesh, each shard straight to its device, and finishes it."""

    def put(leaf: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        # A shard is cut out, and cast, one by one: a view of a memory map is never copied whole.
        to = dtype if bits is None else leaf.dtype
        return jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: np.ascontiguousarray(leaf[index]).astype(to, copy=False)
        )

    finish(parameter, jax.tree.map(put, array, shardings(parameter, array, mesh)), bits)


def finish(parameter: Parameter, array: QArray | jax.Array, bits: int | None) -> None:
    """Casts a weight that is on the mesh to its integer type, lays it out for its kernel, and gives it to the model.

    Raises:
      ValueError: if values do not fit the integer type, naming the tensor.
    """
    if isinstance(array, QArray) and bits is not None:
        array = cast_values(array, bits, name=parameter.source)
    if parameter.axes is not None:
        array = select.prepare("quantized_matmul", array)
    parameter.variable.set_value(array)
