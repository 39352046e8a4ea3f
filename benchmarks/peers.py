"""jetserve against llama.cpp and OpenVINO GenAI: the same model, prompts and threads, in one run.

    python benchmarks/peers.py --table=peers.md --plot=peers.png

Each engine runs in a process of its own, which stays loaded. Every measurement is made with one engine after the other,
round after round, so that what else the machine does falls on all alike; an engine whose turn it is not is stopped.
Prompts are random tokens, new ones for every measurement, and prefix caches are off. Results are medians over rounds.

The peers are optional. They may live in environments of their own, named by --llama_python and --openvino_python:

    pip install llama-cpp-python
    pip install openvino-genai optimum-intel nncf torch transformers gguf accelerate

llama.cpp runs the default model's own file (Q4_1), and the same requantized to Q4_0; OpenVINO an export to int4 in
groups of 64. Both run with the best settings that were found (flash attention in llama.cpp makes it up to 25 % faster).
The last line of standard output is a JSON object. Plotting takes matplotlib (`pip install 'jetserve[plot]'`).
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetserve import default_model

SCRIPTS = Path(__file__).parent / "peer_engines"
BATCH_SIZES, PROMPT_LENGTHS = (1, 4, 16, 32), (128, 512, 2048)
QUICK_BATCH_SIZES, QUICK_PROMPT_LENGTHS = (1, 16), (128, 512)
BATCH_PROMPT, STEPS = 64, 32
"""Tokens of each prompt of a batch, and steps that are timed after them."""
ORDINARY_TOKENS = range(1000, 40000)
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER_TOKENS = 20
MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One column of the table: an engine, the Python that runs it, and what it is made with."""

    name: str
    is_peer: bool
    python: str
    script: str
    settings: Mapping[str, Any]
    needs: str | None = None
    """A module that the Python must have, of the package that `install` names."""
    install: str = ""


class Engine:
    """An engine's process. It runs only within `turn`."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            [entry.python, str(SCRIPTS / entry.script), json.dumps(entry.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version: str = self._read()["ready"]
        self.start_seconds = time.perf_counter() - begin
        self._process.send_signal(signal.SIGSTOP)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.entry.name} ended with status {self._process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def ask(self, command: str, **arguments: Any) -> Any:
        """What the engine answers to a command of `peer_engines/protocol.py`."""
        assert self._process.stdin is not None
        with self.turn():
            print(json.dumps({"command": command, **arguments}), file=self._process.stdin, flush=True)
            return self._read()["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def entries(args: argparse.Namespace) -> list[Entry]:
    """All columns, whether or not their engine is there."""
    gguf = default_model.fetch(default_model.default_cache_dir())
    folder = default_model.default_cache_dir() / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    spare = BATCH_PROMPT + STEPS + max(args.batch_sizes)
    limits = {
        "prompt_length": max(args.prompt_lengths) + spare,
        "batch_size": max(args.batch_sizes),
        "batch_length": BATCH_PROMPT + spare,
    }
    found = [
        Entry(
            name=f"jetserve {quantize_type}",
            is_peer=False,
            python=sys.executable,
            script="with_jetserve.py",
            settings={"limits": limits, "quantize_type": quantize_type},
        )
        for quantize_type in ("keep", "int4_blockwise")
    ]
    theirs = {"limits": limits, "threads": args.threads}
    for form, model in (("Q4_1", gguf), ("Q4_0", folder / f"{gguf.stem}-as-Q4_0.gguf")):
        found.append(
            Entry(
                name=f"llama.cpp {form}",
                is_peer=True,
                python=args.llama_python,
                script="with_llama.py",
                settings={**theirs, "model": str(model)},
                needs="llama_cpp",
                install="pip install llama-cpp-python",
            )
        )
    return [
        *found,
        Entry(
            name="OpenVINO int4",
            is_peer=True,
            python=args.openvino_python,
            script="with_openvino.py",
            settings={**theirs, "model": str(folder / "openvino-int4")},
            needs="openvino_genai",
            install="pip install openvino-genai optimum-intel nncf torch transformers gguf accelerate",
        ),
    ]


def available(entry: Entry) -> bool:
    """Whether the engine's package is there, and if so its model too, made if need be."""
    if entry.needs is None:
        return True
    if subprocess.run([entry.python, "-c", f"import {entry.needs}"], capture_output=True, check=False).returncode:
        print(f"without {entry.name}: {entry.python} has no {entry.needs}; {entry.install}", file=sys.stderr)
        return False
    if not os.path.exists(entry.settings["model"]):
        script = "make_openvino.py" if entry.needs == "openvino_genai" else "make_q4_0.py"
        source = default_model.fetch(default_model.default_cache_dir())
        print(f"making {entry.settings['model']}, once", file=sys.stderr)
        subprocess.run(
            [entry.python, str(SCRIPTS / script), str(source), entry.settings["model"]], check=True, stdout=sys.stderr
        )
    return True


class Prompts:
    """Random tokens, never the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, length: int) -> list[int]:
        return [self._random.choice(ORDINARY_TOKENS) for _ in range(length)]


Measurement = tuple[str, int]
"""("decode", batch size), in seconds a step; or ("first token", prompt length), in seconds."""


def measure(engine: Engine, measurement: Measurement, prompts: Sequence[list[int]]) -> float:
    """Seconds."""
    kind, _ = measurement
    seconds: float = (
        engine.ask("decode_step", prompts=prompts, steps=STEPS)
        if kind == "decode"
        else engine.ask("first_token", prompt=prompts[0])
    )
    return seconds


def rounds(
    engines: Sequence[Engine], measurements: Sequence[Measurement], count: int
) -> dict[str, dict[Measurement, list[float]]]:
    """Seconds of every round after the first, which warms up."""
    prompts = Prompts(seed=0)
    found: dict[str, dict[Measurement, list[float]]] = {
        engine.entry.name: {measurement: [] for measurement in measurements} for engine in engines
    }
    for i in range(count + 1):
        for measurement in measurements:
            kind, size = measurement
            made = [prompts.make(BATCH_PROMPT) for _ in range(size)] if kind == "decode" else [prompts.make(size)]
            for engine in engines:
                seconds = measure(engine, measurement, made)
                if i:
                    found[engine.entry.name][measurement].append(seconds)
        load = ", ".join(f"{load:.2f}" for load in os.getloadavg())
        print(f"round {i} of {count} is done; load average {load}", file=sys.stderr)
    return found


def report(engines: Sequence[Engine], found: Mapping[str, Mapping[Measurement, Sequence[float]]]) -> dict[str, Any]:
    """Medians, and how many times as fast as the best peer jetserve is."""
    medians = {name: {key: statistics.median(times) for key, times in kinds.items()} for name, kinds in found.items()}
    peers = [engine.entry.name for engine in engines if engine.entry.is_peer]
    summary: dict[str, Any] = {}
    for engine in engines:
        name = engine.entry.name
        summary[name] = {
            "version": engine.version,
            "start_to_first_token_seconds": engine.start_seconds,
            "peak_memory_bytes": engine.ask("peak_memory"),
        }
        for (kind, size), seconds in medians[name].items():
            tokens = size / seconds
            entry = {"ms": 1e3 * seconds, "tokens_per_second": tokens}
            entry["ms_of_rounds"] = [1e3 * seconds for seconds in found[name][kind, size]]
            if peers and not engine.entry.is_peer:
                entry["times_the_best_peer"] = min(medians[peer][kind, size] for peer in peers) / seconds
            summary[name].setdefault(kind, {})[str(size)] = entry
    return summary


def table(summary: Mapping[str, Any], measurements: Sequence[Measurement]) -> str:
    """Markdown, a column an engine."""
    names = list(summary)
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]

    def row(label: str, cells: Sequence[str]) -> None:
        lines.append(f"| {label} | {' | '.join(cells)} |")

    for kind, size in measurements:
        cells = [summary[name][kind][str(size)] for name in names]
        ratios = [f" ({cell['times_the_best_peer']:.2f}x)" if "times_the_best_peer" in cell else "" for cell in cells]
        if kind == "decode":
            texts = [f"{cell['tokens_per_second']:.0f}" for cell in cells]
            label = f"decode, batch {size}, tokens/s"
        else:
            texts = [f"{cell['ms']:.0f} ms, {cell['tokens_per_second']:.0f}" for cell in cells]
            label = f"{size} tokens to the first one, and tokens/s"
        row(label, [text + ratio for text, ratio in zip(texts, ratios, strict=True)])
    row("start to first token, s", [f"{summary[name]['start_to_first_token_seconds']:.1f}" for name in names])
    row("peak memory, MiB", [f"{summary[name]['peak_memory_bytes'] / MIB:.0f}" for name in names])
    return "\n".join(lines)


def plot(path: Path, summary: Mapping[str, Any], measurements: Sequence[Measurement]) -> None:
    """Bars, in groups of a batch size or a prompt length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, kind, title in (
        (axes[0], "decode", "decode, tokens/s by batch size"),
        (axes[1], "first token", "prompt tokens/s to the first token, by prompt length"),
    ):
        sizes = [str(size) for found, size in measurements if found == kind]
        width = 0.8 / len(summary)
        for i, (name, entry) in enumerate(summary.items()):
            places = [place + i * width for place in range(len(sizes))]
            axis.bar(places, [entry[kind][size]["tokens_per_second"] for size in sizes], width, label=name)
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(sizes))], sizes)
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def show_answers(engines: Sequence[Engine]) -> None:
    """The start of every engine's greedy answer: that the numbers are those of a model that works."""
    ours = next(engine for engine in engines if not engine.entry.is_peer)
    question = ours.ask("encode", text=QUESTION)
    for engine in engines:
        tokens = engine.ask("answer", prompt=question, count=ANSWER_TOKENS)
        print(f"{engine.entry.name:24} {ours.ask('decode', tokens=tokens)!r}", file=sys.stderr)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the peers; jetserve takes all")
    parser.add_argument("--llama_python", default=sys.executable)
    parser.add_argument("--openvino_python", default=sys.executable)
    parser.add_argument("--only", default="", help="of the columns, those whose name holds one of these, by commas")
    parser.add_argument("--quick", action="store_true", help="fewer batch sizes and prompts, two rounds")
    parser.add_argument("--table", type=Path, help="write the table here too")
    parser.add_argument("--plot", type=Path, help="write a PNG here")
    args = parser.parse_args()
    args.batch_sizes = QUICK_BATCH_SIZES if args.quick else BATCH_SIZES
    args.prompt_lengths = QUICK_PROMPT_LENGTHS if args.quick else PROMPT_LENGTHS
    if args.quick:
        args.rounds = 2
    return args


def main() -> None:
    """Starts all engines, measures, reports."""
    args = parse()
    wanted = args.only.split(",")
    chosen = [entry for entry in entries(args) if any(part in entry.name for part in wanted) and available(entry)]
    measurements = [("decode", size) for size in args.batch_sizes]
    measurements += [("first token", length) for length in args.prompt_lengths]
    load_before = os.getloadavg()
    engines: list[Engine] = []
    try:
        for entry in chosen:
            print(f"starting {entry.name}", file=sys.stderr)
            engines.append(Engine(entry))
        show_answers(engines)
        found = rounds(engines, measurements, args.rounds)
        summary = report(engines, found)
    finally:
        for engine in engines:
            engine.close()
    text = table(summary, measurements)
    print(text)
    if args.table:
        args.table.write_text(text + "\n", encoding="utf-8")
    if args.plot:
        plot(args.plot, summary, measurements)
    machine = {"host": platform.machine(), "cpus": os.cpu_count()}
    loads = {"before": load_before, "after": os.getloadavg()}
    print(json.dumps({"rounds": args.rounds, "machine": machine, "load_average": loads, "engines": summary}))


if __name__ == "__main__":
    main()
