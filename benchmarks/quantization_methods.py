"""What every quantization method and type costs in perplexity: the default model, converted and evaluated in turn.

    python benchmarks/quantization_methods.py --folder=WORK --calibration_file=VALID --text_file=TEST

Each cell of the table is one conversion and one evaluation by the commands that users run, so that a number can be had
again by hand. What stands in WORK is not made again: a run that was stopped goes on, and `--only` picks some. Prints
the table of all that stands there; the last line of standard output is a JSON object.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXACT, INT8_ACTIVATIONS = "--cpu_activation=float32", "--quantize_activation"
ACT_ORDER, CLIP, SWEEPS = "--gptq_act_order", "--clip=mse", "--gptq_sweeps=4"
GPTQ, AWQ = "--quantize_method=gptq", "--quantize_method=awq"


@dataclasses.dataclass(frozen=True)
class Method:
    """How it is asked for, and how what it made is evaluated."""

    flags: tuple[str, ...] = ()
    activation: str = EXACT

    @property
    def calibrated(self) -> bool:
        """Whether it takes a text."""
        return any(flag.startswith("--quantize_method") for flag in self.flags)


TYPES = {
    "int4_per_channel": ("--quantize_type=int4_per_channel",),
    "int4_per_channel, asymmetric": ("--quantize_type=int4_per_channel", "--symmetric=False"),
    "int4_blockwise": ("--quantize_type=int4_blockwise",),
    "int4_blockwise, asymmetric": ("--quantize_type=int4_blockwise", "--symmetric=False"),
    "int8_per_channel": ("--quantize_type=int8_per_channel",),
    "int8_blockwise": ("--quantize_type=int8_blockwise",),
}
METHODS = {
    "rtn": Method(),
    "rtn, clip": Method((CLIP,)),
    "awq": Method((AWQ,)),
    "awq, clip": Method((AWQ, CLIP)),
    "gptq": Method((GPTQ,)),
    "gptq, act-order": Method((GPTQ, ACT_ORDER)),
    "gptq, act-order, clip": Method((GPTQ, ACT_ORDER, CLIP)),
    "gptq, act-order, clip, sweeps": Method((GPTQ, ACT_ORDER, CLIP, SWEEPS)),
    "awq, gptq, act-order, clip, sweeps": Method((GPTQ, "--scale_inputs=awq", ACT_ORDER, CLIP, SWEEPS)),
    "rtn, int8 activations": Method((), INT8_ACTIVATIONS),
    "smoothquant, int8 activations": Method(("--quantize_method=smoothquant",), INT8_ACTIVATIONS),
}


def record_of(folder: Path, kind: str, method: str) -> Path:
    """Where a cell's result is kept; its checkpoint is beside it."""
    return folder / (f"{kind}, {method}".replace(", ", "-").replace(" ", "_") + ".json")


def measure(kind: str, method: Method, record: Path, args: argparse.Namespace) -> None:
    """One cell: converts unless that was done, evaluates unless that was done."""
    if record.exists():
        return
    start = time.perf_counter()
    made = record.with_suffix("")
    if not made.exists():
        command = [sys.executable, "-m", "jetserve", "convert", f"--output_checkpoint_dir={made}"]
        command += [*TYPES[kind], *method.flags]
        if method.calibrated:
            command += [
                f"--calibration_file={args.calibration_file}",
                f"--calibration_samples={args.samples}",
                f"--calibration_length={args.length}",
            ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - start
    command = [sys.executable, "-m", "jetserve", "offline", "--task=perplexity", f"--checkpoint_path={made}"]
    command += [f"--text_file={args.text_file}", f"--max_tokens={args.max_tokens}", method.activation]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    result = {
        "perplexity": found["perplexity"],
        "standard_error": found["standard_error"],
        "bits_per_weight": found["bits_per_weight"],
        "conversion_seconds": round(seconds, 1),
        "samples": args.samples if method.calibrated else None,
    }
    record.write_text(json.dumps(result))


def table(folder: Path, samples: int) -> dict[str, dict[str, Any]]:
    """Prints the results that there are, a type a column, and returns them; windows are told where they are others."""
    cells = {}
    for kind in TYPES:
        for method in METHODS:
            if (record := record_of(folder, kind, method)).exists():
                cells[kind, method] = json.loads(record.read_text())
    kinds = [kind for kind in TYPES if any(found == kind for found, _ in cells)]
    print(f"| method | {' | '.join(kinds)} |\n{'|---' * (len(kinds) + 1)}|")
    for method in METHODS:
        shown = [_shown(cells.get((kind, method)), samples) for kind in kinds]
        if any(shown):
            print(f"| {method} | {' | '.join(shown)} |")
    return {f"{kind}, {method}": result for (kind, method), result in cells.items()}


def _shown(result: dict[str, Any] | None, samples: int) -> str:
    if result is None:
        return ""
    told = "" if result["samples"] in (None, samples) else f" ({result['samples']})"
    return f"{result['perplexity']:.2f} ± {result['standard_error']:.2f}{told}"


def main() -> None:
    """Measures what is asked for, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints and results are kept")
    parser.add_argument("--calibration_file", type=Path, required=True)
    parser.add_argument("--text_file", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--max_tokens", type=int, default=32768)
    parser.add_argument(
        "--only", default="", help="names of cells, type and method, separated by semicolons (unset: all)"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    cells = {f"{kind}, {method}": (kind, method) for kind in TYPES for method in METHODS}
    wanted = [name.strip() for name in args.only.split(";") if name.strip()] or list(cells)
    unknown = set(wanted) - set(cells)
    if unknown:
        raise SystemExit(f"--only names {'; '.join(sorted(unknown))}; expected some of {'; '.join(cells)}")
    for kind, method in (cells[name] for name in wanted):
        measure(kind, METHODS[method], record_of(args.folder, kind, method), args)
    print(json.dumps(table(args.folder, args.samples)))


if __name__ == "__main__":
    main()
