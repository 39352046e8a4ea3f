"""`/v1/completions`: prompts of text or tokens, and their answers."""

import codecs
from collections.abc import Sequence
from typing import Any

from jetserve.server.openai import sampling
from jetserve.server.openai.answers import Answer, Choice, VisibleTokens, finite
from jetserve.server.openai.backend import Call
from jetserve.server.openai.errors import InvalidRequestError
from jetserve.server.openai.protocol import CompletionBody
from jetserve.tokenizer import Tokenizer
from jetserve.types import Request, RequestOutput, TokenLogprobs

DEFAULT_MAX_TOKENS = 16


def answer_of(body: CompletionBody, call: Call) -> Answer:
    """An answer that is still empty, with its requests for the engine. May take a while: it makes tokens of texts.

    Raises:
      ValueError: for what is missing, out of range or not supported.
    """
    tokenizer = call.backend.tokenizer
    prompts = _prompts(body, tokenizer)
    params = sampling.params_of(body, max_tokens=DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    requests = call.requests(
        [tokens for tokens, _ in prompts], params, priority=body.priority, timeout=body.timeout, param="prompt"
    )
    choices = [
        CompletionChoice(
            prompt * params.n + sample, requests[prompt], tokenizer, echo=_echo(prompts[prompt], body, tokenizer)
        )
        for prompt in range(len(prompts))
        for sample in range(params.n)
    ]
    return Answer(
        call,
        requests,
        choices,
        id_prefix="cmpl",
        whole_object="text_completion",
        chunk_object="text_completion",
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


_Prompt = tuple[Sequence[int], str | None]
"""Tokens, and the text that they were made of if there was one."""


def _prompts(body: CompletionBody, tokenizer: Tokenizer) -> list[_Prompt]:
    match body.prompt:
        case str() | [int(), *_] as one:
            several: Sequence[Any] = [one]
        case several:
            pass
    if not several:
        raise InvalidRequestError("prompt is empty; expected at least one text or token", param="prompt")
    add_special = body.add_special_tokens is not False
    prompts: list[_Prompt] = []
    for one in several:
        tokens = tokenizer.encode(one, add_special_tokens=add_special) if isinstance(one, str) else one
        if not tokens:
            raise InvalidRequestError("prompt has no tokens; expected at least one", param="prompt")
        prompts.append((tokens, one if isinstance(one, str) else None))
    return prompts


def _echo(prompt: _Prompt, body: CompletionBody, tokenizer: Tokenizer) -> str:
    if not body.echo:
        return ""
    tokens, text = prompt
    return tokenizer.decode([token for token in tokens if tokenizer.has_token(token)]) if text is None else text


class CompletionChoice(Choice):
    """Text, after the prompt's own if that is echoed."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, *, echo: str) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._visible = VisibleTokens(request, tokenizer)
        self._unsent = echo
        self._text: list[str] = []
        self._logprobs = None if request.sampling.logprobs is None else _LogprobTable(tokenizer)
        self._reason: str | None = None

    def push(self, output: RequestOutput) -> list[dict[str, Any]]:
        text, self._unsent = self._unsent + output.text, ""
        self._text.append(text)
        self._reason = None if output.finish_reason is None else output.finish_reason.value
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.push(self._visible.of(output))
        if not (text or output.finished or (logprobs and logprobs["tokens"])):
            return []
        return [self._entry(text, logprobs)]

    def whole(self) -> dict[str, Any]:
        return self._entry("".join(self._text), None if self._logprobs is None else self._logprobs.whole)

    def _entry(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self._reason}


class _LogprobTable:
    """OpenAI's older form of logprobs: a column for each token. Tokens that are no whole characters read "bytes:…"."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self.whole: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def push(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Adds tokens, and returns them as a table of their own."""
        new: dict[str, list[Any]] = {name: [] for name in self.whole}
        for entry in entries:
            top = {self._name(token): finite(logprob) for token, logprob in entry.top}
            top[self._name(entry.token_id)] = finite(entry.logprob)
            new["tokens"].append(self._name(entry.token_id))
            new["token_logprobs"].append(finite(entry.logprob))
            new["top_logprobs"].append(top)
            new["text_offset"].append(self._offset)
            self._offset += len(self._characters.decode(token_bytes(self._tokenizer, entry.token_id)))
        for name, column in new.items():
            self.whole[name] += column
        return new

    def _name(self, token: int) -> str:
        data = token_bytes(self._tokenizer, token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token spells; nothing for ids that only pad the model's vocabulary."""
    return tokenizer.token_text(token) if tokenizer.has_token(token) else b""
