"""The HTTP server's life: a port from the start, health while the model loads, answers, and an orderly end.

Knows nothing of when to stop: `serve` says that.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jetserve.config import ServerConfig
from jetserve.engine.async_engine import AsyncEngine
from jetserve.engine.profiler import Profiler
from jetserve.server import auth, listen
from jetserve.server.observe import Observer
from jetserve.server.openai.app import make_app
from jetserve.server.openai.backend import Backend
from jetserve.server.openai.operations import Phase, ServerState

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept: longer than clients keep theirs, which must not meet one that just closed."""


MAX_HEAD_BYTES = 64 * 2**10
"""Of a request's line and headers."""


class _Protocol(HttpToolsProtocol):
    """Ends connections whose headers do not end: httptools would keep all that comes."""

    _is_in_head = False
    _head_bytes = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The headers have more than {MAX_HEAD_BYTES} bytes.")


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A server that has its port from the start, so that one in use is known before a model is loaded.

    Made and used on one event loop.
    """

    def __init__(self, config: ServerConfig, *, profile_folder: Path) -> None:
        """Binds the port, and takes no connections yet.

        Raises:
          ValueError: if there is a key that cannot be one, or a file that the configuration names cannot be used.
          RuntimeError: if the port cannot be had.
        """
        assert config.http_port is not None
        listen.certificate_and_key(config)  # refused in words of ours before uvicorn reads them
        self.state = ServerState(profiler=Profiler(profile_folder))
        app = make_app(
            self.state,
            key=auth.key_of(config),
            max_bytes=config.max_message_bytes,
            cors_origins=config.cors_origins,
        )
        settings = uvicorn.Config(
            app,
            http=_Protocol,
            ssl_certfile=config.tls_cert_file,
            ssl_keyfile=config.tls_key_file,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        settings.load()
        self._server = _Uvicorn(settings)
        self._socket = listen.bind(config.host, config.http_port, flag="--http_port", backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"{'http' if config.tls_cert_file is None else 'https'}://{host}:{self.port}"
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Takes connections: `/health` is fine, and all that needs the model is refused until `start`."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    def tell_progress(self, text: str) -> None:
        """What `/ready` says until `start`."""
        self.state.progress = text

    async def start(self, engine: AsyncEngine, observer: Observer, *, model: str) -> None:
        """Takes requests, for `engine` to answer; clients call it `model`."""
        self.state.backend = Backend(engine=engine, observer=observer, model=model)
        self.state.phase = Phase.READY

    async def say_not_serving(self) -> None:
        """Tells who asks `/ready` to send new requests elsewhere."""
        self.state.phase = Phase.STOPPING

    async def stop(self, seconds: float) -> None:
        """Takes no more connections, gives clients up to `seconds` to read what is ready for them, and drops the rest.

        A second call with less time shortens the first one's.
        """
        if self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        _, late = await asyncio.wait((self._serving,), timeout=seconds)
        if late:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await self._serving
