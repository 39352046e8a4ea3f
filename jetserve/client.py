"""A client of the gRPC server, for Python programs: text in, text out, or a stream of what is new.

Knows the protocol and nothing of engines; importing it takes neither jax nor flax.

    with Client("127.0.0.1:9000") as client:
        print(client.generate("The capital of France is").text)
"""

import dataclasses
import numbers
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from jetserve.server.proto import jetstream_pb2 as pb
from jetserve.server.proto import jetstream_pb2_grpc
from jetserve.types import FieldError, FinishReason, GuideKind, RequestOutput, SamplingParams, TokenLogprobs, Usage

DEFAULT_ADDRESS = "127.0.0.1:9000"
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, its token ids, or the messages of a chat, each with "role" and "content"."""

_REASONS = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One sample, whole. `text` is empty for a prompt of token ids: the server answers those with ids alone."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()


class Client:
    """A connection to one server, made at the first call. May be used from several threads."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, token: str | None = None, tls_ca_file: Path | None = None
    ) -> None:
        """`address` is host:port; `token` a bearer token; `tls_ca_file` the PEM certificates to trust, for TLS."""
        if tls_ca_file is None:
            self._channel = grpc.insecure_channel(address)
        else:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(tls_ca_file.read_bytes()))
        self._stub = jetstream_pb2_grpc.OrchestratorStub(self._channel)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it every call that is under way."""
        self._channel.close()

    def is_live(self, *, timeout_seconds: float = 5.0) -> bool:
        """Whether the server serves. Raises grpc.RpcError if it does not answer."""
        return self._stub.HealthCheck(pb.HealthCheckRequest(), timeout=timeout_seconds).is_live

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> Generator[RequestOutput, None, None]:
        """Yields what is new of every sample as it comes. Closing the iterator ends the request on the server.

        Args:
          prompt: see `Prompt`; its form decides which field of the protocol carries it.
          sampling: None is greedy, with up to 256 tokens.
          priority: lower runs first.
          timeout_seconds: in which the answer must be complete, None for ever.
          request_id: for logs; empty lets the server draw one.

        Raises:
          ValueError: for an empty prompt, or what the protocol cannot carry; the message names the field.
          grpc.RpcError: as `jetstream.proto` says; RESOURCE_EXHAUSTED has "retry-after-ms" in its trailing metadata.
        """
        message = to_message(prompt, sampling or SamplingParams(temperature=0.0))
        _put(message, priority=priority, request_id=request_id, timeout_seconds=timeout_seconds)
        return self._outputs(message)

    def _outputs(self, message: pb.DecodeRequest) -> Generator[RequestOutput, None, None]:
        call = self._stub.Decode(message, metadata=self._metadata)
        try:
            for response in call:
                for index, sample in enumerate(response.stream_content.samples):
                    if sample.text or sample.token_ids or sample.finish_reason:
                        yield _output(response.request_id, index, sample)
        finally:
            call.cancel()  # to no effect on one that is over

    def generate_samples(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, timeout_seconds: float | None = None
    ) -> list[Answer]:
        """All `sampling.n` answers, whole. Arguments and errors are `stream`'s."""
        outputs: list[list[RequestOutput]] = [[] for _ in range(sampling.n if sampling else 1)]
        for output in self.stream(prompt, sampling, timeout_seconds=timeout_seconds):
            outputs[output.index].append(output)
        return [_answer(its_outputs) for its_outputs in outputs]

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, timeout_seconds: float | None = None
    ) -> Answer:
        """The first answer, whole. Arguments and errors are `stream`'s."""
        return self.generate_samples(prompt, sampling, timeout_seconds=timeout_seconds)[0]


def to_message(prompt: Prompt, sampling: SamplingParams) -> pb.DecodeRequest:
    """A request as the protocol has it. Raises ValueError for what the protocol cannot carry, and an empty prompt."""
    message = pb.DecodeRequest()
    _put(
        message,
        max_tokens=sampling.max_tokens,
        num_samples=sampling.n,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
    )
    if (guide := sampling.guide) is not None:
        setattr(message, guide.kind.value, True if guide.kind is GuideKind.JSON_OBJECT else guide.source)
    _put_prompt(message, prompt)
    return message


def _put(message: pb.DecodeRequest, **fields: object) -> None:
    for field, value in fields.items():
        try:
            message.MergeFrom(pb.DecodeRequest(**{field: value}))  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            expected = "an integer of 64 bits with a sign" if field == "seed" else "what the protocol's field can hold"
            raise ValueError(f"{field} is {value!r}; expected {expected} ({error})") from error


def _put_prompt(message: pb.DecodeRequest, prompt: Prompt) -> None:
    if not prompt:
        raise FieldError("prompt", prompt, "a text, token ids or messages, not empty")
    if isinstance(prompt, str):
        _put(message, text_content={"text": prompt})
    elif any(isinstance(item, Mapping) for item in prompt):
        messages = [_turn(item, f"messages[{index}]") for index, item in enumerate(prompt)]
        _put(message, chat_content={"messages": messages})
    else:
        for index, token in enumerate(prompt):
            if not (isinstance(token, numbers.Integral) and 0 <= int(token) < 2**31):
                raise FieldError(f"prompt[{index}]", token, "a token id, which is an integer of 0 or more in 32 bits")
        _put(message, token_content={"token_ids": prompt})


def _turn(item: object, where: str) -> Mapping[str, str]:
    if not isinstance(item, Mapping):
        raise FieldError(where, item, 'a message with "role" and "content", like the others')
    for key in ("role", "content"):
        if not isinstance(item.get(key), str):
            raise FieldError(f"{where}.{key}", item.get(key), "a text")
    return {"role": item["role"], "content": item["content"]}


def _output(request_id: str, index: int, sample: pb.DecodeResponse.StreamContent.Sample) -> RequestOutput:
    usage = sample.usage
    return RequestOutput(
        request_id=request_id,
        index=index,
        text=sample.text,
        token_ids=tuple(sample.token_ids),
        finish_reason=_REASONS.get(sample.finish_reason),
        usage=Usage(
            prompt_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens, cached_tokens=usage.cached_tokens
        ),
        logprobs=tuple(
            TokenLogprobs(
                token_id=entry.token_id,
                logprob=entry.logprob,
                top=tuple((other.token_id, other.logprob) for other in entry.top),
            )
            for entry in sample.logprobs
        ),
    )


def _answer(outputs: Sequence[RequestOutput]) -> Answer:
    """Raises ValueError if the last output has no finish reason: a server that ends a call well sends one."""
    if not outputs or outputs[-1].finish_reason is None:
        raise ValueError("the server ended the call without a finish reason; expected one of jetserve")
    return Answer(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=outputs[-1].finish_reason,
        usage=outputs[-1].usage,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )
