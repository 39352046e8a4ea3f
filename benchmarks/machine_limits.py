"""What this machine can do, and the share of it that the default model's steps reach.

    python benchmarks/machine_limits.py

Decoding is limited by memory: its bytes a second (all weights once a step, and the cache that is read) stand against a
measured read of as many bytes. Prefill is limited by arithmetic: its operations a second stand against the peak of the
processor's int8 and float32 instructions. Prints tables; the last line of standard output is a JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import steps

from jetserve.config import EngineConfig, ModelSource
from jetserve.default_model import default_cache_dir
from jetserve.engine.build import build_engine
from jetserve.engine.runner import Runner
from jetserve.kernels.native import builder

SOURCE = Path(__file__).with_suffix(".cc")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-pthread")
BATCH_SIZES, PROMPT = (1, 16), 512
DRAM_MEGABYTES = 1000
GIGA = 1e9


def limits(seconds: float, threads: int, weight_megabytes: float) -> dict[str, float]:
    """Bytes a second of reads that fit the last cache or not, and operations a second of both kinds of numbers."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / SOURCE.stem
        command = [*builder.compiler().command, *FLAGS, builder.march_flag(), str(SOURCE), "-o", str(program)]
        subprocess.run(command, check=True)

        def measured(kind: str, count: int, megabytes: float = 0) -> float:
            command = [str(program), kind, str(count), str(megabytes), str(seconds)]
            return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

        found = {}
        for count in sorted({1, threads}):
            found[f"read {weight_megabytes:.0f} MB, {count} threads"] = measured("read", count, weight_megabytes)
            found[f"read {DRAM_MEGABYTES} MB, {count} threads"] = measured("read", count, DRAM_MEGABYTES)
            found[f"float32, {count} threads"] = measured("float", count)
            found[f"int8, {count} threads"] = measured("int8", count)
    return found


def weight_bytes(runner: Runner) -> int:
    """Of all weights as they lie in memory; a tied embedding is one of them, and read as the head."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(runner._step.params))


def cache_bytes(runner: Runner, sequences: int) -> int:
    """That one decode step of `steps.milliseconds` reads."""
    leaves = jax.tree.leaves(runner._cache)
    return sum(leaf.nbytes // (leaf.shape[0] * leaf.shape[1]) for leaf in leaves) * sequences * steps.CONTEXT


def prefill_operations(runner: Runner, tokens: int) -> float:
    """Of all matmuls and of attention, a multiplication and an addition being two."""
    c = runner.model_config
    heads = c.hidden_size * c.head_size * (2 * c.num_heads + 2 * c.num_kv_heads)
    matmuls = tokens * c.num_layers * (heads + 3 * c.hidden_size * c.mlp_size)
    head = runner.config.max_sequences * c.hidden_size * c.vocab_size
    attention = c.num_layers * 2 * c.num_heads * c.head_size * tokens * (tokens + 1) / 2
    return 2.0 * (matmuls + head + attention)


def main() -> None:
    """Measures the model, then the machine, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize_type", default="keep")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of the machine")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    source = ModelSource(cache_dir=default_cache_dir(), quantize_type=args.quantize_type)
    runner = build_engine(source, EngineConfig(max_sequences=max(BATCH_SIZES))).runner
    weights = weight_bytes(runner)
    rows: dict[str, dict[str, Any]] = {}
    for size in BATCH_SIZES:
        seconds = steps.milliseconds(runner, size, 1, args.rounds) / 1e3
        rows[f"decode, batch {size}"] = {"ms": 1e3 * seconds, "rate": (weights + cache_bytes(runner, size)) / seconds}
    seconds = steps.milliseconds(runner, max(BATCH_SIZES), PROMPT, max(3, args.rounds // 4)) / 1e3
    rows[f"prefill, {PROMPT} tokens"] = {"ms": 1e3 * seconds, "rate": prefill_operations(runner, PROMPT) / seconds}
    found = limits(args.seconds, args.threads, weights / 1e6)
    print(f"{'the machine':32} G bytes or operations/s", file=sys.stderr)
    for name, rate in found.items():
        print(f"{name:32} {rate / GIGA:8.1f}", file=sys.stderr)
    print(f"{'the model':32} {'ms':>8} {'G/s':>8}  share", file=sys.stderr)
    for name, row in rows.items():
        kinds = ("read",) if name.startswith("decode") else ("int8", "float32")
        row["shares"] = {
            limit: row["rate"] / rate
            for limit, rate in found.items()
            if rate and limit.startswith(kinds) and limit.endswith(f" {args.threads} threads")
        }
        shares = ", ".join(f"{share:.0%} of {limit}" for limit, share in row["shares"].items())
        print(f"{name:32} {row['ms']:8.2f} {row['rate'] / GIGA:8.1f}  {shares}", file=sys.stderr)
    print(json.dumps({"weight_bytes": weights, "machine": found, "model": rows}))


if __name__ == "__main__":
    main()
