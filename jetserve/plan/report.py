"""Shows plans: tables on standard error, and a PNG that compares them."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jetserve.parallel.autotp import WeightPlan
from jetserve.plan.advice import Advice

GIB = 2**30
WIDTH = 150
"""Columns where there is no terminal."""


def check_plot(path: Path | None) -> None:
    """Refuses what would fail only after everything was compiled.

    Raises:
      OSError: if the file's folder is not there.
      ValueError: if matplotlib is not installed.
    """
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder of {path} does not exist; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot takes matplotlib, which is not installed; run: pip install 'jetserve[plot]'")


def _console() -> Console:
    return Console(file=sys.stderr, highlight=False, width=None if sys.stderr.isatty() else WIDTH)


def show(result: Mapping[str, Any], advice: Advice | None, weights: Sequence[WeightPlan] | None) -> None:
    """One plan."""
    console = _console()
    if weights is not None:
        console.print(_weights_table(weights))
    table = Table(title=_title(result), show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)
    if advice is not None:
        console.print(f"does not fit: {_gib(advice.missing_bytes)} too much on each device")
        console.print(f"any of these would fit: {'  '.join(advice.changes) or 'nothing that was tried'}", markup=False)


def _title(result: Mapping[str, Any]) -> str:
    return (
        f"{result['model']}, {result['quantize_type']}, on {result['topology']} ({result['devices']} devices):"
        f" {result['batch_size']} x {result['max_cache_length']} tokens"
    )


def _gib(count: float | None) -> str:
    return "-" if count is None else f"{count / GIB:.2f} GiB"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("fits", "yes" if result["fits"] else "no"),
        ("memory of a device", _gib(result["hbm_bytes_per_device"])),
        ("needed", _gib(result["needed_bytes_per_device"])),
        ("weights", _gib(result["weights_bytes_per_device"])),
        ("weights, ideally", _gib(result["ideal_weights_bytes_per_device"])),
        ("KV cache", _gib(result["kv_cache_bytes_per_device"])),
        ("a step besides", _gib(result["temp_bytes_per_device"])),
        ("largest batch of this length", str(result["largest_batch_size"])),
        ("largest length of this batch", str(result["largest_cache_length"])),
    ]
    if result["collectives"] is not None:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(result["collectives"].items()))
        rows.append(("collectives of a decode step", listed or "none"))
    if "roofline_step_ms" in result:
        parts = result["roofline_ms"]
        rows += [
            ("decode step, at best (roofline)", _ms(result["roofline_step_ms"])),
            ("  memory, compute, links", ", ".join(_ms(parts[key]) for key in ("memory", "compute", "links"))),
            ("decode step, compiler's estimate", _ms(result["estimated_step_ms"])),
            ("tokens a second, at best", f"{result['tokens_per_second']:,.0f}"),
        ]
        if result["dollars_per_million_tokens"] is not None:
            rows.append(("a million tokens, at best", f"${result['dollars_per_million_tokens']:.3f}"))
    if "prefill_tokens" in result:
        rows += [
            (f"prefill step of {result['prefill_tokens']} tokens, at best", _ms(result["prefill_roofline_step_ms"])),
            ("prefill step, compiler's estimate", _ms(result["prefill_estimated_step_ms"])),
        ]
    rows.append(("compiled in", f"{result['compile_seconds']:.0f} s"))
    return rows


def _weights_table(weights: Sequence[WeightPlan]) -> Table:
    table = Table(title="how weights lie over the devices", title_justify="left")
    for name in ("weight", "layers", "axes", "split", "shards", "bytes a device", "why"):
        table.add_column(name, justify="right" if name in ("layers", "shards", "bytes a device") else "left")
    for plan in weights:
        total = plan.bytes_per_device * plan.count
        table.add_row(
            plan.name, str(plan.count), plan.axes, plan.split.value, str(plan.shards), f"{total:,}", plan.reason
        )
    return table


def show_comparison(results: Sequence[Mapping[str, Any]]) -> None:
    """Plans side by side."""
    table = Table(title="side by side", title_justify="left")
    for name in ("", "type", "fits", "needed", "weights", "KV cache", "step at best", "estimate", "tokens/s", "$/M"):
        table.add_column(name, justify="left" if name in ("", "type") else "right")
    for result in results:
        price = result.get("dollars_per_million_tokens")
        rate = result.get("tokens_per_second")
        table.add_row(
            result["topology"],
            result["quantize_type"],
            "yes" if result["fits"] else "no",
            _gib(result["needed_bytes_per_device"]),
            _gib(result["weights_bytes_per_device"]),
            _gib(result["kv_cache_bytes_per_device"]),
            _ms(result.get("roofline_step_ms")),
            _ms(result.get("estimated_step_ms")),
            "-" if rate is None else f"{rate:,.0f}",
            "-" if price is None else f"{price:.3f}",
        )
    _console().print(table)


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Memory by kind, and a decode step's time at best, of every plan."""
    from matplotlib.figure import Figure

    labels = [f"{result['topology']}\n{result['quantize_type']}" for result in results]
    places = range(len(results))
    figure = Figure(figsize=(2.5 + 2.5 * len(results), 5), layout="constrained")
    memory, time = figure.subplots(1, 2)
    bottom = [0.0] * len(results)
    for key, name in (
        ("weights_bytes_per_device", "weights"),
        ("kv_cache_bytes_per_device", "KV cache"),
        ("temp_bytes_per_device", "a step besides"),
    ):
        values = [(result[key] or 0) / GIB for result in results]
        memory.bar(places, values, bottom=bottom, label=name)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    limits = [result["hbm_bytes_per_device"] / GIB for result in results]
    memory.plot(places, limits, "k_", markersize=40, label="memory of a device")
    memory.set(ylabel="GiB a device", xticks=list(places), xticklabels=labels)
    memory.legend()
    time.bar(places, [result.get("roofline_step_ms") or 0 for result in results])
    time.set(ylabel="ms, at best (roofline)", title="decode step", xticks=list(places), xticklabels=labels)
    figure.suptitle(f"{results[0]['model']}: {results[0]['batch_size']} x {results[0]['max_cache_length']} tokens")
    figure.savefig(path)
