"""An engine behind asyncio: one worker thread steps it, any number of coroutines wait for what it makes.

Owns the worker, the queue in front of the engine, and who waits for what. Knows nothing of networks.

Why no lock guards the engine: only the worker calls it, from the first request to the last, but for `prepare` and
`is_prepared`, which are made for any thread: guides are compiled in threads of their own, before the worker sees the
request. What the two sides share is the `_Shared` state, read and written under its condition: requests come in and
consumers say that they left through it. Results go the other way by `mailbox.Post`. `stats` reads a frozen snapshot
that the worker replaces as a whole. The worker never waits for a consumer, so a slow reader delays nobody; what piles
up for it is no more than its own answer.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import enum
import functools
import logging
import threading
from collections.abc import Iterable

from jetserve.engine.engine import Engine
from jetserve.engine.mailbox import Item, Mailbox, Outputs, Post
from jetserve.engine.scheduler import QueueFullError
from jetserve.types import EngineStats, FinishReason, Request, RequestOutput, Usage

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Steps that fail in a row before the engine is given up."""
STOP_SECONDS = 10.0
"""How long `stop` and the end of `drain` wait for a step that is under way."""
PREPARING_THREADS = 2


class DrainingError(RuntimeError):
    """The engine takes no new requests, because it is about to stop; another one may."""


class EngineDeadError(RuntimeError):
    """The engine has failed for good, or does not end a step; only a new process helps."""


class State(enum.Enum):
    """Life goes one way: RUNNING, DRAINING, STOPPED; or from either of the first two to DEAD."""

    RUNNING = enum.auto()
    DRAINING = enum.auto()
    STOPPED = enum.auto()
    DEAD = enum.auto()


class _Consumer:
    """Who waits for one request. `remaining`, the samples that have not ended, belongs to the worker."""

    def __init__(self, request: Request, post: Post) -> None:
        self.request = request
        self.post = post
        self.mailbox = Mailbox()
        self.remaining = request.sampling.n


@dataclasses.dataclass(eq=False)
class _Shared:
    """What both sides see, under `condition`.

    `open`: consumers that have not been sent their last item; `preparing`: how many have a thread at work for them;
    `inbox`: those that are ready for the worker, which has not seen them yet; `left`: those whose caller has gone.
    `cancel_all`: the time that `drain` gave is over.
    """

    condition: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    state: State = State.RUNNING
    error: str = ""
    open: set[_Consumer] = dataclasses.field(default_factory=set)
    preparing: int = 0
    inbox: collections.deque[_Consumer] = dataclasses.field(default_factory=collections.deque)
    left: list[_Consumer] = dataclasses.field(default_factory=list)
    cancel_all: bool = False


class AsyncEngine:
    """Serves many callers at once from one engine. The worker starts with it and runs until `stop`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._shared = _Shared()
        self._stats = engine.stats()
        self._posts: dict[asyncio.AbstractEventLoop, Post] = {}  # under the shared condition
        self._consumers: dict[str, _Consumer] = {}  # by request id, those in the engine; the worker's own
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._failures = 0  # in a row; the worker's own
        self._preparers = concurrent.futures.ThreadPoolExecutor(PREPARING_THREADS, "jetserve-prepare")
        self._thread = threading.Thread(target=self._work, name="jetserve-engine", daemon=True)
        self._thread.start()

    # What callers do, on any event loop.

    def generate(self, request: Request) -> Outputs:
        """Takes a request, to be answered by what is returned. Called on the event loop that reads the answer.

        Raises, here or from what is returned:
          ValueError: for a prompt that cannot fit, token ids outside the vocabulary, a guide that cannot be used, or a
            request id in use.
          QueueFullError: if `EngineConfig.max_queue` others wait.
          DrainingError: if the engine is about to stop, or stopped before the request had begun.
          EngineDeadError: if it has failed for good, now or before.
        """
        consumer = _Consumer(request, self._post_to(asyncio.get_running_loop()))
        self._enter(consumer)
        return Outputs(consumer.mailbox, functools.partial(self._leave, consumer))

    def _post_to(self, loop: asyncio.AbstractEventLoop) -> Post:
        with self._shared.condition:
            if loop not in self._posts:
                self._posts = {other: post for other, post in self._posts.items() if not other.is_closed()}
                self._posts[loop] = Post(loop, lambda: len(self._shared.open))
            return self._posts[loop]

    def _enter(self, consumer: _Consumer) -> None:
        shared, limit = self._shared, self.engine.config.max_queue
        with shared.condition:
            self._refuse_unless_running()
            if len(shared.inbox) + shared.preparing >= limit:
                raise QueueFullError(
                    f"the queue is full: {limit} requests arrived since the last step; expected at most {limit}"
                    " (max_queue). Try again later"
                )
            shared.open.add(consumer)
            if self.engine.is_prepared(consumer.request):
                shared.inbox.append(consumer)
                shared.condition.notify_all()
            else:
                shared.preparing += 1
                preparing = self._preparers.submit(self.engine.prepare, consumer.request)
                preparing.add_done_callback(functools.partial(self._take_prepared, consumer))

    def _take_prepared(self, consumer: _Consumer, preparing: "concurrent.futures.Future[None]") -> None:
        """Hands a request on to the worker, or refuses it. In a thread that prepares."""
        shared = self._shared
        if not preparing.cancelled() and (error := preparing.exception()) is not None:
            self._refuse(consumer, error)
        with shared.condition:
            shared.preparing -= 1
            if consumer in shared.open:  # else it is over: refused, its caller has left, or the engine has stopped
                shared.inbox.append(consumer)
                shared.condition.notify_all()

    def _refuse_unless_running(self) -> None:
        if self._shared.state is State.DEAD:
            raise EngineDeadError(self._shared.error)
        if self._shared.state is not State.RUNNING:
            raise DrainingError("the server is about to stop and takes no new requests; try another one")

    def _leave(self, consumer: _Consumer) -> None:
        shared = self._shared
        with shared.condition:
            if consumer in shared.open:
                shared.left.append(consumer)
                shared.condition.notify_all()

    @property
    def state(self) -> State:
        """Where in its life the engine is."""
        return self._shared.state

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self.state is State.RUNNING

    @property
    def is_live(self) -> bool:
        """Whether requests are served, be it only those that are there."""
        return self.state in (State.RUNNING, State.DRAINING)

    def stats(self) -> EngineStats:
        """State and totals after the last step; requests that arrived since count as waiting."""
        stats, arrived = self._stats, len(self._shared.inbox) + self._shared.preparing
        return dataclasses.replace(stats, waiting=stats.waiting + arrived)

    async def wait_until_ended(self) -> None:
        """Returns when the worker has ended: after `stop`, or because the engine has failed for good."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def drain(self, grace_seconds: float) -> None:
        """Refuses new requests, gives those that are there `grace_seconds` to finish, then cancels the rest.

        Returns when none is left, whichever way, or when a step has not ended `STOP_SECONDS` after that; the worker
        still runs, for `stop` to end.
        """
        shared = self._shared
        with shared.condition:
            if shared.state is State.RUNNING:
                shared.state = State.DRAINING
        if not await asyncio.to_thread(self._wait_until_idle, grace_seconds):
            with shared.condition:
                shared.cancel_all = True
                shared.condition.notify_all()
            await asyncio.to_thread(self._wait_until_idle, STOP_SECONDS)

    def _wait_until_idle(self, seconds: float) -> bool:
        """Whether no request is left, or the engine is not live any more, within `seconds`."""
        with self._shared.condition:
            return self._shared.condition.wait_for(lambda: not self._shared.open or not self.is_live, seconds)

    async def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """Ends the worker after the step that is under way; requests that are still there end with CANCELLED.

        A step that takes longer than `timeout_seconds` is left to itself, and its callers get EngineDeadError.
        """
        with self._shared.condition:
            if self._shared.state is not State.DEAD:
                self._shared.state = State.STOPPED
            self._shared.condition.notify_all()
        self._preparers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._thread.join, timeout_seconds)
        if self._thread.is_alive():
            self._die(f"the engine did not end a step in {timeout_seconds:g} seconds")

    # What the worker does.

    def _work(self) -> None:
        try:
            while self._take_commands():
                self._step()
            self._cancel(list(self._consumers.values()))
            self._finish_all(DrainingError, "the server stopped before the request had begun; try another one")
        except BaseException as error:
            logger.exception("the engine has failed for good")
            self._die(f"the engine has failed for good: {type(error).__name__}: {error}")
        finally:
            self._ended.set_result(None)

    def _take_commands(self) -> bool:
        """Waits for something to do, then lets requests in and out of the engine; False if it is to stop."""
        shared = self._shared
        with shared.condition:
            shared.condition.wait_for(lambda: self._has_commands or not self.is_live or self.engine.has_work)
            if not self.is_live or not self._has_commands:
                return self.is_live
            left = set(shared.left)
            shared.open -= left
            cancelled = set(shared.open) if shared.cancel_all else set()
            wanted = shared.open - cancelled
            arrived = [consumer for consumer in shared.inbox if consumer in wanted]
            shared.inbox.clear()
            shared.left.clear()
            shared.cancel_all = False
        for consumer in cancelled:
            if not self._is_in_engine(consumer):
                self._deliver([(consumer, _never_began(consumer, index)) for index in range(consumer.remaining)])
                self._close([consumer])
        for consumer in arrived:
            self._submit(consumer)
        self._cancel(consumer for consumer in left | cancelled if self._is_in_engine(consumer))
        self._stats = self.engine.stats()
        with shared.condition:
            shared.condition.notify_all()
        return True

    @property
    def _has_commands(self) -> bool:
        return bool(self._shared.inbox or self._shared.left or self._shared.cancel_all)

    def _is_in_engine(self, consumer: _Consumer) -> bool:
        return self._consumers.get(consumer.request.request_id) is consumer

    def _submit(self, consumer: _Consumer) -> None:
        """Hands a request to the engine; whatever that raises is its caller's alone."""
        request_id = consumer.request.request_id
        try:
            if request_id in self._consumers:
                raise ValueError(f"request id {request_id!r} is in use; give every request an id of its own")
            self.engine.submit(consumer.request)
        except Exception as error:
            if not isinstance(error, (ValueError, QueueFullError)):
                logger.exception("request %s could not be submitted", request_id)
            self._refuse(consumer, error)
        else:
            self._consumers[request_id] = consumer

    def _refuse(self, consumer: _Consumer, error: BaseException) -> None:
        """Raises an error where the answer was to be read."""
        self._deliver([(consumer, error)])
        self._close([consumer])

    def _cancel(self, consumers: Iterable[_Consumer]) -> None:
        """Ends requests and frees their pages; consumers that still listen are sent the CANCELLED outputs."""
        outputs: list[RequestOutput] = []
        for consumer in consumers:
            outputs += self.engine.cancel(consumer.request.request_id)
        self._stats = self.engine.stats()
        self._distribute(outputs)

    def _step(self) -> None:
        if not self.engine.has_work:
            return
        try:
            outputs = self.engine.step()
            self._failures = 0
        except Exception as error:
            logger.exception("a step failed; the requests in the engine end with an error")
            outputs = self.engine.fail(f"the engine failed: {type(error).__name__}: {error}")
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                self._distribute(outputs)
                raise
        self._stats = self.engine.stats()
        self._distribute(outputs)

    def _distribute(self, outputs: Iterable[RequestOutput]) -> None:
        """Sends each output to its consumer, if there still is one, and the end after the last one."""
        items: list[tuple[_Consumer, Item]] = []
        ended = []
        for output in outputs:
            consumer = self._consumers.get(output.request_id)
            if consumer is None:
                continue
            items.append((consumer, output))
            if output.finished:
                consumer.remaining -= 1
                if consumer.remaining == 0:
                    del self._consumers[output.request_id]
                    ended.append(consumer)
        self._deliver(items)
        if ended:
            self._close(ended)

    def _close(self, consumers: Iterable[_Consumer]) -> None:
        """Sends the end to consumers and forgets them."""
        consumers = list(consumers)
        self._deliver([(consumer, StopAsyncIteration()) for consumer in consumers])
        with self._shared.condition:
            self._shared.open.difference_update(consumers)
            self._shared.condition.notify_all()

    def _deliver(self, items: Iterable[tuple[_Consumer, Item]]) -> None:
        """Sends items to their consumers, in order, without waiting."""
        by_post: collections.defaultdict[Post, list[tuple[Mailbox, Item]]] = collections.defaultdict(list)
        for consumer, item in items:
            by_post[consumer.post].append((consumer.mailbox, item))
        for post, its_items in by_post.items():
            try:
                post.deliver(its_items)
            except RuntimeError:  # the loop is closed, and its callers are gone with it
                with self._shared.condition:
                    self._shared.left += [consumer for consumer in self._shared.open if consumer.post is post]

    def _finish_all(self, error: type[Exception], message: str) -> None:
        """Tells every consumer that is left that there will be nothing more."""
        with self._shared.condition:
            left = list(self._shared.open)
            self._shared.open.clear()
            self._shared.inbox.clear()
            self._shared.condition.notify_all()
        self._deliver([(consumer, error(message)) for consumer in left])

    def _die(self, error: str) -> None:
        """Ends all that waits, now and later, with `error`. Once the state is DEAD nothing enters any more."""
        with self._shared.condition:
            self._shared.state = State.DEAD
            self._shared.error = error
        self._finish_all(EngineDeadError, error)


def _never_began(consumer: _Consumer, index: int) -> RequestOutput:
    """The only output of a sample that was cancelled before the engine had it."""
    return RequestOutput(
        request_id=consumer.request.request_id,
        index=index,
        text="",
        token_ids=(),
        finish_reason=FinishReason.CANCELLED,
        usage=Usage(prompt_tokens=len(consumer.request.prompt_token_ids), output_tokens=0),
    )
