"""`/v1/chat/completions`: messages become a prompt by the model's template, and answers messages."""

from collections.abc import Sequence
from typing import Any

from jetserve.server.openai import sampling, tools
from jetserve.server.openai.answers import Answer, Choice, VisibleTokens, finite
from jetserve.server.openai.backend import Call
from jetserve.server.openai.completions import token_bytes
from jetserve.server.openai.errors import InvalidRequestError
from jetserve.server.openai.protocol import ChatBody, ChatPrompt
from jetserve.tokenizer import Tokenizer
from jetserve.types import FinishReason, Request, RequestOutput, TokenLogprobs

TOOL_CALLS = "tool_calls"
"""The finish reason of a message that calls."""


def answer_of(body: ChatBody, call: Call) -> Answer:
    """An answer that is still empty, with its request for the engine. May take a while: it makes tokens of texts.

    Raises:
      ValueError: for what is missing, out of range or not supported.
    """
    tokenizer = call.backend.tokenizer
    _refuse_two_forms(body)
    prompt = tokenizer.encode(render(body, tokenizer), add_special_tokens=False)
    most = max(call.backend.max_length - len(prompt), 1)
    params = sampling.params_of(
        body,
        max_tokens=most if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        guide=tools.guide_of(body),
    )
    requests = call.requests([prompt], params, priority=body.priority, timeout=body.timeout, param="messages")
    choices = [ChatChoice(index, requests[0], tokenizer, tools.reader_of(body)) for index in range(params.n)]
    return Answer(
        call,
        requests,
        choices,
        id_prefix="chatcmpl",
        whole_object="chat.completion",
        chunk_object="chat.completion.chunk",
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _refuse_two_forms(body: ChatBody) -> None:
    if body.tools and body.tool_choice != "none" and sampling.guide_of(body) is not None:
        raise InvalidRequestError(
            "tools are offered together with a form that the answer must have, which leaves no room for calls; set"
            ' tool_choice to "none", or drop the form',
            param="tools",
        )


def render(body: ChatPrompt, tokenizer: Tokenizer) -> str:
    """The text of the prompt. Raises ValueError for what the template refuses."""
    messages = [tools.as_template_takes(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    offered = [] if body.tool_choice == "none" else body.tools or []
    knows_tools = tokenizer.has_tool_template
    if not knows_tools:
        messages = tools.told_in_words(messages, offered)
    try:
        text = tokenizer.render_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            tools=tools.definitions(offered) if offered and knows_tools else None,
            **(body.chat_template_kwargs or {}),
        )
    except ValueError as error:
        raise InvalidRequestError(str(error), param="messages") from error
    return _up_to_last_message(text, messages[-1]["content"]) if body.continue_final_message else text


def _up_to_last_message(text: str, last: str) -> str:
    """Without what the template puts after the last message."""
    at = text.rfind(last.strip())
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template changes the last message, so that its end cannot be"
            " found",
            param="continue_final_message",
        )
    return text[: at + len(last.strip())]


class ChatChoice(Choice):
    """A message: text, or calls."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, reader: tools.Reader) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._visible = VisibleTokens(request, tokenizer)
        self._reader = reader
        self._has_logprobs = request.sampling.logprobs is not None
        self._has_begun = False
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._reason: str | None = None

    def push(self, output: RequestOutput) -> list[dict[str, Any]]:
        deltas = self._reader.push(output.text)
        if output.finish_reason is not None:
            deltas += self._reader.finish()
        for delta in deltas:
            self._take(delta)
        logprobs = [self._logprob(entry) for entry in self._visible.of(output)]
        self._logprobs += logprobs
        entries = []
        if not self._has_begun:
            self._has_begun = True
            entries.append(self._entry("delta", {"role": "assistant", "content": ""}, []))
        if logprobs and not deltas:
            deltas = [{}]
        for i, delta in enumerate(deltas):
            entries.append(self._entry("delta", delta, logprobs if i == 0 else []))
        if output.finish_reason is not None:
            self._reason = self._reason_of(output.finish_reason)
            entries.append(self._entry("delta", {}, []))
        return entries

    def _take(self, delta: tools.Delta) -> None:
        self._content.append(delta.get("content", ""))
        for entry in delta.get("tool_calls", ()):
            if "id" in entry:
                kept = {name: value for name, value in entry.items() if name != "index"}
                self._calls.append({**kept, "function": dict(entry["function"])})
            else:
                self._calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]

    def _reason_of(self, reason: FinishReason) -> str:
        return TOOL_CALLS if reason is FinishReason.STOP and self._calls else reason.value

    def whole(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls}
        return self._entry("message", message, self._logprobs)

    def _entry(self, name: str, what: dict[str, Any], logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        told = {"content": logprobs, "refusal": None} if self._has_logprobs else None
        return {"index": self._index, name: what, "logprobs": told, "finish_reason": self._reason}

    def _logprob(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}
