"""What a server process bears: clients that are killed, floods, few pages, and a stop, or its own death, under load."""

import asyncio
import collections
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import httpx
import psutil
import pytest
from grpc_parts import text_request, tokens_of
from http_parts import metric_in
from server_process import ROOT, TIMEOUT, Process, start

from jetserve.server.proto.jetstream_pb2_grpc import OrchestratorStub

pytestmark = pytest.mark.slow

Code = grpc.StatusCode
FLOOD = 10_000
MEMORY_GROWTH = 200 * 2**20
"""Bytes, for ten thousand connections' and calls' worth of buffers that an allocator may keep."""
CLIENT = """
import sys
from jetserve.client import Client
from jetserve.types import SamplingParams
for _ in Client(sys.argv[1]).stream("hello", SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=500)):
    print("reading", flush=True)
"""


def grpc_address(process: Process) -> str:
    return f"127.0.0.1:{process.wait_for(r'gRPC on 127.0.0.1:([0-9]+)')[1]}"


def metric(process: Process, name: str, **labels: str) -> float:
    return metric_in(httpx.get(f"{process.http()}/metrics", timeout=TIMEOUT, trust_env=False).text, name, **labels)


async def until_idle(process: Process) -> None:
    """Waits until no request is there, and no page is in use."""
    async with asyncio.timeout(TIMEOUT):
        for name in ("jetserve_sequences_running", "jetserve_sequences_waiting", "jetserve_kv_pages_used"):
            while await asyncio.to_thread(metric, process, name):
                await asyncio.sleep(0.05)


async def code_of(stub: OrchestratorStub, **fields: Any) -> grpc.StatusCode:
    return await end_of(stub.Decode(text_request(**fields)))


async def end_of(call: Any) -> grpc.StatusCode:
    """The status of a call, which comes after its messages."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


async def status_of(session: aiohttp.ClientSession, **fields: Any) -> int | str:
    """The status; "connection" where the server is gone, "cut" where an answer has no end."""
    body = {"prompt": "hello", "ignore_eos": True, "temperature": 0, "stream": True, "max_tokens": 8, **fields}
    try:
        async with session.post("/v1/completions", json=body) as response:
            text = await response.text()
            whole = response.status != 200 or text.endswith("data: [DONE]\n\n") or '"error"' in text
            return response.status if whole else "cut"
    except (aiohttp.ClientError, ConnectionError):
        return "connection"


@contextlib.asynccontextmanager
async def clients(process: Process) -> Any:
    async with (
        grpc.aio.insecure_channel(grpc_address(process)) as channel,
        aiohttp.ClientSession(process.http(), connector=aiohttp.TCPConnector(limit=200)) as session,
        asyncio.timeout(5 * TIMEOUT),
    ):
        yield OrchestratorStub(channel), session


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_client_that_is_killed_frees_its_pages(checkpoint: Path, stack: contextlib.ExitStack, protocol: str) -> None:
    process = start(stack, checkpoint)
    if protocol == "grpc":
        command = [sys.executable, "-c", CLIENT, grpc_address(process)]
    else:
        body = '{"prompt": "hello", "ignore_eos": true, "max_tokens": 500, "stream": true}'
        url = f"{process.http()}/v1/completions"
        command = ["curl", "-sN", "--noproxy", "*", url, "-H", "content-type: application/json", "-d", body]
    client = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    stack.callback(client.wait)
    stack.callback(client.kill)
    assert client.stdout is not None
    assert client.stdout.readline()
    client.send_signal(signal.SIGKILL)
    asyncio.run(until_idle(process))
    assert metric(process, "jetserve_sequences_finished_total", reason="cancelled") == 1


def test_a_flood_is_refused_and_takes_no_memory(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint, "--max_queue=100")

    async def scene() -> None:
        async with clients(process) as (stub, session):
            rss = psutil.Process(process.process.pid).memory_info
            running = [asyncio.create_task(code_of(stub, max_tokens=400)) for _ in range(20)]
            before = (await code_of(stub), rss().rss)[1]
            flood = [code_of(stub) if i % 4 else status_of(session) for i in range(FLOOD)]
            results = collections.Counter(await asyncio.gather(*flood))
            assert results.keys() <= {Code.OK, Code.RESOURCE_EXHAUSTED, 200, 429}
            assert results[Code.RESOURCE_EXHAUSTED] > 0
            assert results[429] > 0
            assert set(await asyncio.gather(*running)) <= {Code.OK, Code.RESOURCE_EXHAUSTED}
            await until_idle(process)
            assert rss().rss - before < MEMORY_GROWTH
            assert await code_of(stub) is Code.OK

    asyncio.run(scene())


def test_few_pages_make_requests_wait_and_lose_none(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint, "--batch_size=8", "--num_pages=40")

    async def scene() -> None:
        async with clients(process) as (stub, session):
            calls = [stub.Decode(text_request(max_tokens=300)) for _ in range(12)]

            async def tokens(call: Any) -> list[int]:
                return tokens_of([response async for response in call])

            statuses = [status_of(session, max_tokens=300) for _ in range(12)]
            answers = await asyncio.gather(*(tokens(call) for call in calls), *statuses)
            assert answers[12:] == [200] * 12
            assert answers[:12] == [answers[0]] * 12
            assert len(answers[0]) == 300
            await until_idle(process)
            assert metric(process, "jetserve_preemptions_total") > 0

    asyncio.run(scene())


def test_sigterm_under_load_leaves_nobody_without_a_status(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint, "--drain_seconds=2")

    async def scene() -> None:
        async with clients(process) as (stub, session):
            calls = [stub.Decode(text_request(max_tokens=400)) for _ in range(40)]
            await calls[0].initial_metadata()  # the engine has taken it
            tasks = [asyncio.create_task(status_of(session, max_tokens=400)) for _ in range(40)]
            await asyncio.to_thread(process.process.send_signal, signal.SIGTERM)
            codes = collections.Counter(await asyncio.gather(*(end_of(call) for call in calls)))
            statuses = collections.Counter(await asyncio.gather(*tasks))
            assert codes.keys() <= {Code.OK, Code.UNAVAILABLE, Code.CANCELLED}
            assert statuses.keys() <= {200, 503, "connection"}

    asyncio.run(scene())
    assert process.wait() == 0
    assert "Traceback" not in process.log


def test_clients_of_a_server_that_is_killed_are_told(checkpoint: Path, stack: contextlib.ExitStack) -> None:
    process = start(stack, checkpoint)

    async def scene() -> None:
        async with clients(process) as (stub, session):
            calls = [stub.Decode(text_request(max_tokens=400)) for _ in range(20)]
            tasks = [asyncio.create_task(status_of(session, max_tokens=400)) for _ in range(20)]
            await calls[0].initial_metadata()
            os.kill(process.process.pid, signal.SIGKILL)
            assert set(await asyncio.gather(*(end_of(call) for call in calls))) <= {Code.OK, Code.UNAVAILABLE}
            assert set(await asyncio.gather(*tasks)) <= {200, "connection"}
            assert await code_of(stub) is Code.UNAVAILABLE
            assert await status_of(session) == "connection"

    asyncio.run(scene())
