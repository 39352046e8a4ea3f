"""The gRPC server over a tiny model: JetStream's clients, every field, every status, and every way to leave."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gate import Gate
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_parts import (
    TIMEOUT,
    Served,
    jetstream_messages,
    loaded,
    make_engine,
    play,
    serving,
    text_of,
    text_request,
    tokens_of,
    until,
)
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jetserve.config import ServerConfig
from jetserve.server.failures import RETRY_AFTER_SECONDS
from jetserve.server.grpc import GrpcServer
from jetserve.server.proto import jetstream_pb2 as pb
from jetserve.types import Request, SamplingParams

Code = grpc.StatusCode


def reference(text: str, max_tokens: int = 8, **sampling: Any) -> tuple[list[int], str]:
    """What the engine answers by itself."""
    engine = make_engine()
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling}, max_tokens=max_tokens)
    prompt = tuple(engine.tokenizer.encode(text, add_special_tokens=True))
    outputs = list(engine.run([Request(request_id="r", prompt_token_ids=prompt, sampling=params)]))
    return [token for output in outputs for token in output.token_ids], "".join(output.text for output in outputs)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


# What is answered.


def test_text_is_answered_with_text_tokens_reason_and_usage() -> None:
    tokens, text = reference("hello")

    async def scene(served: Served) -> None:
        responses = await served.decode(text_request("hello", request_id="mine"))
        assert (tokens_of(responses), text_of(responses)) == (tokens, text)
        assert {response.request_id for response in responses} == {"mine"}
        reasons = [response.stream_content.samples[0].finish_reason for response in responses]
        assert reasons == [pb.FINISH_REASON_UNSPECIFIED] * (len(responses) - 1) + [pb.FINISH_REASON_LENGTH]
        usage = responses[-1].stream_content.samples[0].usage
        prompt = len(served.engine.engine.tokenizer.encode("hello", add_special_tokens=True))
        assert (usage.prompt_tokens, usage.output_tokens) == (prompt, 8)
        assert len({(await served.decode(text_request()))[0].request_id for _ in range(3)}) == 3

    play(scene)


def test_tokens_are_answered_with_tokens_alone() -> None:
    async def scene(served: Served) -> None:
        content = pb.DecodeRequest.TokenContent(token_ids=[5, 6, 7])
        responses = await served.decode(pb.DecodeRequest(token_content=content, max_tokens=8, ignore_eos=True))
        assert len(tokens_of(responses)) == 8
        assert text_of(responses) == ""

    play(scene)


def test_messages_become_a_prompt_by_the_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    prompt = tokenizer.apply_chat_template(messages)

    async def scene(served: Served) -> None:
        chat = pb.DecodeRequest.ChatContent(messages=[pb.DecodeRequest.Message(**turn) for turn in messages])
        responses = await served.decode(pb.DecodeRequest(chat_content=chat, max_tokens=6, ignore_eos=True))
        tokens = pb.DecodeRequest.TokenContent(token_ids=prompt)
        same = await served.decode(pb.DecodeRequest(token_content=tokens, max_tokens=6, ignore_eos=True))
        assert tokens_of(responses) == tokens_of(same)

    play(scene)


def test_an_old_client_is_served_unchanged() -> None:
    """Messages that know nothing of this project's fields, both ways."""
    old = jetstream_messages()
    tokens, text = reference("hello", ignore_eos=False)

    async def scene(served: Served) -> None:
        request = old["DecodeRequest"](max_tokens=8, text_content={"text": "hello"}, metadata={"start_time": 1.5})
        decode = served.channel.unary_stream(
            "/jetstream_proto.Orchestrator/Decode",
            old["DecodeRequest"].SerializeToString,
            old["DecodeResponse"].FromString,
        )
        responses = [response async for response in decode(request)]
        assert all(len(response.stream_content.samples) == 1 for response in responses)
        assert (tokens_of(responses), text_of(responses)) == (tokens, text)
        check = served.channel.unary_unary(
            "/jetstream_proto.Orchestrator/HealthCheck",
            old["HealthCheckRequest"].SerializeToString,
            old["HealthCheckResponse"].FromString,
        )
        assert (await check(old["HealthCheckRequest"]())).is_live

    play(scene)


JETSTREAM_CLIENT = """
import sys, grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = jetstream_pb2_grpc.OrchestratorStub(channel)
    assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
    content = jetstream_pb2.DecodeRequest.TextContent(text="hello")
    request = jetstream_pb2.DecodeRequest(session_cache="", text_content=content, priority=0, max_tokens=8)
    print(*(token for r in stub.Decode(request) for token in r.stream_content.samples[0].token_ids))
"""


@pytest.mark.slow
def test_the_stubs_of_the_jetstream_package_call_the_server() -> None:
    """In a process of its own: both projects name their messages alike, and a process can know a name once."""
    if subprocess.run(
        [sys.executable, "-c", JETSTREAM_CLIENT.split("with")[0]], capture_output=True, check=False
    ).returncode:
        pytest.skip("google-jetstream is not installed: pip install --no-deps google-jetstream==0.2.2")
    tokens, _ = reference("hello", ignore_eos=False)

    async def scene(served: Served) -> None:
        address = f"127.0.0.1:{served.server.port}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", JETSTREAM_CLIENT, address, stdout=subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        assert [int(token) for token in output.split()] == tokens

    play(scene)


def test_sampling_is_the_requests_own() -> None:
    async def scene(served: Served) -> None:
        greedy = tokens_of(await served.decode(text_request(max_tokens=12)))
        assert tokens_of(await served.decode(text_request(max_tokens=12, temperature=0.0))) == greedy
        seeded = {"temperature": 1.5, "seed": 7, "top_p": 0.95}
        expected, _ = reference("hello", 12, **seeded)
        assert expected != greedy
        assert tokens_of(await served.decode(text_request(max_tokens=12, **seeded))) == expected
        assert tokens_of(await served.decode(text_request(max_tokens=12, top_k=1, temperature=5.0))) == greedy
        biased = await served.decode(text_request(max_tokens=3, logit_bias={77: 100.0}))
        assert tokens_of(biased) == [77] * 3
        stopped = await served.decode(text_request(max_tokens=12, stop_token_ids=greedy[2:3]))
        assert tokens_of(stopped) == greedy[: greedy.index(greedy[2]) + 1]
        assert stopped[-1].stream_content.samples[0].finish_reason == pb.FINISH_REASON_STOP

    play(scene)


def test_logprobs_are_reported_where_asked_for() -> None:
    async def scene(served: Served) -> None:
        for count in (0, 3):
            responses = await served.decode(text_request(logprobs=count))
            entries = [entry for r in responses for entry in r.stream_content.samples[0].logprobs]
            assert [entry.token_id for entry in entries] == tokens_of(responses)
            assert all(len(entry.top) == count and entry.logprob <= 0 for entry in entries)
        plain = await served.decode(text_request())
        assert not any(response.stream_content.samples[0].logprobs for response in plain)

    play(scene)


def test_samples_keep_their_places() -> None:
    async def scene(served: Served) -> None:
        responses = await served.decode(text_request(num_samples=3, temperature=1.5, seed=3))
        assert all(len(response.stream_content.samples) == 3 for response in responses)
        answers = [tokens_of(responses, sample) for sample in range(3)]
        assert [len(answer) for answer in answers] == [8] * 3
        assert len({tuple(answer) for answer in answers}) == 3

    play(scene)


def test_fifty_streams_at_once_each_have_their_own_answer() -> None:
    texts = [f"prompt number {i} " * (1 + i % 3) for i in range(50)]
    expected = [reference(text, 3 + i % 6)[0] for i, text in enumerate(texts)]

    async def scene(served: Served) -> None:
        requests = [text_request(text, 3 + i % 6) for i, text in enumerate(texts)]
        answers = await asyncio.gather(*(served.decode(request) for request in requests))
        assert [tokens_of(answer) for answer in answers] == expected

    play(scene)


# What is refused, and how.


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.DecodeRequest(max_tokens=4), ["no content", "text_content"]),
        (text_request(""), ["prompt", "no tokens"]),
        (text_request("word " * 600), ["at most", "--max_cache_length"]),
        (text_request(max_tokens=0), ["max_tokens is 0"]),
        (text_request(max_tokens=-3), ["max_tokens is -3"]),
        (text_request(temperature=-1.0), ["temperature is -1.0"]),
        (text_request(temperature=float("nan")), ["temperature is nan"]),
        (text_request(top_p=0.0), ["top_p is 0.0"]),
        (text_request(stop=[""]), ["stop"]),
        (text_request(logprobs=99), ["logprobs is 99"]),
        (text_request(num_samples=-1), ["num_samples is -1"]),
        (text_request(logit_bias={5000: 1.0}), ["logit_bias", "5000", "vocabulary"]),
        (text_request(timeout_seconds=-1.0), ["timeout_seconds is -1.0"]),
        (text_request(lora_adapter_id="x"), ["lora_adapter_id", "adapters"]),
        (pb.DecodeRequest(token_content={"token_ids": [320]}, max_tokens=1), ["320", "vocabulary"]),
        (pb.DecodeRequest(token_content={"token_ids": [-1]}, max_tokens=1), ["-1", "vocabulary"]),
        (pb.DecodeRequest(chat_content={}, max_tokens=1), ["no messages"]),
        (
            pb.DecodeRequest(chat_content={"messages": [{"role": "alien", "content": "x"}]}, max_tokens=1),
            ["messages[0].role is 'alien'", "assistant"],
        ),
        (text_request(json_schema="{"), ["json_schema is not JSON"]),
        (text_request(json_schema='{"type": "colour"}'), ["json_schema cannot be used", "Invalid type: colour"]),
        (text_request(regex="("), ["regex cannot be used", "unclosed group"]),
        (text_request(grammar=""), ["grammar is ''"]),
    ],
)
def test_what_can_never_succeed_is_refused_with_the_reason(request_: pb.DecodeRequest, words: list[str]) -> None:
    async def scene(served: Served) -> None:
        error = await served.status_of(request_)
        assert error.code() is Code.INVALID_ARGUMENT
        for word in words:
            assert word in (error.details() or "")

    play(scene)


def test_bytes_that_are_no_message_are_refused() -> None:
    async def scene(served: Served) -> None:
        decode = served.channel.unary_stream("/jetstream_proto.Orchestrator/Decode")
        invalid_utf8 = text_request("xyz").SerializeToString().replace(b"xyz", b"x\xffz")
        for data in (b"\xff\xff", invalid_utf8):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await decode(data).read()
            assert refused.value.code() is Code.INVALID_ARGUMENT
            assert "expected a DecodeRequest" in (refused.value.details() or "")
        assert len(tokens_of(await served.decode(text_request()))) == 8

    play(scene)


def test_a_full_queue_is_refused_with_a_hint_when_to_retry(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        running = asyncio.create_task(served.decode(text_request()))
        await until(gate.entered.is_set)
        flood = [asyncio.create_task(served.status_of(text_request())) for _ in range(20)]
        await until(lambda: sum(task.done() for task in flood) >= 18)
        gate.open.set()
        errors = [r for r in await asyncio.gather(*flood, return_exceptions=True) if isinstance(r, grpc.RpcError)]
        assert len(errors) >= 18
        for error in errors:
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert "queue is full" in error.details()
            trailing = dict(error.trailing_metadata())
            assert trailing["retry-after-ms"] == str(1000 * RETRY_AFTER_SECONDS)
            info = error_details_pb2.RetryInfo()
            assert status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details[0].Unpack(info)
            assert info.retry_delay.seconds == RETRY_AFTER_SECONDS
        assert len(tokens_of(await running)) == 8

    play(scene, make_engine(max_queue=2))


@pytest.mark.parametrize("whose", ["field", "grpc"])
def test_an_answer_that_is_late_ends_with_deadline_exceeded(gate: Gate, whose: str) -> None:
    async def scene(served: Served) -> None:
        request = text_request(max_tokens=400, timeout_seconds=0.2 if whose == "field" else None)
        late = asyncio.create_task(served.status_of(request, timeout=0.2 if whose == "grpc" else None))
        await until(gate.entered.is_set)
        await asyncio.sleep(0.3)
        gate.open.set()
        assert (await late).code() is Code.DEADLINE_EXCEEDED
        assert len(tokens_of(await served.decode(text_request()))) == 8

    play(scene)


def test_an_engine_that_fails_ends_the_call_and_serves_the_next(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        gate.open.set()
        gate.fail = True
        error = await served.status_of(text_request())
        assert error.code() is Code.INTERNAL
        assert "injected" in (error.details() or "")
        gate.fail = False
        assert len(tokens_of(await served.decode(text_request()))) == 8

    play(scene)


def test_an_engine_that_is_dead_says_so() -> None:
    async def scene(served: Served) -> None:
        served.engine._die("the engine has failed for good: test")
        error = await served.status_of(text_request())
        assert error.code() is Code.INTERNAL
        assert "failed for good" in (error.details() or "")
        assert not (await served.stub.HealthCheck(pb.HealthCheckRequest())).is_live

    play(scene)


async def health_of(served: Served, service: str = "jetstream_proto.Orchestrator") -> int:
    stub = health_pb2_grpc.HealthStub(served.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


def test_a_server_that_drains_takes_no_more_and_finishes_what_it_has(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        assert await health_of(served) == health_pb2.HealthCheckResponse.SERVING
        running = asyncio.create_task(served.decode(text_request(max_tokens=30)))
        await until(gate.entered.is_set)
        drained = asyncio.create_task(served.engine.drain(TIMEOUT))
        await served.server.say_not_serving()
        await until(lambda: not served.engine.is_ready)
        assert (await served.status_of(text_request())).code() is Code.UNAVAILABLE
        assert await health_of(served, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await served.stub.HealthCheck(pb.HealthCheckRequest())).is_live
        gate.open.set()
        await drained
        assert len(tokens_of(await running)) == 30

    play(scene)


def test_what_outlasts_the_drain_ends_with_a_status(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        running = asyncio.create_task(served.status_of(text_request(max_tokens=400)))
        await until(gate.entered.is_set)
        drained = asyncio.create_task(served.engine.drain(0))
        await asyncio.sleep(0.05)
        gate.open.set()
        await drained
        assert (await running).code() is Code.UNAVAILABLE

    play(scene)


# Who leaves, and who does not read.


@pytest.mark.parametrize("way", ["cancel", "close the channel"])
def test_a_client_that_leaves_frees_its_pages(way: str) -> None:
    async def scene(served: Served) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.port}") as channel:
            decode: Callable[..., Any] = type(served.stub)(channel).Decode
            call = decode(text_request(max_tokens=400))
            await anext(aiter(call))
            if way == "cancel":
                call.cancel()
                await until(lambda: served.engine.stats().running == 0)
        await until(lambda: served.engine.stats().pages_used == 0)
        assert {reason.value: n for reason, n in served.engine.stats().finished.items()} == {"cancelled": 1}

    play(scene)


def test_a_client_that_never_reads_stalls_nobody() -> None:
    async def scene(served: Served) -> None:
        silent = [served.stub.Decode(text_request(max_tokens=400)) for _ in range(4)]
        for _ in range(3):
            assert len(tokens_of(await served.decode(text_request(max_tokens=20)))) == 20
        for call in silent:
            call.cancel()

    play(scene)


# The connection.


def test_reflection_lists_the_service_and_describes_it() -> None:
    async def scene(served: Served) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        service = "jetstream_proto.Orchestrator"
        ask = reflection_pb2.ServerReflectionRequest
        call = stub.ServerReflectionInfo(iter([ask(list_services=""), ask(file_containing_symbol=service)]))
        listing, files = [response async for response in call]
        names = {service.name for service in listing.list_services_response.service}
        assert {service, "grpc.health.v1.Health"} <= names
        (data,) = files.file_descriptor_response.file_descriptor_proto
        described = descriptor_pb2.FileDescriptorProto.FromString(data).service[0]
        assert [method.name for method in described.method] == ["Decode", "HealthCheck"]

    play(scene)


def test_a_message_beyond_the_limit_is_refused() -> None:
    async def scene(served: Served) -> None:
        error = await served.status_of(text_request("x" * 5000))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "larger than max" in (error.details() or "")

    play(scene, max_message_bytes=4096)


def test_a_token_is_wanted_for_all_but_health(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")

    async def scene(served: Served) -> None:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
            error = await served.status_of(text_request(), metadata=metadata)
            assert error.code() is Code.UNAUTHENTICATED
            assert "secret" not in (error.details() or "")
        good = await served.decode(text_request(), metadata=(("authorization", "Bearer secret"),))
        assert len(tokens_of(good)) == 8
        assert await health_of(served) == health_pb2.HealthCheckResponse.SERVING
        assert (await served.stub.HealthCheck(pb.HealthCheckRequest())).is_live

    play(scene, api_key_file=file)


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)

    async def scene(served: Served) -> None:
        assert len(tokens_of(await served.decode(text_request()))) == 8
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.port}") as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await type(served.stub)(plain).HealthCheck(pb.HealthCheckRequest(), timeout=5)

    credentials = grpc.ssl_channel_credentials(cert.read_bytes())
    play(scene, credentials=credentials, tls_cert_file=cert, tls_key_file=key)


def test_a_port_in_use_is_refused() -> None:
    async def main() -> None:
        async with serving(make_engine()) as served:
            with pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{served.server.port}.*--grpc_port"):
                GrpcServer(ServerConfig(grpc_port=served.server.port))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"grpc_port": 70000}, "grpc_port is 70000"),
        ({"drain_seconds": -1.0}, "drain_seconds is -1"),
        ({"tls_cert_file": Path("x")}, "belong together"),
        ({"max_message_bytes": 0}, "max_message_bytes is 0"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerConfig(**settings)
