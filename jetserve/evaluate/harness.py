"""lm-eval's tasks (https://github.com/EleutherAI/lm-evaluation-harness) run by the engine.

Owns the adapter between the two. Takes the extra `eval`: nobody imports this module before it is known to be there.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval
import tqdm
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jetserve.checkpoint.load import LoadedModel
from jetserve.config import EngineConfig, TaskSettings
from jetserve.engine.build import make_engine
from jetserve.evaluate.perplexity import make_runner
from jetserve.types import Request, SamplingParams

logger = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 256
"""Of an answer, where a task does not say."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty")
_IGNORED = ("do_sample",)
"""Of a task's generation settings: greedy is a temperature of 0 here."""

Scores = Mapping[str, Mapping[str, float | None]]
"""By task: each metric, and "<metric>_stderr", None where there is none."""


def run_tasks(
    loaded: LoadedModel, config: EngineConfig, settings: TaskSettings, *, max_length: int | None = None
) -> Scores:
    """Runs tasks.

    Args:
      loaded: the model.
      config: of the engine that generates.
      settings: which tasks, how many examples.
      max_length: tokens that a prompt and its answer may have; what is longer loses its beginning, and is counted.

    Raises:
      ValueError: for tasks that lm-eval does not know, and generation settings that are not known here.
    """
    manager = TaskManager(include_path=None if settings.include_path is None else str(settings.include_path))
    unknown = [name for name in settings.tasks if name not in manager.all_tasks]
    if unknown:
        where = "" if settings.include_path is None else f" and {settings.include_path}"
        raise ValueError(f"lm-eval{where} has no task {', '.join(unknown)}; list them with `lm-eval ls tasks`")
    model = EngineModel(loaded, config, max_length=max_length)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(settings.tasks),
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    if model.shortened:
        logger.warning("%d prompts were longer than the model takes, and lost their beginning", model.shortened)
    return {name: _metrics(scores) for name, scores in found["results"].items()}


def _metrics(scores: Mapping[str, Any]) -> dict[str, float | None]:
    """lm-eval's "acc,none" and "acc_stderr,none" as "acc" and "acc_stderr"."""
    found: dict[str, float | None] = {}
    for key, value in scores.items():
        name, comma, filter_name = key.partition(",")
        if comma:
            label = name if filter_name == "none" else f"{name} ({filter_name})"
            found[label] = float(value) if isinstance(value, int | float) else None
    return found


class EngineModel(TemplateLM):
    """A model as lm-eval sees one. `shortened` counts prompts that were too long."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, max_length: int | None) -> None:
        super().__init__()
        self._engine = make_engine(loaded, config, max_length=max_length)
        self._tokenizer = self._engine.tokenizer
        self._max_length = self._engine.max_length
        self._runner = make_runner(loaded, config, self._max_length)
        self.shortened = 0

    @property
    def eot_token_id(self) -> int:
        return min(self._tokenizer.eos_token_ids)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        del kwargs
        return self._tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        bar = tqdm.tqdm(requests, desc="likelihood", unit="text", mininterval=1, disable=disable_tqdm)
        return [self._likelihood(context, continuation) for _, context, continuation in bar]

    def _likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """The log probability of a continuation, in nats, and whether it is the likeliest, token by token."""
        tokens = [*context, *continuation]
        if len(tokens) > self._max_length:
            self.shortened += 1
            tokens = tokens[-self._max_length :]
        first = max(len(tokens) - len(continuation), 1)
        total, greedy, start = 0.0, True, 0
        for count, logits in self._runner.evaluate(tokens[:-1]):
            rows = range(max(first - 1, start), start + count)  # row i predicts token i + 1
            if rows:
                targets = jnp.asarray([tokens[row + 1] for row in rows])
                scored, best = jax.device_get(_score(logits[rows.start - start : rows.stop - start], targets))
                total += float(scored.sum())
                greedy = greedy and bool(best.all())
            start += count
        return total, greedy

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in tqdm.tqdm(requests, desc="rolling", unit="text", mininterval=1, disable=disable_tqdm):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.eot_token_id,
                max_seq_len=self._max_length - 1,
                context_len=1,
            )
            found.append(sum(self._likelihood(*make_disjoint_window(window))[0] for window in windows))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        bar = tqdm.tqdm(total=len(requests), desc="generate", unit="text", mininterval=1, disable=disable_tqdm)
        size = self._engine.config.max_queue
        for start in range(0, len(requests), size):
            batch = [self._request(i, *requests[i].args) for i in range(start, min(start + size, len(requests)))]
            for output in self._engine.run(batch):
                texts[int(output.request_id)] += output.text
                bar.update(output.finish_reason is not None)
        return texts

    def _request(self, index: int, prompt: str, settings: Mapping[str, Any]) -> Request:
        sampling = sampling_of(settings)
        room = self._max_length - sampling.max_tokens
        if room < 1:
            raise ValueError(
                f"a task wants answers of {sampling.max_tokens} tokens, but a sequence may have {self._max_length};"
                " raise --max_cache_length"
            )
        tokens = self.tok_encode(prompt, add_special_tokens=True)
        if len(tokens) > room:
            self.shortened += 1
        return Request(request_id=str(index), prompt_token_ids=tuple(tokens[-room:]), sampling=sampling)


def sampling_of(settings: Mapping[str, Any]) -> SamplingParams:
    """A task's generation settings. Raises ValueError for one that is not known."""
    known = {"until", "max_gen_toks", "max_new_tokens", *_SAMPLING, *_IGNORED}
    if settings.keys() - known:
        raise ValueError(
            f"a task sets {', '.join(sorted(settings.keys() - known))}; known are {', '.join(sorted(known))}"
        )
    until = settings.get("until") or ()
    params = SamplingParams(
        max_tokens=settings.get("max_gen_toks") or settings.get("max_new_tokens") or DEFAULT_NEW_TOKENS,
        temperature=0.0,
        stop=(until,) if isinstance(until, str) else tuple(text for text in until if text),
    )
    return dataclasses.replace(params, **{name: settings[name] for name in _SAMPLING if settings.get(name) is not None})


@jax.jit
def _score(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[T, V], [T] -> the log probability of each target, and whether nothing is likelier."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    own = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
    return own, jnp.argmax(logprobs, axis=-1) == targets
