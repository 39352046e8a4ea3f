"""What serving costs: the same requests through the engine alone, its asyncio front, and the servers, in one run.

    python benchmarks/serving_overhead.py
    python benchmarks/serving_overhead.py --device_ms=2

On a CPU the model competes with servers and clients for cores. `--device_ms` pretends that it does not, as with a TPU:
a step waits so long in place of computing, and its tokens are made up; all else is done as ever.
Streams begin together and have equally many tokens, so a rate is tokens over the time from the first request to the
last token. All ways make text of the tokens. The engine alone is measured before and after every other way, because
machines change their speed: a ratio is to the mean of the two, and of several rounds the median. The servers' client is
`python -m jetserve.loadtest`, in a process of its own and of the lowest priority: it takes what the server leaves of
the cores. CPU time is that of the serving process. The last line of standard output is a JSON object.
"""

import argparse
import asyncio
import dataclasses
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import uvloop

from jetserve.config import CacheConfig, EngineConfig, ModelSource, ServerConfig
from jetserve.default_model import default_cache_dir
from jetserve.engine.async_engine import AsyncEngine
from jetserve.engine.build import build_engine
from jetserve.engine.engine import Engine
from jetserve.engine.runner import Runner, SampledToken
from jetserve.engine.sampling import Row
from jetserve.engine.scheduler import StepPlan
from jetserve.server.grpc import GrpcServer
from jetserve.server.metrics import Metrics
from jetserve.server.observe import Observer
from jetserve.server.openai.server import HttpServer
from jetserve.testing import make_tiny_checkpoint
from jetserve.types import Request, SamplingParams

INPUT_TOKENS = 32
MAX_LENGTH = 1024
LOWEST_PRIORITY = ("nice", "-n", "19")
_numbers = itertools.count()


def requests(streams: int, tokens: int) -> list[Request]:
    """Greedy ones that do not end early, none like another."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    return [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(16 + (number * (7 + i) + i) % 240 for i in range(INPUT_TOKENS)),
            sampling=sampling,
        )
        for number in itertools.islice(_numbers, streams)
    ]


async def engine_alone(engine: Engine, streams: int, tokens: int) -> float:
    """Tokens a second."""
    batch = requests(streams, tokens)
    start = time.perf_counter()
    count = sum(len(output.token_ids) for output in engine.run(batch))
    return count / (time.perf_counter() - start)


async def through_asyncio(front: AsyncEngine, streams: int, tokens: int) -> float:
    """Tokens a second."""

    async def read(request: Request) -> int:
        return sum([len(output.token_ids) async for output in front.generate(request)])

    batch = requests(streams, tokens)
    start = time.perf_counter()
    counts = await asyncio.gather(*(read(request) for request in batch))
    return sum(counts) / (time.perf_counter() - start)


async def through_server(url: str, streams: int, tokens: int) -> float:
    """Tokens a second, as the client counts, once a short request on each stream has warmed it up."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for request in requests(streams, 2) + requests(streams, tokens):
            sampling = {name: getattr(request.sampling, name) for name in ("temperature", "ignore_eos", "max_tokens")}
            print(json.dumps({"prompt": request.prompt_token_ids, **sampling}), file=file)
        file.flush()
        command = [*LOWEST_PRIORITY, sys.executable, "-m", "jetserve.loadtest"]
        command += [f"--url={url}", f"--concurrency={streams}", f"--prompts_file={file.name}"]
        command += [f"--warmup_requests={streams}", f"--num_requests={streams}"]
        client = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    report = json.loads(client.stdout.splitlines()[-1])
    if report["failed"]:
        raise RuntimeError(f"{report['failed']} requests failed: {report['failures']}")
    return report["output_tokens_per_second"]


def pretend_device(runner: Runner, seconds: float) -> None:
    """Has steps take this long, and no CPU time."""

    def run(plan: StepPlan, rows: Mapping[int, Row]) -> list[SampledToken | None]:
        time.sleep(seconds)
        return [SampledToken(40 + i) if i in rows else None for i in range(len(plan.entries))]

    runner.run = run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one measurement: tokens a second, those of the engine alone next to it, and the CPU time of this process, all
    threads, in microseconds a token.
    """

    rate: float
    engine_rate: float
    cpu: float


async def measure(engine: Engine, args: argparse.Namespace) -> dict[str, list[Cost]]:
    """By way, one a round."""
    front = AsyncEngine(engine)
    alone = Engine(engine.runner, engine.tokenizer)  # takes turns with the other on the same pages
    config = ServerConfig(grpc_port=0, http_port=0)
    grpc_server, http_server = GrpcServer(config), HttpServer(config, profile_folder=Path("profiles"))
    observer = Observer(Metrics(front, model=args.model))
    await http_server.open()
    await grpc_server.start(front, observer)
    await http_server.start(front, observer, model=args.model)
    ways: dict[str, Callable[[], Awaitable[float]]] = {
        "asyncio": lambda: through_asyncio(front, args.streams, args.tokens),
        "grpc": lambda: through_server(f"grpc://127.0.0.1:{grpc_server.port}", args.streams, args.tokens),
        "http": lambda: through_server(http_server.url, args.streams, args.tokens),
    }

    async def once(name: str, way: Callable[[], Awaitable[float]]) -> tuple[float, float]:
        before = time.process_time()
        rate = await way()
        cpu = 1e6 * (time.process_time() - before) / (args.streams * args.tokens)
        print(f"{name:8} {rate:10,.0f} tokens/s {cpu:8.0f} us", file=sys.stderr, flush=True)
        return rate, cpu

    async def once_alone() -> float:
        rate, cpu = await once("engine", lambda: engine_alone(alone, args.streams, args.tokens))
        costs["engine"].append(Cost(rate=rate, engine_rate=rate, cpu=cpu))
        return rate

    costs: dict[str, list[Cost]] = {name: [] for name in ("engine", *ways)}
    before = await once_alone()
    for _ in range(args.rounds):
        for name, way in ways.items():
            rate, cpu = await once(name, way)
            after = await once_alone()
            costs[name].append(Cost(rate=rate, engine_rate=(before + after) / 2, cpu=cpu))
            before = after
    await front.stop()
    await asyncio.gather(grpc_server.stop(1), http_server.stop(1))
    return costs


def main() -> None:
    """Measures, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "default"), default="tiny")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device_ms", type=float, help="a step's time on a device that is not there")
    args = parser.parse_args()
    config = EngineConfig(max_sequences=args.streams, cache=CacheConfig(prefix_caching=False))
    with tempfile.TemporaryDirectory() as folder:
        path = None
        if args.model == "tiny":
            path = str(make_tiny_checkpoint(Path(folder) / "tiny", max_position_embeddings=MAX_LENGTH))
        source = ModelSource(checkpoint_path=path, cache_dir=default_cache_dir())
        engine = build_engine(source, config, max_length=MAX_LENGTH)
    engine.runner.warm_up()
    gc.collect()
    gc.freeze()  # as `serve` does
    if args.device_ms is not None:
        pretend_device(engine.runner, args.device_ms / 1000)
    costs = uvloop.run(measure(engine, args))
    rates = {name: statistics.median(cost.rate for cost in each) for name, each in costs.items()}
    cpu = {name: statistics.median(cost.cpu for cost in each) for name, each in costs.items()}
    ratios = {name: statistics.median(cost.rate / cost.engine_rate for cost in each) for name, each in costs.items()}
    print("           tokens/s   of the engine's   CPU us a token", file=sys.stderr)
    for name, rate in rates.items():
        print(f"{name:8} {rate:10,.0f} {100 * ratios[name]:15.1f} % {cpu[name]:16.0f}", file=sys.stderr)
    result = {"tokens_per_second": rates, "ratio": ratios, "cpu_us_per_token": cpu}
    print(json.dumps({"model": args.model, "streams": args.streams, **result}))


if __name__ == "__main__":
    main()
