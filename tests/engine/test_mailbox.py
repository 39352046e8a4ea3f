"""What waits for a reader: joined in order, and the reader woken in turn, but never late for the first or the last."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from jetserve.engine.mailbox import MAX_GAP_SECONDS, TURNS_A_GAP, Mailbox, Post, gap_seconds, join
from jetserve.types import FinishReason, RequestOutput, TokenLogprobs, Usage

GAP_SECONDS = gap_seconds(20)


def output_of(token: int, index: int = 0, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        index=index,
        text=f"<{token}>",
        token_ids=(token,),
        finish_reason=reason,
        usage=Usage(prompt_tokens=1, output_tokens=token),
        logprobs=(TokenLogprobs(token_id=token, logprob=-1.0, top=()),),
    )


class HeldLoop:
    """An event loop's clock, by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.calls = 0

    def time(self) -> float:
        return self.now

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        self.calls += 1
        callback(*args)

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        self.timers.append((when, callback))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer[0] <= self.now]
        self.timers = [timer for timer in self.timers if timer not in due]
        for _, callback in due:
            callback()


class Scene:
    """A loop, the post to it, and two readers that were woken for their first outputs and have read them."""

    def __init__(self) -> None:
        self.loop = HeldLoop()
        self.post = Post(self.loop, lambda: 20)  # type: ignore[arg-type]
        self.readers = Mailbox(), Mailbox()
        self.post.deliver([(reader, output_of(0)) for reader in self.readers])
        assert self.woken() == [True, True]

    def woken(self) -> list[bool]:
        """Which readers have been woken since this was last asked; they read what there is."""
        woken = []
        for reader in self.readers:
            woken.append(reader._news.is_set())
            reader._news.clear()
            if woken[-1]:
                reader._pending.clear()
        return woken


def test_outputs_of_a_sample_become_one() -> None:
    joined = join([output_of(1), output_of(2), output_of(3, reason=FinishReason.LENGTH)])
    assert (joined.text, joined.token_ids, joined.finish_reason) == ("<1><2><3>", (1, 2, 3), FinishReason.LENGTH)
    assert [entry.token_id for entry in joined.logprobs] == [1, 2, 3]
    assert joined.usage.output_tokens == 3


def test_a_slow_reader_finds_one_output_a_sample_and_then_the_end() -> None:
    async def scene() -> None:
        mailbox = Mailbox()
        for token in range(5):
            mailbox.put(output_of(token, index=token % 2))
        mailbox.put(KeyError("over"))
        mailbox.put(StopAsyncIteration())
        assert [(await mailbox.get()).token_ids for _ in range(2)] == [(0, 2, 4), (1, 3)]
        for _ in range(2):
            with pytest.raises(KeyError, match="over"):
                await mailbox.get()

    asyncio.run(scene())


def test_readers_take_turns_and_find_all_that_came() -> None:
    loop = HeldLoop()
    post = Post(loop, lambda: 20)  # type: ignore[arg-type]
    readers = [Mailbox() for _ in range(20)]
    woken: list[list[int]] = []

    def send(token: int) -> None:
        post.deliver([(reader, output_of(token)) for reader in readers])

    def note() -> None:
        woken.append([number for number, reader in enumerate(readers) if reader._news.is_set()])
        for reader in readers:
            reader._news.clear()

    send(0)
    note()
    send(1)
    note()
    assert woken == [[*range(20)]] * 2  # the first, and then there was no turn for long
    for reader in readers:
        reader._pending.clear()
    calls = loop.calls
    for token in range(2, 2 + TURNS_A_GAP):
        send(token)
        loop.advance(GAP_SECONDS / TURNS_A_GAP)
        note()
    assert loop.calls == calls + 1
    assert [len(each) for each in woken[2:]] == [20 // TURNS_A_GAP] * TURNS_A_GAP
    assert [number for each in woken[2:] for number in each] == [*range(20)]
    assert [output.token_ids for output in readers[0]._pending[0]] == [(token,) for token in range(2, 2 + TURNS_A_GAP)]


def test_what_nobody_reads_ends_the_turns() -> None:
    loop = HeldLoop()
    post = Post(loop, lambda: 0)  # type: ignore[arg-type]
    reader = Mailbox()
    for token in range(3):
        post.deliver([(reader, output_of(token))])
    loop.advance(GAP_SECONDS)
    assert not loop.timers


def test_nothing_waits_where_steps_are_slow() -> None:
    scene = Scene()
    for token in range(1, 4):
        scene.loop.advance(2 * GAP_SECONDS)
        scene.post.deliver([(scene.readers[1], output_of(token))])
        assert scene.woken() == [False, True]


@pytest.mark.parametrize("item", [output_of(3, reason=FinishReason.STOP), StopAsyncIteration(), KeyError("over")])
def test_the_last_wakes_at_once_and_the_others_go_on_waiting(item: RequestOutput | BaseException) -> None:
    scene = Scene()
    scene.post.deliver([(reader, output_of(1)) for reader in scene.readers])
    assert scene.woken() == [True, True]
    scene.post.deliver([(reader, output_of(2)) for reader in scene.readers])
    scene.post.deliver([(scene.readers[0], item)])
    assert scene.woken() == [True, False]
    scene.loop.advance(GAP_SECONDS)
    assert scene.woken() == [False, True]


def test_threads_may_deliver_while_a_loop_reads() -> None:
    async def scene() -> list[int]:
        mailbox, post = Mailbox(), Post(asyncio.get_running_loop(), lambda: 1)

        def write() -> None:
            for token in range(1000):
                post.deliver([(mailbox, output_of(token))])
            post.deliver([(mailbox, StopAsyncIteration())])

        writing = asyncio.create_task(asyncio.to_thread(write))
        tokens: list[int] = []
        with contextlib.suppress(StopAsyncIteration):
            while True:
                tokens += (await mailbox.get()).token_ids
        await writing
        return tokens

    assert asyncio.run(asyncio.wait_for(scene(), 60)) == list(range(1000))


def test_a_closed_loop_is_told_of() -> None:
    loop = asyncio.new_event_loop()
    post = Post(loop, lambda: 1)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        post.deliver([(Mailbox(), output_of(1))])


def test_the_gap_grows_with_the_requests_up_to_a_limit() -> None:
    assert [gap_seconds(requests) for requests in (0, 1, 20, 10_000)] == [0.002, 0.002, 0.04, MAX_GAP_SECONDS]
