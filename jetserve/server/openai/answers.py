"""The growing answer to one call, and what OpenAI's API says of it, whole or in chunks.

Knows nothing of connections. What differs between completions and chats is in their `Choice`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from jetserve.server.openai.backend import Call
from jetserve.tokenizer import Tokenizer
from jetserve.types import Request, RequestOutput, TokenLogprobs, Usage

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Choice(ABC):
    """One sample of one prompt."""

    @abstractmethod
    def push(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Takes what is new, and returns it as entries of `choices` in chunks."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The entry of `choices` once all has come."""


class Answer:
    """All samples of all prompts of one call, `n` a prompt."""

    def __init__(
        self,
        call: Call,
        requests: Sequence[Request],
        choices: Sequence[Choice],
        *,
        id_prefix: str,
        whole_object: str,
        chunk_object: str,
        stream: bool,
        include_usage: bool,
    ) -> None:
        self.requests = requests
        self.stream = stream
        self.include_usage = include_usage
        self._choices = choices
        self._usages: dict[int, Usage] = {}
        self._samples = requests[0].sampling.n
        self._whole_object, self._chunk_object = whole_object, chunk_object
        self._head = {
            "id": f"{id_prefix}-{call.uid}",
            "created": int(time.time()),
            "model": call.backend.model,
            "system_fingerprint": call.backend.fingerprint,
        }

    def push(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Takes an output of the prompt with this index, and returns it as chunks: none if nothing can be told yet."""
        index = prompt * self._samples + output.index
        self._usages[index] = output.usage
        return [self._chunk([entry]) for entry in self._choices[index].push(output)]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.include_usage else {}
        return {**self._head, "object": self._chunk_object, "choices": choices, **usage}

    def usage_chunk(self) -> dict[str, Any]:
        """The last one of a stream that was asked for its usage."""
        return {**self._chunk([]), "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The response that is no stream."""
        choices = [choice.whole() for choice in self._choices]
        return {**self._head, "object": self._whole_object, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        # A prompt is read once, and only its first sample can have found it in the cache of an earlier request.
        firsts = [self._usages[index] for index in range(0, len(self._choices), self._samples)]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        output = sum(usage.output_tokens for usage in self._usages.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
        }


class VisibleTokens:
    """Which logprobs are told: all but that of a token that ended the answer and is no part of its text."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(tokenizer.eos_token_ids))

    def of(self, output: RequestOutput) -> list[TokenLogprobs]:
        """The entries of an output that are told."""
        if not output.finished:
            return list(output.logprobs)
        return [entry for entry in output.logprobs if entry.token_id not in self._ends]


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return max(logprob, LOWEST_LOGPROB)
