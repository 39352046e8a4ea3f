"""Everything at once, over both protocols: right answers, clients that leave, requests that cannot be, deadlines.

Afterwards nothing is left: no page, no request, no memory.
"""

import asyncio
import collections
import contextlib
import functools
import json
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil
import pytest
from grpc_parts import TIMEOUT, make_engine, text_of, text_request, until
from http_parts import metric_in

from jetserve.config import ServerConfig
from jetserve.engine.async_engine import AsyncEngine
from jetserve.server.grpc import GrpcServer
from jetserve.server.metrics import Metrics
from jetserve.server.observe import Observer
from jetserve.server.openai.server import HttpServer
from jetserve.server.proto.jetstream_pb2_grpc import OrchestratorStub
from jetserve.types import FinishReason, Request, SamplingParams

REQUESTS = 2000
AT_ONCE = 64
TEXTS = [f"client {i} says" for i in range(20)]
MAX_TOKENS = 13
KINDS = ["good"] * 15 + ["leaves"] * 10 + ["malformed"] * 3 + ["late"] * 2
"""A third leaves, a tenth is malformed."""
MEMORY_GROWTH = 64 * 2**20
"""Bytes that a process may grow by after its first third: allocators keep what they had at the busiest moment."""

Sampling = dict[str, Any]


def sampling_of(i: int) -> Sampling:
    """Greedy, or by a seed of the request's own."""
    return {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i % len(TEXTS)}


@functools.cache
def expected(i: int, max_tokens: int) -> str:
    """The engine's own answer to request `i`, computed alone. To be called before the server uses the same pages."""
    engine = make_engine()
    prompt = tuple(engine.tokenizer.encode(TEXTS[i], add_special_tokens=True))
    params = SamplingParams(**sampling_of(i), ignore_eos=True, max_tokens=max_tokens)
    return "".join(
        output.text for output in engine.run([Request(request_id="r", prompt_token_ids=prompt, sampling=params)])
    )


class GrpcCaller:
    """Plays clients over gRPC; `statuses` are of what is malformed, and late."""

    statuses = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED)

    def __init__(self, stub: OrchestratorStub) -> None:
        self._stub = stub

    async def answer(self, text: str, **fields: Any) -> str:
        return text_of([response async for response in self._stub.Decode(text_request(text, **fields))])

    async def status(self, text: str, *, timeout: float | None = None, **fields: Any) -> grpc.StatusCode:
        call = self._stub.Decode(text_request(text, timeout_seconds=timeout, **fields))
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        return await call.code()

    async def leave(self, text: str, *, after_first: bool, wait: float, **fields: Any) -> None:
        call = self._stub.Decode(text_request(text, **fields))
        await (call.read() if after_first else asyncio.sleep(wait))
        call.cancel()


class HttpCaller:
    """Plays clients over HTTP, of which half stream."""

    statuses = (400, 504)

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def _post(self, text: str, **fields: Any) -> Any:
        return self._session.post("/v1/completions", json={"prompt": text, "ignore_eos": True, **fields})

    async def answer(self, text: str, **fields: Any) -> str:
        stream = fields["max_tokens"] % 2 == 0
        async with self._post(text, stream=stream, **fields) as response:
            assert response.status == 200
            if not stream:
                return (await response.json())["choices"][0]["text"]
            *events, done = (await response.text()).strip().split("\n\n")
        assert done == "data: [DONE]"
        return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)

    async def status(self, text: str, **fields: Any) -> int:
        async with self._post(text, **fields) as response:
            return response.status

    async def metrics(self) -> str:
        async with self._session.get("/metrics") as response:
            return await response.text()

    async def leave(self, text: str, *, after_first: bool, wait: float, **fields: Any) -> None:
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(None if after_first else wait),
                self._post(text, stream=True, **fields) as response,
            ):
                await response.content.readany()
                response.close()


async def one(caller: GrpcCaller | HttpCaller, i: int, kind: str, rng: random.Random) -> None:
    """Plays one client."""
    text, max_tokens = TEXTS[i % len(TEXTS)], 2 + i % (MAX_TOKENS - 1)
    sampling, (malformed, late) = sampling_of(i % len(TEXTS)), caller.statuses
    if kind == "malformed":
        assert await caller.status(text, max_tokens=4, temperature=-1.0) == malformed
    elif kind == "late":
        assert await caller.status(text, max_tokens=400, timeout=0.001) == late
    elif kind == "leaves":
        await caller.leave(text, max_tokens=400, after_first=rng.random() < 0.5, wait=rng.random() / 50)
    else:
        answer = await caller.answer(text, max_tokens=max_tokens, **sampling)
        assert answer == expected(i % len(TEXTS), max_tokens)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[AsyncEngine, GrpcCaller, HttpCaller]]:
    """One engine behind both protocols, and a client of each."""
    config = ServerConfig(grpc_port=0, http_port=0)
    engine = AsyncEngine(make_engine())
    observer = Observer(Metrics(engine, model="tiny"))
    grpc_server, http_server = GrpcServer(config), HttpServer(config, profile_folder=Path("profiles"))
    await http_server.open()
    await grpc_server.start(engine, observer)
    await http_server.start(engine, observer, model="tiny")
    try:
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
            aiohttp.ClientSession(http_server.url, connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            yield engine, GrpcCaller(OrchestratorStub(channel)), HttpCaller(session)
    finally:
        await engine.stop()
        await asyncio.gather(grpc_server.stop(1), http_server.stop(1))


async def soak(requests: int) -> None:
    rng, slots = random.Random(requests), asyncio.Semaphore(AT_ONCE)
    kinds = [KINDS[i % len(KINDS)] for i in range(requests)]
    rng.shuffle(kinds)
    rss = psutil.Process().memory_info
    async with serving() as (engine, *callers):
        _, http = callers

        async def with_slot(i: int) -> None:
            async with slots:
                await one(callers[rng.randrange(len(callers))], i, kinds[i], rng)

        third = requests // 3
        await asyncio.gather(*(with_slot(i) for i in range(third)))
        before = rss().rss
        await asyncio.gather(*(with_slot(i) for i in range(third, requests)))
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)
        stats, count = engine.stats(), collections.Counter(kinds)
        assert stats.pages_used == 0
        assert stats.finished[FinishReason.LENGTH] == count["good"]
        assert stats.finished[FinishReason.DEADLINE] == count["late"]
        metrics = await http.metrics()
        for outcome, kind in (("length", "good"), ("deadline", "late"), ("invalid", "malformed")):
            assert metric_in(metrics, "jetserve_requests_total", outcome=outcome) == count[kind]
        assert metric_in(metrics, "jetserve_requests_total", outcome="internal") == 0
        assert engine.is_ready
        assert rss().rss - before < MEMORY_GROWTH


@pytest.mark.slow
def test_soak(caplog: pytest.LogCaptureFixture) -> None:
    for i in range(REQUESTS):
        expected(i % len(TEXTS), 2 + i % (MAX_TOKENS - 1))
    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(soak(REQUESTS), 5 * TIMEOUT))
    # asyncio tells of writes to a connection that it has not yet noticed to be gone.
    assert [record.getMessage() for record in caplog.records if record.name != "asyncio"] == []
