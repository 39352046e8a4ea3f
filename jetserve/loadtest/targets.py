"""The two protocols that a load test speaks: one request at a time, and when each part of its answer came.

Both reduce a server to `Target`. Failures are exceptions that name their kind, so that they are counted apart.
"""

import dataclasses
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import aiohttp
import grpc

from jetserve.client import to_message
from jetserve.loadtest.config import Server
from jetserve.loadtest.workload import Ask
from jetserve.server.proto import jetstream_pb2 as pb
from jetserve.server.proto.jetstream_pb2_grpc import OrchestratorStub
from jetserve.types import SamplingParams, Usage

CONNECT_SECONDS = 10.0
DONE = b"[DONE]"
_UNSET = SamplingParams()


class RequestError(Exception):
    """A request that was not answered whole. `kind`: what failures are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Target(Protocol):
    """A server. `connect` comes first, `close` last."""

    async def connect(self) -> None:
        """Raises RuntimeError if there is no server, or it wants another token."""

    async def send(self, ask: Ask, arrived: Callable[[], None]) -> Usage:
        """Waits for one whole answer, calling `arrived` with every message that brings something new.

        Raises:
          RequestError: if it does not come.
        """

    async def close(self) -> None:
        """Ends the connections."""


def make_target(server: Server) -> Target:
    """The target of a URL. Raises ValueError for one that is none."""
    parts = urllib.parse.urlsplit(server.url)
    scheme, host = parts.scheme, parts.netloc
    if scheme not in ("grpc", "grpcs", "http", "https") or not host or parts.path.strip("/"):
        raise ValueError(f"--url is {server.url!r}; expected grpc://HOST:PORT or http://HOST:PORT (grpcs, https: TLS)")
    if scheme in ("http", "grpc") and server.tls_ca_file is not None:
        raise ValueError(f"--tls_ca_file has no effect on {server.url}; expected {scheme}s://, or drop it")
    if scheme in ("grpc", "grpcs") and server.model is not None:
        raise ValueError("--model has no effect on gRPC, which serves one model; drop it")
    return GrpcTarget(server, host) if scheme in ("grpc", "grpcs") else HttpTarget(server)


class GrpcTarget:
    """JetStream's protocol."""

    def __init__(self, server: Server, address: str) -> None:
        self._server = server
        self._address = address
        self._metadata = () if server.token is None else (("authorization", f"Bearer {server.token}"),)

    async def connect(self) -> None:
        server = self._server
        if server.url.startswith("grpcs:"):
            trusted = None if server.tls_ca_file is None else server.tls_ca_file.read_bytes()
            self._channel = grpc.aio.secure_channel(self._address, grpc.ssl_channel_credentials(trusted))
        else:
            self._channel = grpc.aio.insecure_channel(self._address)
        self._stub = OrchestratorStub(self._channel)
        try:
            await self._stub.HealthCheck(pb.HealthCheckRequest(), timeout=CONNECT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise RuntimeError(f"no gRPC server answers at {server.url}: {error.details()}") from error

    async def send(self, ask: Ask, arrived: Callable[[], None]) -> Usage:
        message = to_message(ask.prompt, ask.sampling)
        message.priority = ask.priority
        call = self._stub.Decode(message, metadata=self._metadata)
        unended, usage = ask.sampling.n, Usage(prompt_tokens=0, output_tokens=0)
        try:
            async for response in call:
                arrived()
                for sample in response.stream_content.samples:
                    if sample.finish_reason:
                        unended -= 1
                        usage = Usage(
                            prompt_tokens=sample.usage.prompt_tokens,
                            output_tokens=usage.output_tokens + sample.usage.output_tokens,
                        )
        except grpc.aio.AioRpcError as error:
            raise RequestError(error.code().name, error.details() or "") from error
        if unended:
            raise RequestError("incomplete", f"{unended} samples ended without a finish reason")
        return usage

    async def close(self) -> None:
        await self._channel.close()


class HttpTarget:
    """OpenAI's API: /v1/chat/completions for messages, /v1/completions for the rest, streamed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._url = server.url.rstrip("/")

    async def connect(self) -> None:
        server = self._server
        trusted: ssl.SSLContext | bool = True
        if server.tls_ca_file is not None:
            trusted = ssl.create_default_context(cafile=str(server.tls_ca_file))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=trusted),  # 0: no limit
            headers={} if server.token is None else {"Authorization": f"Bearer {server.token}"},
            timeout=aiohttp.ClientTimeout(total=None),
        )
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
            async with self._session.get(f"{self._url}/v1/models", timeout=timeout) as response:
                body = await response.text()
                if response.status != 200:
                    raise RuntimeError(f"{server.url} answers {response.status} to /v1/models: {body[:200]}")
                self._model = server.model or json.loads(body)["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            await self.close()
            raise RuntimeError(f"no OpenAI server answers at {server.url}: {_words_of(error)}") from error

    async def send(self, ask: Ask, arrived: Callable[[], None]) -> Usage:
        path = "chat/completions" if isinstance(ask.prompt, list) else "completions"
        try:
            async with self._session.post(f"{self._url}/v1/{path}", json=_body(ask, self._model)) as response:
                if response.status != 200:
                    raise RequestError(f"HTTP {response.status}", (await response.text())[:200])
                return await _read(response.content.iter_any(), ask.sampling.n, arrived)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise RequestError("connection", _words_of(error)) from error

    async def close(self) -> None:
        await self._session.close()


def _words_of(error: Exception) -> str:
    return str(error) or type(error).__name__  # a timeout has no words


async def _read(parts: AsyncIterator[bytes], samples: int, arrived: Callable[[], None]) -> Usage:
    """The usage at the end of a stream of server-sent events."""
    unended, usage = samples, None
    async for data in _events(parts):
        if data == DONE:
            break
        event = json.loads(data)
        if "error" in event:
            raise RequestError("error event", str(event["error"].get("message", event["error"]))[:200])
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event["choices"]):
            arrived()
        unended -= sum(choice["finish_reason"] is not None for choice in event["choices"])
        usage = event.get("usage") or usage
    else:
        raise RequestError("incomplete", "the stream ended without [DONE]")
    if unended or usage is None:
        raise RequestError("incomplete", f"{unended} samples ended without a finish reason, usage is {usage}")
    return Usage(prompt_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"])


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, which for OpenAI's API is always one line."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _body(ask: Ask, model: str) -> dict[str, Any]:
    """A request as the API has it; fields that OpenAI does not know keep the names of `SamplingParams`."""
    sampling, chat = ask.sampling, isinstance(ask.prompt, list)
    body: dict[str, Any] = {
        "model": model,
        "messages" if chat else "prompt": ask.prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "priority": ask.priority,
    }
    for field in dataclasses.fields(sampling):
        value = getattr(sampling, field.name)
        if field.name not in body and value != getattr(_UNSET, field.name):
            body[field.name] = value
    if chat and sampling.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    return body
