"""The only owner of device state: weights, the KV pages, and the compiled steps over them.

Turns a scheduler's plan into padded arrays, runs the model and the sampler, and copies the result to the host once.
What devices do is asked of the runners of all processes, in the same order (`parallel.processes`): what they need
besides is in host arrays. Knows nothing of text, stop conditions or queues.
"""

import dataclasses
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jetserve.cache.kv_cache import make_cache
from jetserve.config import EngineConfig
from jetserve.engine import sampling
from jetserve.engine.sampling import Row, Sampled, SamplingBatch
from jetserve.engine.scheduler import ScheduledSequence, StepPlan
from jetserve.engine.step import Step, empty_batch
from jetserve.kernels.attention import RaggedBatch
from jetserve.models.base import Model
from jetserve.parallel.processes import Alone, Processes
from jetserve.types import TokenLogprobs

logger = logging.getLogger(__name__)

SMALLEST_PREFILL = 16
"""Tokens of the smallest step that is not decode only."""


@dataclasses.dataclass(frozen=True)
class SampledToken:
    """The token of one entry of a plan, with logprobs where its request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def _powers_of_two(first: int, last: int) -> list[int]:
    """first, 2 first, … up to `last`, which is always there."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


class Runner:
    """Runs steps of one model.

    A step is padded to a bucket (T tokens, S sequences): decode steps to (S, S) with S a power of two up to
    `max_sequences`, others to (T, max_sequences) with T a power of two up to `max_step_tokens`. One program a bucket.
    """

    def __init__(self, model: Model, config: EngineConfig, mesh: Mesh, processes: Processes | None = None) -> None:
        self.config = config
        self.model_config = model.config
        self.vocab_size: int = model.config.vocab_size
        self.decode_sizes = _powers_of_two(1, config.max_sequences)
        self.prefill_sizes = _powers_of_two(min(SMALLEST_PREFILL, config.max_step_tokens), config.max_step_tokens)
        self._mesh = mesh
        self._processes = processes or Alone()
        self._cache = make_cache(model.config, config, mesh)
        self._step = Step(model, config, self._cache)

    def lower_step(self, *, tokens: int, sequences: int, decode: bool) -> jax.stages.Lowered:
        """The step of one bucket, lowered and not run: to read its program or its cost."""
        return self._step.lower(self._cache, self._empty_batch(tokens, sequences, 1 if decode else tokens))

    def _empty_batch(self, T: int, S: int, max_query_length: int) -> RaggedBatch:
        return empty_batch(self.config, T, S, max_query_length)

    def _make_batch(self, entries: Seq[ScheduledSequence], decode: bool) -> RaggedBatch:
        total = sum(entry.num_tokens for entry in entries)
        sizes = self.decode_sizes if decode else self.prefill_sizes
        T = next(size for size in sizes if size >= total)
        batch = self._empty_batch(T, T if decode else self.config.max_sequences, 1 if decode else T)
        tokens: list[int] = []
        positions: list[int] = []
        for i, entry in enumerate(entries):
            sequence, start = entry.sequence, entry.sequence.num_computed_tokens
            stop = start + entry.num_tokens
            tokens += sequence.tokens[start:stop]
            positions += range(start, stop)
            batch.kv_lengths[i] = stop
            batch.page_table[i, : len(sequence.pages)] = sequence.pages
            batch.query_starts[i + 1] = len(tokens)
        batch.tokens[:total], batch.positions[:total] = tokens, positions
        batch.query_starts[len(entries) + 1 :] = total
        return batch

    def run(self, plan: StepPlan, rows: Mapping[int, Row]) -> list[SampledToken | None]:
        """Runs one step.

        Args:
          plan: what to compute.
          rows: by index of the entry, how to sample each entry that samples.

        Returns:
          A token for every entry that samples, None for the others.
        """
        batch = self._make_batch(plan.entries, plan.is_decode_only)
        self._everywhere("compute", batch)
        if not rows:
            return [None] * len(plan.entries)
        if all(row.is_plain_greedy for row in rows.values()):
            tokens = np.asarray(self._best)
            return [SampledToken(int(tokens[i])) if i in rows else None for i in range(len(plan.entries))]
        # Entries that do not sample get an idle row, so that row i of the logits is entry i.
        idle = Row(params=sampling.GREEDY, seed=0, tokens=(), prompt_length=0)
        every_row = [rows.get(i, idle) for i in range(len(plan.entries))]
        S = batch.kv_lengths.shape[0]
        sampled = self._everywhere("sample", sampling.make_batch(every_row, S, self.config.max_length, self.vocab_size))
        return [_token_of(sampled, i, rows[i]) if i in rows else None for i in range(len(plan.entries))]

    def _everywhere(self, method: str, *args: Any) -> Any:
        """Calls a method of the runner of every process."""
        return self._processes.run(operator.methodcaller(method, *args), self)

    def compute(self, batch: RaggedBatch, all_logits: bool = False) -> jax.Array:
        """Runs the model, and keeps the logits for the sampler. Called on every process, as all below are."""
        self._logits, self._best, self._cache = self._step(self._cache, batch, all_logits=all_logits)
        return self._logits

    def sample(self, batch: SamplingBatch) -> Sampled:
        """Tokens from the logits that were computed last, by every setting, as host arrays."""
        return jax.device_get(sampling.sample(self._logits, self._best, batch))

    def restore_cache(self) -> None:
        """Makes new pages if a step that failed took the old ones with it: they are donated to every step."""
        self._everywhere("remake_cache")

    def remake_cache(self) -> None:
        """See `restore_cache`."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._cache)):
            self._cache = make_cache(self.model_config, self.config, self._mesh)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every program that serving can need, by running each on padding.

        Args:
          progress: called with (programs done, programs in all).
        """
        programs = [(T, T, 1) for T in self.decode_sizes]
        programs += [(T, self.config.max_sequences, T) for T in self.prefill_sizes if T > 1]
        for done, (T, S, max_query_length) in enumerate(programs):
            progress(done, len(programs))
            logits = self._everywhere("compute", self._empty_batch(T, S, max_query_length))
            if max_query_length == 1:  # the sampler depends on S alone, and every S is a decode size
                self._everywhere("sample", sampling.make_batch([], S, self.config.max_length, self.vocab_size))
            logits.block_until_ready()
        progress(len(programs), len(programs))

    def evaluate(self, token_ids: Seq[int]) -> Iterator[tuple[int, jax.Array]]:
        """The logits of every token of one text, in chunks: (number of tokens, [T, V] of which those rows count).

        Overwrites the KV pages: not for use beside an engine that serves from this runner.

        Raises:
          ValueError: if the text is longer than the cache.
        """
        pages = -(-len(token_ids) // self.config.cache.page_size)
        if len(token_ids) > self.config.max_length or pages > self.config.num_pages:
            raise ValueError(
                f"the text has {len(token_ids)} tokens; expected at most {self.config.max_length} (--max_cache_length)"
            )
        for start in range(0, len(token_ids), self.config.max_step_tokens):
            chunk = token_ids[start : start + self.config.max_step_tokens]
            T = next(size for size in self.prefill_sizes if size >= len(chunk))
            batch = self._empty_batch(T, 1, T)
            batch.tokens[: len(chunk)] = chunk
            batch.positions[: len(chunk)] = np.arange(start, start + len(chunk))
            batch.query_starts[1:] = len(chunk)
            batch.kv_lengths[0] = start + len(chunk)
            batch.page_table[0, :pages] = np.arange(1, pages + 1)
            yield len(chunk), self._everywhere("compute", batch, True)


def _token_of(sampled: Any, i: int, row: Row) -> SampledToken:
    """Row i of a `Sampled` on the host."""
    token, count = int(sampled.tokens[i]), row.params.logprobs
    if count is None:
        return SampledToken(token)
    top = zip(sampled.top_ids[i, :count].tolist(), sampled.top_logprobs[i, :count].tolist(), strict=True)
    return SampledToken(token, TokenLogprobs(token_id=token, logprob=float(sampled.logprob[i]), top=tuple(top)))
