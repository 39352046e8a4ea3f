"""Runs one call: through the engine, and back to the client whole or as server-sent events.

A client that leaves cancels the task that runs this, and so frees what its request holds.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pydantic_core
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jetserve.engine.async_engine import AsyncEngine
from jetserve.engine.mailbox import Outputs
from jetserve.server import failures
from jetserve.server.metrics import Protocol
from jetserve.server.openai.answers import Answer
from jetserve.server.openai.backend import Backend, Call
from jetserve.server.openai.errors import api_error_of
from jetserve.types import Request, RequestOutput

_DONE = b"data: [DONE]\n\n"
_End = None

Chunks = list[dict[str, Any]]


async def answer(backend: Backend, make: Callable[[Call], Answer], request_id: str) -> Response:
    """Answers one call.

    The status is sent when the first token is there, so that whatever ends a call before that has a status of its own.

    Args:
      backend: the engine.
      make: reads the client's body; runs in a thread.
      request_id: for the log.

    Raises:
      Exception: whatever ended the call before its first token, or at all if it does not stream.
    """
    events = _run(backend, make, request_id)
    its_answer, chunks = await anext(events)
    if its_answer.stream:
        return EventStream(_encoded(its_answer, chunks, events))
    async for _ in events:
        pass
    return JSONResponse(its_answer.whole())


async def _run(
    backend: Backend, make: Callable[[Call], Answer], request_id: str
) -> AsyncGenerator[tuple[Answer, Chunks], None]:
    """The answer as it grows, with what is new of it."""
    with backend.observer.observe(Protocol.HTTP, request_id) as observation:
        its_answer = await asyncio.to_thread(make, Call(backend=backend, arrival=observation.arrival))
        observation.begin(request_id, its_answer.requests)
        async with contextlib.aclosing(_outputs(backend.engine, its_answer.requests)) as outputs:
            async for prompt, output in outputs:
                observation.take(output)
                failures.check(output)
                yield its_answer, its_answer.push(prompt, output)


async def _outputs(engine: AsyncEngine, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several requests as they come, each with its request's index."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(contextlib.aclosing(engine.generate(r))) for r in requests]
        if len(streams) == 1:
            async for output in streams[0]:
                yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()
        for index, stream in enumerate(streams):
            stack.callback(asyncio.create_task(_pump(index, stream, queue)).cancel)
        open_streams = len(streams)
        while open_streams:
            match await queue.get():
                case None:
                    open_streams -= 1
                case Exception() as error:
                    raise error
                case item:
                    yield item


async def _pump(
    index: int, outputs: Outputs, queue: "asyncio.Queue[tuple[int, RequestOutput] | Exception | None]"
) -> None:
    try:
        async for output in outputs:
            queue.put_nowait((index, output))
        queue.put_nowait(_End)
    except Exception as error:  # noqa: BLE001  (raised again by who reads the queue)
        queue.put_nowait(error)


async def _encoded(
    its_answer: Answer, chunks: Chunks, events: AsyncGenerator[tuple[Answer, Chunks], None]
) -> AsyncGenerator[bytes, None]:
    """A stream that breaks ends with an event that holds an error, and without the "[DONE]" of one that is whole."""
    async with contextlib.aclosing(events):
        if chunks:
            yield _events(chunks)
        try:
            async for _, chunks in events:
                if chunks:
                    yield _events(chunks)
        except Exception as error:  # noqa: BLE001  (each has an error of its own; the observation has logged it)
            yield _events([api_error_of(error).body()])
            return
        yield (_events([its_answer.usage_chunk()]) if its_answer.include_usage else b"") + _DONE


def _events(objects: Chunks) -> bytes:
    return b"".join(b"data: " + pydantic_core.to_json(each) + b"\n\n" for each in objects)


class EventStream(Response):
    """Sends events as they come, as fast as the client reads them, and closes their source whichever way it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
