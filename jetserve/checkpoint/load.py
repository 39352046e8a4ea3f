"""Loads any checkpoint onto a mesh, tensor by tensor: read, quantized on the way where asked for, sharded, laid out.

Owns the order of these steps. The whole of a checkpoint is never on the host, and no tensor is put on one device to be
spread from there. Knows nothing of flags or of how tokens are generated.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jetserve.checkpoint.base import CheckpointError, CheckpointReader, SourceKind
from jetserve.checkpoint.detect import open_checkpoint
from jetserve.checkpoint.files import some
from jetserve.checkpoint.native import NativeCheckpoint, is_native
from jetserve.checkpoint.native_reader import NativeReader, can_be_rounded
from jetserve.checkpoint.parts import in_parts, renamed
from jetserve.checkpoint.source import check_tensors, make_weight
from jetserve.kernels import select
from jetserve.models import base
from jetserve.models.base import Parameter, Role
from jetserve.parallel.rules import vector_sharding, weight_sharding
from jetserve.quantize.qarray import INTEGER_RANGE, QArray, by_expert, cast_values
from jetserve.quantize.recipe import KEEP, NONE, Recipe, Rules, Target
from jetserve.quantize.report import TensorReport, WeightReport
from jetserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

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
      quantize_type: how they are quantized, one of `recipe.TYPE_NAMES` or `recipe.RULES`.
    """

    model: base.Model
    config: Any
    hf_config: Mapping[str, Any]
    tokenizer: Tokenizer | None
    report: WeightReport
    quantize_type: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A checkpoint whose description was read, but none of its weights."""

    source: CheckpointReader | NativeCheckpoint
    module: ModuleType
    config: Any

    @property
    def hf_config(self) -> Mapping[str, Any]:
        return self.source.hf_config

    def build(self) -> tuple[base.Model, list[Parameter]]:
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
    path = Path(path)
    source = NativeCheckpoint(path) if is_native(path) else open_checkpoint(path, quantize_type=quantize_type)
    module = base.find(source.hf_config.get("model_type"))
    config = module.Config.from_hf(source.hf_config)
    if not isinstance(source, NativeCheckpoint):
        source = renamed(source, module.WEIGHTS)
    return OpenModel(source=source, module=module, config=config)


def load_model(
    path: str | Path,
    *,
    quantize_type: str | None = None,
    block_size: int | None = None,
    symmetric: bool | None = None,
    quantize_activation: bool = False,
    rules: Rules | None = None,
    mesh: Mesh,
    dtype: jnp.dtype,
    exact_activations: bool = True,
    progress: Progress = silent,
) -> LoadedModel:
    """Loads a checkpoint of any format.

    Args:
      path: a folder or a file.
      quantize_type: one of `recipe.TYPE_NAMES`; None is `keep` for a quantized source, `none` for a float one.
      block_size: of blockwise types; None for the default.
      symmetric: None for the default, True.
      quantize_activation: whether linear layers quantize their other operand as they run.
      rules: of a recipe file; for a source, not for a converted checkpoint.
      mesh: where the weights go.
      dtype: of the weights that stay floats.
      exact_activations: whether kernels must leave activations as they are where they would rather quantize them.
      progress: wraps the sequence of tensors.

    Raises:
      CheckpointError: for what is wrong with the files.
      ValueError: for settings that cannot be had, before any weight is read.
    """
    placement = Placement(mesh=mesh, dtype=dtype, exact_activations=exact_activations)
    opened = open_model(path, quantize_type=quantize_type)
    model, parameters = opened.build()
    source = opened.source
    if isinstance(source, NativeCheckpoint):
        check_entries(source, parameters)
        if rules is None and can_be_rounded(source, parameters, quantize_type):
            source = NativeReader(source)
    if isinstance(source, NativeCheckpoint):
        if rules is not None:
            raise ValueError(
                f"a recipe cannot change {path}, which is converted already; convert the model's source with it"
            )
        check_settings(source, parameters, quantize_type=quantize_type, block_size=block_size, symmetric=symmetric)
        reports = _load_native(source, parameters, quantize_activation, placement, progress)
        made = source.manifest.quantization.type
    else:
        recipe = Recipe.from_settings(
            quantize_type,
            block_size=block_size,
            symmetric=symmetric,
            quantize_activation=quantize_activation,
            rules=rules,
            source_quantized=source.kind is SourceKind.QUANTIZED,
        )
        reports = _load_other(source, parameters, recipe, placement, progress)
        made = recipe.made
    share_input_orders(parameters)
    _report_replicated(parameters, mesh)
    return LoadedModel(
        model=model,
        config=opened.config,
        hf_config=opened.hf_config,
        tokenizer=source.tokenizer(),
        report=WeightReport(tensors=tuple(reports)),
        quantize_type=made,
    )


def _report_replicated(parameters: Sequence[Parameter], mesh: Mesh) -> None:
    """Warns of matrices that every device holds whole, for they take their memory and time on all of them."""
    if mesh.shape["tensor"] == 1:
        return
    arrays = {p.path: jax.tree.leaves(p.variable.get_value())[0] for p in parameters if p.axes is not None}
    whole = [path for path, array in arrays.items() if array.sharding.is_fully_replicated]
    if whole:
        logger.warning(
            "%d of %d matrices are whole on every device, because their heads or blocks are not a multiple of the %d"
            " devices: %s",
            len(whole),
            len(arrays),
            mesh.shape["tensor"],
            some(whole),
        )


def _load_other(
    source: CheckpointReader,
    parameters: Sequence[Parameter],
    recipe: Recipe,
    placement: "Placement",
    progress: Progress,
) -> list[TensorReport]:
    source, plan = make_plan(source, parameters, recipe)
    reports = []
    for parameter in progress(parameters):
        weight = make_weight(source, parameter, plan[parameter.path])
        place(parameter, weight.array, weight.bits, placement)
        reports.append(weight.report)
    return reports


def make_plan(
    source: CheckpointReader, parameters: Sequence[Parameter], recipe: Recipe
) -> tuple[CheckpointReader, dict[str, Target]]:
    """The source with every parameter under its own name, and what each becomes, by its path.

    The source is checked to have them all. Of a converted checkpoint, what is already as it is to be stays so.

    Raises:
      CheckpointError: as `check_tensors` does.
      ValueError: as `Recipe.plan` does.
    """
    plan = recipe.plan(parameters)
    if isinstance(source, NativeReader):
        return source, source.unchanged(plan, parameters)
    check_tensors(source, parameters)
    return in_parts(source, parameters), plan


def _load_native(
    source: NativeCheckpoint,
    parameters: Sequence[Parameter],
    quantize_activation: bool,
    placement: "Placement",
    progress: Progress,
) -> list[TensorReport]:
    by_source = {parameter.source: parameter for parameter in parameters}
    linears = [entry for name, entry in source.tensors.items() if by_source[name].role is Role.LINEAR]
    if quantize_activation and not any(entry.bits for entry in linears):
        raise ValueError(
            f"quantize_activation takes quantized weights, but {source.path} holds linear layers in floats"
        )
    for _, (entry, array) in zip(progress(source.manifest.tensors), source.read(), strict=True):
        parameter = by_source[entry.name]
        if isinstance(array, QArray) and quantize_activation and parameter.role is Role.LINEAR:
            array = dataclasses.replace(array, quantize_activation=True)
        place(parameter, array, entry.bits, placement)
    return [entry.report for entry in source.manifest.tensors]


def check_entries(source: NativeCheckpoint, parameters: Sequence[Parameter]) -> None:
    """Checks that a converted checkpoint holds exactly the model's weights.

    Raises:
      CheckpointError: naming those that are missing, unknown or of another shape.
    """
    shapes = {parameter.source: parameter.shape for parameter in parameters}
    for names, fault in (
        (shapes.keys() - source.tensors.keys(), "lacks tensors of the model"),
        (source.tensors.keys() - shapes.keys(), "has tensors that the model does not"),
    ):
        if names:
            raise CheckpointError(f"{source.path} {fault}: {some(names, 10)}. Convert it from its source again")
    for name, entry in source.tensors.items():
        if tuple(entry.shape) != shapes[name]:
            raise CheckpointError(
                f"{source.path}: {name} has shape {entry.shape}; by its config, {list(shapes[name])} is expected."
                " Convert it from its source again"
            )


def check_settings(
    source: NativeCheckpoint,
    parameters: Sequence[Parameter],
    *,
    quantize_type: str | None,
    block_size: int | None,
    symmetric: bool | None,
) -> None:
    """Checks that what is asked for does not contradict what a converted checkpoint is.

    Its type is the one it was converted to, and also that of all its linear layers (of weights carried over from a
    GGUF file: "keep" and "int4_blockwise").

    Raises:
      ValueError: naming both.
    """
    entries = [source.tensors[p.source] for p in parameters if p.role is Role.LINEAR and p.source in source.tensors]
    made = source.manifest.quantization
    types = {entry.report.type_name if entry.bits else NONE for entry in entries}
    block_sizes = {entry.block_size for entry in entries}
    symmetries = {entry.zero_point == "none" for entry in entries if entry.bits}
    for name, asked, found in (
        ("quantize_type", quantize_type, {made.type} | (types if len(types) == 1 else set())),
        ("block_size", block_size, {made.block_size} | (block_sizes if len(block_sizes) == 1 else set())),
        ("symmetric", symmetric, symmetries if len(symmetries) == 1 else set()),
    ):
        if asked not in (None, KEEP) and asked not in found:
            values = " or ".join(sorted(str(value) for value in found if value is not None)) or "none of one kind"
            raise ValueError(
                f"{name} is {asked}, but {source.path} was converted to {name} {values}; drop the setting, or"
                f" convert the model's source again with {name} {asked}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where weights go, what floats are cast to, and whether their kernels must leave activations as they are."""

    mesh: Mesh
    dtype: jnp.dtype
    exact_activations: bool


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
    if isinstance(array, QArray) and bits == 4 and placement.mesh.devices.flat[0].platform == "cpu":
        array = _cast_on_host(array)
    if parameter.axes is not None and parameter.axes.experts is not None:
        array = by_expert(array, parameter.axes.experts)

    def put(leaf: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        # A shard is cut out, and cast, one by one: a view of a memory map is never copied whole.
        to = placement.dtype if bits is None else leaf.dtype
        return jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: np.ascontiguousarray(leaf[index]).astype(to, copy=False)
        )

    placed = jax.tree.map(put, array, shardings(parameter, array, placement.mesh))
    if bits is not None:
        placed = cast_values(placed, bits, name=parameter.source)
    give(parameter, placed, exact_activations=placement.exact_activations)


def shardings(parameter: Parameter, weight: Any, mesh: Mesh) -> Any:
    """Of each leaf of a weight, in its own structure."""
    if parameter.axes is None:
        return vector_sharding(parameter.output_axes, mesh)
    return weight_sharding(parameter.axes, weight, mesh)


def give(parameter: Parameter, placed: Any, *, exact_activations: bool = True) -> None:
    """Lays a weight that is on the mesh out for its kernel, and gives it to the model; its input order to its layer."""
    if parameter.linear is not None and parameter.axes is not None:
        if isinstance(placed, QArray) and placed.input_order is not None:
            parameter.linear.input_order = nnx.Variable(placed.input_order)
            placed = dataclasses.replace(placed, input_order=None)
        operation = "quantized_matmul" if parameter.axes.experts is None else "grouped_matmul"
        placed = select.prepare(operation, placed, exact_activations=exact_activations)
    parameter.variable.set_value(placed)


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
