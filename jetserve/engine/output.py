"""From the tokens of one sequence to its text and its end.

Owns the rules by which a sequence stops. Knows nothing of scheduling or devices.
"""

import dataclasses

from jetserve.engine.guided import Matcher
from jetserve.engine.runner import SampledToken
from jetserve.engine.sampling import Row, resolve_seed
from jetserve.engine.scheduler import Sequence
from jetserve.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer
from jetserve.types import FinishReason, RequestOutput, TokenLogprobs, Usage

NOT_FINITE = (
    "the model's logits are NaN or infinite, so no token can be sampled; its weights may be damaged, or overflow this"
    " dtype"
)


class Stream:
    """The growing answer of one sequence.

    A token that ends it (end of sequence, a stop token) is reported among the token ids and adds no text. With a
    `matcher` it ends as soon as nothing more may come.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, matcher: Matcher | None) -> None:
        self.sequence = sequence
        self._matcher = matcher
        ends = frozenset(tokenizer.eos_token_ids)
        ignores_ends = sequence.sampling.ignore_eos
        self._stop_ids = frozenset(sequence.sampling.stop_token_ids)
        if not ignores_ends or matcher is not None:
            self._stop_ids |= ends
        # After an end of sequence a guide has nothing to go on with, so ignoring it means that it must not come.
        unwanted = ends if ignores_ends and matcher is not None else frozenset()
        self._row = Row(
            params=sequence.sampling,
            seed=resolve_seed(sequence.sampling, sequence.index),
            tokens=sequence.tokens,
            prompt_length=len(sequence.prompt_token_ids),
            banned=tuple(unwanted),
            matcher=matcher,
        )
        self._early_row = dataclasses.replace(self._row, banned=tuple(self._stop_ids))
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=sequence.prompt_token_ids)
        if matcher is not None:  # half a character at the end of the prompt is no part of what has a form
            self._detokenizer.flush()
        self._stops = StopStrings(sequence.sampling.stop)

    def row(self) -> Row:
        """How the next token is to be sampled."""
        is_early = self.sequence.num_output_tokens < self.sequence.sampling.min_tokens
        return self._early_row if is_early else self._row

    @property
    def why_no_token(self) -> tuple[FinishReason, str]:
        """What to say when the sampler found no token."""
        if self._matcher is None or self._matcher.error is None:
            return FinishReason.ERROR, NOT_FINITE
        return FinishReason.GUIDE, self._matcher.error

    def push(self, sampled: SampledToken, *, is_full: bool) -> RequestOutput:
        """Takes the token that was just appended to the sequence. `is_full`: nothing more fits after it."""
        sequence, params, matcher = self.sequence, self.sequence.sampling, self._matcher
        is_end = sampled.token_id in self._stop_ids
        if matcher is not None and not is_end:
            matcher.advance(sampled.token_id)
            if matcher.error is not None:
                return self.end(FinishReason.GUIDE, matcher.error)
        text, matched, reason = "", None, None
        if is_end:
            reason = FinishReason.STOP
        else:
            text = self._text_of(sampled.token_id)
            if sequence.num_output_tokens >= params.min_tokens:  # a stop string before that is text like any other
                text, matched = self._stops.push(text)
            if matched is not None or (matcher is not None and matcher.is_complete):
                reason = FinishReason.STOP
            elif is_full or sequence.num_output_tokens >= params.max_tokens:
                reason = FinishReason.LENGTH
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        if reason is not None and matched is None:
            text += self._rest()
        return self._output(reason, text, (sampled.token_id,), logprobs)

    def end(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """The last output of a sequence that ends without another token. An error drops text that was held back."""
        return self._output(reason, self._rest() if error is None else "", (), (), error)

    def _text_of(self, token_id: int) -> str:
        # Models pad their vocabularies with ids that no tokenizer has.
        return self._detokenizer.push([token_id]) if self._tokenizer.has_token(token_id) else ""

    def _rest(self) -> str:
        """Text held back as half a character or as the beginning of a stop string that never came."""
        text, _ = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush()

    def _output(
        self,
        reason: FinishReason | None,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        error: str | None = None,
    ) -> RequestOutput:
        sequence = self.sequence
        return RequestOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=len(sequence.prompt_token_ids),
                output_tokens=sequence.num_output_tokens,
                cached_tokens=sequence.num_cached_tokens,
            ),
            logprobs=logprobs,
            error=error,
            started_time=sequence.started_time,
        )
