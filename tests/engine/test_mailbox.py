"""What waits for a reader: joined in order, and the reader woken seldom, but never late for the first or the last."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jetserve.engine.mailbox import MAX_GAP_SECONDS, Mailbox, gap_seconds, join
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
        self.now = 100.125 * GAP_SECONDS
        self.timers: list[HeldTimer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        self.timers.append(HeldTimer(when, callback))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.when <= self.now]:
            self.timers.remove(timer)
            if not timer.is_cancelled:
                timer.callback()


class HeldTimer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when, self.callback, self.is_cancelled = when, callback, False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_outputs_of_a_sample_become_one() -> None:
    joined = join([output_of(1), output_of(2), output_of(3, reason=FinishReason.LENGTH)])
    assert (joined.text, joined.token_ids, joined.finish_reason) == ("<1><2><3>", (1, 2, 3), FinishReason.LENGTH)
    assert [entry.token_id for entry in joined.logprobs] == [1, 2, 3]
    assert joined.usage.output_tokens == 3


def test_a_slow_reader_finds_one_output_a_sample_and_then_the_end() -> None:
    async def scene() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), lambda: 1)
        for token in range(5):
            mailbox.put(output_of(token, index=token % 2))
        mailbox.end(KeyError("over"))
        mailbox.end(StopAsyncIteration())
        assert [(await mailbox.get()).token_ids for _ in range(2)] == [(0, 2, 4), (1, 3)]
        for _ in range(2):
            with pytest.raises(KeyError, match="over"):
                await mailbox.get()

    asyncio.run(scene())


def test_a_reader_is_woken_at_once_and_then_once_a_gap() -> None:
    loop = HeldLoop()
    mailbox = Mailbox(loop, lambda: 20)  # type: ignore[arg-type]
    news = mailbox._news
    mailbox.put(output_of(1))
    assert news.is_set()  # the first
    news.clear()
    loop.advance(GAP_SECONDS / 4)
    mailbox.put(output_of(2))
    loop.advance(GAP_SECONDS / 4)
    mailbox.put(output_of(3))
    assert not news.is_set()
    assert len(loop.timers) == 1
    loop.advance(GAP_SECONDS / 2)
    assert news.is_set()
    news.clear()
    loop.advance(2 * GAP_SECONDS)
    mailbox.put(output_of(4))
    assert news.is_set()  # steps are slow, and nothing waits
    news.clear()
    mailbox.put(output_of(5))
    mailbox.put(output_of(6, reason=FinishReason.STOP))
    assert news.is_set()  # the last
    assert all(timer.is_cancelled for timer in loop.timers)


def test_the_end_wakes_at_once() -> None:
    loop = HeldLoop()
    mailbox = Mailbox(loop, lambda: 20)  # type: ignore[arg-type]
    mailbox.put(output_of(1))
    mailbox._news.clear()
    mailbox.put(output_of(2))
    mailbox.end(StopAsyncIteration())
    assert mailbox._news.is_set()


def test_the_gap_grows_with_the_requests_up_to_a_limit() -> None:
    assert [gap_seconds(requests) for requests in (0, 1, 20, 10_000)] == [0.001, 0.001, 0.02, MAX_GAP_SECONDS]
