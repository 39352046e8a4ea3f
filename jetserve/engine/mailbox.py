"""Between the engine's worker and the coroutine that reads an answer: what has come and was not read yet.

Owns how outputs are joined and how often a reader is woken. Touched by one event loop alone.

Waking a reader and sending its client a message takes a few tenths of a millisecond, of which an event loop has only so
many in a second. So each reader is woken at most once in a gap that grows with the number of requests, all in the same
moment, and finds all that came meanwhile in one output. The first output and the last of a sample never wait, and
nothing does where steps take longer than the gap.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence

from jetserve.types import RequestOutput

GAP_SECONDS_A_REQUEST = 0.001
MAX_GAP_SECONDS = 0.05


def gap_seconds(requests: int) -> float:
    """How often the readers of so many requests are woken, at most."""
    return min(max(1, requests) * GAP_SECONDS_A_REQUEST, MAX_GAP_SECONDS)


class Mailbox:
    """The outputs of one request that wait to be read, and then its end. `requests` says how many there are now."""

    def __init__(self, loop: asyncio.AbstractEventLoop, requests: Callable[[], int]) -> None:
        self._loop = loop
        self._requests = requests
        self._pending: dict[int, list[RequestOutput]] = {}  # by sample
        self._end: BaseException | None = None
        self._news = asyncio.Event()
        self._woken = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: RequestOutput) -> None:
        """Keeps an output, and wakes the reader now or in a while."""
        self._pending.setdefault(output.index, []).append(output)
        gap = gap_seconds(self._requests())
        began = self._loop.time() // gap * gap  # the same for all, so that they are woken together
        if output.finished or self._woken < began:
            self._wake()
        elif self._timer is None:
            self._timer = self._loop.call_at(began + gap, self._wake)

    def end(self, reason: BaseException) -> None:
        """Lets `get` raise `reason` once all outputs are read; the first one given counts."""
        self._end = self._end or reason
        self._wake()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._woken = self._loop.time()
        self._news.set()

    async def get(self) -> RequestOutput:
        """All that is new of one sample, in one output. Raises what `end` was given."""
        while not self._pending:
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()
        return join(self._pending.pop(next(iter(self._pending))))


def join(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Outputs of one sample that follow each other, as one."""
    if len(outputs) == 1:
        return outputs[0]
    return dataclasses.replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )
