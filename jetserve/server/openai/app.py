"""The paths of OpenAI's API, and what turns bodies into answers."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

import jetserve
from jetserve.server.openai import chat, completions, errors, operations, stream
from jetserve.server.openai.answers import Answer
from jetserve.server.openai.backend import Backend, Call
from jetserve.server.openai.errors import ApiError, InvalidRequestError
from jetserve.server.openai.guard import REQUEST_ID, Guard
from jetserve.server.openai.operations import ServerState
from jetserve.server.openai.protocol import (
    ChatBody,
    ChatPrompt,
    CompletionBody,
    DetokenizeBody,
    NamesModel,
    SamplingFields,
    TokenizeBody,
)

B = TypeVar("B", bound=NamesModel)
S = TypeVar("S", bound=SamplingFields)


def make_app(state: ServerState, *, key: str | None, max_bytes: int, cors_origins: tuple[str, ...]) -> ASGIApp:
    """The app for an ASGI server."""
    app = FastAPI(title="jetserve", version=jetserve.__version__, openapi_url=None)
    app.include_router(operations.routes(state))
    _add_api(app, state)
    for kind in (HTTPException, ApiError, InvalidRequestError, Exception):
        app.add_exception_handler(kind, errors.respond)
    guarded: ASGIApp = Guard(app, key=key, max_bytes=max_bytes)
    if cors_origins:
        guarded = CORSMiddleware(
            guarded, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[REQUEST_ID]
        )
    return guarded


def _add_api(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(state, request, ChatBody, chat.answer_of)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        return await _answer(state, request, CompletionBody, completions.answer_of)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(state.ready_backend())]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        state.ready_backend().check_model(name)
        return _model(state.ready_backend())

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await _convert(state, request, TokenizeBody, _tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _convert(state, request, DetokenizeBody, _detokenize)


def _read(kind: type[B], data: bytes) -> B:
    try:
        return kind.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise errors.invalid_request(error) from error


async def _answer(
    state: ServerState, request: Request, kind: type[S], answer_of: Callable[[S, Call], Answer]
) -> Response:
    backend, data = state.ready_backend(), await request.body()

    def make(call: Call) -> Answer:
        body = _read(kind, data)
        backend.check_model(body.model)
        return answer_of(body, call)

    try:
        return await stream.answer(backend, make, request.state.request_id)
    except Exception as error:  # noqa: BLE001  (each has a status; the observation has logged it)
        return errors.api_error_of(error).response()


async def _convert(
    state: ServerState, request: Request, kind: type[B], convert: Callable[[B, Backend], dict[str, Any]]
) -> Response:
    """For what needs the tokenizer alone."""
    backend, data = state.ready_backend(), await request.body()

    def work() -> dict[str, Any]:
        body = _read(kind, data)
        backend.check_model(body.model)
        return convert(body, backend)

    try:
        return JSONResponse(await asyncio.to_thread(work))
    except ValueError as error:
        return errors.api_error_of(error).response()


def _tokenize(body: TokenizeBody, backend: Backend) -> dict[str, Any]:
    """As vLLM's: `tokens`, their `count`, and how many fit."""
    tokenizer = backend.tokenizer
    if body.messages is None:
        tokens = tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    else:
        prompt = ChatPrompt(messages=body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt)
        tokens = tokenizer.encode(chat.render(prompt, tokenizer), add_special_tokens=bool(body.add_special_tokens))
    texts = [tokenizer.token_text(token).decode("utf-8", "replace") for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": backend.max_length,
        "tokens": tokens,
        "token_strs": texts if body.return_token_strs else None,
    }


def _detokenize(body: DetokenizeBody, backend: Backend) -> dict[str, Any]:
    try:
        return {"prompt": backend.tokenizer.decode(body.tokens, skip_special_tokens=False)}
    except ValueError as error:
        raise InvalidRequestError(str(error), param="tokens") from error


def _model(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.model,
        "object": "model",
        "created": backend.created,
        "owned_by": "jetserve",
        "max_model_len": backend.max_length,
    }
