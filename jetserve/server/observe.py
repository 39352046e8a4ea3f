"""Watches every request from its arrival to its end, whichever protocol it came by: metrics, and a line in the log.

Never sees a prompt or a text.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from types import TracebackType

from jetserve.server import failures
from jetserve.server.failures import FailureKind
from jetserve.server.metrics import CANCELLED, Metrics, Protocol
from jetserve.types import FinishReason, Request, RequestOutput

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Sample:
    """Times are seconds of `time.monotonic`."""

    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0
    started: float | None = None


class Observation:
    """One request of a client, in a `with` around all that is done for it. The exception that ends it says how."""

    def __init__(self, metrics: Metrics, protocol: Protocol, request_id: str, *, log: bool) -> None:
        self._metrics = metrics
        self._protocol = protocol
        self._log = log
        self.arrival = time.monotonic()
        """Seconds of `time.monotonic`."""
        self._request_id = request_id
        self._prompt_tokens = 0
        self._samples: dict[tuple[str, int], _Sample] = {}
        self._first_token: float | None = None
        self._reason: FinishReason | None = None

    def begin(self, request_id: str, requests: Sequence[Request]) -> None:
        """Says what a client's request became: several for the engine, if it has several prompts."""
        self._request_id = request_id
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)

    def take(self, output: RequestOutput) -> None:
        """Notes an output at the moment when it comes."""
        sample = self._samples.setdefault((output.request_id, output.index), _Sample())
        sample.started = output.started_time
        if output.token_ids:
            sample.last_token = time.monotonic()
            if sample.first_token is None:
                sample.first_token = sample.last_token
            if self._first_token is None:
                self._first_token = sample.last_token
            sample.tokens += len(output.token_ids)
        self._reason = output.finish_reason or self._reason

    def __enter__(self) -> "Observation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outcome = self._outcome(error)
        seconds = time.monotonic() - self.arrival
        self._record(outcome, seconds)
        if outcome == FailureKind.INTERNAL.value:
            logger.error("request %s ended with an error", self._request_id, exc_info=error)
        if self._log:
            self._write(outcome, seconds)

    def _outcome(self, error: BaseException | None) -> str:
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            return CANCELLED
        if isinstance(error, Exception):
            return failures.kind_of(error).value
        if self._reason is None:
            return FailureKind.INTERNAL.value
        return self._reason.value

    def _record(self, outcome: str, seconds: float) -> None:
        metrics, protocol = self._metrics, self._protocol.value
        metrics.requests.labels(protocol, outcome).inc()
        for sample in self._samples.values():
            if sample.started is not None:
                metrics.queue_time.labels(protocol).observe(sample.started - self.arrival)
            if sample.first_token is not None and sample.tokens > 1:
                mean = (sample.last_token - sample.first_token) / (sample.tokens - 1)
                metrics.time_per_output_token.labels(protocol).observe(mean)
        if self._first_token is not None:
            metrics.time_to_first_token.labels(protocol).observe(self._first_token - self.arrival)
        if self._samples:
            metrics.prompt_tokens.labels(protocol).observe(self._prompt_tokens)
            metrics.output_tokens.labels(protocol).observe(self._output_tokens)
        if outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            metrics.request_duration.labels(protocol).observe(seconds)

    @property
    def _output_tokens(self) -> int:
        return sum(sample.tokens for sample in self._samples.values())

    def _write(self, outcome: str, seconds: float) -> None:
        first = None if self._first_token is None else round(self._first_token - self.arrival, 6)
        fields = {
            "request_id": self._request_id,
            "protocol": self._protocol.value,
            "outcome": outcome,
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "time_to_first_token_seconds": first,
            "seconds": round(seconds, 6),
        }
        logger.info(
            "request %s: %s over %s, %d prompt and %d output tokens, first token after %s s, %.3f s in all",
            self._request_id,
            outcome,
            self._protocol.value,
            self._prompt_tokens,
            self._output_tokens,
            "-" if first is None else f"{first:.3f}",
            seconds,
            extra={"fields": fields},
        )


class Observer:
    """Makes observations of one server's requests. `log`: whether each leaves a line in the log."""

    def __init__(self, metrics: Metrics, *, log: bool = True) -> None:
        self.metrics = metrics
        self._log = log

    def observe(self, protocol: Protocol, request_id: str) -> Observation:
        """A request that arrives now; `request_id` is for the log."""
        return Observation(self.metrics, protocol, request_id, log=self._log)
