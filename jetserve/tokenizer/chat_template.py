"""Renders a conversation to prompt text with a model's own Jinja template.

Owns the sandbox, the helpers that templates of the Hugging Face format expect, and the checks of what a conversation
is. Knows nothing of token ids. Templates come with checkpoints and are untrusted: they run in Jinja's immutable sandbox
and see nothing but plain JSON data.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message = Mapping[str, object]

# What a template's own expressions may raise: "x" + None, missing attributes, range(10**9), endless macros.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks an assistant's text for training; rendering just passes it on."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def reads(source: str, name: str) -> bool:
    """Whether the template `source` looks at the variable `name`. Raises ValueError if it is not valid Jinja."""
    environment = jinja2.Environment(extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    try:
        return name in jinja2.meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from error


def _plain(value: object, where: str) -> object:
    """A copy of `value` made of exact JSON types, so that the template cannot reach methods of rich objects."""
    if value is None or isinstance(value, bool):
        return value
    for plain_type in (str, int, float):
        if isinstance(value, plain_type):
            return plain_type(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ValueError(
        f"{where} is a {type(value).__name__}; a chat template takes JSON data only "
        "(strings, numbers, booleans, null, lists, objects)"
    )


def _checked_messages(messages: object) -> list[dict[str, object]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages is a {type(messages).__name__}; expected a list of objects like "
            '{"role": "user", "content": "Hello"}'
        )
    if not messages:
        raise ValueError("messages is empty; expected at least one message")
    checked: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is {message!r}; expected an object with 'role' and 'content'")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"{where}.role is {role!r}; expected a string such as 'system', 'user' or 'assistant'")
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"{where} has no content; expected a string, or tool_calls in its place")
        if content is not None and not isinstance(content, (str, list, tuple)):
            raise ValueError(f"{where}.content is a {type(content).__name__}; expected a string or a list of parts")
        # Templates handle a missing key, but print a null one as "None".
        checked.append({str(key): _plain(item, f"{where}.{key}") for key, item in message.items() if item is not None})
    return checked


def render(
    source: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object],
) -> str:
    """The prompt text of `messages` under the template `source`, as Hugging Face's chat template format defines it.

    `tools` are JSON schemas of functions; `variables` holds the names of special tokens and whatever else the template
    reads. Raises ValueError for malformed messages and for anything that the template refuses, with its own message.
    """
    checked = _checked_messages(messages)
    if tools is not None:
        for index, tool in enumerate(tools):
            if not isinstance(tool, Mapping):
                raise ValueError(f"tools[{index}] is {tool!r}; expected the JSON schema of a function")
    context: dict[str, object] = {name: _plain(value, name) for name, value in variables.items()}
    context |= {
        "messages": checked,
        "tools": None if tools is None else _plain(list(tools), "tools"),
        "documents": context.get("documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compile(source).render(**context)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from error
    except _TEMPLATE_FAULTS as error:
        raise ValueError(f"the chat template refused the conversation: {error}") from error
