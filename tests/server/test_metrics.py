"""What Prometheus and the log are told, by both protocols, and that nothing is compiled once a server is warm."""

import asyncio
import json
import logging
import re
from pathlib import Path

import grpc
import pytest
from gate import Gate
from grpc_parts import make_engine, text_request, until
from http_parts import HELLO, Served, play
from prometheus_client.parser import text_string_to_metric_families

from jetserve.config import ServerConfig
from jetserve.server import logs
from jetserve.server.grpc import GrpcServer
from jetserve.server.metrics import Metrics
from jetserve.server.observe import Observer
from jetserve.server.proto.jetstream_pb2_grpc import OrchestratorStub

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.mark.slow
def test_histograms_count_what_was_asked() -> None:
    async def scene(served: Served) -> None:
        for _ in range(3):
            await served.complete(prompt=[5, 6, 7, 8], n=2)
        async for _ in await served.chat(stream=True):
            pass
        await served.post("/v1/completions", {"prompt": "x", "temperature": -1})
        prompts = len(served.engine.engine.tokenizer.apply_chat_template(HELLO)) + 3 * 4
        for name, count, total in (
            ("request_prompt_tokens", 4, prompts),
            ("request_output_tokens", 4, 3 * 16 + 8),
            ("time_to_first_token_seconds", 4, None),
            ("request_duration_seconds", 4, None),
            ("time_per_output_token_seconds", 7, None),
            ("queue_time_seconds", 7, None),
        ):
            assert await served.metric(f"jetserve_{name}_count", protocol="http") == count
            assert await served.metric(f"jetserve_{name}_count", protocol="grpc") == 0
            found = await served.metric(f"jetserve_{name}_sum", protocol="http")
            assert found == total if total is not None else found > 0
        first, whole, queue = [
            await served.metric(f"jetserve_{name}_seconds_sum")
            for name in ("time_to_first_token", "request_duration", "queue_time")
        ]
        assert queue / 7 <= first / 4 <= whole / 4
        assert await served.metric("jetserve_requests_total", outcome="length") == 4
        assert await served.metric("jetserve_requests_total", outcome="invalid") == 1
        assert await served.metric("jetserve_output_tokens_total") == 56
        assert await served.metric("jetserve_sequences_finished_total", reason="length") == 7
        assert await served.metric("process_resident_memory_bytes") > 0

    play(scene)


@pytest.mark.slow
def test_gauges_follow_the_engine(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        assert await served.metric("jetserve_kv_pages_used") == 0
        running = asyncio.create_task(served.complete(n=3))
        gate.open.set()
        await running
        gate.open.clear()
        held = asyncio.create_task(served.complete(n=3, max_tokens=20))
        gate.entered.clear()
        await until(gate.entered.is_set)
        waits = asyncio.create_task(served.complete())
        await until(lambda: served.engine.stats().waiting > 0)
        assert await served.metric("jetserve_sequences_waiting") > 0
        gate.open.set()
        await asyncio.gather(held, waits)
        assert await served.metric("jetserve_kv_pages_used") == 0
        assert await served.metric("jetserve_kv_pages_capacity") == served.engine.stats().pages_total
        assert await served.metric("jetserve_ready") == 1

    play(scene)


@pytest.mark.slow
def test_both_protocols_are_counted_by_the_same_hand() -> None:
    async def scene(served: Served) -> None:
        metrics = Metrics(served.engine, model="tiny")
        server = GrpcServer(ServerConfig(grpc_port=0))
        await server.start(served.engine, Observer(metrics))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            decode = OrchestratorStub(channel).Decode
            _ = [response async for response in decode(text_request())]
            with pytest.raises(grpc.aio.AioRpcError):
                _ = [response async for response in decode(text_request(max_tokens=0))]
            call = decode(text_request(max_tokens=400))
            await anext(aiter(call))
            call.cancel()
            await until(lambda: 'outcome="cancelled",protocol="grpc"} 1.0' in metrics.text().decode())
        await server.stop(1)
        samples = {
            (sample.name, sample.labels.get("outcome")): sample.value
            for family in text_string_to_metric_families(metrics.text().decode())
            for sample in family.samples
            if sample.labels.get("protocol") == "grpc"
        }
        for outcome in ("length", "invalid", "cancelled"):
            assert samples["jetserve_requests_total", outcome] == 1
        assert samples["jetserve_time_to_first_token_seconds_count", None] == 2

    play(scene)


@pytest.mark.slow
def test_a_warm_server_compiles_nothing() -> None:
    engine = make_engine()
    engine.runner.warm_up()

    async def scene(served: Served) -> None:
        calls = [
            served.complete(
                prompt=list(range(3, 4 + 37 * i % 300)),
                max_tokens=1 + 7 * i % 40,
                temperature=i % 2,
                logprobs=5 if i % 3 else None,
                stream=i % 4 == 0,
                n=1 + i % 3,
                stop=["x", "yz"] if i % 5 else None,
                logit_bias={"7": 5} if i % 2 else None,
                presence_penalty=0.5 if i % 3 else 0,
            )
            for i in range(40)
        ]
        for answer in await asyncio.gather(*calls):
            if hasattr(answer, "__aiter__"):
                _ = [chunk async for chunk in answer]
        await served.chat(extra_body={"guided_regex": "[ab]{9}"}, n=3)
        await served.chat(logprobs=True, top_logprobs=20, seed=3, extra_body={"min_p": 0.1, "top_k": 3})
        assert await served.metric("jetserve_compilations_after_warmup_total") == 0

    play(scene, engine)


def test_the_dashboard_names_metrics_that_are_there() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = set(
        re.findall(r"jetserve_\w+|process_\w+", json.dumps([panel["targets"] for panel in dashboard["panels"]]))
    )
    assert len(asked) >= 15

    async def scene(served: Served) -> None:
        await served.complete()
        families = text_string_to_metric_families((await served.http.get("/metrics")).text)
        told = {sample.name for family in families for sample in family.samples}
        assert asked <= told

    play(scene)


def test_a_line_is_logged_for_each_request_and_never_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(served: Served) -> None:
        with caplog.at_level(logging.INFO, "jetserve"):
            await served.post(
                "/v1/completions", {"prompt": "private words", "max_tokens": 3}, headers={"x-request-id": "mine"}
            )
            await served.post("/v1/completions", {"prompt": "private words", "n": 0})

    play(scene)
    records = [record for record in caplog.records if record.name == "jetserve.server.observe"]
    assert len(records) == 2
    lines = [json.loads(logs.JsonFormatter().format(record)) for record in records]
    assert lines[0]["request_id"] == "mine"
    assert (lines[0]["protocol"], lines[0]["output_tokens"], lines[1]["outcome"]) == ("http", 3, "invalid")
    assert lines[0]["time_to_first_token_seconds"] <= lines[0]["seconds"]
    assert lines[0]["prompt_tokens"] > 0
    assert lines[0]["level"] == "info"
    assert "private" not in caplog.text


def test_errors_in_json_carry_their_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it %s", ("failed",), (type(error), error, None))
    line = json.loads(logs.JsonFormatter().format(record))
    assert (line["message"], line["level"]) == ("it failed", "error")
    assert "ValueError: broken" in line["exception"]


@pytest.mark.slow
def test_the_profiler_is_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    async def scene(served: Served) -> None:
        for header in ("x-forwarded-for", "origin"):
            response = await served.http.post("/debug/profiler/start", headers={header: "http://10.0.0.1"})
            assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        assert (await served.http.post("/debug/profiler/stop")).status_code == 409
        started = await served.http.post("/debug/profiler/start")
        assert started.status_code == 200
        assert (await served.http.post("/debug/profiler/start")).status_code == 409
        await served.complete()
        stopped = await served.http.post("/debug/profiler/stop")
        assert stopped.json() == started.json()
        assert list(Path(stopped.json()["directory"]).rglob("*.xplane.pb"))

    play(scene)
