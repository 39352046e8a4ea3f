"""Converts a checkpoint of any format into jetserve's own: tensor by tensor, resumable, with a report at the end.

Owns the order of the work and the report. Peak memory is bounded by the largest tensor, whatever the model's size.
"""

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jetserve import auto, default_model
from jetserve.checkpoint import calibrated, hub
from jetserve.checkpoint.huggingface_writer import ExportFormat, HuggingFaceWriter
from jetserve.checkpoint.load import Progress
from jetserve.checkpoint.manifest import MANIFEST, QuantizationEntry, SourceEntry
from jetserve.checkpoint.native_writer import NativeWriter, check_output
from jetserve.checkpoint.source import HostWeight, make_weight
from jetserve.config import ConvertConfig
from jetserve.conversion_plan import ConversionPlan, drawn, make_conversion_plan, type_table
from jetserve.kernels import native
from jetserve.method_config import ROUND_TO_NEAREST, AutoConfig, MethodConfig, RTNConfig
from jetserve.models.base import Parameter
from jetserve.quantize.qarray import QArray
from jetserve.quantize.recipe import KEEP, NONE, Rules
from jetserve.quantize.recipe_file import read_rules
from jetserve.quantize.report import TensorReport, WeightReport
from jetserve.tokenizer import Tokenizer

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
        table = type_table(self.weights, f"{self.output} ({self.quantize_type})")
        lines = [
            f"on disk: {self.input_bytes / 1e6:.1f} MB before, {self.output_bytes / 1e6:.1f} MB after"
            f" ({self.output_bytes * 8 / max(1, self.weights.weights):.2f} bits a weight, compressed)"
        ]
        for (asked, used), count in self.weights.changed_block_sizes().items():
            lines.append(f"block size {asked} does not divide {count} tensors, which got {used}")
        for type_name, count in self.weights.dequantized().items():
            lines.append(f"{count} tensors of type {type_name}, which cannot be carried over, became floats")
        for reason, count in self.weights.fallbacks().items():
            lines.append(f"{count} tensors were {reason}")
        lines += [f"rounding error {t.error:.4f}{_of_output(t)}: {t.name}" for t in self.weights.worst(WORST)]
        resumed = f", {self.resumed} of {len(self.weights.tensors)} tensors by an earlier run" if self.resumed else ""
        lines.append(f"type, block size and error of every tensor: {self.output / MANIFEST}")
        lines.append(f"took {self.seconds:.1f} s{resumed}")
        return drawn(table) + "\n".join(lines)


def _of_output(tensor: TensorReport) -> str:
    return "" if tensor.output_error is None else f" ({tensor.output_error:.1e} of what its layer computes, squared)"


def convert(
    source: str | Path,
    output: str | Path,
    *,
    quantize_type: str | None = None,
    block_size: int | None = None,
    symmetric: bool | None = None,
    rules: Rules | None = None,
    method: MethodConfig = ROUND_TO_NEAREST,
    tokenizer: Tokenizer | None = None,
    progress: Progress = progress_bar,
) -> ConversionReport:
    """Converts a checkpoint. Run again after it was cut short, it goes on after the parts that it had finished.

    Args:
      source: a folder or a file of any format; jetserve's own only to be rounded to fewer bits.
      output: the folder to be made; must not exist, or be empty.
      quantize_type: one of `recipe.TYPE_NAMES`; None is `keep` for a quantized source, `none` for a float one.
      block_size: of blockwise types; None for the default.
      symmetric: None for the default, True.
      rules: of a recipe file, for the matrices that they match.
      method: how linear layers are rounded where no rule says otherwise.
      tokenizer: in place of the source's own.
      progress: wraps the sequence of tensors.

    Raises:
      CheckpointError: for what is wrong with the source, an output that exists, a disk too small.
      ValueError: for settings that cannot be had, before any weight is read.
    """
    started = time.monotonic()
    source, output = Path(source), Path(output)
    check_output(output)
    plan = make_conversion_plan(
        source,
        quantize_type=quantize_type,
        block_size=block_size,
        symmetric=symmetric,
        rules=rules,
        method=method,
    )
    reader = plan.reader
    tokenizer = tokenizer or reader.tokenizer()
    windows = _windows(plan, method, tokenizer)
    origin = SourceEntry(name=source.resolve().name, kind=reader.kind.value, fingerprint=reader.fingerprint())
    quantization = _quantization(plan, method, windows)
    with NativeWriter(output, hf_config=reader.hf_config, quantization=quantization, source=origin) as writer:
        finished = writer.finished
        left = [parameter for parameter in plan.parameters if parameter.source not in finished]
        writer.check_space(plan.estimate(left))
        try:
            for _, weight in _weights(plan, left, method, windows, progress, writer.read, writer.flush):
                writer.add(weight)
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


def _windows(plan: ConversionPlan, method: MethodConfig, tokenizer: Tokenizer | None) -> np.ndarray | None:
    """The calibration tokens of a method that takes any."""
    if isinstance(method, RTNConfig):
        return None
    return calibrated.windows(plan.targets, method, tokenizer, max_length=plan.model.config.max_position)


def _weights(
    plan: ConversionPlan,
    left: Sequence[Parameter],
    method: MethodConfig,
    windows: np.ndarray | None,
    progress: Progress,
    finished: Callable[[str], QArray | np.ndarray | None] = lambda name: None,
    keep: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Parameter, HostWeight]]:
    """Makes the weights that are left; the progress bar shows each one's error in what its layer computes.

    `finished` and `keep` are `calibrated.weights`'.
    """
    if not isinstance(method, RTNConfig) and windows is not None:
        work = calibrated.Work(reader=plan.reader, parameters=plan.parameters, targets=plan.targets, config=method)
        made = calibrated.weights(work, plan.model, windows, finished=finished, keep=keep)
    else:
        made = ((parameter, make_weight(plan.reader, parameter, plan.targets[parameter.path])) for parameter in left)
    bar = progress(left)
    for _, (parameter, weight) in zip(bar, made, strict=True):
        yield parameter, weight
        if isinstance(bar, tqdm) and weight.report.output_error is not None:
            bar.set_postfix_str(f"{weight.report.name.removesuffix('.weight')} {weight.report.output_error:.2e}")


def export(
    source: str | Path,
    output: str | Path,
    output_format: str,
    *,
    method: MethodConfig = ROUND_TO_NEAREST,
    progress: Progress = progress_bar,
    **settings: Any,
) -> None:
    """Writes a checkpoint, quantized already or now, in another project's format. Not resumable.

    Args:
      source: a folder or a file of any format; jetserve's own is carried over as it is.
      output: the Hugging Face folder to be made.
      output_format: the value of an `ExportFormat`.
      method: `convert`'s.
      progress: wraps the sequence of tensors.
      **settings: `convert`'s.

    Raises:
      CheckpointError, ValueError: as `convert` does, and for weights that the format cannot hold.
    """
    with HuggingFaceWriter(Path(output), ExportFormat(output_format)) as writer:
        plan = make_conversion_plan(Path(source), as_it_is=True, method=method, **settings)
        if not plan.quantizes_linears:
            raise ValueError(
                f"{source} has no linear layer in 4 or 8 bits, and is not to get one; expected some, for that is what"
                f" {output_format} is. Ask for a quantize type"
            )
        stacked = [parameter.source for parameter in plan.parameters if parameter.origin.stacked]
        if stacked:
            raise ValueError(
                f"{source} is of a model with all experts in one tensor ({stacked[0]} is part of one), for which"
                f" {output_format} has no form. Convert to jetserve's format"
            )
        tokenizer = plan.reader.tokenizer()
        windows = _windows(plan, method, tokenizer)
        for parameter, weight in _weights(plan, plan.parameters, method, windows, progress):
            writer.add(parameter, weight)
        writer.finish(plan.reader.hf_config, tokenizer)
    logger.info("%s is a %s checkpoint of %.1f MB", output, output_format, bytes_on_disk(Path(output)) / 1e6)


def run(config: ConvertConfig) -> int:
    """Converts as `config` says, or only shows the plan; prints the report, and returns the exit code.

    Raises:
      ValueError, RuntimeError, OSError: see `convert`, `read_rules`, `hub.local_path` and `default_model.fetch`.
    """
    wanted = config.source
    native.use_cache_dir(wanted.cache_dir)
    if wanted.checkpoint_path is None:
        source = default_model.fetch(wanted.cache_dir)
    else:
        source = hub.local_path(wanted.checkpoint_path)
    settings: dict[str, Any] = {
        "quantize_type": wanted.quantize_type,
        "block_size": wanted.block_size,
        "symmetric": wanted.symmetric,
        "rules": None if wanted.quantize_recipe is None else read_rules(wanted.quantize_recipe),
    }
    method = config.method
    if isinstance(method, AutoConfig):
        rules = auto.choose(source, method, progress=functools.partial(tqdm, desc="Measuring", unit="tensor"))
        settings |= {"quantize_type": auto.OTHERS, "rules": rules}
        method = method.method
    if config.output is None:
        print(make_conversion_plan(source, **settings, method=method).as_text())
    elif config.output_format is not None:
        export(source, config.output, config.output_format, **settings, method=method)
    else:
        print(convert(source, config.output, **settings, method=method).as_text())
    return 0


def _quantization(plan: ConversionPlan, method: MethodConfig, windows: np.ndarray | None) -> QuantizationEntry:
    """As the manifest tells it: `keep` of a source that has nothing to carry over is `none`."""
    recipe, reader = plan.recipe, plan.reader
    entry = QuantizationEntry(
        type=recipe.made,
        block_size=None,
        symmetric=None,
        rules=None if recipe.rules is None else json.dumps(dataclasses.asdict(recipe.rules), default=lambda e: e.value),
        method=None if method == ROUND_TO_NEAREST else calibrated.describe(method, windows),
    )
    if recipe.linear is not None:
        return dataclasses.replace(entry, block_size=recipe.linear.block_size, symmetric=recipe.linear.symmetric)
    if recipe.rules is not None:
        return entry
    kept = recipe.quantize_type == KEEP and any(reader.quantized_bits(name) for name in reader.tensors)
    return dataclasses.replace(entry, type=KEEP if kept else NONE)


def bytes_on_disk(path: Path) -> int:
    """What `du` says of a file or a folder."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_blocks * 512 for file in files)
