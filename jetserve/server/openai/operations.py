"""What is served beside the API: health, readiness, metrics, live state, the profiler, the chat page."""

import asyncio
import dataclasses
import enum
import importlib.resources
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

import jetserve
from jetserve.engine.profiler import Profiler, ProfilerStateError
from jetserve.server import metrics
from jetserve.server.openai.backend import Backend
from jetserve.server.openai.errors import ApiError, unavailable


class Phase(enum.Enum):
    """Where in its life a server is."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


@dataclasses.dataclass
class ServerState:
    """What handlers look at. `progress` says in words how far the loading is."""

    profiler: Profiler
    phase: Phase = Phase.LOADING
    progress: str = "the model is being loaded"
    backend: Backend | None = None

    def ready_backend(self) -> Backend:
        """What answers. Raises ApiError while there is nothing yet."""
        if self.backend is None:
            raise unavailable(f"{self.progress}; try again later", Phase.LOADING.value)
        return self.backend

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self.phase is Phase.READY and self.backend is not None and self.backend.engine.is_ready

    @property
    def is_live(self) -> bool:
        """False once the engine has failed for good: only a new process helps."""
        return self.backend is None or self.phase is Phase.STOPPING or self.backend.engine.is_live


_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "origin")
"""Headers of requests that came through something else: a proxy on this machine, or a web page."""


def routes(state: ServerState) -> APIRouter:
    """All of them."""
    router = APIRouter()
    page = importlib.resources.files("jetserve.server").joinpath("static/chat.html").read_text(encoding="utf-8")

    @router.get("/")
    async def chat_page() -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(page, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return JSONResponse({"status": "ok" if state.is_live else "dead"}, 200 if state.is_live else 503)

    @router.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        if state.is_ready:
            return JSONResponse({"status": "ready"})
        status = state.progress if state.phase is Phase.LOADING else Phase.STOPPING.value
        return JSONResponse({"status": status}, 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": jetserve.__version__}

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(state.ready_backend().observer.metrics.text(), media_type=metrics.CONTENT_TYPE)

    @router.get("/state")
    async def live_state() -> dict[str, Any]:
        backend = state.ready_backend()
        stats = backend.engine.stats()
        return {
            "phase": state.phase.value,
            "model": backend.model,
            "running": stats.running,
            "waiting": stats.waiting,
            "pages_used": stats.pages_used,
            "pages_total": stats.pages_total,
            "max_length": backend.max_length,
        }

    @router.post("/debug/profiler/start")
    async def start_profiler(request: Request) -> dict[str, str]:
        return await _profile(request, state.profiler.start)

    @router.post("/debug/profiler/stop")
    async def stop_profiler(request: Request) -> dict[str, str]:
        return await _profile(request, state.profiler.stop)

    return router


async def _profile(request: Request, act: Callable[[], Path]) -> dict[str, str]:
    host = "" if request.client is None else request.client.host
    is_local = ipaddress.ip_address(host).is_loopback if host else False
    if not is_local or any(name in request.headers for name in _FORWARDED):
        raise ApiError(403, "the profiler is for clients on this machine alone", code="forbidden")
    try:
        return {"directory": str(await asyncio.to_thread(act))}
    except ProfilerStateError as error:
        raise ApiError(409, str(error), code="conflict") from error
