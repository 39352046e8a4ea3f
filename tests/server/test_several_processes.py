"""One model served by two processes, of four devices each."""

import contextlib
import json
import signal
from pathlib import Path

import httpx
import pytest
from many_devices import environment_of_devices, free_port
from server_process import TIMEOUT, Process, start

from jetserve.server.serve import EXIT_FAILED
from jetserve.testing import make_tiny_checkpoint

pytestmark = pytest.mark.slow


def start_two(
    stack: contextlib.ExitStack, *checkpoints: Path, flags: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
) -> list[Process]:
    address = f"127.0.0.1:{free_port()}"
    return [
        start(
            stack,
            checkpoints[number % len(checkpoints)],
            "--warmup=False",
            f"--coordinator_address={address}",
            "--num_processes=2",
            f"--process_id={number}",
            *flags[number],
            environment=environment_of_devices(4),
        )
        for number in range(2)
    ]


def client_of(stack: contextlib.ExitStack, process: Process) -> httpx.Client:
    process.wait_for("ready: gRPC")
    return stack.enter_context(httpx.Client(base_url=process.http(), timeout=TIMEOUT, trust_env=False))


def test_a_request_is_answered_and_a_signal_ends_both(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    started = start_two(stack, checkpoint)
    client = client_of(stack, started[0])
    started[1].wait_for("ready: process 1 of 2 follows process 0")
    for number in (signal.SIGTERM, signal.SIGINT):  # are for process 0
        started[1].process.send_signal(number)
    body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
    started[0].process.send_signal(signal.SIGTERM)
    assert [process.wait() for process in started] == [0, 0]
    assert all(process.log.splitlines()[-1] == "stopped" for process in started)


def test_a_process_that_is_lost_ends_the_other(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    started = start_two(stack, checkpoint)
    client = client_of(stack, started[0])
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        assert "error" not in json.loads(next(lines).removeprefix("data: "))
        started[1].process.kill()
        rest = [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]
    assert "error" in rest[-1] or rest[-1]["choices"][0]["finish_reason"] is not None
    assert started[0].wait() == EXIT_FAILED
    assert "process 1 of 2 is lost" in started[0].log


def test_other_flags_are_refused_and_nobody_waits(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    started = start_two(stack, checkpoint, flags=((), ("--max_cache_length=256", "--quantize_kv_cache")))
    assert [process.wait() for process in started] == [1, 1]
    assert "process 1 was started with other flags than process 0" in started[0].log
    assert "max_length is 256 there, 512 here" in started[0].log
    assert "process 0 has ended without a word" in started[1].log


def test_another_checkpoint_is_refused(checkpoint: Path, stack: contextlib.ExitStack, tmp_path: Path) -> None:
    started = start_two(stack, checkpoint, make_tiny_checkpoint(tmp_path, rope_theta=500.0))
    assert [process.wait() for process in started] == [1, 1]
    assert (
        "process 1 was started with other flags than process 0, or another checkpoint: checkpoint is " in started[0].log
    )
    assert "process 0 has ended without a word" in started[1].log
