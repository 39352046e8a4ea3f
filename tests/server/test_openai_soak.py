"""HTTP, everything at once: right answers, clients that leave, requests that cannot be, deadlines; nothing is left."""

import asyncio
import collections
import functools
import json
import logging
import random

import pytest
from grpc_parts import make_engine, until
from http_parts import Served, play

from jetserve.types import FinishReason, Request, SamplingParams

AT_ONCE = 64
PATH = "/v1/completions"
TEXTS = [f"client {i} says" for i in range(20)]
MAX_TOKENS = 13


@functools.cache
def expected(text: str, max_tokens: int) -> str:
    """The engine's own greedy answer. Computed before the server uses the same pages."""
    engine = make_engine()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    prompt = tuple(engine.tokenizer.encode(text, add_special_tokens=True))
    outputs = engine.run([Request(request_id="r", prompt_token_ids=prompt, sampling=params)])
    return "".join(output.text for output in outputs)


async def stream(served: Served, body: dict[str, object], leave_after: int | None = None) -> str:
    """The text of a stream, up to its end, or until its client leaves."""
    text = ""
    async with served.http.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                leave_after = None if leave_after is None else leave_after - 1
                if leave_after == 0:
                    return text
    raise AssertionError("the stream broke off")


async def one(served: Served, i: int, rng: random.Random) -> str:
    """Plays one client and returns what became of it."""
    text, max_tokens = TEXTS[i % len(TEXTS)], 2 + i % (MAX_TOKENS - 1)
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    kind = rng.choice(("whole", "stream", "stream", "leaves", "leaves", "leaves", "malformed", "late"))
    if kind == "malformed":
        response = await served.http.post(
            PATH, content=rng.choice((b"{", b'{"prompt": "x", "n": 0}', b'{"x": "\xff"}'))
        )
        assert response.status_code == 400
    elif kind == "late":
        response = await served.post(PATH, {**body, "max_tokens": 400, "timeout": 0.001})
        assert response.status_code == 504
    elif kind == "leaves":
        await stream(served, {**body, "max_tokens": 400}, leave_after=rng.randint(1, 5))
    elif kind == "stream":
        assert await stream(served, body) == expected(text, max_tokens)
    else:
        answer = (await served.post(PATH, body)).json()
        assert answer["choices"][0]["text"] == expected(text, max_tokens)
        assert answer["usage"]["completion_tokens"] == max_tokens
    return kind


@pytest.mark.slow
def test_soak(caplog: pytest.LogCaptureFixture) -> None:
    rng, slots = random.Random(0), asyncio.Semaphore(AT_ONCE)
    for text in TEXTS:
        for max_tokens in range(2, MAX_TOKENS + 1):
            expected(text, max_tokens)

    async def with_slot(served: Served, i: int) -> str:
        async with slots:
            return await one(served, i, rng)

    async def scene(served: Served) -> None:
        kinds = collections.Counter(await asyncio.gather(*(with_slot(served, i) for i in range(500))))
        await until(lambda: served.engine.stats().running == served.engine.stats().waiting == 0)
        stats = served.engine.stats()
        assert stats.pages_used == 0
        assert stats.finished[FinishReason.LENGTH] == kinds["whole"] + kinds["stream"]
        assert stats.finished[FinishReason.CANCELLED] == kinds["leaves"]
        assert stats.finished[FinishReason.DEADLINE] == kinds["late"]
        for outcome, count in (
            ("length", kinds["whole"] + kinds["stream"]),
            ("cancelled", kinds["leaves"]),
            ("deadline", kinds["late"]),
            ("invalid", kinds["malformed"]),
            ("internal", 0),
        ):
            assert await served.metric("jetserve_requests_total", outcome=outcome, protocol="http") == count

    with caplog.at_level(logging.WARNING):
        play(scene)
    # asyncio tells of writes to a connection that it has not yet noticed to be gone.
    assert [record.getMessage() for record in caplog.records if record.name != "asyncio"] == []
