"""Sends a workload in time, and records what becomes of every request.

Owns the clock. Knows neither protocols nor definitions of latencies.
"""

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from jetserve.loadtest import report, statistics
from jetserve.loadtest.config import DEFAULT_REQUESTS, LoadTestConfig
from jetserve.loadtest.statistics import Record
from jetserve.loadtest.targets import RequestError, Target, make_target
from jetserve.loadtest.workload import DEFAULT_LENGTHS, Ask, file_asks, poisson_arrivals, random_asks

logger = logging.getLogger(__name__)

EXIT_FAILED = 1


def run(config: LoadTestConfig) -> int:
    """Loads a server and reports: a table on standard error, JSON as the last line of standard output.

    Returns:
      0, or `EXIT_FAILED` if no request was answered.

    Raises:
      ValueError, OSError: for prompts or paths that cannot be used.
      RuntimeError: if there is no server.
    """
    report.check_paths(config)
    count, asks = _asks(config)
    records = uvloop.run(_measure(config, make_target(config.server), count, asks))
    result = {"url": config.server.url, **statistics.report(records, config.goals)}
    report.write(config, records, result)
    print(json.dumps(result))
    return 0 if result["completed"] else EXIT_FAILED


def _asks(config: LoadTestConfig) -> tuple[int | None, Iterator[Ask]]:
    """How many requests to send, None for as many as `duration` allows, and what they ask."""
    rng = random.Random(config.seed)
    if config.prompts_file is not None:
        default, asks = file_asks(config.prompts_file, config.sampling, rng, config.output_tokens)
    else:
        lengths = config.input_tokens or DEFAULT_LENGTHS, config.output_tokens or DEFAULT_LENGTHS
        default, asks = DEFAULT_REQUESTS, random_asks(config.sampling, rng, *lengths)
    unset = None if config.duration is not None else default
    return config.num_requests or unset, asks


async def _measure(config: LoadTestConfig, target: Target, count: int | None, asks: Iterator[Ask]) -> list[Record]:
    await target.connect()
    try:
        at_once = config.concurrency or config.warmup_requests
        await _Run(target, config.timeout_seconds).keep(at_once, itertools.islice(asks, config.warmup_requests), None)
        this = _Run(target, config.timeout_seconds)
        asks = itertools.islice(asks, count)
        if config.concurrency is not None:
            await this.keep(config.concurrency, asks, config.duration)
        elif config.request_rate is not None:
            arrivals = poisson_arrivals(config.request_rate, random.Random(config.seed))
            await this.pace(arrivals, asks, config.duration)
        return sorted(this.records, key=lambda record: record.index)
    finally:
        await target.close()


class _Run:
    """Requests against one clock, which starts with it."""

    def __init__(self, target: Target, timeout_seconds: float) -> None:
        self._target = target
        self._timeout = timeout_seconds
        self._start = time.perf_counter()
        self._indices = itertools.count()
        self.records: list[Record] = []

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def keep(self, at_once: int, asks: Iterator[Ask], duration: float | None) -> None:
        """`at_once` requests under way, the next as one ends, until there are no more or `duration` is over."""

        async def client() -> None:
            for ask in asks:  # shared: each takes the next one
                if duration is not None and self._now() >= duration:
                    return
                await self._send(ask, self._now())

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def pace(self, arrivals: Iterator[float], asks: Iterator[Ask], duration: float | None) -> None:
        """Requests at given times, however long the ones before take."""
        async with asyncio.TaskGroup() as tasks:
            for scheduled, ask in zip(arrivals, asks, strict=False):
                if duration is not None and scheduled >= duration:
                    return
                await asyncio.sleep(scheduled - self._now())
                tasks.create_task(self._send(ask, scheduled))

    async def _send(self, ask: Ask, scheduled: float) -> None:
        index, sent = next(self._indices), self._now()
        arrivals: list[float] = []
        result: dict[str, Any] = {}
        try:
            async with asyncio.timeout(self._timeout):
                usage = await self._target.send(ask, lambda: arrivals.append(self._now()))
            result = {"prompt_tokens": usage.prompt_tokens, "output_tokens": usage.output_tokens}
        except TimeoutError:
            result = {"failure": "timeout", "message": f"no whole answer in {self._timeout:g} s"}
        except RequestError as error:
            result = {"failure": error.kind, "message": str(error)}
        self.records.append(
            Record(index=index, scheduled=scheduled, sent=sent, arrivals=tuple(arrivals), ended=self._now(), **result)
        )
