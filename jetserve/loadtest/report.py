"""Shows a load test: a table, a plot, and a line for every request."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jetserve.loadtest.config import LoadTestConfig
from jetserve.loadtest.statistics import PERCENTILES, Record

_LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "latency_ms": "latency",
}
MESSAGES_SHOWN = 3


def check_paths(config: LoadTestConfig) -> None:
    """Refuses what would fail only after the measurement.

    Raises:
      OSError: for a file whose folder is not there.
      ValueError: if a plot is wanted and matplotlib is not installed.
    """
    for path in (config.plot, config.output_file):
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"the folder of {path} does not exist; make it first")
    if config.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot takes matplotlib, which is not installed; run: pip install 'jetserve[plot]'")


def write(config: LoadTestConfig, records: Sequence[Record], result: dict[str, Any]) -> None:
    """The table on standard error, and the files that were asked for."""
    _print_table(records, result)
    if config.output_file is not None:
        _write_records(config.output_file, records)
    if config.plot is not None:
        _plot(config.plot, records, result)


def _print_table(records: Sequence[Record], result: dict[str, Any]) -> None:
    console = Console(file=sys.stderr)
    table = Table(title=f"{result['completed']} of {result['requests']} requests in {result['seconds']:.1f} s")
    table.add_column("ms")
    for name in ("mean", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(name, justify="right")
    for key, title in _LATENCIES.items():
        if result[key] is not None:
            table.add_row(title, *(f"{value:,.1f}" for value in result[key].values()))
    console.print(table)
    console.print(
        f"{result['requests_per_second']:.2f} requests/s, {result['prompt_tokens_per_second']:,.0f} prompt tokens/s,"
        f" {result['output_tokens_per_second']:,.0f} output tokens/s",
        highlight=False,
    )
    if "goodput" in result:
        found = result["goodput"]
        console.print(
            f"goodput: {100 * found['share']:.1f} % of requests met the goals, {found['requests_per_second']:.2f}/s",
            highlight=False,
        )
    for kind, count in result["failures"].items():
        messages = list(dict.fromkeys(record.message for record in records if record.failure == kind))
        console.print(f"failed: {count} with {kind}", highlight=False, markup=False)
        for message in messages[:MESSAGES_SHOWN]:
            console.print(f"  {message}", highlight=False, markup=False)


def _write_records(path: Path, records: Sequence[Record]) -> None:
    """A JSON object a request, in order; seconds from the first arrival on."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            line: dict[str, Any] = {
                "index": record.index,
                "scheduled": record.scheduled,
                "sent": record.sent,
                "ended": record.ended,
                "ttft": record.ttft,
                "tpot": record.tpot,
                "latency": record.latency,
                "gaps": record.gaps,
                "prompt_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
            }
            if record.failure is not None:
                line |= {"failure": record.failure, "message": record.message}
            file.write(json.dumps(line) + "\n")


def _plot(path: Path, records: Sequence[Record], result: dict[str, Any]) -> None:
    """Every latency's distribution, and the latencies over time."""
    from matplotlib.figure import Figure

    good = [record for record in records if record.failure is None]
    values: dict[str, list[float | None]] = {
        "ttft_ms": [record.ttft for record in good],
        "tpot_ms": [record.tpot for record in good],
        "itl_ms": [gap for record in good for gap in record.gaps],
        "latency_ms": [record.latency for record in good],
    }
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 3)
    for ax, (key, title) in zip([*axes[0], axes[1][0]], _LATENCIES.items(), strict=True):
        ms = sorted(1e3 * value for value in values[key] if value is not None)
        ax.plot(ms, [100 * (i + 1) / len(ms) for i in range(len(ms))], drawstyle="steps-post")
        ax.set(title=title, xlabel="ms", ylabel="% of all")
    for ax, name, found in ((axes[1][1], "time to first token", "ttft"), (axes[1][2], "latency", "latency")):
        ax.plot([r.scheduled for r in good], [1e3 * getattr(r, found) for r in good], ".", label="answered")
        failed = [record for record in records if record.failure is not None]
        ax.plot([r.scheduled for r in failed], [0] * len(failed), "x", label="failed")
        ax.set(title=f"{name}, by arrival", xlabel="s", ylabel="ms")
        ax.legend()
    figure.suptitle(f"{result['url']}: {result['completed']} of {result['requests']} requests")
    figure.savefig(path)
