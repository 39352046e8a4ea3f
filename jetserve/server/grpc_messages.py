"""Between the messages of `proto/jetstream.proto` and the engine's own types.

Knows nothing of connections, status codes or engines.
"""

import math

from jetserve.server import roles
from jetserve.server.proto import jetstream_pb2 as pb
from jetserve.tokenizer import Tokenizer
from jetserve.types import FinishReason, Guide, GuideKind, Request, RequestOutput, SamplingParams, TokenLogprobs

GREEDY = 0.0
"""The temperature where a request names none: JetStream's servers decode greedily unless told otherwise."""

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_OPTIONAL_FIELDS = (
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
)


def to_request(
    message: pb.DecodeRequest, tokenizer: Tokenizer, *, request_id: str, arrival: float, seconds_left: float | None
) -> Request:
    """The request that a client sent.

    Args:
      message: as it came.
      tokenizer: of the model.
      request_id: in place of one that the message does not name.
      arrival: seconds of `time.monotonic`.
      seconds_left: of gRPC's own deadline, counted from `arrival`; None if there is none.

    Raises:
      ValueError: for what is missing, out of range or not supported; the message names the field.
    """
    if message.lora_adapter_id:
        raise ValueError(f"lora_adapter_id is {message.lora_adapter_id!r}; expected none: there are no adapters")
    limits = [seconds for seconds in (_timeout(message), seconds_left) if seconds is not None]
    return Request(
        request_id=message.request_id or request_id,
        prompt_token_ids=tuple(_prompt(message, tokenizer)),
        sampling=_sampling(message),
        priority=message.priority,
        deadline=arrival + min(limits) if limits else None,
        arrival_time=arrival,
    )


def _timeout(message: pb.DecodeRequest) -> float | None:
    if not message.HasField("timeout_seconds"):
        return None
    if not (math.isfinite(message.timeout_seconds) and message.timeout_seconds > 0):
        raise ValueError(f"timeout_seconds is {message.timeout_seconds}; expected a finite number above 0")
    return message.timeout_seconds


def _prompt(message: pb.DecodeRequest, tokenizer: Tokenizer) -> list[int]:
    kind = message.WhichOneof("content")
    if kind == "text_content":
        return tokenizer.encode(message.text_content.text, add_special_tokens=not message.has_bos)
    if kind == "token_content":
        return _begun(list(message.token_content.token_ids), tokenizer, message.has_bos)
    if kind == "chat_content":
        messages = [
            {"role": roles.for_template(turn.role, f"messages[{index}].role"), "content": turn.content}
            for index, turn in enumerate(message.chat_content.messages)
        ]
        if not messages:
            raise ValueError("chat_content has no messages; expected at least one")
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    raise ValueError("the request has no content; expected text_content, token_content or chat_content")


def _begun(tokens: list[int], tokenizer: Tokenizer, has_bos: bool) -> list[int]:
    """Tokens with the beginning-of-sequence token that a text would have been given."""
    bos = tokenizer.bos_token_id
    if not tokens or has_bos or bos is None or tokens[0] == bos:
        return tokens
    is_wanted = tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
    return [bos, *tokens] if is_wanted else tokens


def _sampling(message: pb.DecodeRequest) -> SamplingParams:
    if message.num_samples < 0:
        raise ValueError(f"num_samples is {message.num_samples}; expected 1 or more, or 0 for one")
    chosen = {field: getattr(message, field) for field in _OPTIONAL_FIELDS if message.HasField(field)}
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature if message.HasField("temperature") else GREEDY,
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        guide=_guide(message),
        n=message.num_samples or 1,
        **chosen,
    )


def _guide(message: pb.DecodeRequest) -> Guide | None:
    field = message.WhichOneof("guide")
    if field is None or (field == GuideKind.JSON_OBJECT.value and not message.json_object):
        return None
    kind = GuideKind(field)
    return Guide(kind=kind, source="" if kind is GuideKind.JSON_OBJECT else getattr(message, field))


def with_text(message: pb.DecodeRequest) -> bool:
    """Whether the answer is wanted as text too: a client that sends tokens has a tokenizer of its own."""
    return message.WhichOneof("content") != "token_content"


def to_response(output: RequestOutput, *, samples: int, text: bool) -> pb.DecodeResponse:
    """What one output brings, with an empty entry for every other one of the request's `samples`."""
    response = pb.DecodeResponse(request_id=output.request_id)
    every = response.stream_content.samples
    for _ in range(samples):
        every.add()
    sample = every[output.index]
    sample.token_ids.extend(output.token_ids)
    sample.logprobs.extend(_logprobs(entry) for entry in output.logprobs)
    if text:
        sample.text = output.text
    if output.finish_reason in _FINISH_REASONS:
        sample.finish_reason = _FINISH_REASONS[output.finish_reason]
        sample.usage.prompt_tokens = output.usage.prompt_tokens
        sample.usage.output_tokens = output.usage.output_tokens
        sample.usage.cached_tokens = output.usage.cached_tokens
    return response


def _logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprobs.Alternative(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return pb.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top=top)
