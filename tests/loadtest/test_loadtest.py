"""The load generator: a fake server shows how it keeps time and counts, a real one that it speaks the protocol."""

import asyncio
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jetserve.loadtest.config import Server
from jetserve.loadtest.drive import _Run
from jetserve.loadtest.targets import RequestError, make_target
from jetserve.loadtest.workload import Ask
from jetserve.types import SamplingParams, Usage

ROOT = Path(__file__).resolve().parents[2]
ASK = Ask(prompt=(16, 17), sampling=SamplingParams(temperature=0.0))


class FakeTarget:
    """Answers when `at_once` requests are under way, and knows how many were at most."""

    def __init__(self, at_once: int = 1) -> None:
        self.barrier = asyncio.Barrier(at_once)
        self.now = self.most = self.sent = 0
        self.failure: Exception | None = None

    async def connect(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def send(self, ask: Ask, arrived: Callable[[], None]) -> Usage:
        self.sent += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            await self.barrier.wait()
            if self.failure is not None:
                raise self.failure
            arrived()
            arrived()
            return Usage(prompt_tokens=len(ask.prompt), output_tokens=2)
        finally:
            self.now -= 1


def test_concurrency_is_kept_and_not_exceeded() -> None:
    async def scene() -> None:
        target = FakeTarget()
        run = _Run(target, 60.0)
        await run.keep(5, itertools.repeat(ASK, 23), None)
        assert (target.sent, target.most) == (23, 5)
        assert sorted(record.index for record in run.records) == list(range(23))
        assert {(record.prompt_tokens, record.output_tokens, record.failure) for record in run.records} == {
            (2, 2, None)
        }

    asyncio.run(scene())


def test_arrivals_do_not_wait_for_answers_and_latency_counts_from_the_plan() -> None:
    async def scene() -> None:
        target = FakeTarget(at_once=3)
        run = _Run(target, 60.0)
        await run.pace(iter([-5.0, -4.0, -3.0]), itertools.repeat(ASK), None)  # planned 5 s before the client could
        assert sorted(record.scheduled for record in run.records) == [-5.0, -4.0, -3.0]
        assert all(record.ttft is not None and record.ttft >= 3.0 for record in run.records)

    asyncio.run(scene())


def test_no_request_starts_after_the_duration() -> None:
    async def scene() -> None:
        target = FakeTarget()
        run = _Run(target, 60.0)
        await run.pace(iter([0.0, 0.001, 9e9]), itertools.repeat(ASK), 0.5)
        await run.keep(3, itertools.repeat(ASK), 1e-9)
        assert target.sent == 2

    asyncio.run(scene())


def test_failures_are_recorded_by_kind() -> None:
    async def scene() -> None:
        target = FakeTarget()
        target.failure = RequestError("HTTP 429", "full")
        run = _Run(target, 60.0)
        await run.keep(1, itertools.repeat(ASK, 2), None)
        assert [(record.failure, record.message) for record in run.records] == [("HTTP 429", "full")] * 2
        run = _Run(FakeTarget(at_once=2), 0.01)
        await run.keep(1, itertools.repeat(ASK, 1), None)
        assert [record.failure for record in run.records] == ["timeout"]

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (Server(url="127.0.0.1:9000"), "grpc://HOST:PORT"),
        (Server(url="ftp://x"), "grpc://HOST:PORT"),
        (Server(url="http://x/v1"), "http://HOST:PORT"),
        (Server(url="grpc://x:1", tls_ca_file=Path("ca")), "expected grpcs://"),
        (Server(url="grpc://x:1", model="m"), "--model has no effect"),
    ],
)
def test_what_is_no_server_is_refused(server: Server, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make_target(server)


def test_importing_it_takes_no_jax() -> None:
    code = (
        "import sys, jetserve.loadtest, jetserve.loadtest_flags, jetserve.commands;"
        "sys.exit(any(name in sys.modules for name in ('jax', 'flax')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def loadtest(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jetserve.loadtest", *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url=grpc://127.0.0.1:9", "--concurrency=1"], "no gRPC server answers at grpc://127.0.0.1:9"),
        (
            ["--url=http://127.0.0.1:9", "--concurrency=1"],
            "no OpenAI server answers at http://127.0.0.1:9: Cannot connect",
        ),
        ([], "neither of --request_rate and --concurrency"),
        (["--concurrency=1", "--input_tokens=none"], "--input_tokens: 'none' is no length"),
        (["--concurrency=1", "--plot=/no/such/p.png"], "the folder of /no/such/p.png does not exist"),
        (["--concurrency=1", "--prompts_file=/no/such"], "/no/such"),
    ],
)
def test_errors_are_one_line(flags: list[str], words: str) -> None:
    result = loadtest(*flags)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert words in result.stderr
    assert result.stdout == ""
