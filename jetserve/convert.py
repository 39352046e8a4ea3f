"""Converts a checkpoint of any format into jetserve's own: tensor by tensor, resumable, with a report at the end.

Owns the order of the work and the report. Peak memory is bounded by the largest tensor, whatever the model's size.
"""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from jetserve import default_model
from jetserve.checkpoint import hub
from jetserve.checkpoint.base import CheckpointError, CheckpointReader, SourceKind
from jetserve.checkpoint.load import Progress, open_model
from jetserve.checkpoint.native import MANIFEST, NativeCheckpoint, QuantizationEntry, SourceEntry
from jetserve.checkpoint.native_writer import NativeWriter, check_output
from jetserve.checkpoint.parts import in_parts
from jetserve.checkpoint.source import check_tensors, make_weight
from jetserve.config import ConvertConfig
from jetserve.models.base import Parameter
from jetserve.quantize.recipe import KEEP, NONE, Action, Recipe, Target
from jetserve.quantize.report import WeightReport

logger = logging.getLogger(__name__)

WORST = 5
"""Tensors of the largest rounding errors that the report names."""

progress_bar: Progress = functools.partial(tqdm, desc="Converting", unit="tensor")
"""On standard error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What a conversion did.

    `input_bytes` and `output_bytes` are what the files take on disk; bits a weight, by contrast, count an int4 as 4
    bits, as it is in memory. `resumed` tensors had been finished by an earlier run.
    """

    input: Path
    output: Path
    quantize_type: str
    weights: WeightReport
    input_bytes: int
    output_bytes: int
    seconds: float
    resumed: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "input": str(self.input),
            "output": str(self.output),
            "quantize_type": self.quantize_type,
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "seconds": self.seconds,
            "resumed_tensors": self.resumed,
            **self.weights.as_dict(),
        }

    def as_text(self) -> str:
        """For people."""
        table = Table(title=f"{self.output} ({self.quantize_type})", title_justify="left")
        for name in ("type", "tensors", "weights", "bits a weight"):
            table.add_column(name, justify="left" if name == "type" else "right")
        for name, group in {**self.weights.by_type(), "all": self.weights}.items():
            table.add_row(name, str(len(group.tensors)), f"{group.weights:,}", f"{group.bits_per_weight:.3f}")
        console = Console(width=110, force_terminal=False, color_system=None)
        with console.capture() as capture:
            console.print(table)
        lines = [
            f"on disk: {self.input_bytes / 1e6:.1f} MB before, {self.output_bytes / 1e6:.1f} MB after"
            f" ({self.output_bytes * 8 / max(1, self.weights.weights):.2f} bits a weight, compressed)"
        ]
        for (asked, used), count in self.weights.changed_block_sizes().items():
            lines.append(f"block size {asked} does not divide {count} tensors, which got {used}")
        for type_name, count in self.weights.dequantized().items():
            lines.append(f"{count} tensors of type {type_name}, which cannot be carried over, became floats")
        lines += [f"rounding error {t.error:.4f}: {t.name}" for t in self.weights.worst(WORST)]
        resumed = f", {self.resumed} of {len(self.weights.tensors)} tensors by an earlier run" if self.resumed else ""
        lines.append(f"type, block size and error of every tensor: {self.output / MANIFEST}")
        lines.append(f"took {self.seconds:.1f} s{resumed}")
        return capture.get() + "\n".join(lines)


def convert(
    source: str | Path,
    output: str | Path,
    *,
    quantize_type: str | None = None,
    block_size: int | None = None,
    symmetric: bool | None = None,
    progress: Progress = progress_bar,
) -> ConversionReport:
    """Converts a checkpoint. Run again after it was cut short, it goes on after the parts that it had finished.

    Args:
      source: a folder or a file of any format but jetserve's own.
      output: the folder to be made; must not exist, or be empty.
      quantize_type: one of `recipe.TYPE_NAMES`; None is `keep` for a quantized source, `none` for a float one.
      block_size: of blockwise types; None for the default.
      symmetric: None for the default, True.
      progress: wraps the sequence of tensors.

    Raises:
      CheckpointError: for what is wrong with the source, an output that exists, a disk too small.
      ValueError: for settings that cannot be had, before any weight is read.
    """
    started = time.monotonic()
    source, output = Path(source), Path(output)
    check_output(output)
    opened = open_model(source, quantize_type=quantize_type)
    reader = opened.source
    if isinstance(reader, NativeCheckpoint):
        raise CheckpointError(
            f"{source} is a converted checkpoint already, of type {reader.manifest.quantization.type}; rounding twice"
            " loses quality: convert the model's source"
        )
    recipe = Recipe.from_settings(
        quantize_type, block_size=block_size, symmetric=symmetric, source_quantized=reader.kind is SourceKind.QUANTIZED
    )
    _, parameters = opened.build()
    plan = recipe.plan(parameters)
    check_tensors(reader, parameters)
    reader = in_parts(reader, parameters)
    tokenizer = reader.tokenizer()
    origin = SourceEntry(name=source.resolve().name, kind=reader.kind.value, fingerprint=reader.fingerprint())
    with NativeWriter(
        output, hf_config=reader.hf_config, quantization=_quantization(recipe, plan, reader), source=origin
    ) as writer:
        finished = writer.finished
        left = [parameter for parameter in parameters if parameter.source not in finished]
        writer.check_space(estimate(reader, left, plan))
        try:
            for parameter in progress(left):
                writer.add(make_weight(reader, parameter, recipe, plan[parameter.path]))
        except KeyboardInterrupt:
            logger.warning("stopped; the same conversion run again goes on after %d tensors", len(writer.finished))
            raise
        manifest = writer.finish(tokenizer)
    return ConversionReport(
        input=source,
        output=output,
        quantize_type=manifest.quantization.type,
        weights=WeightReport(tensors=tuple(entry.report for entry in manifest.tensors)),
        input_bytes=bytes_on_disk(source),
        output_bytes=bytes_on_disk(output),
        seconds=time.monotonic() - started,
        resumed=len(finished),
    )


def run(config: ConvertConfig) -> int:
    """Converts as `config` says, prints the report, and returns the exit code.

    Raises:
      ValueError, RuntimeError: see `convert`, `hub.local_path` and `default_model.fetch`.
    """
    wanted = config.source
    if wanted.checkpoint_path is None:
        source = default_model.fetch(wanted.cache_dir)
    else:
        source = hub.local_path(wanted.checkpoint_path)
    report = convert(
        source,
        config.output,
        quantize_type=wanted.quantize_type,
        block_size=wanted.block_size,
        symmetric=wanted.symmetric,
    )
    print(report.as_text())
    return 0


def _quantization(recipe: Recipe, plan: Mapping[str, Target], reader: CheckpointReader) -> QuantizationEntry:
    """As the manifest tells it: `keep` of a source that has nothing to carry over is `none`."""
    if recipe.linear is not None:
        return QuantizationEntry(
            type=recipe.quantize_type, block_size=recipe.linear.block_size, symmetric=recipe.linear.symmetric
        )
    kept = recipe.quantize_type == KEEP and any(reader.quantized_bits(name) for name in reader.tensors)
    return QuantizationEntry(type=KEEP if kept else NONE, block_size=None, symmetric=None)


def estimate(reader: CheckpointReader, parameters: Sequence[Parameter], plan: Mapping[str, Target]) -> int:
    """Bytes that the tensors will take on disk, about: compressed, an int4 takes up to 4.5 bits, an int8 up to 8."""
    bits = 0.0
    for parameter in parameters:
        info, target = reader.tensors[parameter.source], plan[parameter.path]
        count = math.prod(parameter.shape)
        kept = reader.quantized_bits(parameter.source) if target.action is Action.KEEP else None
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


def bytes_on_disk(path: Path) -> int:
    """What `du` says of a file or a folder."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_blocks * 512 for file in files)
