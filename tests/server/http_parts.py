"""What the HTTP tests share: the tiny model of the gRPC tests behind a real HTTP server, and clients of it."""

import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc_parts
import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from jetserve.config import ServerConfig
from jetserve.engine.async_engine import AsyncEngine
from jetserve.engine.engine import Engine
from jetserve.server.metrics import Metrics
from jetserve.server.observe import Observer
from jetserve.server.openai.server import HttpServer

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hi"}]


class Served:
    """A server on a port of its own, the official client, and a plain one for what that cannot send."""

    def __init__(self, engine: AsyncEngine, server: HttpServer, key: str) -> None:
        self.engine = engine
        self.server = server
        # Reading the certificates of all the world takes longer than most tests.
        self.http = httpx.AsyncClient(
            base_url=server.url,
            timeout=grpc_parts.TIMEOUT,
            headers={"authorization": f"Bearer {key}"},
            trust_env=False,
            verify=False,
        )
        plain = httpx.AsyncClient(trust_env=False, verify=False)
        self.openai = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=plain)

    async def chat(self, **fields: Any) -> Any:
        """A chat of at most 8 tokens that are always the same, unless told otherwise."""
        extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
        fields = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0, **fields}
        return await self.openai.chat.completions.create(**fields, extra_body=extra)

    async def complete(self, **fields: Any) -> Any:
        """The same for completions."""
        extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
        fields = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0, **fields}
        return await self.openai.completions.create(**fields, extra_body=extra)

    async def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **settings)

    async def metric(self, name: str, **labels: str) -> float:
        """The value of a sample, summed over labels that are not given."""
        return metric_in((await self.http.get("/metrics")).text, name, **labels)


def metric_in(text: str, name: str, **labels: str) -> float:
    """The value of a sample in Prometheus' format, summed over labels that are not given."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"no {name} {labels} in {text}"
    return sum(found)


@contextlib.asynccontextmanager
async def serving(engine: Engine, *, key: str = "none", **settings: Any) -> AsyncIterator[Served]:
    server = HttpServer(ServerConfig(http_port=0, **settings), profile_folder=Path("profiles"))
    await server.open()
    front = AsyncEngine(engine)
    served = Served(front, server, key)
    try:
        await server.start(front, Observer(Metrics(front, model=MODEL)), model=MODEL)
        yield served
    finally:
        await served.http.aclose()
        await served.openai.close()
        await front.stop()
        await server.stop(1)


play = functools.partial(grpc_parts.play, serve=serving)
