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
from jax.sharding import Mesh

from jetserve.checkpoint.abstract import Quantization, native_quantization, source_quantization, with_activations
from jetserve.checkpoint.base import CheckpointError, CheckpointReader, SourceKind
from jetserve.checkpoint.detect import open_checkpoint
from jetserve.checkpoint.files import some
from jetserve.checkpoint.native import NativeCheckpoint, is_native
from jetserve.checkpoint.native_reader import NativeReader, can_be_rounded
from jetserve.checkpoint.parts import in_parts, renamed
from jetserve.checkpoint.placement import Placement, layout_of, place, share_input_orders
from jetserve.checkpoint.source import check_tensors, make_weight
from jetserve.models import base
from jetserve.models.base import Parameter, Role
from jetserve.quantize.qarray import QArray
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
    opened = open_model(path, quantize_type=quantize_type)
    model, parameters = opened.build()
    settled = settle(
        opened.source,
        parameters,
        quantize_type=quantize_type,
        block_size=block_size,
        symmetric=symmetric,
        quantize_activation=quantize_activation,
        rules=rules,
    )
    source = settled.source
    placement = Placement(
        layout=layout_of(parameters, settled.quantization, mesh), dtype=dtype, exact_activations=exact_activations
    )
    if isinstance(source, NativeCheckpoint):
        reports = _load_native(source, parameters, quantize_activation, placement, progress)
    else:
        reports = _load_other(source, parameters, settled.plan, placement, progress)
    share_input_orders(parameters)
    _report_replicated(parameters, mesh)
    return LoadedModel(
        model=model,
        config=opened.config,
        hf_config=opened.hf_config,
        tokenizer=source.tokenizer(),
        report=WeightReport(tensors=tuple(reports)),
        quantize_type=settled.quantize_type,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """What will be made of a checkpoint, before a weight is read.

    Attributes:
      source: with every parameter under its own name.
      plan: what each parameter becomes, by its path; of a converted checkpoint, which is as it is, nothing.
      quantization: how each will be quantized, by its path.
      quantize_type: of the whole, one of `recipe.TYPE_NAMES` or `recipe.RULES`.
    """

    source: CheckpointReader | NativeCheckpoint
    plan: Mapping[str, Target]
    quantization: Quantization
    quantize_type: str


def settle(
    source: CheckpointReader | NativeCheckpoint,
    parameters: Sequence[Parameter],
    *,
    quantize_type: str | None,
    block_size: int | None,
    symmetric: bool | None,
    quantize_activation: bool,
    rules: Rules | None = None,
) -> Settled:
    """What a user's settings, `load_model`'s, make of a checkpoint.

    Raises:
      CheckpointError: if the checkpoint does not hold exactly the model's weights.
      ValueError: for settings that cannot be had.
    """
    if isinstance(source, NativeCheckpoint):
        check_entries(source, parameters)
        if rules is None and can_be_rounded(source, parameters, quantize_type):
            source = NativeReader(source)
    if isinstance(source, NativeCheckpoint):
        if rules is not None:
            raise ValueError(
                f"a recipe cannot change {source.path}, which is converted already; convert the model's source with it"
            )
        check_settings(source, parameters, quantize_type=quantize_type, block_size=block_size, symmetric=symmetric)
        plan: Mapping[str, Target] = {}
        quantization = native_quantization(source, parameters)
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
        source, plan = make_plan(source, parameters, recipe)
        quantization, made = source_quantization(source, parameters, plan), recipe.made
    if quantize_activation:
        quantization = with_activations(quantization, parameters)
    return Settled(source=source, plan=plan, quantization=quantization, quantize_type=made)


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
    plan: Mapping[str, Target],
    placement: Placement,
    progress: Progress,
) -> list[TensorReport]:
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
    placement: Placement,
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
