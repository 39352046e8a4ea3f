"""Which tokens of which sequences the next step computes.

Owns the sequences that wait and run, their order, and the pages they hold. Knows nothing of jax, of the model, or of
why a sequence should stop: the engine decides that and calls `finish`. It has no clock either: the time is an argument.
It is called between steps, from one thread.

A step in three lines:

    plan = scheduler.schedule(now)
    tokens = ...                    # run the plan: one token for each entry that samples
    scheduler.update(plan, tokens)

The rules:

- Rank is (priority, arrival), lower first. Waiting sequences start in that order and nobody overtakes: when the first
  one does not fit, those behind it wait too.
- Every running sequence that lacks one token (a decoding one) gets it in every step; what is left of `max_step_tokens`
  goes to prefills, by rank, the running ones before the waiting ones.
- A sequence starts when there are pages for all its known tokens, so only decoding asks for more pages. When there
  are none, the running sequence of the worst rank gives up its pages and waits at its rank to be computed again, output
  tokens included. The running sequence of the best rank never loses its pages to another and advances in every step:
  decoding sequences cannot use up the budget, because `max_step_tokens >= max_sequences`.
"""

import bisect
import dataclasses
from collections.abc import Iterable

from jetserve.cache.pages import PageAllocator
from jetserve.config import EngineConfig
from jetserve.types import FinishReason, SamplingParams


class QueueFullError(RuntimeError):
    """As many sequences wait as `EngineConfig.max_queue` allows. The request may succeed later."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Sequence:
    """One sample (`index` in 0..n-1) of a request, compared by identity; a request with n samples makes n of them.

    `priority`: lower runs first. `deadline`: seconds of `time.monotonic`, or None. The scheduler sets all that is not
    an argument. Invariants: `tokens` is the prompt and the output so far; `num_computed_tokens < len(tokens)`, the
    tokens whose keys and values lie in `pages`; `pages` is in order of positions, and empty unless the sequence runs.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    index: int = 0
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    priority: int = 0
    deadline: float | None = None
    arrival: int | None = dataclasses.field(default=None, init=False)
    tokens: list[int] = dataclasses.field(init=False)
    pages: list[int] = dataclasses.field(default_factory=list, init=False)
    num_computed_tokens: int = dataclasses.field(default=0, init=False)
    num_cached_tokens: int = dataclasses.field(default=0, init=False)
    """Tokens of the prompt that the prefix cache held when the sequence first started."""
    started_time: float | None = dataclasses.field(default=None, init=False)
    """When the sequence first started, in seconds of `time.monotonic`."""
    num_preemptions: int = dataclasses.field(default=0, init=False)
    finish_reason: FinishReason | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"the prompt of {self.name} has no tokens; expected at least one")
        self.tokens = list(self.prompt_token_ids)

    @property
    def name(self) -> str:
        return f"request {self.request_id!r} sample {self.index}"

    @property
    def rank(self) -> tuple[int, int]:
        """(priority, arrival): the lowest goes first. Set once the scheduler has accepted the sequence."""
        assert self.arrival is not None
        return self.priority, self.arrival

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens sampled so far."""
        return self.tokens[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens that are not computed yet: 1 when decoding, else a prefill's rest."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class ScheduledSequence:
    """`num_tokens` of `sequence` to compute, from position `sequence.num_computed_tokens` on.

    `samples`: they include its last known token, so that a new one is sampled. Valid until `update`.
    """

    sequence: Sequence
    num_tokens: int
    samples: bool


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one step computes, and what deciding it did to others.

    `entries`: those with one token come first. `expired`: the sequences that `schedule` ended; each says why in its
    `finish_reason` (DEADLINE, or LENGTH where it outgrew the cache). `preempted`: those that wait again.
    """

    entries: tuple[ScheduledSequence, ...]
    expired: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]

    @property
    def total_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def is_decode_only(self) -> bool:
        """Whether every entry has exactly one token."""
        return all(entry.num_tokens == 1 for entry in self.entries)


def _enter(entries: list[ScheduledSequence], sequence: Sequence, budget: int) -> int:
    """Plan as many tokens of `sequence` as the budget allows, and return how many."""
    num_tokens = min(sequence.num_missing_tokens, budget)
    if num_tokens:
        entries.append(ScheduledSequence(sequence, num_tokens, num_tokens == sequence.num_missing_tokens))
    return num_tokens


class Scheduler:
    """Plans steps for at most `config.max_sequences` sequences and `config.max_step_tokens` tokens at once.

    `preemptions` counts the times that a sequence lost its pages to another. `max_length`: tokens of a prompt and its
    answer together, `config.max_length` or what all the pages hold if that is less.
    """

    def __init__(self, config: EngineConfig, allocator: PageAllocator) -> None:
        self.config = config
        self.allocator = allocator
        self.preemptions = 0
        self.max_length = min(config.max_length, allocator.total * allocator.page_size)
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._requests: dict[str, list[Sequence]] = {}
        self._arrivals = 0
        self._plan: StepPlan | None = None  # the one that `update` may take

    @property
    def running(self) -> int:
        """How many sequences hold pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many sequences wait, for the first time or after a preemption."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All that have not ended: the running ones, then the waiting ones, each by rank."""
        return (*self._running, *self._waiting)

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """The sequences of one request that have not ended; empty for a request that is unknown or over."""
        return list(self._requests.get(request_id, ()))

    @property
    def max_length_flag(self) -> str:
        """The flag that `max_length` comes from."""
        return "--max_cache_length" if self.max_length == self.config.max_length else "--num_pages"

    def is_full(self, sequence: Sequence) -> bool:
        """Whether `sequence` has reached `max_length`.

        It cannot go on then. The engine ends it with LENGTH, unless its last token is a better reason; `schedule` ends
        those that the engine left.
        """
        return len(sequence.tokens) >= self.max_length

    def add(self, sequence: Sequence) -> None:
        """Let one sequence wait. Raises as `add_all` does."""
        self.add_all([sequence])

    def add_all(self, sequences: Iterable[Sequence]) -> None:
        """Let all the samples of a request wait, or none of them.

        Raises QueueFullError when they would make more than `config.max_queue` wait, and ValueError for a prompt that
        can never run, or a sequence (or its request id and index) that was added before.
        """
        sequences = list(sequences)
        for sequence in sequences:
            self._check_prompt(sequence)
        taken = {(other.request_id, other.index) for s in sequences for other in self._requests.get(s.request_id, ())}
        for sequence in sequences:
            key = (sequence.request_id, sequence.index)
            if sequence.arrival is not None or key in taken:
                raise ValueError(f"{sequence.name} was added before; give every request an id of its own")
            taken.add(key)
        if len(self._waiting) + len(sequences) > self.config.max_queue:
            raise QueueFullError(
                f"the queue is full: {len(self._waiting)} sequences wait and {len(sequences)} would join them;"
                f" expected at most {self.config.max_queue} (max_queue). Try again later"
            )
        for sequence in sequences:
            sequence.arrival = self._arrivals
            self._arrivals += 1
            self._requests.setdefault(sequence.request_id, []).append(sequence)
            bisect.insort(self._waiting, sequence, key=lambda s: s.rank)

    def cancel(self, request_id: str) -> list[Sequence]:
        """End every sequence of a request with CANCELLED, free its pages, and return those ended.

        Empty for a request that is unknown or over: a client may hang up just as its answer ends.
        """
        cancelled = self.sequences_of(request_id)
        for sequence in cancelled:
            self.finish(sequence, FinishReason.CANCELLED)
        return cancelled

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence and free its pages, whose content stays shareable until evicted.

        Raises ValueError for a sequence that has ended already or was never added.
        """
        siblings = self._requests.get(sequence.request_id, [])
        if sequence not in siblings:
            raise ValueError(
                f"{sequence.name} is not live (finish_reason {sequence.finish_reason}); expected one that waits or runs"
            )
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request_id]
        if sequence.pages:
            self._running.remove(sequence)
            self._drop_pages(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.finish_reason = reason

    def preempt_all(self) -> None:
        """Make every running sequence give up its pages and wait, to be computed again."""
        while self._running:
            self._preempt_worst()

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. `now`: seconds of `time.monotonic`.

        First ends the sequences whose deadline has come or that cannot grow. The plan has entries whenever
        `has_work` is still true. A plan that is never passed to `update` (its step failed) is planned anew.
        """
        expired = self._end_overdue(now)
        preempted = self._secure_pages()
        decoding = [sequence for sequence in self._running if sequence.num_missing_tokens == 1]
        prefilling = [sequence for sequence in self._running if sequence.num_missing_tokens > 1]
        budget = self.config.max_step_tokens
        entries: list[ScheduledSequence] = []
        for sequence in (*decoding, *prefilling):
            budget -= _enter(entries, sequence, budget)
        # Pages were short a moment ago: whoever starts now would be the next to lose them.
        while budget and not preempted and (started := self._start_next(now)) is not None:
            budget -= _enter(entries, started, budget)
        entries.sort(key=lambda entry: entry.num_tokens > 1)
        self._plan = StepPlan(tuple(entries), tuple(expired), tuple(preempted))
        return self._plan

    def update(self, plan: StepPlan, tokens: Iterable[int | None]) -> None:
        """Record that `plan` was computed: `tokens[i]` was sampled for `plan.entries[i]`.

        Full pages become shareable and sampled tokens are appended; whether a sequence stops is for the caller to say.
        The token of an entry that does not sample, or whose sequence has ended since, is ignored. Raises ValueError,
        changing nothing, when the plan is not the latest or a token is missing.
        """
        if plan is not self._plan:
            raise ValueError("the plan is not the latest, or was passed before; expected each plan once, in order")
        tokens = list(tokens)
        if len(tokens) != len(plan.entries):
            raise ValueError(f"found {len(tokens)} tokens; expected one for each of {len(plan.entries)} entries")
        live = [
            (entry, token) for entry, token in zip(plan.entries, tokens, strict=True) if not entry.sequence.finished
        ]
        for entry, token in live:
            if entry.samples and token is None:
                raise ValueError(f"{entry.sequence.name} samples in this step but has no token; expected a token id")
        self._plan = None
        for entry, token in live:
            self._advance(entry.sequence, entry.num_tokens)
            if entry.samples and token is not None:
                entry.sequence.tokens.append(token)

    def _check_prompt(self, sequence: Sequence) -> None:
        length, limit = len(sequence.prompt_token_ids), self.max_length
        if length >= limit:
            raise ValueError(
                f"the prompt of {sequence.name} has {length} tokens; expected at most {limit - 1}, so that one more"
                f" fits in {limit}: shorten it or raise {self.max_length_flag}"
            )

    def _end_overdue(self, now: float) -> list[Sequence]:
        ended = []
        for sequence in self.sequences:
            if sequence.deadline is not None and now >= sequence.deadline:
                self.finish(sequence, FinishReason.DEADLINE)
            elif self.is_full(sequence):
                self.finish(sequence, FinishReason.LENGTH)
            else:
                continue
            ended.append(sequence)
        return ended

    def _secure_pages(self) -> list[Sequence]:
        """Give every running sequence, by rank, pages for all its known tokens; return those preempted for it."""
        preempted: list[Sequence] = []
        secured = 0
        while secured < len(self._running):
            sequence = self._running[secured]
            pages = self.allocator.allocate(self.allocator.pages_for(len(sequence.tokens)) - len(sequence.pages))
            if pages is None:
                preempted.append(self._preempt_worst())  # the last one running: one not secured yet, maybe this one
            else:
                sequence.pages += pages
                secured += 1
        return preempted

    def _preempt_worst(self) -> Sequence:
        sequence = self._running.pop()
        self._drop_pages(sequence)
        sequence.num_preemptions += 1
        self.preemptions += 1
        bisect.insort(self._waiting, sequence, key=lambda s: s.rank)
        return sequence

    def _start_next(self, now: float) -> Sequence | None:
        """Start the first sequence that waits, sharing the pages of its prefix; None when there is no room for it."""
        if not self._waiting or len(self._running) >= self.config.max_sequences:
            return None
        sequence = self._waiting[0]
        shared = self.allocator.match_prefix(sequence.tokens)
        pages = self.allocator.allocate(self.allocator.pages_for(len(sequence.tokens)) - len(shared), shared)
        if pages is None:
            return None
        del self._waiting[0]
        bisect.insort(self._running, sequence, key=lambda s: s.rank)
        sequence.pages = pages
        sequence.num_computed_tokens = len(shared) * self.allocator.page_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            sequence.started_time = now
        return sequence

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Count `num_tokens` as computed and register the pages that they filled."""
        size = self.allocator.page_size
        first = sequence.num_computed_tokens // size
        sequence.num_computed_tokens += num_tokens
        for i in range(first, sequence.num_computed_tokens // size):
            parent = sequence.pages[i - 1] if i else None
            self.allocator.register(sequence.pages[i], sequence.tokens[i * size : (i + 1) * size], parent)

    def _drop_pages(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        sequence.pages = []
        sequence.num_computed_tokens = 0
