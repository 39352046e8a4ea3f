"""Peak memory of converting a large checkpoint: a synthetic Llama in bfloat16 shards, written, converted, measured.

    python benchmarks/conversion_memory.py --layers=8 --hidden=4096

The goal: peak resident memory under twice the largest tensor plus 1 GB, whatever the model's size. The conversion runs
in a process of its own, whose peak the operating system reports. The last line of standard output is a JSON object.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jetserve.testing import make_tiny_checkpoint

GIB = 2**30


def write(folder: Path, args: argparse.Namespace) -> None:
    """Makes the checkpoint to convert."""
    make_tiny_checkpoint(
        folder,
        dtype="bfloat16",
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=args.hidden // 128,
    )


def main() -> None:
    """Writes, converts, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--mlp", type=int, default=11008)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--quantize_type", default="int4_blockwise")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (unset: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source, converted = Path(folder) / "source", Path(folder) / "converted"
        # In a process of its own: a child's peak starts from its parent's size, which must stay small.
        writer = multiprocessing.get_context("spawn").Process(target=write, args=(source, args))
        writer.start()
        writer.join()
        source_bytes = sum(file.stat().st_size for file in source.iterdir())
        start = time.perf_counter()
        command = [sys.executable, "-m", "jetserve", "convert", f"--input_checkpoint_dir={source}"]
        command += [f"--output_checkpoint_dir={converted}", f"--quantize_type={args.quantize_type}"]
        process = subprocess.Popen(command, stdout=sys.stderr)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"the conversion failed with status {os.waitstatus_to_exitcode(status)}")
    peak = usage.ru_maxrss * 1024
    largest = 2 * args.hidden * max(args.mlp, args.vocabulary)
    report = {
        "source_bytes": source_bytes,
        "largest_tensor_bytes": largest,
        "peak_memory_bytes": peak,
        "goal_bytes": 2 * largest + 10**9,
        "seconds": round(seconds, 1),
    }
    print(f"{source_bytes / GIB:.1f} GiB converted in {seconds:.0f} s, peak {peak / GIB:.2f} GiB", file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
