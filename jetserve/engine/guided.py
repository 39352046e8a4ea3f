"""Answers that must have a form: a JSON object, a JSON schema, a regular expression or a grammar.

Owns llguidance (https://github.com/guidance-ai/llguidance): the vocabulary as it reads it, the guides that it compiled,
and what each sequence may say next. Knows nothing of devices, of scheduling, or of when else a sequence ends.
"""

import collections
import functools
import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from jetserve.tokenizer import Tokenizer
from jetserve.types import Guide, GuideKind, InvalidFieldError

MAX_COMPILED = 16
"""Guides that are kept compiled, those used last: with the limit on states, half a gigabyte in the worst case."""
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,  # of one token: some 10 ms, in the worst cases 100, in which everyone waits
    max_lexer_states=20_000,  # at about 1.7 kB
    verbose_errors=False,
)
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the parts of JSON, unless a schema has settings of its own: some models would never end it."""

_MAX_FORCED = 4096
"""Characters that are looked at of a text that must come next: only its first token is used."""
_ANCHOR = "\n"
_FULL = "too many states"
_MAX_ERROR = 500


class _Vocabulary:
    """A tokenizer as `TokenizerWrapper` takes it, which chose the public names.

    `tokens`: the bytes of every id of the model, none for an id that the tokenizer lacks.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.end_ids = [token for token in tokenizer.eos_token_ids if token < vocab_size]
        self.eos_token_id = self.end_ids[0]
        known = [token for token in range(vocab_size) if tokenizer.has_token(token)]
        self.tokens = [b""] * vocab_size
        for token in known:
            self.tokens[token] = tokenizer.token_text(token)
        # Never part of a text, whatever they spell: an end of sequence inside a JSON string would end the answer.
        self.special_token_ids = sorted({token for token in known if tokenizer.is_special(token)} | {*self.end_ids})
        plain = set(known).difference(self.special_token_ids)
        self._ids = {self.tokens[token]: token for token in plain if self.tokens[token]}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that must come next: those that the model has learnt to write it with."""
        text = text[:_MAX_FORCED]
        for anchor in ("", _ANCHOR):  # SentencePiece may put a space before the text, or before the anchor instead
            before, tokens = self._encode(anchor), self._encode(anchor + text)
            if tokens[: len(before)] == before and self._spell(tokens[len(before) :], text):
                return tokens[len(before) :]
        return self._longest_first(text.encode())

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    def _spell(self, tokens: list[int], text: str) -> bool:
        return max(tokens, default=0) < len(self.tokens) and b"".join([self.tokens[t] for t in tokens]) == text.encode()

    def _longest_first(self, data: bytes) -> list[int]:
        """At each place the longest token, up to a byte that has none."""
        tokens: list[int] = []
        while data:
            length = min(self._longest, len(data))
            while length and data[:length] not in self._ids:
                length -= 1
            if length == 0:
                break
            tokens.append(self._ids[data[:length]])
            data = data[length:]
        return tokens


class Guides:
    """The guides of one tokenizer and model. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._has_end = any(token < vocab_size for token in tokenizer.eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[Guide, LLMatcher] = collections.OrderedDict()  # last used last

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.end_ids)

    def warm_up(self) -> None:
        """Reads the vocabulary, for which the first guide would wait."""
        if self._has_end:
            assert self._vocabulary

    def is_prepared(self, guide: Guide) -> bool:
        """Whether `find` finds this guide compiled."""
        return guide in self._compiled

    def find(self, guide: Guide) -> LLMatcher:
        """A guide compiled, now or before: a matcher at the beginning of an answer, of which sequences take copies.

        Raises:
          ValueError: for a guide that is malformed, too complex, of a kind that llguidance does not support, or that no
            text of this vocabulary matches; or for any, if the tokenizer has no end of sequence.
        """
        with self._lock:
            if guide in self._compiled:
                self._compiled.move_to_end(guide)
                return self._compiled[guide]
        compiled = self._compile(guide)  # without the lock: it may take seconds
        with self._lock:
            self._compiled[guide] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def renew(self, guide: Guide, full: LLMatcher) -> LLMatcher:
        """A matcher that shares nothing, for one of the copies of `full`, which is forgotten.

        Copies share the states that their lexer has been in, which only grow, up to a limit.
        """
        with self._lock:
            if self._compiled.get(guide) is full:
                del self._compiled[guide]
        return self._compile(guide)

    def _compile(self, guide: Guide) -> LLMatcher:
        if not self._has_end:
            raise InvalidFieldError(guide.name, "cannot be used: this model's tokenizer has no end of sequence")
        compiled = LLMatcher(self._vocabulary, _grammar(guide), log_level=0, limits=LIMITS)
        if not compiled.is_error():
            # Some faults show only now. What the first mask takes to build serves every copy.
            compiled.compute_bitmask()
        if compiled.is_error():
            raise InvalidFieldError(guide.name, f"cannot be used: {_reason(compiled)}")
        return compiled


def _grammar(guide: Guide) -> str:
    """In llguidance's own notation."""
    if guide.kind is GuideKind.REGEX:
        return LLMatcher.grammar_from_regex(guide.source)
    if guide.kind is GuideKind.GRAMMAR:
        return json.dumps({"grammars": [{"lark_grammar": guide.source}]})
    schema = {"type": "object"} if guide.kind is GuideKind.JSON_OBJECT else _schema(guide)
    return LLMatcher.grammar_from_json_schema({"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **schema})


def _schema(guide: Guide) -> dict[str, Any]:
    try:
        schema = json.loads(guide.source)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(guide.name, f"is not JSON: {error}") from error
    if schema is True:  # anything
        return {}
    if not isinstance(schema, dict):
        raise InvalidFieldError(guide.name, f"is {guide.source[:40]}; expected an object")
    return schema


def _reason(matcher: LLMatcher) -> str:
    """llguidance's words for what went wrong, without its traces."""
    error = matcher.get_error().split("\n<")[0].strip()
    if error == "NoExtensionBias":
        return "no token of the vocabulary can come next"
    return error[:_MAX_ERROR]


class Matcher:
    """What one sequence may say next. `error`: why it can say nothing, once that is so."""

    def __init__(self, guides: Guides, guide: Guide) -> None:
        """At the beginning of the answer. Raises ValueError as `Guides.find` does."""
        self.error: str | None = None
        self._guides = guides
        self._guide = guide
        self._compiled = guides.find(guide)
        self._state = self._compiled.deep_copy()
        self._tokens: list[int] = []
        self._restarted = False

    @property
    def is_complete(self) -> bool:
        """Whether the answer has its form, and nothing may follow."""
        return self.error is None and self._state.is_stopped()

    def advance(self, token_id: int) -> None:
        """Takes the token that came, which was allowed and ends nothing."""
        self._tokens.append(token_id)
        self._state.consume_token(token_id)
        if self._state.is_error() and not self._restart():
            self._fail()

    def _restart(self) -> bool:
        """Whether a start of its own got rid of an error: only of one that others may have brought about."""
        if _FULL not in self._state.get_error() or self._restarted:
            return False
        self._restarted = True
        self._state = self._guides.renew(self._guide, self._compiled)
        self._state.consume_tokens(self._tokens)
        return not self._state.is_error()

    def _fail(self) -> None:
        self.error = f"the answer cannot go on as its {self._guide.kind.value} asks: {_reason(self._state)}"


def fill_masks(matchers: Mapping[int, Matcher], masks: "np.ndarray[Any, np.dtype[np.uint32]]") -> None:
    """Sets rows of `masks` [S, ceil(V / 32)] to what may come next: token t by bit t % 32 of word t // 32.

    Args:
      matchers: by row. One that has nothing to allow has an `error` afterwards, and its row is zeros.
      masks: where to write.
    """
    words = masks.view(np.int32)
    fill_next_token_bitmask_par(_threads(), [(matcher._state, row) for row, matcher in matchers.items()], words)
    for row, matcher in matchers.items():
        if not matcher._state.is_error():
            continue
        if matcher._restart():
            fill_next_token_bitmask(matcher._state, words, row)
        if matcher._state.is_error():  # llguidance has allowed the end of sequence, as if all were well
            matcher._fail()
            words[row] = 0


@functools.cache
def _threads() -> LLExecutor:
    return LLExecutor()
