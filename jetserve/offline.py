"""Work on files: generate from a file of prompts, evaluate a text, benchmark.

Owns the choice of the task, what is printed, and the batch that keeps an engine busy while its results go out in order.
The formats of prompts and results are `batch_files`'.
"""

import collections
import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tqdm

from jetserve import batch_files, benchmark
from jetserve.batch_files import PromptLine, ResultFile
from jetserve.config import EngineConfig, ModelSource, OfflineConfig
from jetserve.engine.build import build_engine
from jetserve.engine.engine import Engine
from jetserve.engine.scheduler import QueueFullError
from jetserve.evaluate import perplexity
from jetserve.tokenizer import Tokenizer
from jetserve.types import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs, Usage

logger = logging.getLogger(__name__)

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
MAX_FAILED_STEPS = 3
"""In a row, before a batch stops."""
RUN_AHEAD = 64
"""Prompts a running sequence, at most, between the first without a result on file and the last that was read."""


def run(config: OfflineConfig, source: ModelSource, engine_config: EngineConfig, *, max_length: int | None) -> int:
    """Does one task. The last line on standard output is its JSON summary; see `generate`, `perplexity`, `benchmark`.

    Args:
      config: the task and its files.
      source: the model.
      engine_config: limits, of which `max_length` is replaced.
      max_length: tokens that a sequence may have; None takes what the model was made for, up to 2048.

    Returns:
      The exit code: 0, also when single prompts failed; 1 if all did or a batch had to stop; 130 if interrupted.

    Raises:
      ValueError, OSError, RuntimeError: for settings and files that cannot be used, mostly before a model is loaded.
    """
    code = EXIT_DONE
    if config.task == "generate":
        summary, code = generate(config, source, engine_config, max_length=max_length)
    elif config.task == "perplexity":
        summary = perplexity.run(config, source, engine_config, max_length=max_length)
    elif config.task == "benchmark":
        result = benchmark.run(config, source, engine_config, max_length=max_length)
        summary = result.summary
        print(result.block)
    else:
        raise ValueError(f"the task is {config.task!r}; expected generate, perplexity or benchmark")
    print(json.dumps(summary, allow_nan=False), flush=True)
    return code


class StepsFailedError(RuntimeError):
    """The engine failed `MAX_FAILED_STEPS` times in a row."""


@dataclasses.dataclass(kw_only=True)
class Totals:
    """Of one run, which may be one of several over a file: results written, and tokens of those without an error."""

    results: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class Answer:
    """The growing result of one request."""

    def __init__(self, line: PromptLine, request: Request) -> None:
        self.line = line
        self.request = request
        self._texts: list[list[str]] = [[] for _ in range(request.sampling.n)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(request.sampling.n)]
        self._reasons: dict[int, FinishReason] = {}
        self._usages: dict[int, Usage] = {}
        self._error: str | None = None

    def push(self, output: RequestOutput) -> None:
        """Takes what a step brought."""
        self._texts[output.index].append(output.text)
        self._logprobs[output.index].extend(output.logprobs)
        self._usages[output.index] = output.usage
        if output.finish_reason is not None:
            self._reasons[output.index] = output.finish_reason
            self._error = self._error or output.error

    @property
    def finished(self) -> bool:
        return len(self._reasons) == self.request.sampling.n

    def result(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The line for the output file, once it is finished."""
        if self._error is not None:
            return failure(self.line, self._error)
        samples = [self._sample(i, tokenizer) for i in range(self.request.sampling.n)]
        if any(not math.isfinite(entry.logprob) for entries in self._logprobs for entry in entries):
            return failure(self.line, "the model's probabilities are NaN or infinite: check the checkpoint and --dtype")
        usage = {
            "prompt_tokens": len(self.request.prompt_token_ids),
            "output_tokens": sum(usage.output_tokens for usage in self._usages.values()),
        }
        more: dict[str, Any] = {} if len(samples) == 1 else {"samples": samples}
        return {"index": self.line.index, **samples[0], "usage": usage, **more}

    def _sample(self, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
        sample: dict[str, Any] = {"text": "".join(self._texts[index]), "finish_reason": self._reasons[index].value}
        if self.request.sampling.logprobs is not None:
            sample["logprobs"] = [
                {
                    **_token(entry.token_id, entry.logprob, tokenizer),
                    "top": [
                        _token(token, logprob, tokenizer) for token, logprob in entry.top if math.isfinite(logprob)
                    ],
                }
                for entry in self._logprobs[index]
            ]
        return sample


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.token_text(token_id).decode("utf-8", "replace")
    return {"token_id": token_id, "token": text, "logprob": logprob}


def failure(line: PromptLine, error: str) -> dict[str, Any]:
    """The result of a prompt that has none."""
    where = f"line {line.index + 1}: "
    return {"index": line.index, "error": error if error.startswith(where) else where + error}


class Batch:
    """Prompts through an engine, results in order to a file.

    Prompts are read when the engine has room for them, and no more than `RUN_AHEAD` a running sequence beyond the last
    result on file, so that memory does not grow with the files.
    """

    def __init__(
        self,
        engine: Engine,
        lines: Iterator[PromptLine],
        results: ResultFile,
        defaults: SamplingParams,
        progress: Any,
    ) -> None:
        self.totals = Totals()
        self._engine = engine
        self._lines = lines
        self._results = results
        self._defaults = defaults
        self._progress = progress
        self._held: Answer | None = None  # read, but the queue had no room for it
        self._order: collections.deque[int] = collections.deque()  # indices without a result on file
        self._answers: dict[str, Answer] = {}  # in the engine, by request id
        self._ready: dict[int, dict[str, Any]] = {}  # finished, by index
        self._failed_steps = 0
        limits = engine.config
        self._max_ahead = RUN_AHEAD * limits.max_sequences
        self._max_waiting = min(2 * limits.max_sequences, limits.max_queue)

    def run(self) -> None:
        """Answers every prompt.

        Raises:
          StepsFailedError: if the engine keeps failing.
          OSError: if results cannot be written.
        """
        while True:
            self._feed()
            self._write()
            if self._engine.has_work:
                self._step()
            elif not self._order:
                return

    def _feed(self) -> None:
        while self._engine.stats().waiting < self._max_waiting:
            answer, self._held = self._held or self._next(), None
            if answer is None:
                return
            try:
                self._engine.submit(answer.request)
            except QueueFullError as error:
                if self._engine.stats().waiting:
                    self._held = answer
                    return
                self._ready[answer.line.index] = failure(answer.line, f"n is too large: {error}")
            except ValueError as error:
                self._ready[answer.line.index] = failure(answer.line, str(error))
            else:
                self._answers[answer.request.request_id] = answer

    def _next(self) -> Answer | None:
        """The next prompt that can be asked; None at the end of the file, or of how far ahead the batch may run."""
        while len(self._order) < self._max_ahead and (line := next(self._lines, None)) is not None:
            self._order.append(line.index)
            try:
                return Answer(line, self._request(line))
            except ValueError as error:
                self._ready[line.index] = failure(line, str(error))
        return None

    def _request(self, line: PromptLine) -> Request:
        found = batch_files.parse(line, self._defaults)
        tokenizer = self._engine.tokenizer
        if found.messages is not None:
            token_ids: Sequence[int] = tokenizer.apply_chat_template(found.messages)
        elif isinstance(found.prompt, str):
            token_ids = tokenizer.encode(found.prompt, add_special_tokens=True)
        else:
            token_ids = found.prompt or ()
        return Request(
            request_id=str(line.index),
            prompt_token_ids=tuple(token_ids),
            sampling=found.sampling,
            priority=found.priority,
        )

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
            self._failed_steps = 0
        except Exception as error:  # whatever it was: it is reported, and three in a row end the batch
            logger.exception("a step of the engine failed")
            outputs = self._engine.fail(f"the engine failed: {error}")
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise StepsFailedError(
                    f"the engine failed {self._failed_steps} times in a row, last with: {error}"
                ) from error
        for output in outputs:
            self._take(output)

    def _take(self, output: RequestOutput) -> None:
        answer = self._answers[output.request_id]
        answer.push(output)
        if answer.finished:
            del self._answers[output.request_id]
            self._ready[answer.line.index] = answer.result(self._engine.tokenizer)

    def _write(self) -> None:
        """Results go out as far as none is missing between them."""
        while self._order and self._order[0] in self._ready:
            result = self._ready.pop(self._order[0])
            self._results.write(result)
            self._order.popleft()
            self.totals.results += 1
            if "error" in result:
                self.totals.failed += 1
            else:
                self.totals.prompt_tokens += result["usage"]["prompt_tokens"]
                self.totals.output_tokens += result["usage"]["output_tokens"]
            seconds = self._progress.format_dict["elapsed"]
            self._progress.set_postfix_str(
                f"{self.totals.output_tokens / max(seconds, 1e-9):.0f} tokens/s", refresh=False
            )
            self._progress.update()


def generate(
    config: OfflineConfig, source: ModelSource, engine_config: EngineConfig, *, max_length: int | None
) -> tuple[dict[str, Any], int]:
    """Answers a file of prompts. An output file that is there already is continued after its last whole result.

    Returns:
      For JSON, and the exit code. `requests` and `failed` count all results on file; `resumed` of them were there
      before. Tokens, seconds and output_tokens_per_second are of this run alone, without loading the model. `total`
      counts the prompts, so that a batch is complete when `requests` equals it; "stopped" says why one is not.

    Raises:
      ValueError, OSError: for files and settings that cannot be used, before the model is loaded.
    """
    prompts, output = batch_files.check_paths(config.prompts_file, config.output_file)
    defaults = batch_files.default_sampling(config.sampling)
    total = batch_files.count_prompts(prompts)
    code, stopped, totals, seconds = EXIT_DONE, None, Totals(), 0.0
    with ResultFile(output) as results:
        earlier = batch_files.read_results(output, prompts)
        batch_files.check_job(output, _job(prompts, source, engine_config, defaults), earlier.results)
        results.keep(earlier.size)
        if earlier.results:
            logger.info("%s holds %d of %d results; going on after them", output, earlier.results, total)
        if earlier.results < total:
            engine = build_engine(source, engine_config, max_length=max_length, progress=_loading)
            lines = batch_files.read_after(prompts, earlier.results)
            logger.info("generating; the first steps wait for their programs to be compiled, or read from the cache")
            start = time.perf_counter()
            with _progress(total, earlier.results) as progress:
                batch = Batch(engine, lines, results, defaults, progress)
                try:
                    batch.run()
                except KeyboardInterrupt:
                    code, stopped = EXIT_INTERRUPTED, "interrupted"
                except (OSError, StepsFailedError) as error:
                    code, stopped = EXIT_FAILED, str(error)
            totals, seconds = batch.totals, time.perf_counter() - start
    done = earlier.results + totals.results
    if stopped is not None:
        logger.error("%s. %d of %d results are in %s; run the same again to go on", stopped, done, total, output)
    failed = earlier.failed + totals.failed
    if failed:
        logger.warning("%d of %d prompts failed; why is in %s", failed, done, output)
        code = EXIT_FAILED if failed == done else code
    summary: dict[str, Any] = {
        "task": "generate",
        "requests": done,
        "failed": failed,
        "total": total,
        "resumed": earlier.results,
        "prompt_tokens": totals.prompt_tokens,
        "output_tokens": totals.output_tokens,
        "seconds": seconds,
        "output_tokens_per_second": totals.output_tokens / seconds if seconds else 0.0,
    }
    return (summary if stopped is None else {**summary, "stopped": stopped}), code


def _job(
    prompts: Path, source: ModelSource, engine_config: EngineConfig, defaults: SamplingParams
) -> dict[str, str | int | float | None]:
    """What results depend on: the prompts, the model with its settings, and the sampling defaults."""
    return {
        "prompts": batch_files.digest_of(prompts),
        "checkpoint_path": source.checkpoint_path,
        "tokenizer_path": source.tokenizer_path,
        "quantize_type": source.quantize_type,
        "block_size": source.block_size,
        "symmetric": source.symmetric,
        "quantize_recipe": None if source.quantize_recipe is None else batch_files.digest_of(source.quantize_recipe),
        "quantize_activation": source.quantize_activation,
        "cpu_activation": source.cpu_activation,
        "quantize_kv_cache": engine_config.cache.quantize,
        "dtype": engine_config.dtype,
        **{name: getattr(defaults, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")},
    }


def _loading(work: Any) -> Any:
    return tqdm.tqdm(work, desc="loading the model", unit="tensor", mininterval=1)


def _progress(total: int, initial: int) -> tqdm.tqdm:
    interval = 0.2 if sys.stderr.isatty() else 10.0  # a log need not hold every stroke
    return tqdm.tqdm(total=total, initial=initial, desc="generate", unit="request", mininterval=interval)
