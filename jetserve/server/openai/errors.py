"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Owns which status, type and code a failure gets over HTTP.
"""

import json
from collections.abc import Mapping
from typing import Any

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jetserve.server import failures
from jetserve.server.failures import RETRY_AFTER_SECONDS, FailureKind
from jetserve.server.openai import protocol
from jetserve.types import InvalidFieldError

INVALID_REQUEST = "invalid_request_error"
_RETRY = {"retry-after": str(RETRY_AFTER_SECONDS)}
_MAX_FOUND = 80
_MAX_PROBLEMS = 3
_SHOULD_BE = "Input should be "
_TYPES = ("str", "int", "bool", "float", "NamedTool")
"""What pydantic puts among the names of fields that may be of several types."""


class ApiError(Exception):
    """What a client is told. `param` names the field of the request that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """As JSON data."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        content = json.dumps(self.body(), ensure_ascii=False)
        return Response(content, self.status, headers=self.headers, media_type="application/json")


class InvalidRequestError(ValueError):
    """A request that can never succeed; `param` names the field, `code` is OpenAI's word for what is wrong, if any."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


def unavailable(message: str, code: str) -> ApiError:
    """For a server that cannot take requests now."""
    return ApiError(503, message, kind="service_unavailable", code=code, headers=_RETRY)


def api_error_of(error: Exception) -> ApiError:
    """How an exception that ended a request is told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    message = failures.message_of(error)
    match failures.kind_of(error):
        case FailureKind.INVALID if isinstance(error, InvalidRequestError):
            return ApiError(error.status, message, param=error.param, code=error.code)
        case FailureKind.INVALID if isinstance(error, InvalidFieldError):
            return ApiError(400, message, param=error.field)
        case FailureKind.INVALID:
            return ApiError(400, message)
        case FailureKind.QUEUE_FULL:
            return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=_RETRY)
        case FailureKind.UNAVAILABLE:
            return unavailable(message, "draining")
        case FailureKind.DEADLINE:
            # OpenAI's client would ask again; the time that it gave is over.
            headers = {"x-should-retry": "false"}
            return ApiError(504, message, kind="timeout", code="deadline_exceeded", headers=headers)
        case FailureKind.DEAD:
            return unavailable(message, "engine_dead")
        case FailureKind.INTERNAL:
            return ApiError(500, message, kind="server_error", code="internal_error")


async def respond(_request: Request, error: Exception) -> Response:
    """For Starlette's table of exception handlers."""
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = ApiError(404, f"there is nothing at {_request.method} {_request.url.path}", code="not_found")
    elif isinstance(error, HTTPException) and error.status_code == 405:
        message = f"{_request.method} is not for {_request.url.path}"
        error = ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return api_error_of(error).response()


def invalid_request(error: pydantic.ValidationError) -> InvalidRequestError:
    """What pydantic found wrong with a body, in one message; `param` is the first field."""
    problems = error.errors(include_url=False)
    if problems[0]["type"] == "json_invalid":
        return InvalidRequestError(f"the body is no valid JSON in UTF-8: {problems[0]['ctx']['error']}")
    # A field that may be of several types is reported once for each: the one that came furthest was meant.
    depth: dict[tuple[int | str, ...], int] = {}
    for problem in problems:
        depth[problem["loc"][:1]] = max(depth.get(problem["loc"][:1], 0), len(problem["loc"]))
    deepest = [problem for problem in problems if len(problem["loc"]) == depth[problem["loc"][:1]]]
    # What is said of a field, and what its types would each have expected, said once.
    said: dict[str, dict[str, None]] = {}
    for problem in deepest:
        found, expected = _told(problem)
        said.setdefault(found, {}).update(dict.fromkeys(expected))
    sentences = [found + " or ".join(expected) for found, expected in said.items()]
    return InvalidRequestError("; ".join(sentences[:_MAX_PROBLEMS]), param=_name(deepest[0]) or None)


def shown(value: object) -> str:
    """A value for a message, which need not hold all of it."""
    text = repr(value)
    return text if len(text) <= _MAX_FOUND else f"{text[:_MAX_FOUND]}…"


def _name(problem: Mapping[str, Any]) -> str:
    name = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in _TYPES:
            name += f".{part}" if name else part
    if problem["type"] == protocol.PROBLEM:
        name += f".{problem['ctx']['field']}" if name else problem["ctx"]["field"]
    return name


def _told(problem: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The beginning of a sentence on a problem, and its end: what was expected, if anything is left to say."""
    name = _name(problem)
    match problem["type"]:
        case "missing":
            return f"{name} is missing", []
        case protocol.PROBLEM:
            return str(problem["msg"]), []
        case "model_type" if not name:
            return "the body is no JSON object; expected one", []
        case "model_type" | "dict_type":
            return f"{name} is {shown(problem['input'])}; expected ", ["an object"]
    expected = problem["msg"].removeprefix(_SHOULD_BE)
    start = f"{name} is {shown(problem['input'])}; "
    return (start, [expected]) if expected == problem["msg"] else (f"{start}expected ", [expected])
