"""What every HTTP request passes first: its id, the key, its size, and whether its client is still there.

Plain ASGI, because a stream must not pass through anything that buffers.
"""

import asyncio
import contextlib
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jetserve.server import auth
from jetserve.server.openai import errors
from jetserve.server.openai.errors import ApiError

REQUEST_ID = "x-request-id"
_MAX_REQUEST_ID = 128
_LINGER_SECONDS = 2.0
_BODY_SECONDS = 60.0
"""Until a body must be there."""
OPEN_TO_ALL = frozenset({"/", "/health", "/ready"})
"""Paths that need no key: the page, which asks for it, and what load balancers look at."""


class Guard:
    """Around an app: `scope["state"]["request_id"]` names a request, and its body is there in one piece."""

    def __init__(self, app: ASGIApp, *, key: str | None, max_bytes: int) -> None:
        self._app = app
        self._key = key
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"found a {scope['type']} connection; expected http")
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID)
        is_plain = request_id is None or _is_plain(request_id)
        named = request_id if request_id and is_plain else uuid.uuid4().hex

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = named
            await send(message)

        reading = _Reading(receive)
        try:
            if not is_plain:
                raise ApiError(
                    400, f"{REQUEST_ID} is {errors.shown(request_id)}; expected 1 to 128 printable ASCII characters"
                )
            self._check_key(scope["path"], headers)
            length = headers.get("content-length", "")
            self._check_size(int(length) if length.isdecimal() else 0)
            body = await self._body(reading)
        except ApiError as error:
            await reading.discard()
            await error.response()(scope, receive, send_named)
            return
        if body is not None:
            scope.setdefault("state", {})["request_id"] = named
            await _run_while_connected(self._app, scope, body, receive, send_named)

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._key is None or path in OPEN_TO_ALL:
            return
        if not auth.is_right(headers.get("authorization", ""), self._key):
            raise ApiError(
                401,
                auth.EXPECTED,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, reading: "_Reading") -> bytes | None:
        """The whole of it; None if the client left before it was sent."""
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while not reading.is_over:
                    body += await reading.next()
                    self._check_size(len(body))
        except TimeoutError as error:
            raise ApiError(
                408,
                f"the body was not there after {_BODY_SECONDS:g} seconds; send all that content-length tells",
                code="request_timeout",
                headers={"connection": "close"},
            ) from error
        return None if reading.has_left else bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise ApiError(
                413,
                f"the body has {size} bytes or more; expected at most {self._max_bytes} (--max_message_bytes)",
                code="request_too_large",
                headers={"connection": "close"},
            )


class _Reading:
    """A body as it comes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_over = self.has_left = False

    async def next(self) -> bytes:
        """Its next part."""
        message = await self._receive()
        self.has_left = message["type"] == "http.disconnect"
        self.is_over = self.has_left or not message.get("more_body", False)
        return message.get("body", b"")

    async def discard(self) -> None:
        """Reads the rest, for a while: a client that finds its connection closed while it sends never reads why."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while not self.is_over:
                    await self.next()


def _is_plain(request_id: str) -> bool:
    return request_id.isascii() and request_id.isprintable() and 0 < len(request_id) <= _MAX_REQUEST_ID


async def _run_while_connected(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Runs the app, and cancels it when its client leaves."""
    is_read = False

    async def receive_again() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # this function says when the client has left, nobody else
        raise AssertionError("unreachable")

    work = asyncio.create_task(_call(app, scope, receive_again, send))
    left: asyncio.Task[Message] = asyncio.create_task(_next(receive))
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        has_left = not work.done()
        if has_left:
            work.cancel()
    if has_left:
        with contextlib.suppress(asyncio.CancelledError):
            await work
    else:
        work.result()


async def _call(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


async def _next(receive: Receive) -> Message:
    return await receive()
