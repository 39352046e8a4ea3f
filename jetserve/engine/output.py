"""From the tokens of one sequence to its text and its end.

Owns the rules by which a sequence stops. Knows nothing of scheduling or devices.
"""

from jetserve.engine.runner import SampledToken
from jetserve.engine.sampling import Row, resolve_seed
from jetserve.engine.scheduler import Sequence
from jetserve.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer
from jetserve.types import FinishReason, RequestOutput, TokenLogprobs, Usage


class Stream:
    """The growing answer of one sequence.

    A token that ends it (end of sequence, a stop token) is reported among the token ids and adds no text.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        self._seed = resolve_seed(sequence.sampling, sequence.index)
        self._stop_ids = frozenset(sequence.sampling.stop_token_ids)
        if not sequence.sampling.ignore_eos:
            self._stop_ids |= set(tokenizer.eos_token_ids)
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=sequence.prompt_token_ids)
        self._stops = StopStrings(sequence.sampling.stop)

    def row(self) -> Row:
        """How the next token is to be sampled."""
        sequence = self.sequence
        early = sequence.num_output_tokens < sequence.sampling.min_tokens
        return Row(
            params=sequence.sampling,
            seed=self._seed,
            tokens=sequence.tokens,
            prompt_length=len(sequence.prompt_token_ids),
            banned=tuple(self._stop_ids) if early else (),
        )

    def push(self, sampled: SampledToken, *, is_full: bool) -> RequestOutput:
        """Takes the token that was just appended to the sequence. `is_full`: nothing more fits after it."""
        sequence, params = self.sequence, self.sequence.sampling
        text, reason = "", None
        if sampled.token_id in self._stop_ids:
            reason = FinishReason.STOP
        else:
            text, matched = self._text_of(sampled.token_id), None
            if sequence.num_output_tokens >= params.min_tokens:  # a stop string before that is text like any other
                text, matched = self._stops.push(text)
            if matched is not None:
                reason = FinishReason.STOP
            elif is_full or sequence.num_output_tokens >= params.max_tokens:
                reason = FinishReason.LENGTH
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        matched_stop = reason is FinishReason.STOP and sampled.token_id not in self._stop_ids
        if reason is not None and not matched_stop:
            text += self._rest()
        return self._output(reason, text, (sampled.token_id,), logprobs)

    def end(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """The last output of a sequence that ends without another token."""
        return self._output(reason, self._rest(), (), (), error)

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
        )
