"""What Prometheus is told: histograms of requests, and the engine's own state and totals when it asks.

Owns a registry of its own, so that two servers in a process count apart. Knows nothing of protocols beyond their names.
Names carry units; every combination of labels exists from the start, so that a rate over it is never missing.
"""

import enum
import itertools
from collections.abc import Iterator, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import jetserve
from jetserve.engine import compilations
from jetserve.engine.async_engine import AsyncEngine
from jetserve.server.failures import FailureKind
from jetserve.types import FinishReason

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_LATENCIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_TOKEN_TIMES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_TOKENS = tuple(4**power for power in range(10))

CANCELLED = "cancelled"
"""The outcome of a request whose client left."""
OUTCOMES = (
    FinishReason.STOP.value,
    FinishReason.LENGTH.value,
    CANCELLED,
    *(kind.value for kind in FailureKind),
)


class Protocol(enum.Enum):
    """How a request came."""

    GRPC = "grpc"
    HTTP = "http"


class Metrics:
    """The metrics of one server. Programs that are compiled after it is made count as missed by the warm-up."""

    def __init__(self, engine: AsyncEngine, *, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "jetserve_requests",
            "Requests that have ended, by how: stop and length are good ends, cancelled is a client that left.",
            ("protocol", "outcome"),
            registry=registry,
        )
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From arrival.", _LATENCIES)
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "Mean of one sequence, without its first token.", _TOKEN_TIMES
        )
        self.queue_time = self._histogram("queue_time_seconds", "From arrival until a sequence runs.", _LATENCIES)
        self.request_duration = self._histogram(
            "request_duration_seconds", "From arrival to the end, of requests that ended well.", _LATENCIES
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Of requests that were answered.", _TOKENS)
        self.output_tokens = self._histogram("request_output_tokens", "Of requests that were answered.", _TOKENS)
        for protocol, outcome in itertools.product(Protocol, OUTCOMES):
            self.requests.labels(protocol.value, outcome)
        registry.register(_EngineCollector(engine, model))
        prometheus_client.ProcessCollector(registry=registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"jetserve_{name}", text, ("protocol",), buckets=buckets, registry=self._registry)
        for protocol in Protocol:
            histogram.labels(protocol.value)
        return histogram

    def text(self) -> bytes:
        """In Prometheus' text format, `CONTENT_TYPE`."""
        return prometheus_client.generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine when it is asked, so that no gauge is ever old."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._compiled_before = compilations.count()

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        info = {"version": jetserve.__version__, "model": self._model}
        yield InfoMetricFamily("jetserve", "What serves.", value=info)
        for name, text, value in (
            ("ready", "1 if new requests are taken.", self._engine.is_ready),
            ("sequences_running", "Sequences that hold pages.", stats.running),
            ("sequences_waiting", "Sequences in the queue.", stats.waiting),
            ("kv_pages_used", "Pages of the KV cache that sequences hold.", stats.pages_used),
            ("kv_pages_capacity", "Pages of the KV cache in all.", stats.pages_total),
        ):
            yield GaugeMetricFamily(f"jetserve_{name}", text, value=value)
        compiled = compilations.count() - self._compiled_before
        for name, text, value in (
            ("engine_steps", "Steps computed.", stats.steps),
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("output_tokens", "Tokens sampled.", stats.output_tokens),
            ("prefix_cache_hit_tokens", "Tokens found in the prefix cache.", stats.prefix_cache_hit_tokens),
            ("preemptions", "Sequences that lost their pages to another.", stats.preemptions),
            ("compilations_after_warmup", "Programs that a request had to wait for; expected 0.", compiled),
        ):
            yield CounterMetricFamily(f"jetserve_{name}", text, value=value)
        finished = CounterMetricFamily("jetserve_sequences_finished", "By finish reason.", labels=["reason"])
        for reason in FinishReason:
            finished.add_metric([reason.value], stats.finished.get(reason, 0))
        yield finished
