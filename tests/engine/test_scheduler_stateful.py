"""The scheduler under any sequence of calls, against a model of the device's memory."""

import dataclasses
import itertools

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from jetserve.cache.pages import PageAllocator
from jetserve.config import CacheConfig, EngineConfig
from jetserve.engine.scheduler import QueueFullError, Scheduler, Sequence, StepPlan
from jetserve.types import FinishReason

SIZE = 4
MAX_QUEUE = 6


@dataclasses.dataclass
class Device:
    """Page memory as attention sees it: what a slot holds depends on every token up to its own."""

    slots: dict[tuple[int, int], tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def run(self, plan: StepPlan) -> None:
        """Write every entry's tokens, then check that each entry reads its own prefix and nothing else."""
        for entry in plan.entries:
            start = entry.sequence.num_computed_tokens
            for position in range(start, start + entry.num_tokens):
                page = entry.sequence.pages[position // SIZE]
                self.slots[page, position % SIZE] = tuple(entry.sequence.tokens[: position + 1])
        for entry in plan.entries:
            self.check(entry.sequence, entry.sequence.num_computed_tokens + entry.num_tokens)

    def check(self, sequence: Sequence, length: int) -> None:
        for position in range(length):
            found = self.slots[sequence.pages[position // SIZE], position % SIZE]
            assert found == tuple(sequence.tokens[: position + 1])


class SchedulerMachine(stateful.RuleBasedStateMachine):
    """Requests come, are cancelled, finish and expire in any order, over few pages and few distinct tokens."""

    @stateful.initialize(
        pages=st.integers(3, 14), max_sequences=st.integers(1, 5), budget=st.integers(0, 12), caching=st.booleans()
    )
    def start(self, pages: int, max_sequences: int, budget: int, caching: bool) -> None:
        config = EngineConfig(
            max_sequences=max_sequences,
            max_step_tokens=max_sequences + budget,
            max_length=40,
            max_queue=MAX_QUEUE,
            cache=CacheConfig(page_size=SIZE, num_pages=pages, prefix_caching=caching),
        )
        self.scheduler = Scheduler(config, PageAllocator(config.num_pages, SIZE, caching))
        self.device = Device()
        self.now = 0.0
        self.ids = itertools.count()
        self.added: list[Sequence] = []

    @stateful.rule(
        prefix=st.integers(0, 3),
        length=st.integers(1, 10) | st.integers(1, 24),
        n=st.integers(1, 4),
        priority=st.integers(0, 2),
        patience=st.sampled_from([None, None, 5, 30]),
    )
    def add(self, prefix: int, length: int, n: int, priority: int, patience: int | None) -> None:
        # Prompts of the same `prefix` begin alike; two of the families differ only in their second page.
        prompt = ([prefix // 2] * SIZE + [prefix] * 40)[:length]
        deadline = None if patience is None else self.now + patience
        request_id = f"r{next(self.ids)}"
        samples = [
            Sequence(
                request_id=request_id, prompt_token_ids=tuple(prompt), index=i, priority=priority, deadline=deadline
            )
            for i in range(n)
        ]
        waiting = self.scheduler.waiting
        try:
            self.scheduler.add_all(samples)
        except QueueFullError:
            assert waiting + n > MAX_QUEUE
        except ValueError:
            assert length + 1 > self.scheduler.allocator.total * SIZE
        else:
            self.added += samples

    @stateful.precondition(lambda self: self.added)
    @stateful.rule(data=st.data(), cancel=st.booleans())
    def end(self, data: st.DataObject, cancel: bool) -> None:
        sequence = data.draw(st.sampled_from(self.added))
        if cancel:
            self.scheduler.cancel(sequence.request_id)
        elif not sequence.finished:
            self.scheduler.finish(sequence, FinishReason.STOP)

    @stateful.rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @stateful.rule(data=st.data(), steps=st.integers(1, 6))
    def steps(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            plan = self.schedule()
            self.device.run(plan)
            if data.draw(st.integers(0, 7)) == 0 and plan.entries:
                self.scheduler.cancel(data.draw(st.sampled_from(plan.entries)).sequence.request_id)
            self.update(plan, data.draw(st.lists(st.integers(0, 1), min_size=8, max_size=8)))

    @stateful.rule()
    def failed_step(self) -> None:
        self.schedule()

    def schedule(self) -> StepPlan:
        scheduler = self.scheduler
        waiting = [s for s in scheduler.sequences if not s.pages]
        best = next((s for s in scheduler.sequences if s.pages), None)
        plan = scheduler.schedule(self.now)
        assert plan.total_tokens <= scheduler.config.max_step_tokens
        assert bool(plan.entries) == scheduler.has_work
        assert [e.num_tokens > 1 for e in plan.entries] == sorted(e.num_tokens > 1 for e in plan.entries)
        planned = {entry.sequence for entry in plan.entries}
        assert len(planned) == len(plan.entries)
        assert best is None or best.finished or best in planned
        for s in scheduler.sequences:
            assert s in planned or not (s.pages and s.num_missing_tokens == 1)
            assert s.deadline is None or s.deadline > self.now
        # Those that started are the best-ranked of those that waited and could have.
        started = [s for s in waiting if s.pages]
        left = [s for s in waiting if not s.pages and not s.finished]
        assert not started or not left or max(s.rank for s in started) < min(s.rank for s in left)
        for entry in plan.entries:
            assert entry.samples == (entry.num_tokens == entry.sequence.num_missing_tokens)
            assert 1 <= entry.num_tokens <= entry.sequence.num_missing_tokens
        assert all(s.finish_reason in (FinishReason.DEADLINE, FinishReason.LENGTH) for s in plan.expired)
        return plan

    def update(self, plan: StepPlan, tokens: list[int]) -> None:
        sampled = [token if entry.samples else None for entry, token in zip(plan.entries, tokens, strict=False)]
        self.scheduler.update(plan, sampled)

    @stateful.invariant()
    def pages_are_exactly_those_of_running_sequences(self) -> None:
        allocator = self.scheduler.allocator
        holds = [page for s in self.added for page in s.pages]
        assert all(1 <= page <= allocator.total for page in holds)
        assert allocator.used == len(set(holds))
        assert all(allocator.references(page) == holds.count(page) for page in range(1, allocator.total + 1))
        assert self.scheduler.running <= self.scheduler.config.max_sequences
        assert {s for s in self.added if not s.finished} == set(self.scheduler.sequences)
        assert all(not s.pages for s in self.added if s.finished)

    @stateful.invariant()
    def pages_hold_their_tokens_and_what_is_written_next_is_private(self) -> None:
        allocator = self.scheduler.allocator
        for s in self.scheduler.sequences:
            if s.pages:
                self.device.check(s, s.num_computed_tokens)
            for page in s.pages[s.num_computed_tokens // SIZE :]:
                assert allocator.references(page) == 1
                assert not allocator.is_registered(page)
            assert s.num_computed_tokens < len(s.tokens)

    def teardown(self) -> None:
        """Whatever is left ends within the steps that its tokens can take at one a step, preemptions included."""
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            plan = self.schedule()
            self.device.run(plan)
            self.update(plan, [1] * 8)
        assert all(s.finished for s in self.added)
        assert self.scheduler.allocator.used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = hypothesis.settings(max_examples=150, stateful_step_count=40, deadline=None)
