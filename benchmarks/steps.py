"""Times single steps of the default model, with the CPU kernels and with XLA's own code, in one process.

    python benchmarks/steps.py

Prints a table; the last line of standard output is a JSON object with the medians in milliseconds.
"""

import argparse
import json
import statistics
import sys
import time

import jax

from jetserve.config import EngineConfig, ModelSource
from jetserve.default_model import default_cache_dir
from jetserve.engine.build import build_engine
from jetserve.engine.runner import Runner
from jetserve.kernels import select

BATCH, CONTEXT, PROMPT = 16, 200, 512
IMPLEMENTATIONS = {
    "kernels": {},
    "xla": {
        "quantized_matmul": "dequantized",
        "embedding_lookup": "xla",
        **dict.fromkeys(("projections", "attention", "rms_norm", "rope"), "xla"),
    },
}


def milliseconds(runner: Runner, sequences: int, tokens: int, rounds: int) -> float:
    """The median of one step: `tokens` of one sequence, or one token of each of `sequences`."""
    decode = tokens == 1
    T = sequences if decode else tokens
    batch = runner._empty_batch(T, sequences if decode else runner.config.max_sequences, tokens)
    if decode:
        batch.query_starts[:] = range(sequences + 1)
        batch.kv_lengths[:], batch.positions[:] = CONTEXT, CONTEXT - 1
        for i in range(sequences):
            pages = CONTEXT // runner.config.cache.page_size + 1
            batch.page_table[i, :pages] = range(1 + i * pages, 1 + (i + 1) * pages)
    else:
        batch.query_starts[1:], batch.kv_lengths[0], batch.positions[:] = tokens, tokens, range(tokens)
        pages = tokens // runner.config.cache.page_size
        batch.page_table[0, :pages] = range(1, pages + 1)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        runner.compute(batch).block_until_ready()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])  # the first one compiles


def main() -> None:
    """Measures both, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize_type", default="keep")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    source = ModelSource(cache_dir=default_cache_dir(), quantize_type=args.quantize_type)
    report: dict[str, dict[str, float]] = {}
    for name, choice in IMPLEMENTATIONS.items():
        with select.choose(**choice):
            engine = build_engine(source, EngineConfig(max_sequences=BATCH))
            report[name] = {
                "decode_1": milliseconds(engine.runner, 1, 1, args.rounds),
                f"decode_{BATCH}": milliseconds(engine.runner, BATCH, 1, args.rounds),
                f"prefill_{PROMPT}": milliseconds(engine.runner, BATCH, PROMPT, max(3, args.rounds // 3)),
            }
        del engine
        jax.clear_caches()
    for step, kernels in report["kernels"].items():
        xla = report["xla"][step]
        print(f"{step:12} {kernels:8.1f} ms {xla:8.1f} ms  {xla / kernels:.1f}x", file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
