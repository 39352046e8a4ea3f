"""The bodies that clients send: OpenAI's fields, and those of vLLM that its users know.

Owns names and JSON types, and what is refused for being unknown. Ranges are checked where the engine's own types are
made (`jetserve.types`), with one message for all protocols. null means that a field is not given.
"""

import logging
from typing import Any, ClassVar, Literal, Self

import pydantic
from pydantic_core import PydanticCustomError

from jetserve.server.roles import Role
from jetserve.types import MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)

_warned: set[str] = set()
PROBLEM = "problem"
"""The type of pydantic error that this module raises; its context names the `field` to blame."""


def _problem(field: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(PROBLEM, "{message}", {"field": field, "message": message})


class Body(pydantic.BaseModel):
    """Refuses fields that it does not know, unless they are null.

    `harmless`: unknown fields that change no answer; they are taken, with one warning each in the log. `fixed`: fields
    that are taken only with the value that changes nothing.
    """

    model_config = pydantic.ConfigDict(extra="allow", strict=True, frozen=True, protected_namespaces=())
    harmless: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[dict[str, Any]] = {}

    @pydantic.model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None:
                continue
            if name in self.fixed:
                if value != self.fixed[name]:
                    raise _problem(name, f"{name} is {value!r}; only {self.fixed[name]!r} is supported")
            elif name not in self.harmless:
                raise _problem(name, f"{name} is not a field that this server knows; drop it, or see docs/http_api.md")
            elif name not in _warned:
                _warned.add(name)
                logger.warning("requests have the field %r, which has no effect here", name)
        return self


class StreamOptions(Body):
    harmless = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


class JsonSchema(Body):
    """Always strict: the answer matches the schema whether or not `strict` says so."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = pydantic.Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's newer spelling of the `guided_…` fields."""

    json_: dict[str, Any] | str | None = pydantic.Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


class NamesModel(Body):
    """A request. `model` may be left out, as there is one."""

    model: str | None = None


class SamplingFields(NamesModel):
    """What completions and chats have in common."""

    harmless = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    )
    fixed: ClassVar[dict[str, Any]] = {
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "best_of": 1,
        "suffix": "",
        "modalities": ["text"],
    }

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    timeout: float | None = None

    @pydantic.model_validator(mode="after")
    def _refuse_options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _problem("stream_options", "stream_options is set, but stream is not; expected both or none")
        return self


class CompletionBody(SamplingFields):
    """`/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None

    @pydantic.model_validator(mode="after")
    def _refuse_what_is_not_done(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise _problem(
                "best_of", f"best_of is {self.best_of}; only n ({self.n or 1}) is supported: every sample is returned"
            )
        if self.echo and self.logprobs is not None:
            raise _problem(
                "echo", "echo is set together with logprobs; the prompt's logprobs are not computed: drop one"
            )
        return self


class ContentPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    harmless = frozenset({"index"})

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn. What an answer carries is taken back as it came: its fields that this server leaves null."""

    fixed: ClassVar[dict[str, Any]] = {"annotations": []}

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str | None:
        """The content as one text, its parts on lines of their own."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content


class Function(Body):
    harmless = frozenset({"strict"})

    name: str = pydantic.Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatPrompt(Body):
    """What becomes the prompt of a chat."""

    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _check_tools_and_turns(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise _problem("tools", f"tools has a name twice, among {names}; give every function a name of its own")
        if self.tool_choice not in (None, "none") and not names:
            raise _problem("tool_choice", "tool_choice is set, but tools is not; expected at least one function")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise _problem(
                "tool_choice", f"tool_choice names {self.tool_choice.function.name!r}; expected one of {names}"
            )
        reserved = {"messages", "tools", "add_generation_prompt"} & set(self.chat_template_kwargs or ())
        if reserved:
            raise _problem("chat_template_kwargs", f"chat_template_kwargs has {sorted(reserved)}; they are fields")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise _problem(
                    "continue_final_message",
                    "continue_final_message and add_generation_prompt are both true; expected one at most",
                )
            if not self.messages or self.messages[-1].role != "assistant" or not self.messages[-1].text:
                raise _problem(
                    "continue_final_message",
                    "continue_final_message is set; expected the last message to be the assistant's",
                )
        return self


class ChatBody(ChatPrompt, SamplingFields):
    """`/v1/chat/completions`."""

    max_completion_tokens: int | None = pydantic.Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    parallel_tool_calls: bool | None = None

    @pydantic.model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _problem("top_logprobs", "top_logprobs is set, but logprobs is not true; expected both")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _problem("max_tokens", "max_tokens and max_completion_tokens differ; expected one of the two")
        return self


class TokenizeBody(NamesModel):
    """`/tokenize`: a text, or a chat."""

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @pydantic.model_validator(mode="after")
    def _expect_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise _problem("prompt", "expected either prompt or messages")
        return self


class DetokenizeBody(NamesModel):
    """`/detokenize`."""

    tokens: list[int]
