"""Functions that a model may call: how it is told of them, and how its calls are found in its text.

Two forms are understood: `<tool_call>{"name": …, "arguments": …}</tool_call>` anywhere, as the Hermes and Qwen models
write it, and an answer that is nothing but such an object or a list of them, as Llama's and Mistral's. A call that must
come is not looked for: the answer is guided to be one.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from jetserve.server import roles
from jetserve.server.openai.errors import InvalidRequestError
from jetserve.server.openai.protocol import ChatBody, Message, NamedTool, Tool
from jetserve.server.openai.sampling import json_guide
from jetserve.types import Guide

_START, _END = "<tool_call>", "</tool_call>"

Delta = dict[str, Any]
"""What is new of a message: {"content": …} or {"tool_calls": […]}."""


class Reader(ABC):
    """Turns an answer's text, as it comes, into what is new of its message."""

    def __init__(self) -> None:
        self._calls = 0

    @abstractmethod
    def push(self, text: str) -> list[Delta]:
        """Takes text."""

    def finish(self) -> list[Delta]:
        """What was held back until the end."""
        return []

    def _call(self, name: str, arguments: str) -> Delta:
        function = {"name": name, "arguments": arguments}
        entry = {"index": self._calls, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        self._calls += 1
        return {"tool_calls": [entry]}


class PlainReader(Reader):
    """All is text."""

    def push(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []


class NamedReader(Reader):
    """All is the arguments of one function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def push(self, text: str) -> list[Delta]:
        if self._calls == 0:
            return [self._call(self._name, text)]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []


class WholeReader(Reader):
    """All is calls, readable at the end; an answer that was cut off is told as text."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self._text = ""

    def push(self, text: str) -> list[Delta]:
        self._text += text
        return []

    def finish(self) -> list[Delta]:
        calls = _calls_in(self._text, self._names)
        if calls:
            return [self._call(*call) for call in calls]
        return [{"content": self._text}] if self._text else []


class SearchingReader(Reader):
    """Text with calls in it, perhaps."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self._held = ""
        self._has_begun = self._in_call = self._is_after_call = False

    def push(self, text: str) -> list[Delta]:
        self._held += text
        if not self._has_begun:
            beginning = self._held.lstrip()
            if not beginning or beginning[0] in "{[":
                return []  # maybe nothing but calls: that shows at the end
            self._has_begun = True
        deltas: list[Delta] = []
        while (marker := _END if self._in_call else _START) in self._held:
            before, _, self._held = self._held.partition(marker)
            deltas += self._read(before) if self._in_call else self._say(before)
            self._in_call = not self._in_call
        if not self._in_call:
            held = _overlap(self._held, _START)
            text, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
            deltas += self._say(text)
        return deltas

    def _read(self, text: str) -> list[Delta]:
        calls = _calls_in(text, self._names)
        self._is_after_call = bool(calls)
        return [self._call(*call) for call in calls] if calls else self._say(f"{_START}{text}{_END}")

    def _say(self, text: str) -> list[Delta]:
        if self._is_after_call:
            text = text.lstrip()
        self._is_after_call &= not text
        return [{"content": text}] if text else []

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        calls = _calls_in(held, self._names) if self._in_call or not self._has_begun else []
        if calls:
            return [self._call(*call) for call in calls]
        return self._say(_START + held if self._in_call else held)


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)


def _calls_in(text: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Names and arguments (as JSON) of a text that is one call or a list of calls; empty for any other text."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    calls = []
    for entry in found if isinstance(found, list) else [found]:
        match entry:
            case {"name": str(name), "arguments": dict(arguments)} | {"name": str(name), "parameters": dict(arguments)}:
                if name not in names:
                    return []
                calls.append((name, json.dumps(arguments, ensure_ascii=False)))
            case _:
                return []
    return calls


def _names(body: ChatBody) -> list[str]:
    return [tool.function.name for tool in body.tools or ()]


def reader_of(body: ChatBody) -> Reader:
    """How the answer to this body is to be read."""
    match body.tool_choice:
        case NamedTool(function=function):
            return NamedReader(function.name)
        case "required":
            return WholeReader(_names(body))
        case None | "auto" if body.tools:
            return SearchingReader(_names(body))
        case _:
            return PlainReader()


def guide_of(body: ChatBody) -> Guide | None:
    """The form of an answer that must be a call; None if it need not be one."""
    if body.tool_choice in (None, "none", "auto"):
        return None
    tools = body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        wanted = body.tool_choice.function.name
        return json_guide(_parameters(next(tool for tool in tools if tool.function.name == wanted)), field="tools")
    calls: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": _parameters(tool)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    # Where a list of calls is possible, small models go on with it for ever.
    schema = {"type": "array", "items": one, "minItems": 1} if body.parallel_tool_calls else one
    return json_guide(schema, field="tools")


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def definitions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As templates take them."""
    return [
        tool.model_dump(include={"type": True, "function": {"name", "description", "parameters"}}) for tool in tools
    ]


def arguments_of(text: str, where: str) -> Mapping[str, Any]:
    """The arguments of an earlier call, which templates take as an object."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidRequestError(f"{where} is no valid JSON: {error}", param=where) from error
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{where} is {text!r}; expected a JSON object", param=where)
    return arguments


_INSTRUCTION = """\
You can call these functions:
{functions}
To call one, answer with a line of this form and nothing else:
<tool_call>{{"name": "its name", "arguments": {{…}}}}</tool_call>
If none helps, answer in words."""


def told_in_words(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """For templates that know nothing of functions: definitions, calls and results as plain text of other turns."""
    turns = [_in_words(message) for message in messages]
    if not tools:
        return turns
    functions = "\n".join(json.dumps(entry["function"], ensure_ascii=False) for entry in definitions(tools))
    instruction = _INSTRUCTION.format(functions=functions)
    if turns and turns[0]["role"] == "system":
        return [{"role": "system", "content": f"{turns[0]['content']}\n\n{instruction}"}, *turns[1:]]
    return [{"role": "system", "content": instruction}, *turns]


def _in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    lines = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        lines.append(f"{_START}{json.dumps(call['function'], ensure_ascii=False)}{_END}")
    return {"role": message["role"], "content": "\n".join(lines)}


def as_template_takes(message: Message, where: str) -> dict[str, Any]:
    """One turn as plain data."""
    turn: dict[str, Any] = {
        "role": roles.for_template(message.role, f"{where}.role"),
        "content": message.text or "",
    }
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(
                        call.function.arguments, f"{where}.tool_calls[{index}].function.arguments"
                    ),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    elif message.content is None:
        raise InvalidRequestError(f"{where}.content is missing; expected a text", param=f"{where}.content")
    return turn
