"""What a conversion will make of every tensor, decided before it starts, and how that is shown.

Owns opening the source and the sizes to expect. Reads no weights; how they are made is `convert`'s.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jetserve.checkpoint.base import CheckpointError, CheckpointReader, SourceKind
from jetserve.checkpoint.load import check_entries, make_plan, open_model
from jetserve.checkpoint.native import NativeCheckpoint
from jetserve.checkpoint.native_reader import NativeReader, can_be_rounded
from jetserve.method_config import ROUND_TO_NEAREST, MethodConfig
from jetserve.models.base import Model, Parameter, Role
from jetserve.quantize.recipe import KEEP, Action, Recipe, Rules, Target
from jetserve.quantize.report import TensorReport, WeightReport

logger = logging.getLogger(__name__)

WIDTH = 110
"""Columns of tables."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """An open source, and what each of the model's parameters becomes: `targets` by their paths.

    `model` is without memory.
    """

    model: Model
    reader: CheckpointReader
    parameters: Sequence[Parameter]
    recipe: Recipe
    targets: Mapping[str, Target]

    @property
    def quantizes_linears(self) -> bool:
        """Whether any linear layer will have integer weights."""
        linears = [(self.targets[p.path], p.source) for p in self.parameters if p.role is Role.LINEAR]
        return any(
            target.config is not None
            or (target.action is Action.KEEP and self.reader.quantized_bits(source) is not None)
            for target, source in linears
        )

    def estimate(self, parameters: Sequence[Parameter]) -> int:
        """Bytes that these will take on disk, about: compressed, an int4 takes up to 4.5 bits, an int8 up to 8."""
        bits = 0.0
        for parameter in parameters:
            info, target = self.reader.tensors[parameter.source], self.targets[parameter.path]
            count = math.prod(parameter.shape)
            kept = self.reader.quantized_bits(parameter.source) if target.action is Action.KEEP else None
            if target.config is not None:
                side = 32 if target.config.symmetric else 40
                blocks = count // (target.config.block_size or parameter.shape[0])
                bits += count * min(8, target.config.bits + 0.5) + blocks * side
            elif kept is not None:
                bits += count * min(8, kept + 0.5) + max(0, info.nbytes * 8 - count * kept) * 2
            else:
                # A quantized type that cannot be carried over becomes float32.
                bits += count * 32 if info.quantized else info.nbytes * 8
        return math.ceil(bits / 8)

    def report(self, parameter: Parameter) -> TensorReport:
        """What is known of a tensor before it is made; of one that is carried over, in the source's words."""
        info, target = self.reader.tensors[parameter.source], self.targets[parameter.path]
        count = math.prod(parameter.shape)
        if target.config is not None:
            config = target.config
            blocks = count // (config.block_size or parameter.shape[0])
            return TensorReport(
                name=parameter.source,
                type_name=config.name,
                weights=count,
                bits=count * config.bits + blocks * 32 * (1 if config.symmetric else 2),
                block_size=config.block_size,
                asked_block_size=target.asked_block_size if target.asked_block_size != config.block_size else None,
            )
        dequantized = info.quantized and (
            target.action is Action.FLOAT or self.reader.quantized_bits(parameter.source) is None
        )
        return TensorReport(
            name=parameter.source,
            type_name="float32" if dequantized else info.type_name,
            weights=count,
            bits=count * 32 if dequantized else info.nbytes * 8,
            dequantized_from=info.type_name if dequantized else None,
        )

    def as_text(self) -> str:
        """For people: every matrix, then all tensors by their types, then the sizes."""
        table = Table()
        for name in ("tensor", "becomes", "method", "bits a weight"):
            table.add_column(name, justify="right" if name == "bits a weight" else "left", overflow="fold")
        reports = [self.report(parameter) for parameter in self.parameters]
        for parameter, report in zip(self.parameters, reports, strict=True):
            if len(parameter.shape) > 1:
                target = self.targets[parameter.path]
                becomes = [report.type_name]
                if target.config is not None:
                    becomes += [f"block {report.block_size}"] if report.block_size is not None else []
                    becomes += [] if target.config.symmetric else ["asymmetric"]
                bits = report.bits / report.weights
                table.add_row(report.name, ", ".join(becomes), target.method or target.action.value, f"{bits:.3f}")
        weights = WeightReport(tensors=tuple(reports))
        sizes = f"{weights.nbytes / 1e6:.1f} MB of weights, about {self.estimate(self.parameters) / 1e6:.1f} MB on disk"
        return "\n".join([drawn(table) + drawn(type_table(weights)) + sizes, "nothing was written (--dry_run)"])


def type_table(weights: WeightReport, title: str | None = None) -> Table:
    """The tensors of each type, and all of them."""
    table = Table(title=title, title_justify="left")
    for name in ("type", "tensors", "weights", "bits a weight"):
        table.add_column(name, justify="left" if name == "type" else "right")
    for name, group in {**weights.by_type(), "all": weights}.items():
        table.add_row(name, str(len(group.tensors)), f"{group.weights:,}", f"{group.bits_per_weight:.3f}")
    return table


def drawn(table: Table) -> str:
    """A table as plain text."""
    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def make_conversion_plan(
    source: Path,
    *,
    quantize_type: str | None = None,
    block_size: int | None = None,
    symmetric: bool | None = None,
    rules: Rules | None = None,
    method: MethodConfig = ROUND_TO_NEAREST,
    as_it_is: bool = False,
) -> ConversionPlan:
    """Opens a source and decides what becomes of it. Arguments are `convert.convert`'s.

    A checkpoint that was converted already is only rounded to fewer bits, or taken `as_it_is` where no type is asked.

    Raises:
      CheckpointError: for what is wrong with the source; one that was converted already can only be given fewer bits.
      ValueError: for settings that cannot be had.
    """
    opened = open_model(source, quantize_type=quantize_type)
    reader = opened.source
    model, parameters = opened.build()
    if isinstance(reader, NativeCheckpoint):
        check_entries(reader, parameters)
        rounded = can_be_rounded(reader, parameters, quantize_type)
        if rules is not None or not (rounded or (as_it_is and quantize_type in (None, KEEP))):
            raise CheckpointError(
                f"{source} is a converted checkpoint already, of type {reader.manifest.quantization.type}; expected a"
                " quantize type of fewer bits. Rounding twice loses quality: convert the model's source"
            )
        if rounded:
            logger.warning("rounding weights that were rounded before; the model's source would lose less")
        reader = NativeReader(reader)
    recipe = Recipe.from_settings(
        quantize_type,
        block_size=block_size,
        symmetric=symmetric,
        rules=rules,
        method=method.NAME,
        clip=method.clip,
        source_quantized=reader.kind is SourceKind.QUANTIZED,
    )
    reader, targets = make_plan(reader, parameters, recipe)
    return ConversionPlan(model=model, reader=reader, parameters=parameters, recipe=recipe, targets=targets)
