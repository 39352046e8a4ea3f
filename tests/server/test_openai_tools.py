"""Functions and forms: how calls are found in a text, and answers that must be calls, JSON, or match something."""

import json
import re
from typing import Any

import pytest
from grpc_parts import loaded, runner
from http_parts import HELLO, Served, play

from jetserve.engine.engine import Engine
from jetserve.server.openai import chat, tools
from jetserve.server.openai.protocol import ChatBody, ChatPrompt
from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.formats import TokenizerParts

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "maxProperties": 0}}}


def read(reader: tools.Reader, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of a text that comes in pieces of this size."""
    deltas = [delta for i in range(0, len(text), size) for delta in reader.push(text[i : i + size])]
    deltas += reader.finish()
    content = "".join(delta.get("content", "") for delta in deltas)
    entries = [entry for delta in deltas for entry in delta.get("tool_calls", ())]
    assert [entry["index"] for entry in entries] == list(range(len(entries)))
    assert len({entry["id"] for entry in entries}) == len(entries)
    return content, [(e["function"]["name"], json.loads(e["function"]["arguments"])) for e in entries]


PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = ("weather", {"city": "Paris"})


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It is sunny.", "It is sunny.", []),
        ("", "", []),
        ("1 < 2 and <tool", "1 < 2 and <tool", []),
        (f"<tool_call>{PARIS}</tool_call>", "", [CALL]),
        (f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>{PARIS}</tool_call>\n", "", [CALL, CALL]),
        (f"Let me see. <tool_call>{PARIS}</tool_call> Done.", "Let me see. Done.", [CALL]),
        (f"<tool_call>{PARIS}", "", [CALL]),  # the end token came in place of the mark
        ("<tool_call>{broken</tool_call> x", "<tool_call>{broken</tool_call> x", []),
        ("<tool_call>{broken", "<tool_call>{broken", []),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',) * 2 + ([],),
        (PARIS, "", [CALL]),
        (f"\n [{PARIS}, {PARIS}]", "", [CALL, CALL]),
        (PARIS.replace("arguments", "parameters"), "", [CALL]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("[1] is a reference", "[1] is a reference", []),
    ],
)
def test_calls_are_found_however_the_text_is_cut(text: str, content: str, calls: list[Any], size: int) -> None:
    assert read(tools.SearchingReader(["weather"]), text, size) == (content, calls)


def test_text_that_cannot_be_a_call_is_not_held_back() -> None:
    reader = tools.SearchingReader(["weather"])
    assert reader.push("Hello ") == [{"content": "Hello "}]
    assert reader.push("you <") == [{"content": "you "}]
    assert reader.push("b>") == [{"content": "<b>"}]


def test_an_answer_of_calls_that_is_cut_off_is_told_as_text() -> None:
    assert read(tools.WholeReader(["weather"]), f"[{PARIS}, ", 4) == (f"[{PARIS}, ", [])


def parts(template: str) -> Tokenizer:
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    return Tokenizer(
        TokenizerParts(
            backend=tokenizer._backend,
            special_tokens=tokenizer._special_tokens,
            chat_templates={"default": template},
            eos_token_ids=tokenizer.eos_token_ids,
        )
    )


TEMPLATE = (
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
    "{{ m.tool_call_id or '' }};{% endfor %}"
)


def engine() -> Engine:
    return Engine(runner(), parts(TEMPLATE))


CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def prompt(messages: list[dict[str, Any]], **fields: Any) -> ChatPrompt:
    return ChatPrompt.model_validate_json(json.dumps({"messages": messages, **fields}))


def test_a_template_that_knows_functions_is_given_them() -> None:
    tokenizer = parts(TEMPLATE)
    assert tokenizer.has_tool_template
    text = chat.render(prompt(CONVERSATION, tools=[WEATHER]), tokenizer)
    assert text == "[weather]user:Weather?;assistant:weather(Rome);tool:sunnyc1;"
    assert "[weather]" not in chat.render(prompt(CONVERSATION, tools=[WEATHER], tool_choice="none"), tokenizer)


def test_a_template_that_knows_none_is_told_in_words() -> None:
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    assert not tokenizer.has_tool_template
    for first in ([], [{"role": "system", "content": "Be brief."}]):
        text = chat.render(prompt([*first, *CONVERSATION], tools=[WEATHER]), tokenizer)
        assert text.count("<|im_start|>system") == 1
        assert "Tells the weather" in text
        assert ("Be brief." in text) == bool(first)
        assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in text
        assert "<tool_response>\nsunny\n</tool_response>" in text
        assert "strict" not in text


def body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate_json(json.dumps({"messages": HELLO, **fields}))


def test_how_an_answer_is_read_follows_the_choice() -> None:
    for fields, kind, is_guided in (
        ({}, tools.PlainReader, False),
        ({"tools": []}, tools.PlainReader, False),
        ({"tools": [WEATHER]}, tools.SearchingReader, False),
        ({"tools": [WEATHER], "tool_choice": "auto"}, tools.SearchingReader, False),
        ({"tools": [WEATHER], "tool_choice": "none"}, tools.PlainReader, False),
        ({"tools": [WEATHER], "tool_choice": "required"}, tools.WholeReader, True),
    ):
        assert type(tools.reader_of(body(**fields))) is kind
        assert (tools.guide_of(body(**fields)) is not None) == is_guided


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "weather":
        assert found["city"] in ("Paris", "Rome")
        assert 1 <= found["days"] <= 9
        assert len(found) == 2
    else:
        assert (name, found) == ("clock", {})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_named_function_is_called(seed: int) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "max_tokens": 100}
    fields |= {"seed": seed, "temperature": 1.0}

    async def scene(served: Served) -> None:
        (answer,) = (await served.chat(**fields)).choices
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls
        check(call.function.name, call.function.arguments)
        arguments, names, reasons = "", [], []
        async for chunk in await served.chat(**fields, stream=True):
            for entry in chunk.choices[0].delta.tool_calls or ():
                arguments += entry.function.arguments
                names += [entry.function.name] if entry.function.name else []
            reasons.append(chunk.choices[0].finish_reason)
        assert (names, arguments) == (["weather"], call.function.arguments)
        assert reasons[-1] == "tool_calls"
        # The call and its result go back as they came.
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        await served.chat(messages=[*HELLO, answer.message.model_dump(), result], tools=[WEATHER])

    play(scene, engine())


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
def test_some_function_is_called(parallel: bool) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": parallel}

    async def scene(served: Served) -> None:
        for seed in range(4):
            answer = await served.chat(**fields, seed=seed, temperature=1.0, max_tokens=300)
            (choice,) = answer.choices
            if choice.finish_reason == "length":  # a random model may never come to the end of its list
                assert parallel
                continue
            assert choice.finish_reason == "tool_calls"
            assert parallel or len(choice.message.tool_calls) == 1
            assert choice.message.content is None
            for call in choice.message.tool_calls:
                check(call.function.name, call.function.arguments)

    play(scene, engine())


@pytest.mark.slow
def test_answers_have_the_form_that_was_asked_for() -> None:
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]

    async def text_of(served: Served, **fields: Any) -> str:
        known = {name: fields.pop(name) for name in ("response_format",) if name in fields}
        answer = await served.chat(**known, extra_body=fields, temperature=1.0, seed=5, max_tokens=400)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    async def scene(served: Served) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema, "strict": True}}
        for fields in (
            {"response_format": wanted},
            {"guided_json": schema},
            {"guided_json": json.dumps(schema)},
            {"structured_outputs": {"json": schema}},
        ):
            check("weather", await text_of(served, **fields))
        for fields in ({"guided_regex": "[ab]{3}x"}, {"structured_outputs": {"regex": "[ab]{3}x"}}):
            assert re.fullmatch("[ab]{3}x", await text_of(served, **fields))
        grammar = 'start: "yes" " sir"? | "no"'
        for fields in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
            assert await text_of(served, **fields) in ("yes", "yes sir", "no")
        for fields in ({"guided_choice": ['"a"', "ä"]}, {"structured_outputs": {"choice": ['"a"', "ä"]}}):
            assert await text_of(served, **fields) in ('"a"', "ä")
        free = await served.chat(response_format={"type": "json_object"}, max_tokens=20)
        assert free.choices[0].message.content.startswith("{")
        completion = await served.complete(extra_body={"guided_regex": "z{4}"})
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("zzzz", "stop")

    play(scene)


def test_forms_that_are_none_are_refused() -> None:
    async def scene(served: Served) -> None:
        for fields, words in (
            ({"guided_regex": "("}, "regex"),
            ({"guided_grammar": "nonsense ::="}, "grammar"),
            ({"guided_json": {"type": "thing"}}, "guided_json"),
            ({"guided_json": "{"}, "guided_json"),
        ):
            response = await served.post("/v1/completions", {"prompt": "x", **fields})
            assert response.status_code == 400, response.text
            assert words in response.json()["error"]["message"]

    play(scene)
