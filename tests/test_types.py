"""Requests check themselves: every field, at its bounds and beyond."""

import math
from typing import Any

import pytest

from jetserve.types import (
    MAX_GUIDE_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Guide,
    GuideKind,
    Request,
    SamplingParams,
)

BAD = {
    "max_tokens": [0, -1, 1.5, True, None, "1", math.nan],
    "min_tokens": [-1, 257, 0.5, True],
    "temperature": [-0.1, 101, math.nan, math.inf, "hot", True, None, 10**400],
    "top_k": [-1, 1.5, True],
    "top_p": [0, -0.5, 1.5, math.nan, "1"],
    "min_p": [-0.1, 1.1, math.nan],
    "seed": [1.5, True, 2**64, -(2**63) - 1, "7"],
    "repetition_penalty": [0, -1, math.nan, math.inf],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.inf],
    "logit_bias": [{-1: 0.0}, {1: 101.0}, {1: math.nan}, {"1": 0.0}, dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)],
    "logprobs": [-1, 21, True, 1.0],
    "stop": ["text", [""], ("",), (1,), ("a",) * (MAX_STOP_STRINGS + 1)],
    "stop_token_ids": [(-1,), ("1",), (1,) * (MAX_STOP_TOKEN_IDS + 1)],
    "ignore_eos": [1, None],
    "guide": ["[a-z]", {"kind": "regex"}],
    "n": [0, 129, True, 1.0],
}
GOOD = {
    "max_tokens": [1, 10**9],
    "temperature": [0, 0.0, 100],
    "top_p": [1, 1e-9],
    "seed": [None, 0, -1, 2**64 - 1],
    "logit_bias": [{0: -100, 5: 100}],
    "logprobs": [None, 0, 20],
    "guide": [None, Guide(kind=GuideKind.JSON_OBJECT), Guide(kind=GuideKind.REGEX, source="a" * MAX_GUIDE_CHARACTERS)],
    "n": [1, 128],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values])
def test_a_value_at_its_bounds_is_taken(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GuideKind.REGEX, ""),
        (GuideKind.JSON_SCHEMA, {}),
        (GuideKind.JSON_OBJECT, "{}"),
        (GuideKind.GRAMMAR, "a" * (MAX_GUIDE_CHARACTERS + 1)),
    ],
)
def test_a_guide_has_what_its_kind_asks_for(kind: GuideKind, source: Any) -> None:
    with pytest.raises(ValueError, match=kind.value):
        Guide(kind=kind, source=source)


@pytest.mark.parametrize(
    "arguments",
    [
        {"request_id": "", "prompt_token_ids": (1,)},
        {"request_id": "é", "prompt_token_ids": (1,)},
        {"request_id": "a\n", "prompt_token_ids": (1,)},
        {"request_id": "a" * 129, "prompt_token_ids": (1,)},
        {"request_id": "a", "prompt_token_ids": ()},
    ],
)
def test_a_request_has_an_id_and_a_prompt(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Request(**arguments)
