"""Several models, or one quantized in several ways, side by side: a text's perplexity, tasks, a table and a plot.

Owns the order of the work and what is shown. The numbers are `perplexity`'s and `harness`'.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jetserve.checkpoint.load import LoadedModel
from jetserve.config import EngineConfig, EvaluateConfig, ModelSource
from jetserve.engine import build
from jetserve.evaluate import perplexity

EXTRAS = {"lm_eval": "eval", "matplotlib": "plot"}


def run(
    config: EvaluateConfig, sources: Mapping[str, ModelSource], engine_config: EngineConfig, *, max_length: int | None
) -> int:
    """Evaluates every model, one after the other. The last line on standard output is JSON: `{"models": [...]}`.

    Each is an object with model, quantize_type, bits_per_weight and bytes; with a text, perplexity's numbers; with
    tasks, "tasks". The table goes to standard error.

    Args:
      config: what is measured, and which files are written.
      sources: the models by the names that the table gives them.
      engine_config: limits.
      max_length: tokens that a sequence may have, or None.

    Raises:
      ValueError: for an extra that is not installed, before a model is loaded; and as `perplexity.run` and
        `harness.run_tasks` do.
      OSError: for files that cannot be read or written.
    """
    _check(config)
    first = next(iter(sources.values()))
    build.use_cache_dir(first.cache_dir)
    text = None if config.text_file is None else perplexity.read_text(config.text_file)
    reference = None
    if config.reference_checkpoint is not None:
        reference = perplexity.load_reference(config.reference_checkpoint, first.cache_dir, engine_config)
    rows = []
    for name, source in sources.items():
        loaded = build.load_source(source, engine_config, progress=perplexity.loading(name))
        row: dict[str, Any] = {
            "model": name,
            "quantize_type": loaded.quantize_type,
            "bits_per_weight": loaded.report.bits_per_weight,
            "bytes": loaded.report.nbytes,
        }
        if text is not None:
            row |= _of_text(config, loaded, reference, text, engine_config)
        if config.tasks is not None:
            from jetserve.evaluate import harness

            row["tasks"] = harness.run_tasks(loaded, engine_config, config.tasks, max_length=max_length)
        rows.append(row)
    Console(file=sys.stderr, width=None if sys.stderr.isatty() else 160).print(table_of(rows))
    if config.plot is not None:
        plot(config.plot, rows)
    line = json.dumps({"models": rows}, allow_nan=False)
    if config.output_file is not None:
        config.output_file.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return 0


def _check(config: EvaluateConfig) -> None:
    """What can be refused before a model is loaded."""
    wanted = {"lm_eval": config.tasks is not None, "matplotlib": config.plot is not None}
    for module, extra in EXTRAS.items():
        if wanted[module] and importlib.util.find_spec(module) is None:
            raise ValueError(f"{module} is not installed; run: pip install 'jetserve[{extra}]'")
    for path in (config.plot, config.output_file):
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"the folder of {path} does not exist; make it first")


def _of_text(
    config: EvaluateConfig, loaded: LoadedModel, reference: LoadedModel | None, text: str, engine_config: EngineConfig
) -> dict[str, Any]:
    tokens = perplexity.encode(build.tokenizer_of(loaded), text)
    windows = perplexity.cut(tokens, config.window, config.max_tokens, str(config.text_file))
    runner = perplexity.make_runner(loaded, engine_config, config.window)
    other = None
    if reference is not None and config.reference_checkpoint is not None:
        perplexity.check_comparable(config.reference_checkpoint, reference, loaded, text)
        other = perplexity.make_runner(reference, engine_config, config.window)
    return perplexity.measure(runner, windows, reference=other).summary()


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row a model; a column a number, with its standard error where it has one."""
    columns: dict[str, list[str]] = {
        "model": [row["model"] for row in rows],
        "bits a weight": [f"{row['bits_per_weight']:.2f}" for row in rows],
        "MB": [f"{row['bytes'] / 1e6:,.1f}" for row in rows],
    }
    if "perplexity" in rows[0]:
        columns["perplexity"] = [_with_error(row["perplexity"], row["standard_error"], 3) for row in rows]
    for key, title, digits in (
        ("kl_divergence", "KL mean", 4),
        ("kl_divergence_p99", "KL p99", 3),
        ("top1_agreement", "same top token", 3),
    ):
        if key in rows[0]:
            columns[title] = [f"{row[key]:.{digits}f}" for row in rows]
    for task, scores in rows[0].get("tasks", {}).items():
        for metric in scores:
            if "_stderr" not in metric:
                error = metric.replace(" (", "_stderr (") if " (" in metric else f"{metric}_stderr"
                found = [row["tasks"][task] for row in rows]
                columns[f"{task} {metric}"] = [_with_error(each[metric], each.get(error), 3) for each in found]
    table = Table()
    for name in columns:
        table.add_column(name, justify="left" if name == "model" else "right", overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _with_error(value: float | None, error: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if error is None else f"{value:.{digits}f} ± {error:.{digits}f}"


def plot(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Perplexity against bits a weight, a point a model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        x, y = row["bits_per_weight"], row["perplexity"]
        axes.errorbar(x, y, yerr=row["standard_error"] or 0, fmt="o", capsize=3)
        axes.annotate(row["model"], (x, y), textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.set(xlabel="bits a weight", ylabel="perplexity")
    axes.grid(alpha=0.3)
    figure.savefig(path)
