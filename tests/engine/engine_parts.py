"""What the engine's tests share: a tiny model in any form, engines over it, and answers put together."""

import contextlib
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.cache.pages import PageAllocator
from jetserve.checkpoint.load import load_model
from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.engine.engine import Engine
from jetserve.engine.runner import Runner
from jetserve.engine.scheduler import Scheduler
from jetserve.kernels import select
from jetserve.parallel.mesh import make_mesh
from jetserve.testing import make_tiny_checkpoint
from jetserve.tokenizer import Tokenizer
from jetserve.types import FinishReason, Guide, GuideKind, Request, RequestOutput, SamplingParams

VOCABULARY, END = 320, 2
MAX_LENGTH = 72
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to run the model. `kernel`: the implementation of matmuls, or None for the platform's best."""

    quantize_type: str = "none"
    symmetric: bool = True
    quantize_activation: bool = False
    quantize_cache: bool = False
    kernel: str | None = None

    @property
    def id(self) -> str:
        flags = {"asymmetric": not self.symmetric, "a8": self.quantize_activation, "kv8": self.quantize_cache}
        names = [name for name, present in flags.items() if present]
        return "-".join([self.quantize_type, *names, self.kernel or "best"])

    @functools.cached_property
    def context(self) -> Any:
        chosen = {} if self.kernel is None else {"quantized_matmul": self.kernel}
        return functools.partial(select.choose, **chosen) if chosen else contextlib.nullcontext


PLAIN = Setup()


@functools.cache
def checkpoint() -> Path:
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    return make_tiny_checkpoint(Path(folder.name), vocab_size=VOCABULARY)


_folders: list[tempfile.TemporaryDirectory] = []


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(checkpoint())


@functools.cache
def runner_of(setup: Setup, max_sequences: int = 8, max_length: int = MAX_LENGTH) -> Runner:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    settings: dict[str, Any] = {"quantize_type": setup.quantize_type}
    if setup.quantize_type != "none":
        settings |= {"symmetric": setup.symmetric, "quantize_activation": setup.quantize_activation}
        settings |= {"block_size": 32} if setup.quantize_type.endswith("blockwise") else {}
    with setup.context():
        loaded = load_model(checkpoint(), mesh=mesh, dtype=jnp.float32, **settings)
    config = EngineConfig(
        max_sequences=max_sequences,
        max_length=max_length,
        max_step_tokens=32,
        max_queue=40,
        cache=CacheConfig(page_size=8, quantize=setup.quantize_cache),
    )
    return Runner(loaded.model, config, mesh)


def make_engine(
    setup: Setup = PLAIN,
    *,
    pages: int | None = None,
    prefix_caching: bool = True,
    max_sequences: int = 8,
    max_length: int = MAX_LENGTH,
    **limits: int,
) -> Engine:
    """An engine whose programs are compiled already, if any test used them; `limits` bound its scheduler alone."""
    engine = Engine(runner_of(setup, max_sequences, max_length), tokenizer())
    engine.allocator = PageAllocator(pages or engine.config.num_pages, engine.config.cache.page_size, prefix_caching)
    engine.scheduler = Scheduler(dataclasses.replace(engine.config, **limits), engine.allocator)
    return engine


@dataclasses.dataclass
class Answer:
    """The outputs of one sample put together."""

    outputs: list[RequestOutput] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def reason(self) -> FinishReason | None:
        return self.last.finish_reason


def collect(outputs: Iterable[RequestOutput]) -> dict[tuple[str, int], Answer]:
    answers: dict[tuple[str, int], Answer] = {}
    for output in outputs:
        answer = answers.setdefault((output.request_id, output.index), Answer())
        assert not answer.outputs or answer.reason is None, "output after the end"
        answer.outputs.append(output)
    return answers


def run(engine: Engine, requests: Iterable[Request]) -> dict[tuple[str, int], Answer]:
    """All to their end, with the context of the engine's kernels unchanged; no page may be left behind."""
    answers = collect(engine.run(requests))
    assert all(answer.reason is not None for answer in answers.values())
    assert engine.stats().pages_used == 0
    return answers


def ask(engine: Engine, prompt: tuple[int, ...], params: SamplingParams = GREEDY, **fields: Any) -> Answer:
    request = Request(request_id="only", prompt_token_ids=prompt, sampling=params, **fields)
    return run(engine, [request])["only", 0]


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(3, VOCABULARY, length).tolist())


def mixed_requests(count: int = 8, max_tokens: int = 12) -> list[Request]:
    """Prompts of one to many tokens, half greedy and half by a seed."""
    lengths = itertools.cycle([1, 30, 5, 17, 50, 8, 9, 24])
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=prompt_of(length, seed=i),
            sampling=SamplingParams(
                temperature=0 if i % 2 else 0.8, seed=i, max_tokens=max_tokens, top_p=0.9, ignore_eos=True
            ),
        )
        for i, length in zip(range(count), lengths, strict=False)
    ]


def tokens_of(answers: dict[tuple[str, int], Answer]) -> dict[str, list[int]]:
    return {request_id: answer.tokens for (request_id, _), answer in answers.items()}


def alone(setup: Setup, requests: Iterable[Request], max_sequences: int = 8) -> dict[str, list[int]]:
    return {
        request.request_id: tokens_of(run(make_engine(setup, max_sequences=max_sequences), [request]))[
            request.request_id
        ]
        for request in requests
    }


def staggered(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """One more request every other step."""
    outputs, waiting = [], list(requests)
    while waiting or engine.has_work:
        if waiting:
            engine.submit(waiting.pop(0))
        for _ in range(2):
            outputs += engine.step()
    assert engine.stats().pages_used == 0
    return tokens_of(collect(outputs))


# Guided answers

LENGTH = 480
HOT = SamplingParams(temperature=1.5, max_tokens=LENGTH - 20)


def guided(kind: GuideKind, source: str = "", **settings: Any) -> SamplingParams:
    return dataclasses.replace(HOT, guide=Guide(kind=kind, source=source), **settings)


def requests_of(params: SamplingParams, count: int) -> list[Request]:
    return [
        Request(
            request_id=f"g{seed}",
            prompt_token_ids=prompt_of(1 + seed % 7, seed),
            sampling=dataclasses.replace(params, seed=seed),
        )
        for seed in range(count)
    ]


def answers_of(params: SamplingParams, count: int = 8, engine: Engine | None = None) -> list[Answer]:
    return list(run(engine or make_engine(max_length=LENGTH), requests_of(params, count)).values())
