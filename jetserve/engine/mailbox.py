"""Between the engine's worker and the coroutines that read answers: what has come and was not read yet.

Owns the way from one thread to the other, how outputs are joined, and how often readers are woken.

To wake an event loop takes the worker's time, and to wake a reader and send its client a message takes a few tenths of
a millisecond of the loop's, which in Python is the worker's too. So readers are woken in rounds, all of them together,
with a gap between that grows with the number of requests; each finds all that came meanwhile in one output. The first
output of a request and the last of a sample never wait, and nothing does where steps take longer than the gap.
"""

import asyncio
import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Sequence

from jetserve.types import RequestOutput

GAP_SECONDS_A_REQUEST = 0.002
MAX_GAP_SECONDS = 0.05

Item = RequestOutput | BaseException
"""What a reader is sent: an output, or what to raise after the last one."""


def gap_seconds(requests: int) -> float:
    """Between two rounds, at least, where so many requests are open."""
    return min(max(1, requests) * GAP_SECONDS_A_REQUEST, MAX_GAP_SECONDS)


class Mailbox:
    """The outputs of one request that wait to be read, and then its end. Filled by any thread, read on one loop."""

    def __init__(self) -> None:
        self._arrived: collections.deque[Item] = collections.deque()
        self._pending: dict[int, list[RequestOutput]] = {}  # by sample; the reader's own
        self._end: BaseException | None = None  # the reader's own
        self._news = asyncio.Event()
        self._is_empty_yet = True

    def put(self, item: Item) -> bool:
        """Keeps an item, from any thread, and says whether the reader is to be woken at once."""
        is_first, self._is_empty_yet = self._is_empty_yet, False
        self._arrived.append(item)
        return is_first or isinstance(item, BaseException) or item.finished

    def wake(self) -> None:
        """Lets `get` go on, on its loop, if there is something for it."""
        if self._arrived:
            self._news.set()

    async def get(self) -> RequestOutput:
        """All that is new of one sample, in one output. At the end raises what came for it, again at every call."""
        while True:
            self._sort()
            if self._pending:
                return join(self._pending.pop(next(iter(self._pending))))
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()

    def _sort(self) -> None:
        while self._arrived:
            item = self._arrived.popleft()
            if isinstance(item, BaseException):
                self._end = self._end or item
            else:
                self._pending.setdefault(item.index, []).append(item)


class Post:
    """Brings items to the mailboxes of one event loop. `requests` says how many are open now."""

    def __init__(self, loop: asyncio.AbstractEventLoop, requests: Callable[[], int]) -> None:
        self._loop = loop
        self._requests = requests
        self._last_round = -math.inf  # in the loop's time; the loop's own
        self._lock = threading.Lock()  # of what both threads touch:
        self._waiting: set[Mailbox] = set()  # for the next round
        self._is_arranged = False  # that round

    def deliver(self, items: Iterable[tuple[Mailbox, Item]]) -> None:
        """Puts items into mailboxes, in order, without waiting, from any thread.

        Raises:
          RuntimeError: if the loop is closed, and its readers are gone with it.
        """
        if self._loop.is_closed():
            raise RuntimeError("the event loop is closed")
        urgent: set[Mailbox] = set()
        others: set[Mailbox] = set()
        for mailbox, item in items:
            (urgent if mailbox.put(item) else others).add(mailbox)
        with self._lock:
            self._waiting |= others
            arranges = bool(self._waiting) and not self._is_arranged
            self._is_arranged |= arranges
        if urgent or arranges:
            self._loop.call_soon_threadsafe(self._take, urgent, arranges)

    def _take(self, urgent: Iterable[Mailbox], arranges: bool) -> None:
        for mailbox in urgent:
            mailbox.wake()
        if arranges:
            due = self._last_round + gap_seconds(self._requests())
            if due <= self._loop.time():
                self._go_round()
            else:
                self._loop.call_at(due, self._go_round)

    def _go_round(self) -> None:
        self._last_round = self._loop.time()
        with self._lock:
            waiting, self._waiting, self._is_arranged = self._waiting, set(), False
        for mailbox in waiting:
            mailbox.wake()


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
