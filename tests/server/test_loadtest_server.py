"""The load generator as users run it, against real servers: both protocols, prompts of every form, and its files."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ROOT, Process, start

pytestmark = pytest.mark.slow

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 4, "ignore_eos": True},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True, "logprobs": 2},
    {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "seed": 3, "temperature": 0.5, "stop": ["never"]},
    {"prompt": "word " * 600},
]
FAILURE = {"grpc": "INVALID_ARGUMENT", "http": "HTTP 400"}


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Process]:
    with contextlib.ExitStack() as stack:
        process = start(stack, checkpoint, "--batch_size=8")
        process.wait_for("ready")
        yield process


def url_of(server: Process, protocol: str) -> str:
    if protocol == "http":
        return server.http()
    return f"grpc://127.0.0.1:{server.wait_for(r'gRPC on 127.0.0.1:([0-9]+)')[1]}"


def loadtest(*flags: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Its report, and what it wrote to standard error."""
    result = subprocess.run(
        [sys.executable, "-m", "jetserve", "loadtest", *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_random_prompts_at_a_rate(server: Process, protocol: str, tmp_path: Path) -> None:
    plot, lines = tmp_path / "plot.png", tmp_path / "requests.jsonl"
    report, table = loadtest(
        f"--url={url_of(server, protocol)}",
        "--request_rate=50",
        "--num_requests=30",
        "--warmup_requests=2",
        "--input_tokens=uniform:5,20",
        "--output_tokens=9",
        "--goal_latency_ms=100000",
        f"--plot={plot}",
        f"--output_file={lines}",
    )
    assert (report["requests"], report["completed"], report["output_tokens"]) == (30, 30, 30 * 9)
    assert 30 * 5 <= report["prompt_tokens"] <= 30 * 20
    assert report["goodput"]["share"] == 1.0
    for name in ("ttft_ms", "tpot_ms", "latency_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]
    assert "time to first token" in table
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(30))
    assert {record["output_tokens"] for record in records} == {9}
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_prompts_of_a_file_and_failures(server: Process, protocol: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    url = url_of(server, protocol)
    report, table = loadtest(f"--url={url}", "--concurrency=2", f"--prompts_file={file}")
    assert (report["requests"], report["completed"]) == (4, 3)
    assert report["failures"] == {FAILURE[protocol]: 1}
    assert report["output_tokens"] == 4 + 5 + 6
    assert "--max_cache_length" in table  # the server's own words
    file.write_text(json.dumps(PROMPTS[3]) + "\n")
    report, _ = loadtest(f"--url={url}", "--concurrency=1", "--num_requests=3", f"--prompts_file={file}", code=1)
    assert report["failures"] == {FAILURE[protocol]: 3}


def test_a_key_is_sent(checkpoint: Path, tmp_path: Path, stack: contextlib.ExitStack) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    process = start(stack, checkpoint, f"--api_key_file={key}", "--warmup=False")
    for protocol in ("grpc", "http"):
        flags = [f"--url={url_of(process, protocol)}", "--concurrency=1", "--num_requests=1", "--output_tokens=2"]
        report, _ = loadtest(*flags, f"--api_key_file={key}")
        assert report["completed"] == 1
