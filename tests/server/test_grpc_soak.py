"""Everything at once: right answers, clients that leave, requests that cannot be, deadlines; then nothing is left."""

import asyncio
import collections
import functools
import logging
import random

import grpc
import pytest
from grpc_parts import Served, make_engine, play, text_request, tokens_of, until

from jetserve.server.proto import jetstream_pb2 as pb
from jetserve.types import FinishReason, Request, SamplingParams

AT_ONCE = 64
TEXTS = [f"client {i} says" for i in range(20)]
MAX_TOKENS = 13


@functools.cache
def expected() -> dict[str, list[int]]:
    """The engine's own greedy answers by text. Computed before the server uses the same pages."""
    engine = make_engine()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=MAX_TOKENS)
    answers: dict[str, list[int]] = {text: [] for text in TEXTS}
    requests = [
        Request(
            request_id=text,
            prompt_token_ids=tuple(engine.tokenizer.encode(text, add_special_tokens=True)),
            sampling=params,
        )
        for text in TEXTS
    ]
    for output in engine.run(requests):
        answers[output.request_id] += output.token_ids
    return answers


async def one(served: Served, i: int, rng: random.Random) -> str:
    """Plays one client and returns what became of it."""
    text, max_tokens = TEXTS[i % len(TEXTS)], 2 + i % (MAX_TOKENS - 1)
    kind = rng.choice(("good", "good", "good", "leaves", "leaves", "leaves", "malformed", "late"))
    if kind == "malformed":
        error = await served.status_of(text_request(text, max_tokens=-1))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    elif kind == "late":
        error = await served.status_of(text_request(text, max_tokens=400, timeout_seconds=0.001))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    elif kind == "leaves":
        call = served.stub.Decode(text_request(text, max_tokens=400))
        if rng.random() < 0.5:
            await call.read()
        else:
            await asyncio.sleep(rng.random() / 50)
        call.cancel()
    else:
        responses = await served.decode(text_request(text, max_tokens=max_tokens))
        assert tokens_of(responses) == expected()[text][:max_tokens]
        assert responses[-1].stream_content.samples[0].finish_reason == pb.FINISH_REASON_LENGTH
    return kind


@pytest.mark.parametrize("requests", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_soak(requests: int, caplog: pytest.LogCaptureFixture) -> None:
    expected()
    rng, slots = random.Random(requests), asyncio.Semaphore(AT_ONCE)

    async def with_slot(served: Served, i: int) -> str:
        async with slots:
            return await one(served, i, rng)

    async def scene(served: Served) -> None:
        kinds = collections.Counter(await asyncio.gather(*(with_slot(served, i) for i in range(requests))))
        await until(lambda: served.engine.stats().running == served.engine.stats().waiting == 0)
        stats = served.engine.stats()
        assert stats.pages_used == 0
        assert stats.finished[FinishReason.LENGTH] == kinds["good"]
        assert stats.finished[FinishReason.DEADLINE] == kinds["late"]
        assert served.engine.is_ready

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert [record.getMessage() for record in caplog.records] == []
