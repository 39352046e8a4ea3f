"""A process that runs a model together with process 0, which serves it. Takes no requests and ends when that does."""

import logging
import signal

from jetserve.config import EngineConfig, ModelSource, ProcessesConfig
from jetserve.engine import build
from jetserve.parallel.processes import Follower

logger = logging.getLogger(__name__)


def run(
    config: ProcessesConfig, source: ModelSource, engine_config: EngineConfig, *, max_length: int | None = None
) -> int:
    """Follows process 0 until it stops; signals are for that one. Arguments are `serve.run`'s.

    Returns:
      The exit code, 0. A process 0 that is lost ends this one with 1.

    Raises:
      ValueError, RuntimeError, OSError: if process 0 cannot be reached, or the model cannot be loaded.
    """
    follower = Follower(config, build.settings_of(source, engine_config, max_length))
    logger.info("loading %s", build.model_name(source))
    engine = build.build_engine(source, engine_config, max_length=max_length)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    logger.info("ready: process %d of %d follows process 0", config.process_id, config.num_processes)
    follower.follow(engine.runner)
    logger.info("stopped")
    return 0
