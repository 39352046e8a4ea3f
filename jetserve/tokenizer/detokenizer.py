"""Turns tokens into text as they arrive: whole characters only, and nothing of a stop string.

Owns the state between two pushes. Knows nothing of vocabularies beyond each token's bytes.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What the detokenizer asks of a tokenizer."""

    @property
    def leading_spaces_stripped(self) -> int:
        """How many spaces at the very start of a decoded text belong to the encoding and not to the text."""

    def token_text(self, token_id: int) -> bytes:
        """The bytes of one token."""

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` hides this token."""


# A character has at most 4 bytes and a token at least one, so this many tokens hold any unfinished character.
_CONTEXT_TOKENS = 4


class IncrementalDetokenizer:
    """The text of a growing sequence: the pushes and the final flush concatenated equal `tokenizer.decode` of it all.

    Each token costs the length of its own bytes, whatever came before. With `prompt_token_ids`, the text continues that
    prompt: a space before the first new word is then kept, which `decode` of the new tokens alone would drop.
    """

    def __init__(
        self, tokenizer: TokenBytes, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_strip = tokenizer.leading_spaces_stripped
        if any(self._bytes(token) for token in prompt_token_ids):
            self._spaces_to_strip = 0
            self.push(prompt_token_ids[-_CONTEXT_TOKENS:])

    def _bytes(self, token_id: int) -> bytes:
        data = self._tokenizer.token_text(token_id)
        return b"" if self._skip_special_tokens and self._tokenizer.is_special(token_id) else data

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; bytes of an unfinished character wait for the next push.

        Raises ValueError for ids outside the vocabulary, and then takes none of these tokens.
        """
        data = b"".join([self._bytes(token) for token in token_ids])
        while self._spaces_to_strip and data:
            if not data.startswith(b" "):
                self._spaces_to_strip = 0
                break
            data = data[1:]
            self._spaces_to_strip -= 1
        return self._characters.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never got its last bytes, else nothing."""
        return self._characters.decode(b"", final=True)


class StopStrings:
    """Cuts a text stream before the first stop string that completes.

    The stop whose last character comes first wins; of several that end there, the longest. That does not depend on how
    the text is cut into pushes. Once one matched, later text is dropped.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop is {stop!r}; expected strings that are not empty")
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text now certain to precede any stop string, and the stop that matched, if one did."""
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, negative_length, self._matched = min(found)
            self._held = ""
            return text[: end + negative_length], self._matched
        safe = len(text)
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                safe = start
                break
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text held back, at the end of a stream in which no stop completed."""
        held, self._held = self._held, ""
        return held
