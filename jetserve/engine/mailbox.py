"""Between the engine's worker and the coroutine that reads an answer: what has come and was not read yet.

Owns how outputs are joined and how often a reader is woken. Touched by one event loop alone.

A step of a small model takes less time than waking every reader and sending every one a message, so both happen at most
once in `GAP_SECONDS` a request, with all that came meanwhile. The first output and the last of a sample never wait,
and with steps that take longer than that none does. A reader that is slower finds more in one output.
"""

import asyncio
import dataclasses
import math
from collections.abc import Sequence

from jetserve.types import RequestOutput

GAP_SECONDS = 0.02


class Mailbox:
    """The outputs of one request that wait to be read, and then its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: dict[int, list[RequestOutput]] = {}  # by sample
        self._end: BaseException | None = None
        self._news = asyncio.Event()
        self._woken = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: RequestOutput) -> None:
        """Keeps an output, and wakes the reader now or in a while."""
        self._pending.setdefault(output.index, []).append(output)
        wait = 0.0 if output.finished else self._woken + GAP_SECONDS - self._loop.time()
        if wait <= 0:
            self._wake()
        elif self._timer is None:
            self._timer = self._loop.call_later(wait, self._wake)

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
