"""Between the engine's worker and the coroutines that read answers: what has come and was not read yet.

Owns the way from one thread to the other, how outputs are joined and read, and how often readers are woken.

To wake an event loop takes the worker's time, and to wake a reader and send its client a message takes a few tenths of
a millisecond of the loop's, which in Python is the worker's too. So readers take turns: within a gap that grows with
the number of requests each is woken once, and finds all that came meanwhile in one output. A few are woken at a time,
those that have waited longest, so that the worker finds the interpreter free when it comes back from the devices. The
first output of a request and the last of a sample never wait, and nothing does where steps take longer than the gap.
"""

import asyncio
import collections
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from jetserve.types import RequestOutput

GAP_SECONDS_A_REQUEST = 0.002
MAX_GAP_SECONDS = 0.05
TURNS_A_GAP = 5

Item = RequestOutput | BaseException
"""What a reader is sent: an output, or what to raise after the last one."""


def gap_seconds(requests: int) -> float:
    """In which each reader has its turn, where so many requests are open."""
    return min(max(1, requests) * GAP_SECONDS_A_REQUEST, MAX_GAP_SECONDS)


class Mailbox:
    """The outputs of one request that wait to be read, and then its end. Filled by a `Post`, read on the same loop."""

    def __init__(self) -> None:
        self._pending: dict[int, list[RequestOutput]] = {}  # by sample
        self._end: BaseException | None = None
        self._news = asyncio.Event()
        self._has_sent = False  # the sender's own

    def is_urgent(self, item: Item) -> bool:
        """Whether the reader is to be woken at once for an item that is sent now."""
        is_first, self._has_sent = not self._has_sent, True
        return is_first or isinstance(item, BaseException) or item.finished

    def put(self, item: Item) -> None:
        """Keeps an item. Does not wake the reader, who finds it if it is awake."""
        if isinstance(item, BaseException):
            self._end = self._end or item
        else:
            self._pending.setdefault(item.index, []).append(item)

    def wake(self) -> None:
        """Lets `get` go on."""
        self._news.set()

    async def get(self) -> RequestOutput:
        """All that is new of one sample, in one output. At the end raises what came for it, again at every call."""
        while not self._pending:
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()
        return join(self._pending.pop(next(iter(self._pending))))


class Outputs:
    """The outputs of all samples of one request, as they come, joined where several wait: `async for`, in one task.

    `aclose` ends the request before the next step and frees its pages, to no effect on one that is over. One that is
    dropped unread runs on to its end, so wrap it in `contextlib.aclosing`.
    """

    def __init__(self, mailbox: Mailbox, leave: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._leave = leave
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises DrainingError or EngineDeadError if the engine ends first, and what `Engine.submit` raises."""
        if self._is_over:
            raise StopAsyncIteration
        try:
            return await self._mailbox.get()
        except BaseException:  # the end, or the task that reads is cancelled
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """See the class."""
        self._is_over = True
        self._leave()


Delivery = Sequence[tuple[Mailbox, Item]]
"""Items and whom they are for, in order."""


class Post:
    """Brings items to the mailboxes of one event loop. `requests` says how many are open now.

    Who sends hands over all that one step made at once; it is sorted on the loop, while devices compute the next step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, requests: Callable[[], int]) -> None:
        self._loop = loop
        self._requests = requests
        self._sent: collections.deque[Delivery] = collections.deque()  # not sorted yet
        self._waiting: dict[Mailbox, None] = {}  # those with something, who waits longest first; the loop's own
        self._last_turn = -math.inf  # in the loop's time; the loop's own
        self._lock = threading.Lock()  # of what both threads change:
        self._is_arranged = False  # the next turn

    def deliver(self, items: Delivery) -> None:
        """Sends items, without waiting, from any thread.

        Raises:
          RuntimeError: if the loop is closed, and its readers are gone with it.
        """
        if self._loop.is_closed():
            raise RuntimeError("the event loop is closed")
        urgent = [mailbox for mailbox, item in items if mailbox.is_urgent(item)]
        self._sent.append(items)
        arranges = len(urgent) < len(items) and self._arrange()
        if urgent or arranges:
            self._loop.call_soon_threadsafe(self._take, urgent, arranges)

    def _arrange(self) -> bool:
        """Whether who asks is to see to the next turn, because nobody does yet."""
        with self._lock:
            arranges = not self._is_arranged
            self._is_arranged = True
        return arranges

    def _take(self, urgent: Iterable[Mailbox], arranges: bool) -> None:
        self._sort()
        self._wake(urgent)
        if arranges:
            self._turn_when_due()

    def _turn_when_due(self) -> None:
        due = self._last_turn + gap_seconds(self._requests()) / TURNS_A_GAP
        if due <= self._loop.time():
            self._turn()
        else:
            self._loop.call_at(due, self._turn)

    def _turn(self) -> None:
        with self._lock:
            self._is_arranged = False
        self._sort()
        now, requests = self._loop.time(), self._requests()
        share = min((now - self._last_turn) / gap_seconds(requests), 1.0)
        self._last_turn = now
        few = math.ceil(share * max(requests, len(self._waiting)))
        self._wake(list(itertools.islice(self._waiting, few)))
        if self._waiting and self._arrange():
            self._turn_when_due()

    def _sort(self) -> None:
        while self._sent:
            for mailbox, item in self._sent.popleft():
                mailbox.put(item)
                self._waiting.setdefault(mailbox)

    def _wake(self, mailboxes: Iterable[Mailbox]) -> None:
        for mailbox in mailboxes:
            self._waiting.pop(mailbox, None)
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
