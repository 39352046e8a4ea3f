"""The server as a process: what signals do while requests run, and what an engine that fails for good does."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_parts import text_request, tokens_of

from jetserve.server.proto.jetstream_pb2_grpc import OrchestratorStub
from jetserve.server.serve import EXIT_FAILED
from jetserve.testing import make_tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120.0
BROKEN = """
from jetserve import commands
from jetserve.engine.runner import Runner
def run(*arguments):
    raise RuntimeError("injected")
Runner.run = run
commands.serve_command()
"""


class Process:
    """A server on a port of its own; `log` is what it has written so far."""

    def __init__(self, checkpoint: Path, *flags: str, command: tuple[str, ...] = ("run_server.py",)) -> None:
        settings = [
            "--grpc_port=0",
            "--http_port=0",
            "--batch_size=1",
            "--max_step_tokens=16",
            "--max_cache_length=512",
            *flags,
        ]
        self.process = subprocess.Popen(
            [sys.executable, *command, f"--checkpoint_path={checkpoint}", *settings],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def wait_for(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + TIMEOUT
        while (found := re.search(pattern, self.log)) is None:
            assert time.monotonic() < end, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        return found

    def stub(self, stack: contextlib.ExitStack) -> OrchestratorStub:
        port = self.wait_for(r"ready: gRPC on 127\.0\.0\.1:(\d+)")[1]
        return OrchestratorStub(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")))

    def http(self) -> str:
        """Where it serves HTTP, which it does before the model is loaded."""
        return self.wait_for(r"HTTP on (http://127\.0\.0\.1:\d+)")[1]

    def wait(self) -> int:
        code = self.process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)
        return code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def start(stack: contextlib.ExitStack, *arguments: object, **settings: tuple[str, ...]) -> Process:
    process = Process(*arguments, **settings)  # type: ignore[arg-type]
    stack.callback(process.process.wait)
    stack.callback(process.process.kill)
    return process


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
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
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
    assert [(line["outcome"], line["output_tokens"]) for line in ended] == [("unavailable", 0), ("length", 300)]


def test_one_protocol_alone(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint, "--grpc_port=-1", "--warmup=False")
    url = process.http()
    assert "gRPC" not in process.log
    assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    process.process.send_signal(signal.SIGINT)
    assert process.wait() == 0


def test_a_server_that_is_loading_can_be_stopped(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint)
    process.wait_for("compiling")
    process.process.send_signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT
    assert "Traceback" not in process.log


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
