"""The server as a process: what signals do while requests run, and what an engine that fails for good does."""

import contextlib
import json
import signal
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_parts import text_request, tokens_of
from server_process import TIMEOUT, start

from jetserve.server.serve import EXIT_FAILED

pytestmark = pytest.mark.slow

BROKEN = """
from jetserve import commands
from jetserve.engine.runner import Runner
def run(*arguments):
    raise RuntimeError("injected")
Runner.run = run
commands.serve_command()
"""


def test_sigterm_lets_running_requests_finish(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint)
    stub = process.stub(stack)
    calls = [stub.Decode(text_request(max_tokens=300)) for _ in range(3)]
    assert all(call.initial_metadata() for call in calls)  # the engine has taken them
    responses = [[next(calls[0])], [], []]
    process.process.send_signal(signal.SIGTERM)
    process.wait_for("draining")
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Decode(text_request()))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    for call, its_responses in zip(calls, responses, strict=True):
        its_responses += call
        assert len(tokens_of(its_responses)) == 300
    assert process.wait() == 0
    assert process.log.splitlines()[-1] == "stopped"
    assert "Traceback" not in process.log


def test_http_streams_finish_too_and_new_requests_are_refused(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint, "--log_format=json", "--served_model_name=mine")
    client = stack.enter_context(httpx.Client(base_url=process.http(), timeout=TIMEOUT, trust_env=False))
    assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
    # Eight samples one after another, so that the server is still at it when the others ask.
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True, "n": 8}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.process.send_signal(signal.SIGTERM)
        process.wait_for("draining")
        refused = client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait() == 0
    log = [json.loads(line) for line in process.log.splitlines()]
    assert log[-1]["message"] == "stopped"
    ended = [line for line in log if "outcome" in line]
    assert [(line["outcome"], line["output_tokens"]) for line in ended] == [("unavailable", 0), ("length", 8 * 300)]


def test_one_protocol_alone(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint, "--grpc_port=-1", "--warmup=False")
    url = process.http()
    assert "gRPC" not in process.log
    assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    process.process.send_signal(signal.SIGINT)
    assert process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_loading_can_be_stopped(
    checkpoint: Path, stack: contextlib.ExitStack, number: signal.Signals
) -> None:
    process = start(stack, checkpoint)
    process.wait_for("compiling")
    process.process.send_signal(number)
    assert process.wait() == -number
    assert process.log.splitlines()[-1] == "stopped while loading"


@pytest.mark.parametrize("way", ["a second signal", "no grace"])
def test_requests_that_are_cut_off_are_told(checkpoint: Path, stack: contextlib.ExitStack, way: str) -> None:
    process = start(stack, checkpoint, f"--drain_seconds={60 if way == 'a second signal' else 0}")
    stub = process.stub(stack)
    calls = [stub.Decode(text_request(max_tokens=500)) for _ in range(20)]
    next(calls[0])
    process.process.send_signal(signal.SIGTERM)
    if way == "a second signal":
        process.wait_for("draining")
        process.process.send_signal(signal.SIGTERM)
    codes = set()
    for call in calls:
        with contextlib.suppress(grpc.RpcError):
            list(call)
        codes.add(call.code())
    # gRPC itself answers calls with CANCELLED that a busy server had not been handed, or could not finish writing to.
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    assert grpc.StatusCode.UNAVAILABLE in codes
    assert process.wait() == 0
    assert "Traceback" not in process.log


def test_an_engine_that_fails_for_good_ends_the_process(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint, "--warmup=False", command=("-c", BROKEN))
    stub = process.stub(stack)
    codes = []
    for _ in range(3):
        call = stub.Decode(text_request())
        with contextlib.suppress(grpc.RpcError):
            list(call)
        codes.append(call.code())
    assert codes == [grpc.StatusCode.INTERNAL] * 3
    assert process.wait() == EXIT_FAILED
    assert "failed for good" in process.log
