"""Speed of a model on this machine: time to first token, prefill and decode rates, peak memory.

Owns the measurement: what a round is, what is timed, and the proof that nothing was compiled inside. Prompts are random
words, new ones in every round, and prefix caching is off, so no work is saved that a user's first request would cost.

A round takes two steps. One prompt alone, on an idle engine, gives the time to first token. Then B texts are tokenized
and submitted together; once all of them have their first token, the steps in which all B decode are timed. Sequences
that started early get a few tokens more than asked for, so that the batch stays full while it is timed. The first round
warms up and is discarded; the results are medians over the others.
"""

import dataclasses
import gc
import logging
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
import numpy as np
import tqdm

from jetserve.config import EngineConfig, ModelSource, OfflineConfig
from jetserve.engine import build
from jetserve.engine.engine import Engine
from jetserve.tokenizer import Tokenizer
from jetserve.types import Request, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

MIN_ROUNDS, MAX_ROUNDS = 3, 10
ENOUGH_SECONDS = 10.0
"""Of measuring: no further round starts after it, once there are `MIN_ROUNDS`."""
MAX_COMPILED_ROUNDS = 3
"""Rounds discarded because something was compiled in them, before the benchmark gives up."""

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Counts the programs that jax compiles, or takes from its persistent cache, while it is entered."""

    def __init__(self) -> None:
        self.programs = 0
        self.seconds = 0.0

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            self.programs += 1
            self.seconds += duration_secs

    def __enter__(self) -> "CompileWatch":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What one round took, in seconds unless said otherwise.

    Attributes:
      first_token: of a single request, from its submission to its first token.
      batch_first_tokens: of every request of the batch, from their common submission.
      decode: of the steps in which the whole batch decoded.
      decode_steps: how many they were.
      tokenize: of the batch's texts.
      batch: from the first text to the last token of the batch.
      batch_tokens: tokens that the batch generated.
    """

    first_token: float
    batch_first_tokens: tuple[float, ...]
    decode: float
    decode_steps: int
    tokenize: float
    batch: float
    batch_tokens: int


class Texts:
    """Texts of random words that give a prompt of a given number of tokens, never the same one twice."""

    def __init__(self, tokenizer: Tokenizer, tokens: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._rng = np.random.default_rng(seed)
        sample = self._words(256)
        per_word = len(self.encode_all(sample)) / 256
        self._count = int(1.1 * tokens / per_word) + 8

    def _words(self, count: int) -> str:
        lengths = self._rng.integers(2, 8, count)
        return " ".join("".join(map(chr, self._rng.integers(97, 123, length))) for length in lengths)

    def encode_all(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True)

    def make(self) -> str:
        """A text of at least the wanted tokens, and few more."""
        count = self._count
        while len(self.encode_all(text := self._words(count))) < self._tokens:
            count *= 2
        return text

    def prompt(self, text: str) -> tuple[int, ...]:
        """The text's first tokens, exactly as many as wanted."""
        return tuple(self.encode_all(text)[: self._tokens])


class Benchmark:
    """Rounds on one engine, whose queue is empty."""

    def __init__(
        self, engine: Engine, *, batch_size: int, input_tokens: int, output_tokens: int, seed: int = 0
    ) -> None:
        self._engine = engine
        self._batch_size = batch_size
        self._output_tokens = output_tokens
        self._texts = Texts(engine.tokenizer, input_tokens, seed)
        self._rounds = 0
        pages = engine.config.num_pages // batch_size  # of one sequence, so that none is preempted
        room = min(engine.config.max_length, pages * engine.config.cache.page_size) - input_tokens
        wanted = min(room, output_tokens + stagger(batch_size, input_tokens, engine.config.max_step_tokens))
        self._sampling = SamplingParams(max_tokens=wanted, temperature=0.0, ignore_eos=True)

    def round(self) -> Round:
        """One round of new texts.

        Raises:
          RuntimeError: if there was no step in which the whole batch decoded.
        """
        self._rounds += 1
        texts = [self._texts.make() for _ in range(self._batch_size)]
        single = self._texts.prompt(self._texts.make())
        gc.collect()
        first_token = self._single(single)
        return self._batch(texts, first_token)

    def _single(self, prompt: tuple[int, ...]) -> float:
        sampling = dataclasses.replace(self._sampling, max_tokens=1)
        start = time.perf_counter()
        self._engine.submit(Request(request_id=f"{self._rounds}-single", prompt_token_ids=prompt, sampling=sampling))
        while not any(output.token_ids for output in self._engine.step()):
            pass
        return time.perf_counter() - start

    def _batch(self, texts: list[str], first_token: float) -> Round:
        start = time.perf_counter()
        prompts = [self._texts.prompt(text) for text in texts]
        submitted = time.perf_counter()
        for i, prompt in enumerate(prompts):
            request_id = f"{self._rounds}-{i}"
            self._engine.submit(Request(request_id=request_id, prompt_token_ids=prompt, sampling=self._sampling))
        first: dict[str, float] = {}
        tokens, ended = 0, False
        while len(first) < self._batch_size:
            outputs, now = self._step()
            for output in outputs:
                first.setdefault(output.request_id, now - submitted)
                tokens += len(output.token_ids)
            ended |= any(output.finished for output in outputs)
        all_started, steps = time.perf_counter(), 0
        while steps < self._output_tokens - 1 and not ended:
            outputs, now = self._step()
            tokens += sum(len(output.token_ids) for output in outputs)
            ended = any(output.finished for output in outputs)
            steps += 1
        end = time.perf_counter()
        for request_id in first:
            self._engine.cancel(request_id)
        if steps == 0:
            raise RuntimeError(
                f"the first of {self._batch_size} sequences ended before the last one began, so no step decoded them"
                " all: raise --max_cache_length or --max_step_tokens, or lower --batch_size"
            )
        return Round(
            first_token=first_token,
            batch_first_tokens=tuple(first.values()),
            decode=end - all_started,
            decode_steps=steps,
            tokenize=submitted - start,
            batch=end - start,
            batch_tokens=tokens,
        )

    def _step(self) -> tuple[list[RequestOutput], float]:
        """The outputs of one step that bring tokens, and when it ended."""
        outputs = [output for output in self._engine.step() if output.token_ids]
        return outputs, time.perf_counter()

    def measured(self) -> Iterator[Round]:
        """Rounds in which nothing was compiled, until there are enough.

        Raises:
          RuntimeError: if programs are compiled round after round, whose time would stand in the results.
        """
        done, compiled, start = 0, 0, time.perf_counter()
        while done < MIN_ROUNDS or (done < MAX_ROUNDS and time.perf_counter() - start < ENOUGH_SECONDS):
            with CompileWatch() as watch:
                found = self.round()
            if watch.programs == 0:
                done += 1
                yield found
                continue
            compiled += 1
            logger.warning("%d programs were compiled within a round, which is discarded", watch.programs)
            if compiled == MAX_COMPILED_ROUNDS:
                raise RuntimeError(
                    f"programs were compiled in {compiled} rounds after the warm-up; expected none. The engine meets"
                    " new shapes while it serves, which is a bug: please report it"
                )


def stagger(batch_size: int, input_tokens: int, max_step_tokens: int) -> int:
    """How many steps, at most, pass from the first token of the first sequence of a batch to that of the last."""
    if batch_size * input_tokens <= max_step_tokens:
        return 0
    return -(-batch_size * input_tokens // (max_step_tokens - batch_size + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """`summary` is for JSON, `block` the four lines for people."""

    summary: dict[str, Any]
    block: str


def run(config: OfflineConfig, source: ModelSource, engine_config: EngineConfig, *, max_length: int | None) -> Result:
    """Measures a model.

    Args:
      config: `input_tokens` and `output_tokens` of every sequence.
      source: the model.
      engine_config: `max_sequences` is the batch size; prefix caching is turned off.
      max_length: tokens that a sequence may have; None for as many as the benchmark takes.

    Returns:
      Times in ms, rates in tokens a second, all medians over `rounds`: time_to_first_token_ms and
      prefill_tokens_per_second of a single request; batch_… of the whole batch (median over its requests, and up to its
      last first token); time_per_output_token_ms of a step in which all sequences decode; decode_tokens_per_second of
      all of them together. peak_memory_bytes is of the fullest device, or of this process where devices do not tell.

    Raises:
      ValueError: for lengths that the model or the cache cannot hold.
      RuntimeError: see `Benchmark`.
    """
    began = time.perf_counter()
    batch_size, input_tokens, output_tokens = engine_config.max_sequences, config.input_tokens, config.output_tokens
    _check(config, engine_config, max_length)
    build.use_cache_dir(source.cache_dir)
    loaded = build.load_source(source, engine_config, progress=_loading)
    length = input_tokens + output_tokens
    if length > loaded.config.max_position:
        raise ValueError(
            f"--input_tokens and --output_tokens are {length} together, but the model was made for up to"
            f" {loaded.config.max_position} tokens; lower them"
        )
    if max_length is None:
        spare = stagger(batch_size, input_tokens, engine_config.max_step_tokens)
        max_length = min(length + spare, loaded.config.max_position)
    cache = dataclasses.replace(engine_config.cache, prefix_caching=False)
    engine = build.make_engine(loaded, dataclasses.replace(engine_config, cache=cache), max_length=max_length)
    _check_pages(engine.config, length)
    loaded_at = time.perf_counter()
    benchmark = Benchmark(engine, batch_size=batch_size, input_tokens=input_tokens, output_tokens=output_tokens)
    logger.info("warming up with one round, which is discarded")
    with CompileWatch() as watch:
        benchmark.round()
    ready = time.perf_counter()
    rounds = list(tqdm.tqdm(benchmark.measured(), desc="benchmark", unit="round"))
    memory, memory_of = peak_memory()
    end = time.perf_counter()
    summary = {
        "task": "benchmark",
        "batch_size": batch_size,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        **summarize(rounds, batch_size, input_tokens),
        "peak_memory_bytes": memory,
        "peak_memory_of": memory_of,
        "load_seconds": loaded_at - began,
        "warm_up_seconds": ready - loaded_at,
        "compile_seconds": watch.seconds,
        "compiled_programs": watch.programs,
        "model": build.model_name(source),
        "quantize_type": loaded.quantize_type,
        "bits_per_weight": loaded.report.bits_per_weight,
        "quantize_activation": source.quantize_activation,
        "cpu_activation": source.cpu_activation,
        "quantize_kv_cache": engine.config.cache.quantize,
        "dtype": engine.config.dtype,
        "machine": machine(),
    }
    return Result(summary=summary, block=block(rounds, batch_size, ready=ready - began, finish=end - began))


def _loading(work: Any) -> Any:
    return tqdm.tqdm(work, desc="loading the model", unit="tensor", mininterval=1)


def _check(config: OfflineConfig, engine_config: EngineConfig, max_length: int | None) -> None:
    """What can be refused before the model is loaded."""
    if config.input_tokens < 1:
        raise ValueError(f"--input_tokens is {config.input_tokens}; expected at least 1")
    if config.output_tokens < 2:
        raise ValueError(
            f"--output_tokens is {config.output_tokens}; expected at least 2: time per output token lies between two"
        )
    length = config.input_tokens + config.output_tokens
    if max_length is not None and length > max_length:
        raise ValueError(
            f"--input_tokens and --output_tokens are {length} together, but --max_cache_length is {max_length}; raise"
            " it, or leave it unset"
        )
    if engine_config.max_sequences > engine_config.max_queue:
        raise ValueError(
            f"the batch of {engine_config.max_sequences} is more than may wait at once ({engine_config.max_queue});"
            " lower --batch_size"
        )


def _check_pages(config: EngineConfig, length: int) -> None:
    needed = config.max_sequences * -(-length // config.cache.page_size)
    if config.num_pages < needed:
        raise ValueError(
            f"--num_pages is {config.num_pages}, but {config.max_sequences} sequences of {length} tokens take {needed};"
            " raise it, or leave it unset"
        )


def summarize(rounds: list[Round], batch_size: int, input_tokens: int) -> dict[str, Any]:
    """Medians over the rounds; see `run`."""
    first = [1000 * r.first_token for r in rounds]
    step = [1000 * r.decode / r.decode_steps for r in rounds]
    last = [max(r.batch_first_tokens) for r in rounds]
    return {
        "time_to_first_token_ms": statistics.median(first),
        "prefill_tokens_per_second": 1000 * input_tokens / statistics.median(first),
        "time_per_output_token_ms": statistics.median(step),
        "decode_tokens_per_second": 1000 * batch_size / statistics.median(step),
        "batch_time_to_first_token_ms": 1000 * statistics.median(t for r in rounds for t in r.batch_first_tokens),
        "batch_prefill_tokens_per_second": batch_size * input_tokens / statistics.median(last),
        "rounds": len(rounds),
        "time_to_first_token_ms_of_rounds": first,
        "time_per_output_token_ms_of_rounds": step,
    }


def block(rounds: list[Round], batch_size: int, *, ready: float, finish: float) -> str:
    """The four lines, over all measured rounds. `ready` and `finish`: seconds since the start."""
    tokens = sum(r.batch_tokens for r in rounds)
    seconds = sum(r.batch for r in rounds)
    return (
        "*** Performance stats:\n"
        f"Throughput per token including tokenize: {1000 * seconds / tokens:.3f} msecs\n"
        f"Start to ready to generate: {ready:.3f} secs\n"
        f"Tokenize and generate {tokens} (bs={batch_size}) tokens: {seconds:.3f} secs\n"
        f"Start to finish: {finish:.3f} secs"
    )


def peak_memory() -> tuple[int, str]:
    """Bytes at the peak, and of what: "device", the fullest one, or "process", its resident set on the host."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [entry["peak_bytes_in_use"] for entry in stats if entry and "peak_bytes_in_use" in entry]
    if peaks:
        return max(peaks), "device"
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "process"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "host": platform.machine(),
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
    }
