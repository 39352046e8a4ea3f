"""The HTTP server's life: a port from the start, health while the model loads, answers, and an orderly end.

Knows nothing of when to stop: `serve` says that.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from jetserve.config import ServerConfig
from jetserve.engine.async_engine import AsyncEngine
from jetserve.engine.profiler import Profiler
from jetserve.server import auth
from jetserve.server.observe import Observer
from jetserve.server.openai.app import make_app
from jetserve.server.openai.backend import Backend
from jetserve.server.openai.operations import Phase, ServerState

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept: longer than clients keep theirs, which must not meet one that just closed."""


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
          OSError: if a file that the configuration names cannot be read.
          ValueError: if there is a key that cannot be one.
          RuntimeError: if the port cannot be had, or the certificate and key do not belong together.
        """
        self.state = ServerState(profiler=Profiler(profile_folder))
        app = make_app(
            self.state,
            key=auth.key_of(config),
            max_bytes=config.max_message_bytes,
            cors_origins=config.cors_origins,
        )
        settings = uvicorn.Config(
            app,
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
        try:
            settings.load()
        except ssl.SSLError as error:
            raise RuntimeError(
                f"{config.tls_cert_file} and {config.tls_key_file} cannot be used ({error}); expected a PEM certificate"
                " and its key"
            ) from error
        self._server = _Uvicorn(settings)
        self._socket = _bind(config)
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


def _bind(config: ServerConfig) -> socket.socket:
    assert config.http_port is not None
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol named, asyncio sends what it has at once: else small answers wait for the client's delayed ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.http_port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise RuntimeError(
            f"cannot listen on {config.host}:{config.http_port} ({error.strerror}); expected an address of this"
            " machine, and a port that no other process has (--http_port)"
        ) from error
    bound.setblocking(False)
    return bound
