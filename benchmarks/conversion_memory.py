"""Peak memory of converting a large checkpoint and of loading what it became: a synthetic Llama in bfloat16 shards.

    python benchmarks/conversion_memory.py --layers=32

The goal of the conversion: peak resident memory under twice the largest tensor plus 1 GB, whatever the model's size; of
loading, the same beside the weights that are kept. Each runs in a process of its own, whose peak the operating system
reports. The last line of standard output is a JSON object.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import own_process

from jetserve.testing import make_tiny_checkpoint

GB = 10**9
SHARD_BYTES = GB


def write(folder: Path, args: argparse.Namespace) -> None:
    """Makes the checkpoint to convert."""
    make_tiny_checkpoint(
        folder,
        dtype="bfloat16",
        shard_bytes=SHARD_BYTES,
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=args.hidden // 128,
    )


def peak_of(*command: str) -> tuple[int, float]:
    """The peak memory in bytes of a jetserve command, and its seconds."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "jetserve", *command], stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} failed with status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024, time.perf_counter() - start


def size_of(folder: Path) -> int:
    """Of all files in it, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def weights_bytes(converted: Path) -> int:
    """Of a converted checkpoint's weights in memory, without their scales."""
    tensors = json.loads((converted / "jetserve.json").read_text(encoding="utf-8"))["tensors"]
    return sum(math.prod(tensor["shape"]) * (tensor["bits"] or 32) // 8 for tensor in tensors)


def main() -> None:
    """Writes, converts, loads, reports."""
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
        own_process.run(write, source, args)
        folders = (f"--input_checkpoint_dir={source}", f"--output_checkpoint_dir={converted}")
        peak, seconds = peak_of("convert", *folders, f"--quantize_type={args.quantize_type}")
        lengths = ("--batch_size=1", "--input_tokens=16", "--output_tokens=2", "--max_cache_length=64")
        loaded_peak, loaded_seconds = peak_of("offline", "--task=benchmark", f"--checkpoint_path={converted}", *lengths)
        largest = 2 * args.hidden * max(args.mlp, args.vocabulary)
        report = {
            "shards": len(list(source.glob("*.safetensors"))),
            "source_bytes": size_of(source),
            "converted_bytes": size_of(converted),
            "loaded_weights_bytes": weights_bytes(converted),
            "largest_tensor_bytes": largest,
            "peak_memory_bytes": peak,
            "goal_bytes": 2 * largest + GB,
            "seconds": round(seconds, 1),
            "loading_peak_memory_bytes": loaded_peak,
            "loading_goal_bytes": weights_bytes(converted) + 2 * largest + GB,
            "loading_seconds": round(loaded_seconds, 1),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
