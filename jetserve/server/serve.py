"""The server as a process: load, warm up, serve, and end without leaving anybody without an answer.

Owns the order of things and what signals mean. Knows nothing of protocols.
"""

import asyncio
import concurrent.futures
import gc
import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from jetserve.config import EngineConfig, LogFormat, ModelSource, ProcessesConfig, ServerConfig
from jetserve.engine import build
from jetserve.engine.async_engine import AsyncEngine, State
from jetserve.engine.engine import Engine
from jetserve.parallel.processes import Alone, Leader, Processes
from jetserve.server import logs
from jetserve.server.grpc import GrpcServer
from jetserve.server.metrics import Metrics
from jetserve.server.observe import Observer
from jetserve.server.openai.server import HttpServer

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
FLUSH_SECONDS = 5.0
"""How long clients have at least to read the last messages of a server that stops."""


def _at_signals(receive: Callable[[signal.Signals], None]) -> None:
    """Has the event loop call `receive`, and nothing that was set before."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, receive, number)


def _end_while_loading(number: signal.Signals) -> None:
    """Ends the process by the signal itself.

    Python's own way to end would take the interpreter away from the thread that loads the model.
    """
    logger.info("stopped while loading")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class _Signals:
    """SIGTERM and SIGINT: `first` asks for a gentle end, `second` for one now."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        _at_signals(self._receive)

    def _receive(self, _number: signal.Signals) -> None:
        (self.second if self.first.is_set() else self.first).set()


Progress = Callable[[str], None]
"""Is told in words how far the start is."""


def _warm_up(engine: Engine, progress: Progress) -> None:
    """Compiles all that serving can need, so that no request waits for it."""
    started = time.monotonic()
    logger.info("compiling, or reading from the cache, every program that requests can need")
    engine.warm_up(lambda done, total: progress(f"program {done} of {total} is being compiled"))
    logger.info("warmed up in %.1f s", time.monotonic() - started)


async def _first_of(*waits: "asyncio.Future[Any]") -> None:
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


async def _in_thread(work: Callable[[], Engine]) -> Engine:
    """Like `asyncio.to_thread`, in a thread that no process waits for."""
    loop, made = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def finish(engine: Engine | None, error: Exception | None) -> None:
        if made.cancelled():
            return
        if error is not None:
            made.set_exception(error)
        else:
            made.set_result(engine)

    def run() -> None:
        try:
            engine = work()
        except Exception as error:  # noqa: BLE001  (raised again by who waits)
            loop.call_soon_threadsafe(finish, None, error)
        else:
            loop.call_soon_threadsafe(finish, engine, None)

    threading.Thread(target=run, name="jetserve-load", daemon=True).start()
    return await made


class _Servers:
    """Those that a configuration asks for, as one."""

    def __init__(self, config: ServerConfig, profile_folder: Path) -> None:
        self._host = config.host
        self._grpc = None if config.grpc_port is None else GrpcServer(config)
        self._http = None if config.http_port is None else HttpServer(config, profile_folder=profile_folder)

    def __str__(self) -> str:
        grpc = [] if self._grpc is None else [f"gRPC on {self._host}:{self._grpc.port}"]
        http = [] if self._http is None else [f"HTTP on {self._http.url}"]
        return ", ".join(grpc + http)

    def tell_progress(self, text: str) -> None:
        if self._http is not None:
            self._http.tell_progress(text)

    async def open(self) -> None:
        """Health is told from here on."""
        if self._http is not None:
            await self._http.open()

    async def start(self, engine: AsyncEngine, observer: Observer, *, model: str) -> None:
        if self._grpc is not None:
            await self._grpc.start(engine, observer)
        if self._http is not None:
            await self._http.start(engine, observer, model=model)

    async def say_not_serving(self) -> None:
        for server in self._all:
            await server.say_not_serving()

    async def stop(self, seconds: float) -> None:
        await asyncio.gather(*(server.stop(seconds) for server in self._all))

    @property
    def _all(self) -> list[GrpcServer | HttpServer]:
        return [server for server in (self._grpc, self._http) if server is not None]


async def _drain(engine: AsyncEngine, servers: _Servers, seconds: float) -> None:
    """Lets requests finish and slow clients read their answers, both within `seconds`."""
    end = time.monotonic() + seconds
    await engine.drain(seconds)
    await servers.stop(max(end - time.monotonic(), FLUSH_SECONDS))


async def _serve(
    config: ServerConfig,
    make_engine: Callable[[Progress], Engine],
    *,
    model: str,
    profile_folder: Path,
    others_lost: "concurrent.futures.Future[str]",
) -> int:
    servers = _Servers(config, profile_folder)
    await servers.open()
    _at_signals(_end_while_loading)
    loaded = await _in_thread(lambda: make_engine(servers.tell_progress))
    signals = _Signals()
    engine = AsyncEngine(loaded)
    await servers.start(engine, Observer(Metrics(engine, model=model), log=config.log_requests), model=model)
    logger.info("ready: %s", servers)
    ended: asyncio.Task[object] = asyncio.create_task(engine.wait_until_ended())
    asked: asyncio.Task[object] = asyncio.create_task(signals.first.wait())
    lost = asyncio.wrap_future(others_lost)
    await _first_of(ended, asked, lost)
    has_failed = ended.done() or lost.done()
    await servers.say_not_serving()
    if not has_failed:
        logger.info("draining: running requests have %g s to finish; another signal ends them", config.drain_seconds)
        drained: asyncio.Task[object] = asyncio.create_task(_drain(engine, servers, config.drain_seconds))
        now: asyncio.Task[object] = asyncio.create_task(signals.second.wait())
        await _first_of(drained, now)
        now.cancel()
    await engine.stop()
    if has_failed or not drained.done():
        await servers.stop(FLUSH_SECONDS)
    for wait in (asked, ended, lost):
        wait.cancel()
    if not has_failed:
        await drained
    logger.info("stopped")
    return EXIT_FAILED if has_failed or engine.state is State.DEAD else 0


def run(
    config: ServerConfig,
    source: ModelSource,
    engine_config: EngineConfig,
    *,
    max_length: int | None = None,
    processes_config: ProcessesConfig | None = None,
) -> int:
    """Serves a model until SIGTERM or SIGINT; a second one ends requests that are still running.

    Args:
      config: where and how to serve.
      source: the model.
      engine_config: limits.
      max_length: tokens of a prompt and its answer, None for what the model was made for (at most 2048).
      processes_config: of process 0, if there are others that run the model with it (`follow`).

    Returns:
      The exit code: 0 after a signal, `EXIT_FAILED` if the engine failed for good or another process was lost.

    Raises:
      ValueError, RuntimeError, OSError: if the port cannot be had, the model cannot be loaded, or other processes do
        not come.
    """

    if config.log_format is LogFormat.JSON:
        logs.use_json()

    processes: Processes = Alone()
    if processes_config is not None:
        processes = Leader(processes_config, build.settings_of(source, engine_config, max_length))

    def make_engine(progress: Progress) -> Engine:
        logger.info("loading %s", build.model_name(source))
        engine = build.build_engine(source, engine_config, max_length=max_length, processes=processes)
        if config.warm_up:
            _warm_up(engine, progress)
        gc.collect()
        gc.freeze()  # what is loaded stays; to look through it for garbage now and then would stop every stream
        return engine

    # Until the event loop handles signals they end the process at once; without this it would be by an exception.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    model = config.served_model_name or _public_name(build.model_name(source))
    profiles = source.cache_dir / "profiles"
    serving = _serve(config, make_engine, model=model, profile_folder=profiles, others_lost=processes.lost)
    code = uvloop.run(serving)
    if code == 0:
        processes.stop()
    return code


def _public_name(name: str) -> str:
    """A path's last part: where a model lies is not for clients to know."""
    return Path(name).resolve().name if Path(name).exists() else name
