"""From what became of every request to the numbers of a report.

Owns the definitions. Times are seconds since the first arrival; reports are in milliseconds.

- Time to first token (TTFT): from the arrival that was planned to the first text or token. A client that is late to
  send, or a queue, is part of it.
- Time per output token (TPOT): from the first token to the last over the tokens after the first, so only for answers
  of two tokens or more.
- Inter-token latency (ITL): the gaps between messages that bring something, of all answers together. A server may put
  several tokens into one message.
- Latency: from the arrival that was planned to the last token.
- Throughput: what was completed, over the time from the first arrival to the end of the last request. A request that
  failed is in no latency and no throughput, and meets no goal.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jetserve.loadtest.config import Goals

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What became of one request.

    `arrivals`: when each message with something new came, in order. `ended`: when the answer, or the failure, was
    complete. `failure`: its kind, None for an answer that is whole.
    """

    index: int
    scheduled: float
    sent: float
    arrivals: tuple[float, ...]
    ended: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None
    message: str = ""

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0] - self.scheduled if self.arrivals else None

    @property
    def latency(self) -> float:
        return (self.arrivals[-1] if self.arrivals else self.ended) - self.scheduled

    @property
    def tpot(self) -> float | None:
        if self.output_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


def meets(record: Record, goals: Goals) -> bool:
    """Whether a request was answered as well as wanted. An answer of one token has no TPOT to miss."""
    if record.failure is not None:
        return False
    pairs = ((record.ttft, goals.ttft_ms), (record.tpot, goals.tpot_ms), (record.latency, goals.latency_ms))
    return all(found is None or goal is None or 1e3 * found <= goal for found, goal in pairs)


def summary_ms(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles, linear between the nearest two, in milliseconds; None of nothing."""
    values = [1e3 * value for value in seconds if value is not None]
    if not values:
        return None
    cuts = np.percentile(values, PERCENTILES)
    return {"mean": float(np.mean(values)), **{f"p{p}": float(cut) for p, cut in zip(PERCENTILES, cuts, strict=True)}}


def report(records: Sequence[Record], goals: Goals) -> dict[str, Any]:
    """The whole report, as JSON takes it. `records` are at least one."""
    good = [record for record in records if record.failure is None]
    seconds = max(record.ended for record in records) - min(record.scheduled for record in records)

    def rate(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    result: dict[str, Any] = {
        "requests": len(records),
        "completed": len(good),
        "failed": len(records) - len(good),
        "failures": dict(collections.Counter(r.failure for r in records if r.failure is not None)),
        "seconds": seconds,
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "output_tokens": sum(record.output_tokens for record in good),
        "requests_per_second": rate(len(good)),
        "prompt_tokens_per_second": rate(sum(record.prompt_tokens for record in good)),
        "output_tokens_per_second": rate(sum(record.output_tokens for record in good)),
        "ttft_ms": summary_ms(record.ttft for record in good),
        "tpot_ms": summary_ms(record.tpot for record in good),
        "itl_ms": summary_ms(gap for record in good for gap in record.gaps),
        "latency_ms": summary_ms(record.latency for record in good),
    }
    if goals.are_set:
        count = sum(meets(record, goals) for record in records)
        result["goodput"] = {
            "goals": {name: goal for name, goal in dataclasses.asdict(goals).items() if goal is not None},
            "share": count / len(records),
            "requests_per_second": rate(count),
        }
    return result
