"""What every quantization method and type costs in perplexity: the default model, converted and evaluated in turn.

    python benchmarks/quantization_methods.py --folder=WORK --calibration_file=VALID --text_file=TEST

Each line of the table is one conversion and one evaluation by the commands that users run, so that a number can be had
again by hand. What stands in WORK is not made again: a run that was stopped goes on, and `--only` picks some. Prints
the table; the last line of standard output is a JSON object.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

TYPES = {
    "int4_per_channel": ["--quantize_type=int4_per_channel"],
    "int4_blockwise": ["--quantize_type=int4_blockwise"],
    "int4_blockwise, asymmetric": ["--quantize_type=int4_blockwise", "--symmetric=False"],
    "int8_per_channel": ["--quantize_type=int8_per_channel"],
}
ACT_ORDER, CLIP, SWEEPS = "--gptq_act_order", "--clip=mse", "--gptq_sweeps=4"
METHODS = {
    "rtn": [],
    "rtn, clip": [CLIP],
    "awq, clip": ["--quantize_method=awq", CLIP],
    "gptq": ["--quantize_method=gptq"],
    "gptq, act-order": ["--quantize_method=gptq", ACT_ORDER],
    "gptq, act-order, clip": ["--quantize_method=gptq", ACT_ORDER, CLIP],
    "gptq, act-order, sweeps": ["--quantize_method=gptq", ACT_ORDER, SWEEPS],
    "gptq, act-order, clip, sweeps": ["--quantize_method=gptq", ACT_ORDER, CLIP, SWEEPS],
    "awq, gptq, act-order, clip, sweeps": [
        "--quantize_method=gptq",
        "--scale_inputs=awq",
        ACT_ORDER,
        CLIP,
        SWEEPS,
    ],
}


def measure(name: str, flags: list[str], args: argparse.Namespace) -> dict[str, float]:
    """One line: converts unless that was done, evaluates unless that was done."""
    folder = args.folder / name.replace(", ", "-").replace(" ", "_")
    record = folder.with_suffix(".json")
    if record.exists():
        return json.loads(record.read_text())
    start = time.perf_counter()
    if not folder.exists():
        command = [sys.executable, "-m", "jetserve", "convert", f"--output_checkpoint_dir={folder}", *flags]
        if any(flag.startswith("--quantize_method") for flag in flags):
            command += [
                f"--calibration_file={args.calibration_file}",
                f"--calibration_samples={args.samples}",
                f"--calibration_length={args.length}",
            ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - start
    command = [sys.executable, "-m", "jetserve", "offline", "--task=perplexity", f"--checkpoint_path={folder}"]
    command += [f"--text_file={args.text_file}", f"--max_tokens={args.max_tokens}", "--cpu_activation=float32"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    result = {
        "perplexity": found["perplexity"],
        "standard_error": found["standard_error"],
        "bits_per_weight": found["bits_per_weight"],
        "conversion_seconds": round(seconds, 1),
    }
    record.write_text(json.dumps(result))
    return result


def main() -> None:
    """Measures what is asked for, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints and results are kept")
    parser.add_argument("--calibration_file", type=Path, required=True)
    parser.add_argument("--text_file", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--max_tokens", type=int, default=32768)
    parser.add_argument("--only", default="", help="names of lines, separated by semicolons (unset: all)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = {f"{kind}, {method}": [*TYPES[kind], *METHODS[method]] for kind in TYPES for method in METHODS}
    wanted = [name.strip() for name in args.only.split(";") if name.strip()] or list(lines)
    unknown = set(wanted) - set(lines)
    if unknown:
        raise SystemExit(f"--only names {', '.join(sorted(unknown))}; expected some of {'; '.join(lines)}")
    results = {name: measure(name, lines[name], args) for name in wanted}
    print("| type and method | perplexity | bits a weight |\n|---|---|---|")
    for name, result in results.items():
        print(f"| {name} | {result['perplexity']:.2f} | {result['bits_per_weight']:.2f} |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
