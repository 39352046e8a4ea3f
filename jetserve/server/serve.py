"""The server as a process: load, warm up, serve, and end without leaving anybody without an answer.

Owns the order of things and what signals mean. Knows nothing of protocols.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable

from jetserve.config import EngineConfig, ModelSource, ServerConfig
from jetserve.engine import build
from jetserve.engine.async_engine import AsyncEngine, State
from jetserve.engine.engine import Engine
from jetserve.server.grpc import GrpcServer

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
FLUSH_SECONDS = 5.0
"""How long clients have at least to read the last messages of a server that stops."""


class _Signals:
    """SIGTERM and SIGINT: `first` asks for a gentle end, `second` for one now."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _warm_up(engine: Engine) -> None:
    """Compiles all that serving can need, so that no request waits for it."""
    started = time.monotonic()
    logger.info("compiling, or reading from the cache, every program that requests can need")
    engine.runner.warm_up()
    logger.info("warmed up in %.1f s", time.monotonic() - started)


async def _first_of(*waits: "asyncio.Task[object]") -> None:
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


async def _drain(engine: AsyncEngine, server: GrpcServer, seconds: float) -> None:
    """Lets requests finish and slow clients read their answers, both within `seconds`."""
    end = time.monotonic() + seconds
    await engine.drain(seconds)
    await server.stop(max(end - time.monotonic(), FLUSH_SECONDS))


async def _serve(config: ServerConfig, make_engine: Callable[[], Engine]) -> int:
    server = GrpcServer(config)
    loaded = make_engine()
    if config.warm_up:
        _warm_up(loaded)
    signals = _Signals()  # until here they end the process at once, as nobody is served yet
    engine = AsyncEngine(loaded)
    await server.start(engine)
    logger.info("ready: gRPC on %s:%d", config.host, server.port)
    ended: asyncio.Task[object] = asyncio.create_task(engine.wait_until_ended())
    asked: asyncio.Task[object] = asyncio.create_task(signals.first.wait())
    await _first_of(ended, asked)
    has_failed = ended.done()
    await server.say_not_serving()
    if not has_failed:
        logger.info("draining: running requests have %g s to finish; another signal ends them", config.drain_seconds)
        drained: asyncio.Task[object] = asyncio.create_task(_drain(engine, server, config.drain_seconds))
        now: asyncio.Task[object] = asyncio.create_task(signals.second.wait())
        await _first_of(drained, now)
        now.cancel()
    await engine.stop()
    await server.stop(FLUSH_SECONDS)
    for task in (asked, ended):
        task.cancel()
    if not has_failed:
        await drained
    logger.info("stopped")
    return EXIT_FAILED if has_failed or engine.state is State.DEAD else 0


def run(
    config: ServerConfig, source: ModelSource, engine_config: EngineConfig, *, max_length: int | None = None
) -> int:
    """Serves a model until SIGTERM or SIGINT; a second one ends requests that are still running.

    Args:
      config: where and how to serve.
      source: the model.
      engine_config: limits.
      max_length: tokens of a prompt and its answer, None for what the model was made for (at most 2048).

    Returns:
      The exit code: 0 after a signal, `EXIT_FAILED` if the engine failed for good.

    Raises:
      ValueError, RuntimeError, OSError: if the port cannot be had or the model cannot be loaded.
    """

    def make_engine() -> Engine:
        logger.info("loading %s", build.model_name(source))
        return build.build_engine(source, engine_config, max_length=max_length)

    return asyncio.run(_serve(config, make_engine))
