"""The scheduler: one test for each rule. What holds under any sequence of calls is in test_scheduler_stateful.py."""

import itertools

import pytest

from jetserve.cache.pages import PageAllocator
from jetserve.config import CacheConfig, EngineConfig
from jetserve.engine.scheduler import QueueFullError, Scheduler, Sequence, StepPlan
from jetserve.types import FinishReason

SIZE = 4
_ids = itertools.count()


def make(*, pages: int = 64, prefix_caching: bool = True, **limits: int) -> Scheduler:
    defaults = {"max_sequences": 4, "max_length": 64, "max_step_tokens": 16, "max_queue": 16}
    cache = CacheConfig(page_size=SIZE, num_pages=pages, prefix_caching=prefix_caching)
    config = EngineConfig(**{**defaults, **limits}, cache=cache)
    return Scheduler(config, PageAllocator(config.num_pages, SIZE, prefix_caching))


def sequence(length: int, *, first: int = 0, request_id: str = "", **fields: object) -> Sequence:
    request_id = request_id or f"r{next(_ids)}"
    return Sequence(request_id=request_id, prompt_token_ids=tuple(range(first, first + length)), **fields)  # type: ignore[arg-type]


def add(scheduler: Scheduler, *lengths: int, **fields: object) -> list[Sequence]:
    """Sequences of the given prompt lengths that share no prefix."""
    added = [sequence(length, first=1000 * next(_ids), **fields) for length in lengths]
    scheduler.add_all(added)
    return added


def step(scheduler: Scheduler, now: float = 0.0) -> StepPlan:
    plan = scheduler.schedule(now)
    scheduler.update(plan, [7 if entry.samples else None for entry in plan.entries])
    return plan


def tokens_of(plan: StepPlan) -> list[tuple[Sequence, int, bool]]:
    return [(entry.sequence, entry.num_tokens, entry.samples) for entry in plan.entries]


def test_prefill_then_decode():
    scheduler = make()
    (a,) = add(scheduler, 6)
    assert (scheduler.waiting, scheduler.running, scheduler.has_work) == (1, 0, True)
    plan = step(scheduler)
    assert tokens_of(plan) == [(a, 6, True)]
    assert (plan.total_tokens, plan.is_decode_only) == (6, False)
    assert (a.tokens[-1], a.num_output_tokens, a.num_computed_tokens, len(a.pages)) == (7, 1, 6, 2)
    plan = step(scheduler)
    assert tokens_of(plan) == [(a, 1, True)]
    assert plan.is_decode_only
    assert a.output_token_ids == [7, 7]
    scheduler.finish(a, FinishReason.STOP)
    assert (scheduler.has_work, scheduler.allocator.used, a.finish_reason) == (False, 0, FinishReason.STOP)


def test_long_prompts_are_chunked_and_sample_at_their_last_token_only():
    scheduler = make()
    (a,) = add(scheduler, 40)
    assert [tokens_of(step(scheduler)) for _ in range(4)] == [
        [(a, 16, False)],
        [(a, 16, False)],
        [(a, 8, True)],
        [(a, 1, True)],
    ]


def test_decoding_goes_first_and_prefills_share_the_rest_of_the_budget():
    scheduler = make()
    a, b = add(scheduler, 2, 3)
    step(scheduler)
    c, d = add(scheduler, 30, 20)
    assert tokens_of(step(scheduler)) == [(a, 1, True), (b, 1, True), (c, 14, False)]
    assert tokens_of(step(scheduler)) == [(a, 1, True), (b, 1, True), (c, 14, False)]
    assert tokens_of(step(scheduler)) == [(a, 1, True), (b, 1, True), (c, 2, True), (d, 12, False)]
    assert tokens_of(step(scheduler)) == [(a, 1, True), (b, 1, True), (c, 1, True), (d, 8, True)]


def test_single_tokens_come_first_even_when_they_are_chunks():
    scheduler = make(max_step_tokens=5)
    a, b = add(scheduler, 4, 9)
    assert tokens_of(step(scheduler)) == [(b, 1, False), (a, 4, True)]


def test_running_never_exceeds_max_sequences():
    scheduler = make(max_sequences=2)
    a, b, c = add(scheduler, 1, 1, 1)
    assert [entry.sequence for entry in step(scheduler).entries] == [a, b]
    scheduler.finish(a, FinishReason.STOP)
    assert [entry.sequence for entry in step(scheduler).entries] == [b, c]


def test_order_is_priority_then_arrival():
    scheduler = make(max_sequences=1)
    (low,) = add(scheduler, 1, priority=5)
    first, second = add(scheduler, 1, 1)
    (urgent,) = add(scheduler, 1, priority=-1)
    for expected in (urgent, first, second, low):
        assert [entry.sequence for entry in step(scheduler).entries] == [expected]
        scheduler.finish(expected, FinishReason.STOP)


def test_nobody_overtakes_a_waiting_sequence_that_does_not_fit():
    scheduler = make(pages=6)
    (a,) = add(scheduler, 12)
    step(scheduler)
    big, small = add(scheduler, 16, 1)
    assert [entry.sequence for entry in step(scheduler).entries] == [a]
    scheduler.finish(a, FinishReason.STOP)
    assert [entry.sequence for entry in step(scheduler).entries] == [big]
    assert [entry.sequence for entry in step(scheduler).entries] == [big, small]


def test_the_worst_rank_is_preempted_and_computed_again_with_its_output():
    scheduler = make(pages=4, prefix_caching=False)
    a, b = add(scheduler, 7, 7)
    step(scheduler)
    step(scheduler)
    assert (len(a.tokens), scheduler.allocator.free) == (9, 0)
    plan = step(scheduler)
    assert plan.preempted == (b,)
    assert tokens_of(plan) == [(a, 1, True)]
    assert (b.pages, b.num_computed_tokens, b.num_preemptions, scheduler.preemptions) == ([], 0, 1, 1)
    (later,) = add(scheduler, 1)
    assert [entry.sequence for entry in step(scheduler).entries] == [a]  # b is next and does not fit beside a
    scheduler.finish(a, FinishReason.STOP)
    assert tokens_of(step(scheduler)) == [(later, 1, True), (b, 9, True)]
    assert b.output_token_ids == [7, 7, 7]


def test_a_sequence_may_preempt_itself():
    scheduler = make(pages=4)
    (a,) = add(scheduler, 9)
    step(scheduler)
    (b,) = add(scheduler, 3)
    step(scheduler)
    step(scheduler)  # b now needs a second page, and the best-ranked a holds the rest
    plan = scheduler.schedule(0.0)
    assert plan.preempted == (b,)
    assert [entry.sequence for entry in plan.entries] == [a]


def test_nobody_starts_in_a_step_that_preempted():
    scheduler = make(pages=4, max_sequences=2)
    a, b = add(scheduler, 7, 7)
    step(scheduler)
    step(scheduler)
    (urgent,) = add(scheduler, 1, priority=-1)
    plan = step(scheduler)
    assert (plan.preempted, [entry.sequence for entry in plan.entries]) == ((b,), [a])
    assert [entry.sequence for entry in step(scheduler).entries] == [a, urgent]


def test_priority_decides_who_is_preempted():
    scheduler = make(pages=4)
    (late,) = add(scheduler, 7, priority=1)
    (urgent,) = add(scheduler, 7, priority=0)
    step(scheduler)
    step(scheduler)
    assert step(scheduler).preempted == (late,)
    assert urgent.pages


def test_a_preempted_sequence_finds_its_pages_again():
    scheduler = make(pages=4)
    a, b = add(scheduler, 7, 7)
    step(scheduler)
    step(scheduler)
    assert step(scheduler).preempted == (b,)
    scheduler.finish(a, FinishReason.STOP)
    # Its first page held 4 tokens; the second one was the least valuable and went to a.
    plan = scheduler.schedule(0.0)
    assert tokens_of(plan)[0][:2] == (b, 5)
    assert (b.num_computed_tokens, b.num_cached_tokens, scheduler.allocator.hit_tokens) == (4, 0, 4)


def test_equal_prefixes_share_pages_once_computed():
    scheduler = make()
    a, b = sequence(10), sequence(12)
    scheduler.add_all([a])
    step(scheduler)
    scheduler.add(b)
    plan = scheduler.schedule(0.0)
    assert tokens_of(plan) == [(a, 1, True), (b, 4, True)]
    assert (b.pages[:2], b.num_cached_tokens, scheduler.allocator.hit_tokens) == (a.pages[:2], 8, 8)
    assert b.pages[2] != a.pages[2]
    scheduler.cancel(a.request_id)
    assert scheduler.allocator.used == 3


def test_pages_of_an_unfinished_step_are_not_shared():
    scheduler = make()
    a, b = sequence(9), sequence(9)
    scheduler.add_all([a, b])
    plan = scheduler.schedule(0.0)
    assert tokens_of(plan) == [(a, 9, True), (b, 7, False)]
    assert not set(a.pages) & set(b.pages)
    scheduler.cancel(a.request_id)  # its step never happened
    c = sequence(9)
    scheduler.add(c)
    scheduler.update(scheduler.schedule(0.0), [5, None])
    assert (b.num_computed_tokens, c.num_computed_tokens, scheduler.allocator.hit_tokens) == (9, 7, 0)


def test_deadlines_end_waiting_and_running_sequences():
    scheduler = make(max_sequences=1)
    (a,) = add(scheduler, 5, deadline=10.0)
    (b,) = add(scheduler, 5, deadline=9.0)
    (c,) = add(scheduler, 5)
    assert [entry.sequence for entry in step(scheduler, 8.9).entries] == [a]
    assert step(scheduler, 9.0).expired == (b,)
    plan = step(scheduler, 10.0)
    assert plan.expired == (a,)
    assert [entry.sequence for entry in plan.entries] == [c]
    assert a.finish_reason is b.finish_reason is FinishReason.DEADLINE
    assert a.pages == []


def test_max_length_ends_with_length():
    scheduler = make(max_length=8)
    (a,) = add(scheduler, 6)
    step(scheduler)
    assert not scheduler.is_full(a)
    step(scheduler)
    assert scheduler.is_full(a)
    plan = step(scheduler)
    assert (plan.entries, plan.expired, a.finish_reason) == ((), (a,), FinishReason.LENGTH)
    assert len(a.tokens) == 8


def test_outgrowing_all_pages_ends_with_length():
    scheduler = make(pages=2)
    (a,) = add(scheduler, 7)
    step(scheduler)
    assert scheduler.is_full(a)
    assert step(scheduler).expired == (a,)
    assert (a.finish_reason, len(a.tokens), scheduler.has_work) == (FinishReason.LENGTH, 8, False)


def test_cancel_frees_pages_at_once_and_knows_only_its_request():
    scheduler = make(max_sequences=1)
    samples = [sequence(5, request_id="x", index=i) for i in range(3)]
    (other,) = add(scheduler, 5)
    scheduler.add_all(samples)
    scheduler.schedule(0.0)
    assert scheduler.sequences_of("x") == samples
    assert scheduler.cancel(other.request_id) == [other]
    assert scheduler.allocator.used == 0
    assert scheduler.cancel("x") == samples
    assert all(s.finish_reason is FinishReason.CANCELLED for s in samples)
    assert scheduler.cancel("x") == scheduler.cancel("never seen") == scheduler.sequences_of("x") == []
    with pytest.raises(ValueError, match="is not live"):
        scheduler.finish(other, FinishReason.STOP)


def test_ended_between_schedule_and_update_drops_the_token():
    scheduler = make()
    a, b = add(scheduler, 5, 5)
    plan = scheduler.schedule(0.0)
    scheduler.cancel(a.request_id)
    scheduler.update(plan, [8, 9])
    assert (a.output_token_ids, b.output_token_ids) == ([], [9])


def test_update_takes_each_plan_once_with_all_its_tokens():
    scheduler = make()
    add(scheduler, 5)
    stale, plan = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="not the latest"):
        scheduler.update(stale, [1])
    with pytest.raises(ValueError, match="found 2 tokens; expected one for each of 1"):
        scheduler.update(plan, [1, 2])
    with pytest.raises(ValueError, match="has no token"):
        scheduler.update(plan, [None])
    scheduler.update(plan, [1])
    with pytest.raises(ValueError, match="passed before"):
        scheduler.update(plan, [1])


def test_full_queue_refuses_a_request_as_a_whole():
    scheduler = make(max_queue=3)
    add(scheduler, 1, 1)
    samples = [sequence(1, request_id="x", index=i) for i in range(2)]
    with pytest.raises(QueueFullError, match=r"2 sequences wait and 2 would join them; expected at most 3"):
        scheduler.add_all(samples)
    assert (scheduler.waiting, scheduler.sequences_of("x")) == (2, [])
    step(scheduler)
    scheduler.add_all(samples)
    assert scheduler.waiting == 2


def test_impossible_prompts_are_refused():
    scheduler = make(pages=4, max_length=32)
    with pytest.raises(ValueError, match=r"8 tokens; expected at most 7.*--max_cache_length"):
        make(pages=4, max_length=8).add(sequence(8))
    with pytest.raises(ValueError, match=r"16 tokens; expected at most 15.*--num_pages"):
        scheduler.add_all([sequence(1), sequence(16)])
    with pytest.raises(ValueError, match="no tokens"):
        sequence(0)
    assert not scheduler.has_work
    a = sequence(15, request_id="a")
    scheduler.add(a)
    for again in ([a], [sequence(1, request_id="a")], [sequence(1, request_id="b"), sequence(1, request_id="b")]):
        with pytest.raises(ValueError, match="added before"):
            scheduler.add_all(again)
    assert scheduler.sequences == (a,)
