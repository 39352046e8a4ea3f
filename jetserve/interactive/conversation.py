"""What a model is shown of a chat: the history as tokens, and what of it is forgotten when it outgrows the cache.

Knows nothing of engines or terminals.
"""

import dataclasses
from collections.abc import Iterable

from jetserve.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A question and its answer."""

    user: str
    assistant: str


class Conversation:
    """A system message and turns, as tokens of at most `limit` with room for an answer.

    Without a chat template every message is a text to be continued by itself: there is no system message, and turns
    are not remembered.
    """

    def __init__(self, tokenizer: Tokenizer, *, limit: int, reserve: int, system: str | None = None) -> None:
        """`limit` tokens of prompt and answer together, of which `reserve` are kept for the answer where they can be.

        Raises:
          ValueError: as `set_system` does.
        """
        self.tokenizer = tokenizer
        self.limit = limit
        self.reserve = reserve
        self.turns: list[Turn] = []
        self.system: str | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Sets or removes the system message; the turns stay.

        Raises:
          ValueError: if the model's template takes none, or it leaves no room in the limit; nothing has changed then.
        """
        if text is not None:
            if not self.tokenizer.has_chat_template:
                raise ValueError("this model has no chat template, so there is no place for a system message")
            length = len(self._encode(text, [], "?"))
            if length >= self.limit:
                raise ValueError(
                    f"the system message takes {length} tokens with the shortest question; at most {self.limit - 1} fit"
                )
        self.system = text

    def _encode(self, system: str | None, turns: Iterable[Turn], message: str | None) -> list[int]:
        if not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(message or "", add_special_tokens=True)
        messages = [] if system is None else [{"role": "system", "content": system}]
        for turn in turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        if message is not None:
            messages.append({"role": "user", "content": message})
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=message is not None)

    def prompt(self, message: str) -> tuple[list[int], int]:
        """The tokens to be answered, and how many of the oldest turns were forgotten to make them fit.

        Raises:
          ValueError: if the message does not fit even alone (nothing is forgotten then), or the template refuses it.
        """
        alone = len(self._encode(self.system, [], message))
        if alone >= self.limit:
            raise ValueError(
                f"the message takes {alone} tokens, with the system message if there is one; at most {self.limit - 1}"
                " fit. Shorten it, or raise --max_cache_length"
            )
        for dropped in range(len(self.turns) + 1):
            tokens = self._encode(self.system, self.turns[dropped:], message)
            if len(tokens) + self.reserve <= self.limit:
                break
        del self.turns[:dropped]
        return tokens, dropped

    def add(self, turn: Turn) -> None:
        """Remembers a turn, where there is a chat template."""
        if self.tokenizer.has_chat_template:
            self.turns.append(turn)

    @property
    def num_tokens(self) -> int:
        """Tokens of the system message and all turns."""
        if not self.turns and self.system is None:
            return 0
        return len(self._encode(self.system, self.turns, None if self.turns else ""))
