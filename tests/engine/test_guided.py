"""Guided answers: whatever the model would rather say, they have their form, and nobody else notices."""

import dataclasses
import json
import re
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest
from engine_parts import (
    END,
    LENGTH,
    PLAIN,
    VOCABULARY,
    alone,
    answers_of,
    guided,
    make_engine,
    mixed_requests,
    prompt_of,
    requests_of,
    run,
    staggered,
    tokenizer,
    tokens_of,
)

from jetserve.types import FinishReason, Guide, GuideKind, Request, SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grün", 'a "quoted" one', "青\n"]},
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": -5, "maximum": 120},
        "ratio": {"type": "number", "minimum": 0, "maximum": 1},
        "at": {
            "type": "object",
            "properties": {
                "x": {"type": ["boolean", "null"]},
                "code": {"type": "string", "pattern": "^[a-z]{2}[0-9]$"},
            },
            "required": ["x", "code"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 3},
    },
    "required": ["colour", "name", "size", "ratio", "at", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " "},
}


def schema(value: dict[str, Any], **settings: Any) -> SamplingParams:
    return guided(GuideKind.JSON_SCHEMA, json.dumps(value), **settings)


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_json_by_a_schema(count: int) -> None:
    for answer in answers_of(schema(SCHEMA), count):
        assert answer.reason is FinishReason.STOP
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        assert END not in answer.tokens  # nothing else could follow, so no token was spent on saying so


def test_any_json_object() -> None:
    closing = {token: 4.0 for token in range(VOCABULARY) if tokenizer().token_text(token) in (b'"', b"}", b"]")}
    answers = answers_of(guided(GuideKind.JSON_OBJECT, logit_bias=closing), 16)
    whole = [answer for answer in answers if answer.reason is FinishReason.STOP]
    assert len(whole) > 8
    assert all(isinstance(json.loads(answer.text), dict) for answer in whole)
    assert len({answer.text for answer in whole}) > 4


def test_white_space_in_json_has_a_bound_or_the_schemas_own() -> None:
    value = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    blank = {token: 100.0 for token in range(VOCABULARY) if tokenizer().token_text(token).isspace()}
    (wide,) = answers_of(schema(value, logit_bias=blank), 1)
    assert re.fullmatch(r"\[\s{64}1\s{64},\s{64}1\s{64}\]", wide.text)
    for options, text in (({"whitespace_flexible": False}, "[1,1]"), ({"whitespace_pattern": "\t"}, "[\t1\t,\t1\t]")):
        (answer,) = answers_of(schema({**value, "x-guidance": options}, logit_bias=blank), 1)
        assert answer.text == text


PATTERNS = [
    r"[0-9]{3}-[0-9]{4}",
    "(red|green|blue)!?",
    r"[^\n]{5,9}",
    "(ab|ba){4,6}é{2}",
    r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,4})?",
    r"(?i)yes|no",
    r"[\u4e00-\u9fff🙂]{1,4}",
    '"(<|im_end|>|[<|a-z]{4})"',
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression(pattern: str) -> None:
    answers = answers_of(guided(GuideKind.REGEX, pattern))
    for answer in answers:
        assert answer.reason is FinishReason.STOP
        assert re.fullmatch(pattern, answer.text)
    assert len({answer.text for answer in answers}) > 1


def test_half_a_character_is_never_shown() -> None:
    """Here every character takes several tokens."""
    for answer in answers_of(guided(GuideKind.REGEX, "[é青🙂]{6}"), 4):
        assert len(answer.tokens) > 6
        assert all("\ufffd" not in output.text for output in answer.outputs)
        assert [output.text for output in answer.outputs if output.text] == list(answer.text)


def test_a_grammar() -> None:
    source = """
start: sum
sum: term ("+" term)~1..3
term: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[1-9][0-9]?/
"""
    for answer in answers_of(guided(GuideKind.GRAMMAR, source)):
        assert answer.reason is FinishReason.STOP
        assert re.fullmatch(r"[0-9+*()]+", answer.text)
        assert eval(answer.text) > 1


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 3, "min_p": 0.2},
        {"top_p": 0.01, "temperature": 0.1},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logit_bias": dict.fromkeys(range(40, 300), -100.0), "min_tokens": 50},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_whatever_else_is_asked_for(settings: dict[str, Any]) -> None:
    for answer in answers_of(schema(SCHEMA, **settings), 3):
        assert answer.reason is FinishReason.STOP
        jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_greedily() -> None:
    first, again = (answers_of(schema(SCHEMA, temperature=0.0), 2) for _ in range(2))
    assert [answer.tokens for answer in first] == [answer.tokens for answer in again]
    for answer in first:
        jsonschema.validate(json.loads(answer.text), SCHEMA)


@pytest.mark.slow
def test_in_any_company() -> None:
    """Alone, beside others with and without guides, chunked, preempted, from the prefix cache: the same."""
    guides = [
        Guide(kind=GuideKind.REGEX, source="[a-f]{8,20}"),
        Guide(kind=GuideKind.JSON_SCHEMA, source='{"type": "array", "items": {"enum": [1, 22, "x"]}, "maxItems": 6}'),
        Guide(kind=GuideKind.REGEX, source="(yes|no|perhaps){2,8}"),
        None,
    ]
    requests = [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, guide=guides[i % 4]))
        for i, request in enumerate(mixed_requests(8))
    ]
    expected = alone(PLAIN, requests)
    assert tokens_of(run(make_engine(), requests)) == expected
    assert staggered(make_engine(), requests) == expected
    chunked = make_engine(max_step_tokens=8)
    assert tokens_of(run(chunked, requests)) == expected
    assert tokens_of(run(chunked, requests)) == expected
    few = make_engine(pages=14)
    assert tokens_of(run(few, requests)) == expected
    assert few.stats().preemptions > 0
    free = {request.request_id for i, request in enumerate(requests) if guides[i % 4] is None}
    plain = alone(PLAIN, mixed_requests(8))
    assert {name for name, tokens in expected.items() if tokens == plain[name]} == free


def test_samples_of_one_request() -> None:
    params = guided(GuideKind.REGEX, "[a-z]{4,12}[.]", n=4, seed=3)
    engine = make_engine()
    answers = run(engine, [Request(request_id="four", prompt_token_ids=prompt_of(9), sampling=params)])
    texts = [answer.text for answer in answers.values()]
    assert len(set(texts)) == 4
    assert all(re.fullmatch("[a-z]{4,12}[.]", text) for text in texts)


def test_a_cut_answer_is_the_beginning_of_the_whole() -> None:
    whole = answers_of(schema(SCHEMA))
    for length in (1, 9, 40):
        for cut, full in zip(answers_of(schema(SCHEMA, max_tokens=length)), whole, strict=True):
            assert (cut.reason, cut.tokens) == (FinishReason.LENGTH, full.tokens[:length])
    exact = len(whole[0].tokens)
    assert answers_of(schema(SCHEMA, max_tokens=exact), 1)[0].reason is FinishReason.STOP


def test_stops_end_a_guided_answer_too() -> None:
    whole = answers_of(guided(GuideKind.REGEX, "[a-d]{40}"))
    for answer, full in zip(answers_of(guided(GuideKind.REGEX, "[a-d]{40}", stop=("ad", "ca"))), whole, strict=True):
        assert (answer.reason, answer.text) == (FinishReason.STOP, re.split("ad|ca", full.text)[0])
    token = whole[0].tokens[5]
    stopped = answers_of(guided(GuideKind.REGEX, "[a-d]{40}", stop_token_ids=(token,)), 1)[0]
    assert (stopped.reason, stopped.tokens[-1]) == (FinishReason.STOP, token)


def test_where_a_guide_may_end_or_go_on() -> None:
    """The model decides, unless it is told to go on; where nothing may follow it ends in any case."""
    pattern = "a{1,30}"
    lengths = {len(answer.text) for answer in answers_of(guided(GuideKind.REGEX, pattern, logit_bias={END: 5.0}))}
    assert min(lengths) < 10
    for settings in ({"ignore_eos": True}, {"min_tokens": LENGTH - 20}):
        for answer in answers_of(guided(GuideKind.REGEX, pattern, logit_bias={END: 100.0}, **settings)):
            assert (answer.reason, answer.text) == (FinishReason.STOP, "a" * 30)
    for answer in answers_of(guided(GuideKind.REGEX, pattern, logit_bias={END: 100.0}, min_tokens=4)):
        assert (len(answer.tokens), answer.tokens[-1]) == (5, END)


def test_special_tokens_are_no_text() -> None:
    """They may be spelled, letter by letter; the tokens themselves would end the answer in its middle."""
    value = {"const": "<|im_end|> and <|im_start|>"}
    markup = dict.fromkeys(range(3), 100.0)
    for answer in answers_of(schema(value, logit_bias=markup), 2):
        assert json.loads(answer.text) == value["const"]
        assert not {0, 1, 2} & set(answer.tokens)
    for answer in answers_of(schema({"type": "string", "minLength": 20, "maxLength": 20}, logit_bias=markup), 4):
        assert len(json.loads(answer.text)) == 20


@pytest.mark.slow
def test_logprobs_are_the_models_own() -> None:
    engine = make_engine(max_length=LENGTH)
    request = requests_of(guided(GuideKind.REGEX, "[A-Z]{6}", logprobs=3), 1)[0]
    answer = run(engine, [request])["g0", 0]
    rows = [np.asarray(logits[:n]) for n, logits in engine.runner.evaluate((*request.prompt_token_ids, *answer.tokens))]
    expected = jax.nn.log_softmax(np.concatenate(rows), axis=-1)[len(request.prompt_token_ids) - 1 : -1]
    for entry, row in zip([e for output in answer.outputs for e in output.logprobs], np.asarray(expected), strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-3)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:3].tolist()


BAD = [
    (GuideKind.JSON_SCHEMA, "{", "json_schema is not JSON"),
    (GuideKind.JSON_SCHEMA, "[" * 50_000, "json_schema is not JSON"),
    (GuideKind.JSON_SCHEMA, "[1]", "expected an object"),
    (GuideKind.JSON_SCHEMA, "false", "expected an object"),
    (GuideKind.JSON_SCHEMA, '{"type": "colour"}', "json_schema cannot be used: Invalid type: colour"),
    (GuideKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    (GuideKind.JSON_SCHEMA, '{"$ref": "http://localhost/x.json"}', "does not fetch"),
    (GuideKind.JSON_SCHEMA, '{"$ref": "#"}', "json_schema cannot be used"),
    (GuideKind.JSON_SCHEMA, '{"type": "array", "minItems": 3, "maxItems": 2}', "Unsatisfiable"),
    (GuideKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 982451653}', "fuel"),
    (GuideKind.REGEX, "(", "unclosed group"),
    (GuideKind.REGEX, r"(?=a)b", "look-around"),
    (GuideKind.GRAMMAR, "start: nothing", "unknown name"),
    (GuideKind.GRAMMAR, '{"grammars": []}', "grammar cannot be used"),
    (GuideKind.GRAMMAR, "start: start", "grammar cannot be used"),
]


@pytest.mark.parametrize(("kind", "source", "words"), BAD)
def test_a_guide_that_cannot_be_used_is_refused(kind: GuideKind, source: str, words: str) -> None:
    engine = make_engine(max_length=LENGTH)
    good = requests_of(guided(GuideKind.REGEX, "[a-z]{9}"), 2)
    for request in good:
        engine.submit(request)
    engine.step()
    bad = Request(request_id="bad", prompt_token_ids=(5,), sampling=guided(kind, source, n=2))
    for refuse in (engine.prepare, engine.submit):
        with pytest.raises(ValueError, match=words) as refused:
            refuse(bad)
        assert "<non-verbose" not in str(refused.value)
        assert len(str(refused.value)) < 600
    assert (engine.stats().waiting, engine.stats().running) == (0, 2)
    run(engine, [])


def test_a_guide_that_gets_stuck_ends_its_answer_alone_with_the_reason() -> None:
    """Its text is forced and takes more work for one token than is allowed."""
    engine = make_engine(max_length=LENGTH)
    stuck = Request(request_id="stuck", prompt_token_ids=(5,), sampling=guided(GuideKind.REGEX, "[ab](a{1000}){1000}"))
    good = requests_of(guided(GuideKind.REGEX, "[a-z]{9}"), 2)
    answers = run(engine, [stuck, *good])
    assert answers["stuck", 0].reason is FinishReason.GUIDE
    assert "cannot go on as its regex asks" in answers["stuck", 0].last.error
    assert all(len(answers[request.request_id, 0].text) == 9 for request in good)
