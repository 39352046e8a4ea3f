"""From the fields of a body to how the engine samples. Knows nothing of prompts."""

import json
from typing import Any

from jetserve.server.openai.errors import InvalidRequestError
from jetserve.server.openai.protocol import SamplingFields
from jetserve.types import Guide, GuideKind, SamplingParams

_TAKEN_AS_THEY_ARE = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "n",
)


def params_of(
    body: SamplingFields, *, max_tokens: int, logprobs: int | None, guide: Guide | None = None
) -> SamplingParams:
    """How to sample; the temperature is 1 where none is given, as in OpenAI's API.

    Args:
      body: as it came.
      max_tokens: where it does not say.
      logprobs: alternatives to report a token, None for no logprobs.
      guide: in place of the body's own.

    Raises:
      ValueError: for what is out of range, naming the field.
    """
    fields = body.model_dump(include=set(_TAKEN_AS_THEY_ARE), exclude_none=True)
    stop = body.stop
    return SamplingParams(
        **fields,
        max_tokens=max_tokens if body.max_tokens is None else body.max_tokens,
        top_k=0 if body.top_k in (None, -1) else body.top_k,  # vLLM's -1 is off
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        guide=guide or guide_of(body),
    )


def json_guide(schema: dict[str, Any] | bool, *, field: str) -> Guide:
    """For answers that match a JSON schema, which came in `field`."""
    return Guide(kind=GuideKind.JSON_SCHEMA, source=json.dumps(schema), field=field)


def guide_of(body: SamplingFields) -> Guide | None:
    """The form that an answer must have, from whichever field says it.

    Raises:
      InvalidRequestError: if several do, or one lacks what it needs.
    """
    found = [*_from_response_format(body), *_from_guided_fields(body)]
    if len(found) > 1:
        names = " and ".join(guide.field for guide in found)
        raise InvalidRequestError(f"{names} are set together; an answer can follow one of them", param=found[1].field)
    return found[0] if found else None


def _from_response_format(body: SamplingFields) -> list[Guide]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [Guide(kind=GuideKind.JSON_OBJECT, field="response_format")]
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequestError(
            "response_format.json_schema.schema is missing; expected a JSON schema", param="response_format"
        )
    return [json_guide(wanted.json_schema.schema_, field="response_format")]


def _from_guided_fields(body: SamplingFields) -> list[Guide]:
    outputs = body.structured_outputs
    fields: list[tuple[str, GuideKind, Any]] = [
        ("guided_json", GuideKind.JSON_SCHEMA, body.guided_json),
        ("guided_regex", GuideKind.REGEX, body.guided_regex),
        ("guided_grammar", GuideKind.GRAMMAR, body.guided_grammar),
        ("guided_choice", GuideKind.GRAMMAR, _choice(body.guided_choice, "guided_choice")),
    ]
    if outputs is not None:
        fields += [
            ("structured_outputs.json", GuideKind.JSON_SCHEMA, outputs.json_),
            ("structured_outputs.json_object", GuideKind.JSON_OBJECT, "" if outputs.json_object else None),
            ("structured_outputs.regex", GuideKind.REGEX, outputs.regex),
            ("structured_outputs.grammar", GuideKind.GRAMMAR, outputs.grammar),
            ("structured_outputs.choice", GuideKind.GRAMMAR, _choice(outputs.choice, "structured_outputs.choice")),
        ]
    return [
        Guide(kind=kind, source=value if isinstance(value, str) else json.dumps(value), field=name)
        for name, kind, value in fields
        if value is not None
    ]


def _choice(texts: list[str] | None, field: str) -> str | None:
    """A Lark grammar of these texts alone."""
    if texts is None:
        return None
    if not texts or "" in texts:
        raise InvalidRequestError(f"{field} is empty, or one of its texts is; expected texts", param=field)
    return "start: " + " | ".join(json.dumps(text) for text in texts)
