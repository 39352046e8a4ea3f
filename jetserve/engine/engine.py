"""Continuous batching: schedule, run, update.

`Engine` joins the scheduler, the runner and the text of every sequence. It is driven from one thread and knows nothing
of networks; `async_engine` puts it behind a queue for servers.
"""

import collections
import logging
import time
from collections.abc import Callable, Iterable, Iterator

from jetserve.cache.pages import PageAllocator
from jetserve.config import EngineConfig
from jetserve.engine.guided import Guides, Matcher
from jetserve.engine.output import Stream
from jetserve.engine.runner import Runner, SampledToken
from jetserve.engine.sampling import MAX_END_TOKENS, NO_TOKEN
from jetserve.engine.scheduler import Scheduler, Sequence, StepPlan
from jetserve.tokenizer import Tokenizer
from jetserve.types import EngineStats, FinishReason, InvalidFieldError, Request, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests of one model."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        if len(tokenizer.eos_token_ids) > MAX_END_TOKENS:
            raise ValueError(
                f"the tokenizer has {len(tokenizer.eos_token_ids)} ends of sequence; expected at most {MAX_END_TOKENS}"
            )
        self.config: EngineConfig = runner.config
        self.runner = runner
        self.tokenizer = tokenizer
        cache = self.config.cache
        self.allocator = PageAllocator(self.config.num_pages, cache.page_size, cache.prefix_caching)
        self.scheduler = Scheduler(self.config, self.allocator)
        self.guides = Guides(tokenizer, runner.vocab_size)
        self._streams: dict[Sequence, Stream] = {}
        self._plan: StepPlan | None = None  # of the step under way, or that failed
        self._outputs: list[RequestOutput] = []  # of that step, so far
        self._steps = self._prompt_tokens = self._output_tokens = 0
        self._finished: collections.Counter[FinishReason] = collections.Counter()

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.scheduler.max_length

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Does what first requests would wait for: compiles every program, and reads the vocabulary for guides.

        Args:
          progress: called with (programs done, programs in all).
        """
        self.guides.warm_up()
        self.runner.warm_up(progress)

    def is_prepared(self, request: Request) -> bool:
        """Whether `submit` will be quick."""
        return request.sampling.guide is None or self.guides.is_prepared(request.sampling.guide)

    def prepare(self, request: Request) -> None:
        """Does ahead of `submit`, in any thread, what may take it long: compiling a guide.

        Raises:
          ValueError: for a guide that cannot be used.
        """
        if request.sampling.guide is not None:
            self.guides.find(request.sampling.guide)

    def submit(self, request: Request) -> None:
        """Queues a request; its outputs come from `step`.

        Raises:
          ValueError: for a prompt that cannot fit, token ids outside the vocabulary, a guide that cannot be used, or a
            request id in use.
          QueueFullError: if too many wait; the request may succeed later.
        """
        params = request.sampling
        for field, ids in (
            ("prompt", request.prompt_token_ids),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in (min(ids), max(ids)) if ids else ():  # every step waits for a long prompt's check
                if not 0 <= token < self.runner.vocab_size:
                    raise InvalidFieldError(
                        field, f"holds token id {token}; expected 0 to {self.runner.vocab_size - 1}, the vocabulary"
                    )
        sequences = [
            Sequence(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                index=index,
                sampling=params,
                priority=request.priority,
                deadline=request.deadline,
            )
            for index in range(params.n)
        ]
        streams = {sequence: Stream(sequence, self.tokenizer, self._matcher(params)) for sequence in sequences}
        self.scheduler.add_all(sequences)
        self._streams.update(streams)
        self._prompt_tokens += len(request.prompt_token_ids)

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        return None if params.guide is None else Matcher(self.guides, params.guide)

    def cancel(self, request_id: str) -> list[RequestOutput]:
        """Ends every sample of a request and frees its pages; nothing for a request that is unknown or over."""
        return [self._end(sequence) for sequence in self.scheduler.cancel(request_id)]

    def fail(self, error: str) -> list[RequestOutput]:
        """After `step` raised: ends the requests that it was computing with an error, after what else it had brought.

        The others go on. Those that run are computed again, as the step may have taken the pages with it. All end where
        it is not known who was computed.
        """
        outputs, plan = self._outputs, self._plan
        self._outputs, self._plan = [], None
        outputs += [self._end(sequence) for sequence in [*self._streams] if sequence.finished]
        touched = self.scheduler.sequences if plan is None else [entry.sequence for entry in plan.entries]
        for request_id in dict.fromkeys(sequence.request_id for sequence in touched):
            for sequence in self.scheduler.sequences_of(request_id):
                self.scheduler.finish(sequence, FinishReason.ERROR)
                outputs.append(self._end(sequence, error))
        self.scheduler.preempt_all()
        self.allocator.clear()
        self.runner.restore_cache()
        return outputs

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """Computes one step, and returns what is new of every sequence that it touched. If it raises, call `fail`."""
        self._plan, self._outputs = None, []
        self._plan = self.scheduler.schedule(time.monotonic())
        self._outputs += [self._end(sequence) for sequence in self._plan.expired]
        if self._plan.entries:
            self._compute(self._plan)
        outputs, self._outputs, self._plan = self._outputs, [], None
        return outputs

    def _compute(self, plan: StepPlan) -> None:
        outputs = self._outputs
        rows = {i: self._streams[entry.sequence].row() for i, entry in enumerate(plan.entries) if entry.samples}
        sampled = self.runner.run(plan, rows)
        for entry, token in zip(plan.entries, sampled, strict=True):
            if token is not None and token.token_id == NO_TOKEN:
                reason, error = self._streams[entry.sequence].why_no_token
                self.scheduler.finish(entry.sequence, reason)
                outputs.append(self._end(entry.sequence, error))
        self.scheduler.update(plan, [None if token is None else token.token_id for token in sampled])
        self._steps += 1
        for entry, token in zip(plan.entries, sampled, strict=True):
            sequence = entry.sequence
            if token is None or sequence.finished:
                continue
            self._output_tokens += 1
            output = self._push(sequence, token)
            if output.finish_reason is not None:
                self.scheduler.finish(sequence, output.finish_reason)
                self._forget(sequence)
            outputs.append(output)

    def _push(self, sequence: Sequence, token: SampledToken) -> RequestOutput:
        """What a token brings. An exception over it is one sequence's, and ends that one alone."""
        stream = self._streams[sequence]
        try:
            return stream.push(token, is_full=self.scheduler.is_full(sequence))
        except Exception as error:
            logger.exception("%s ends with an error", sequence.name)
            return stream.end(FinishReason.ERROR, f"the answer failed: {type(error).__name__}: {error}")

    def run(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Submits requests and yields their outputs until all have ended."""
        for request in requests:
            self.submit(request)
        while self.has_work:
            yield from self.step()

    def _end(self, sequence: Sequence, error: str | None = None) -> RequestOutput:
        """The last output of a sequence that the scheduler has ended."""
        assert sequence.finish_reason is not None
        output = self._streams[sequence].end(sequence.finish_reason, error)
        self._forget(sequence)
        return output

    def _forget(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        self._finished[sequence.finish_reason] += 1
        del self._streams[sequence]

    def stats(self) -> EngineStats:
        """State and totals now."""
        return EngineStats(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            pages_used=self.allocator.used,
            pages_total=self.allocator.total,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            prefix_cache_hit_tokens=self.allocator.hit_tokens,
            preemptions=self.scheduler.preemptions,
            finished=dict(self._finished),
        )
