"""What the HTTP server refuses and how, and every way that a request can end badly."""

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gate import Gate
from grpc_parts import TIMEOUT, make_engine, until
from http_parts import HELLO, Served, play, serving

from jetserve.config import ServerConfig
from jetserve.server.openai import guard
from jetserve.server.openai.server import MAX_HEAD_BYTES, HttpServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
BAD_SCHEMA = {"type": "colour"}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA}}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"schema": BAD_SCHEMA}}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 4, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, **fields}


async def expect(response: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    """The error in a response that must be one, in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    for word in words:
        assert word in body["error"]["message"]
    return body["error"]


REFUSED = [
    (CHAT, {}, "messages", ["messages is missing"]),
    (CHAT, chat(messages=[]), "messages", ["messages is empty"]),
    (CHAT, chat(messages="Hi"), "messages", ["messages is 'Hi'"]),
    (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role", ["robot", "assistant"]),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content", ["content is missing"]),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0].type",
        ["image_url", "'text'"],
    ),
    (CHAT, chat(colour="red"), "colour", ["colour is not a field"]),
    (CHAT, chat(functions=[{"name": "f"}]), "functions", ["functions is not a field"]),
    (CHAT, chat(reasoning_effort="low"), "reasoning_effort", ["reasoning_effort"]),
    (CHAT, chat(modalities=["audio"]), "modalities", ["only ['text']"]),
    (CHAT, chat(temperature="hot"), "temperature", ["temperature is 'hot'", "number"]),
    (CHAT, chat(temperature=-1), "temperature", ["temperature is -1"]),
    (CHAT, chat(top_p=0), "top_p", ["top_p is 0"]),
    (CHAT, chat(n=0), "n", ["n is 0"]),
    (CHAT, chat(n=1.5), "n", ["n is 1.5"]),
    (CHAT, chat(max_tokens=0), "max_tokens", ["max_tokens is 0"]),
    (CHAT, chat(max_completion_tokens=9), "max_tokens", ["max_completion_tokens differ"]),
    (CHAT, chat(stop=[""]), "stop", ["stop"]),
    (CHAT, chat(stop=["x"] * 17), "stop", ["17 strings"]),
    (CHAT, chat(seed=2**70), "seed", ["seed"]),
    (CHAT, chat(top_logprobs=2), "top_logprobs", ["logprobs is not true"]),
    (CHAT, chat(logprobs=True, top_logprobs=99), "top_logprobs", ["top_logprobs is 99"]),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", ["max_completion_tokens is 0"]),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias.x", ["logit_bias.x"]),
    (CHAT, chat(logit_bias={"5000": 1}), "logit_bias", ["5000", "vocabulary"]),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", ["stream is not"]),
    (CHAT, chat(stop_token_ids=[10**9]), "stop_token_ids", ["1000000000", "vocabulary"]),
    (CHAT, chat(timeout=-1), "timeout", ["timeout is -1"]),
    (CHAT, chat(tool_choice="auto"), "tool_choice", ["tools is not"]),
    (CHAT, chat(tools=[TOOL, TOOL]), "tools", ["a name twice"]),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "no name"}}]), "tools[0].function.name", ["pattern"]),
    (
        CHAT,
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
        ["names 'g'", "['f']"],
    ),
    (CHAT, chat(tools=[TOOL], response_format={"type": "json_object"}), "tools", ["no room for calls"]),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type", ["xml"]),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format", ["schema is missing"]),
    (CHAT, chat(guided_regex="a", guided_json={}), "guided_regex", ["guided_json and guided_regex"]),
    (CHAT, chat(guided_choice=[]), "guided_choice", ["guided_choice is empty"]),
    (CHAT, chat(guided_choice=["x" * 70_000]), "guided_choice", ["guided_choice has 70009 characters"]),
    (CHAT, chat(guided_regex="("), "guided_regex", ["guided_regex cannot be used"]),
    (CHAT, chat(guided_json="{"), "guided_json", ["guided_json is not JSON"]),
    (CHAT, chat(guided_json=True), "guided_json", ["guided_json is True; expected an object or a valid string"]),
    (CHAT, chat(guided_grammar="start: start"), "guided_grammar", ["guided_grammar cannot be used"]),
    (CHAT, chat(structured_outputs={"regex": "("}), "structured_outputs.regex", ["structured_outputs.regex cannot"]),
    (CHAT, chat(response_format=BAD_FORMAT), "response_format", ["response_format cannot be used"]),
    (CHAT, chat(tools=[BAD_TOOL], tool_choice="required"), "tools", ["tools cannot be used"]),
    (
        CHAT,
        chat(tools=[TOOL], tool_choice="banana"),
        "tool_choice",
        ["'banana'; expected 'none', 'auto' or 'required'"],
    ),
    (CHAT, chat(continue_final_message=True), "continue_final_message", ["the assistant's"]),
    (CHAT, chat(chat_template_kwargs={"tools": []}), "chat_template_kwargs", ["tools"]),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": "word " * 600}]),
        "messages",
        ["at most 479", "max_cache_length"],
    ),
    (TEXT, {"prompt": []}, "prompt", ["prompt is empty"]),
    (TEXT, {"prompt": ""}, "prompt", ["no tokens"]),
    (TEXT, {"prompt": ["a", ""]}, "prompt", ["no tokens"]),
    (TEXT, {"prompt": [320]}, "prompt", ["320", "vocabulary"]),
    (TEXT, {"prompt": [-1]}, "prompt", ["-1", "vocabulary"]),
    (TEXT, {"prompt": 5}, "prompt", ["prompt is 5; expected a valid string or a valid array"]),
    (TEXT, {"prompt": "word " * 600}, "prompt", ["at most 479"]),
    (TEXT, text(best_of=3), "best_of", ["best_of is 3"]),
    (TEXT, text(suffix="end"), "suffix", ["only '' is supported"]),
    (TEXT, text(echo=True, logprobs=1), "echo", ["logprobs"]),
    (TEXT, text(prompt=["x"] * 100, n=3), "n", ["100 prompts", "at most 200"]),
    (TEXT, text(min_tokens=9), "min_tokens", ["min_tokens is 9"]),
    ("/tokenize", {}, "prompt", ["prompt or messages"]),
    ("/detokenize", {"tokens": [100000]}, "tokens", ["100000"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_succeed_is_refused_with_the_reason(stream: bool) -> None:
    async def scene(served: Served) -> None:
        for path, body, param, words in REFUSED:
            streamed = {"stream": True} if stream and path.startswith("/v1") and "stream_options" not in body else {}
            error = await expect(await served.post(path, body | streamed), 400, *words)
            assert (error["type"], error["param"]) == ("invalid_request_error", param), (body, error)
        long = await served.post(TEXT, {"prompt": "word " * 600})
        assert long.json()["error"]["code"] == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="temperature is -1"):
            await served.chat(temperature=-1)
        with pytest.raises(openai.NotFoundError, match="model is 'gpt-4'; expected 'tiny'") as missing:
            await served.chat(model="gpt-4")
        assert missing.value.code == "model_not_found"
        assert await served.metric("jetserve_requests_total", outcome="internal") == 0
        assert len((await served.complete()).choices) == 1

    play(scene)


def test_what_does_not_fit_into_the_pages_is_refused_as_what_is_too_long() -> None:
    async def scene(served: Served) -> None:
        assert (await served.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 32
        assert (await served.http.get("/state")).json()["max_length"] == 32
        for path, body, param in (
            (TEXT, text(prompt=[5] * 32), "prompt"),
            (CHAT, chat(messages=[{"role": "user", "content": "word " * 32}]), "messages"),
        ):
            error = await expect(await served.post(path, body), 400, "at most 31", "--num_pages")
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        answer = await served.complete(prompt=[5] * 20, max_tokens=100)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (12, "length")

    play(scene, make_engine(pages=4))


def test_fields_that_change_nothing_are_taken() -> None:
    async def scene(served: Served) -> None:
        harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "colour": None}
        nothing = {"best_of": 1, "suffix": "", "skip_special_tokens": True, "response_format": {"type": "text"}}
        expected = (await served.complete()).choices[0].text
        assert (await served.complete(extra_body={**harmless, **nothing})).choices[0].text == expected

    play(scene)


def test_bodies_that_are_no_json_object_are_refused() -> None:
    async def scene(served: Served) -> None:
        for content, words in (
            (b"", "no valid JSON"),
            (b"{", "no valid JSON"),
            (b'{"prompt": "\xff"}', "UTF-8"),
            (b'{"prompt": "\\ud800"}', "no valid JSON"),
            (b"[]", "no JSON object"),
            (b"[" * 100_000, "no valid JSON"),
        ):
            await expect(await served.http.post(TEXT, content=content), 400, words)
        # curl says that its data is a form.
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert (await served.http.post(TEXT, content=json.dumps(text()), headers=form)).status_code == 200

    play(scene)


def test_unknown_paths_and_methods(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(served: Served) -> None:
        await expect(await served.http.get("/v2/nothing"), 404, "/v2/nothing")
        error = await expect(await served.http.get(CHAT), 405, "GET")
        assert error["code"] == "method_not_allowed"
        await expect(await served.http.get("/v1/models/other"), 404, "model is 'other'")

    play(scene)
    assert not [
        record for record in caplog.records if record.exc_info
    ]  # a client's mistake is no fault of the server's


def test_connections_send_at_once() -> None:
    no_delay = []

    class Watched(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            no_delay.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    async def main() -> None:
        bound = HttpServer(ServerConfig(http_port=0), profile_folder=Path("profiles"))
        listening = await asyncio.get_running_loop().create_server(Watched, sock=bound._socket)
        async with listening:
            reader, writer = await asyncio.open_connection("127.0.0.1", bound.port)
            assert await reader.read() == b""
            writer.close()

    asyncio.run(main())
    assert len(no_delay) == 1
    assert no_delay[0] != 0


@pytest.mark.slow
def test_a_body_beyond_the_limit_is_refused() -> None:
    async def scene(served: Served) -> None:
        await expect(await served.post(TEXT, text(prompt="x" * 5000)), 413, "at most 4096")

        async def endless() -> Any:
            for _ in range(100):
                yield b" " * 1000

        await expect(await served.http.post(TEXT, content=endless()), 413, "at most 4096")
        assert (await served.post(TEXT, text())).status_code == 200

    play(scene, max_message_bytes=4096)


def test_headers_that_do_not_end_are_refused() -> None:
    async def scene(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        writer.write(b"GET /health HTTP/1.1\r\n".ljust(MAX_HEAD_BYTES + 1, b"x"))
        assert b"400 Bad Request" in await reader.readline()
        assert b"more than 65536 bytes" in await reader.read()
        writer.close()

    play(scene)


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BODY_SECONDS", 0.1)
    monkeypatch.setattr(guard, "_LINGER_SECONDS", 0.1)

    async def scene(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        writer.write(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{{".encode())
        answer = await reader.read()  # up to the end: the connection is closed
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"request_timeout"' in answer
        writer.close()

    play(scene)


@pytest.mark.parametrize("origin", ["foo", "example.org", "https://example.org/", "https://Example.org", ""])
def test_origins_that_no_browser_tells_are_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"cors_origins has .*https://example\.org.* or \* for all"):
        ServerConfig(cors_origins=(origin,))
    assert ServerConfig(cors_origins=("*", "http://localhost:3000")).cors_origins


@pytest.mark.slow
def test_request_ids_come_back() -> None:
    async def scene(served: Served) -> None:
        ids = {(await served.post(TEXT, text())).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2
        named = {"x-request-id": "mine 1"}
        for body, status in ((text(), 200), ({}, 400)):
            response = await served.post(TEXT, body, headers=named)
            assert (response.status_code, response.headers["x-request-id"]) == (status, "mine 1")
        both = await asyncio.gather(*(served.post(TEXT, text(), headers=named) for _ in range(3)))
        assert {response.status_code for response in both} == {200}
        for bad in ("x" * 129, "x" * 5000, "caf\u00e9".encode("latin-1")):
            response = await served.post(TEXT, text(), headers=[(b"x-request-id", bad)])
            error = await expect(response, 400, "x-request-id")
            assert len(error["message"]) < 200

    play(scene)


@pytest.mark.slow
def test_a_full_queue_is_refused_with_a_hint_when_to_retry(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        running = asyncio.create_task(served.post(TEXT, text()))
        await until(gate.entered.is_set)
        flood = [asyncio.create_task(served.post(TEXT, text(stream=i % 2 == 0))) for i in range(20)]
        await until(lambda: sum(task.done() for task in flood) >= 18)
        gate.open.set()
        refused = [r for r in await asyncio.gather(*flood) if r.status_code != 200]
        assert len(refused) >= 18
        for response in refused:
            error = await expect(response, 429, "queue is full")
            assert (error["code"], response.headers["retry-after"]) == ("queue_full", "1")
        assert (await running).status_code == 200
        assert await served.metric("jetserve_requests_total", outcome="queue_full") == len(refused)

    play(scene, make_engine(max_queue=2))


@pytest.mark.slow
def test_an_answer_that_is_late_ends_with_an_error(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        late = [
            asyncio.create_task(served.post(TEXT, text(max_tokens=400, timeout=0.2, stream=stream)))
            for stream in (False, True)
        ]
        await until(gate.entered.is_set)
        await asyncio.sleep(0.3)
        gate.open.set()
        whole, stream = await asyncio.gather(*late)
        error = await expect(whole, 504, "not complete in time")
        assert error["code"] == "deadline_exceeded"
        assert '"deadline_exceeded"' in stream.text  # after a token, perhaps
        assert (await served.post(TEXT, text())).status_code == 200

    play(scene)


@pytest.mark.slow
def test_an_engine_that_fails_ends_the_request_and_serves_the_next(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        gate.open.set()
        gate.fail = True
        with pytest.raises(openai.InternalServerError, match="injected"):
            await served.complete()
        gate.fail = False
        assert len((await served.complete()).choices) == 1
        # In the middle of a stream there is no status left to send: an event tells, and no [DONE] follows.
        async with served.http.stream("POST", TEXT, json=text(max_tokens=400, stream=True)) as response:
            lines = aiter(response.aiter_lines())
            assert '"text"' in await anext(lines)
            gate.fail = True
            rest = [line async for line in lines if line]
        assert "[DONE]" not in rest[-1]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (error["code"], "injected" in error["message"]) == ("internal_error", True)
        gate.fail = False
        stream = await served.complete(stream=True, max_tokens=400)
        gate.fail = True
        with pytest.raises(openai.APIError, match="injected"):
            _ = [chunk async for chunk in stream]
        assert await served.metric("jetserve_requests_total", outcome="internal", protocol="http") == 3

    play(scene)


def test_an_engine_that_is_dead_says_so() -> None:
    async def scene(served: Served) -> None:
        served.engine._die("the engine has failed for good: test")
        error = await expect(await served.post(TEXT, text()), 503, "failed for good")
        assert error["code"] == "engine_dead"
        assert (await served.http.get("/health")).status_code == 503
        assert (await served.http.get("/ready")).status_code == 503

    play(scene)


@pytest.mark.slow
def test_a_server_that_drains_takes_no_more_and_finishes_what_it_has(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        assert (await served.http.get("/ready")).status_code == 200
        running = asyncio.create_task(served.complete(max_tokens=30, stream=False))
        await until(gate.entered.is_set)
        await served.server.say_not_serving()
        drained = asyncio.create_task(served.engine.drain(TIMEOUT))
        await until(lambda: not served.engine.is_ready)
        error = await expect(await served.post(TEXT, text()), 503, "about to stop")
        assert error["code"] == "draining"
        assert (await served.http.get("/ready")).json() == {"status": "stopping"}
        assert (await served.http.get("/health")).status_code == 200
        gate.open.set()
        await drained
        await served.server.stop(TIMEOUT)
        assert (await running).usage.completion_tokens == 30

    play(scene)


@pytest.mark.slow
def test_what_outlasts_the_drain_is_told(gate: Gate) -> None:
    async def scene(served: Served) -> None:
        running = asyncio.create_task(served.post(TEXT, text(max_tokens=400)))
        await until(gate.entered.is_set)
        drained = asyncio.create_task(served.engine.drain(0))
        await asyncio.sleep(0.05)
        gate.open.set()
        await drained
        await expect(await running, 503, "stopped before")

    play(scene)


@pytest.mark.slow
def test_clients_that_do_not_read_are_dropped_in_the_end() -> None:
    async def main() -> None:
        async with serving(make_engine()) as served:
            body = json.dumps(text(max_tokens=400, stream=True, n=16, logprobs=20)).encode()
            head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port, limit=1)
            writer.write(head + body)
            await until(lambda: sum(served.engine.stats().finished.values()) == 16)
            stopping = asyncio.create_task(served.server.stop(TIMEOUT))
            await asyncio.sleep(0.3)
            assert not stopping.done()  # it waits for the client to read
            await served.server.stop(0.1)
            await stopping
            writer.close()
            assert len(await reader.read(1)) == 1

    asyncio.run(main())


@pytest.mark.slow
def test_before_the_model_is_there_health_is_told_and_the_rest_refused() -> None:
    async def main() -> None:
        server = HttpServer(ServerConfig(http_port=0), profile_folder=Path("profiles"))
        await server.open()
        try:
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/ready")).json() == {"status": "the model is being loaded"}
                server.tell_progress("program 3 of 9 is being compiled")
                ready = await client.get("/ready")
                assert (ready.status_code, ready.json()) == (503, {"status": "program 3 of 9 is being compiled"})
                for path in (TEXT, CHAT, "/tokenize"):
                    response = await client.post(path, json={})
                    error = await expect(response, 503, "program 3 of 9")
                    assert (error["code"], response.headers["retry-after"]) == ("loading", "1")
                for path in ("/metrics", "/v1/models", "/state"):
                    await expect(await client.get(path), 503)
        finally:
            await server.stop(1)

    asyncio.run(main())


# Who leaves, and who does not read.


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(stream: bool, gate: Gate) -> None:
    async def scene(served: Served) -> None:
        call = asyncio.create_task(served.complete(max_tokens=400, stream=stream, prompt=["hello", "other"]))
        await until(gate.entered.is_set)
        if stream:
            gate.open.set()
            answer = await call
            await anext(aiter(answer))
            await answer.close()
        else:
            call.cancel()
            await asyncio.wait((call,))
        gate.open.set()
        await until(lambda: sum(served.engine.stats().finished.values()) == 2)
        assert served.engine.stats().pages_used == 0
        assert {reason.value for reason in served.engine.stats().finished} == {"cancelled"}
        assert await served.metric("jetserve_requests_total", outcome="cancelled") == 1

    play(scene)


@pytest.mark.slow
def test_a_client_that_never_reads_stalls_nobody() -> None:
    async def scene(served: Served) -> None:
        body = json.dumps(text(max_tokens=400, stream=True, n=4)).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        silent = [await asyncio.open_connection("127.0.0.1", served.server.port, limit=1) for _ in range(3)]
        for _, writer in silent:
            writer.write(head + body)
            await writer.drain()
        for _ in range(3):
            assert (await served.complete(max_tokens=20)).usage.completion_tokens == 20
        for _, writer in silent:
            writer.close()

    play(scene)


# The connection.


@pytest.mark.slow
def test_a_key_is_wanted_for_all_but_health(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")

    async def scene(served: Served) -> None:
        assert len((await served.complete()).choices) == 1
        async with httpx.AsyncClient(base_url=served.server.url, trust_env=False) as other:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                for method, path in (("POST", TEXT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/state")):
                    response = await other.request(method, path, headers=headers, content=b"{")
                    error = await expect(response, 401, "Bearer KEY")
                    assert error["code"] == "invalid_api_key"
                    assert "secret" not in response.text
            for path in ("/health", "/ready", "/"):
                assert (await other.get(path)).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            await served.openai.with_options(api_key="wrong").models.list()

    play(scene, api_key_file=file, key="secret")
    play(scene, api_key="secret", key="secret")


@pytest.mark.slow
def test_pages_of_other_origins_need_leave() -> None:
    async def asked(served: Served) -> httpx.Response:
        headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
        return await served.http.options(TEXT, headers=headers)

    async def refused(served: Served) -> None:
        assert "access-control-allow-origin" not in (await asked(served)).headers

    async def allowed(served: Served) -> None:
        assert (await asked(served)).headers["access-control-allow-origin"] == "https://example.org"
        response = await served.post(TEXT, {}, headers={"origin": "https://example.org"})
        assert response.status_code == 400
        assert response.headers["access-control-allow-origin"] == "https://example.org"

    play(refused)
    play(allowed, cors_origins=("https://example.org",))


@pytest.mark.slow
def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)

    async def scene(served: Served) -> None:
        assert served.server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(base_url=served.server.url, verify=trusting, trust_env=False) as client:
            assert (await client.post(TEXT, json=text())).status_code == 200

    play(scene, tls_cert_file=cert, tls_key_file=key)
    with pytest.raises(ValueError, match="cannot be used"):
        HttpServer(ServerConfig(http_port=0, tls_cert_file=cert, tls_key_file=cert), profile_folder=tmp_path)


@pytest.mark.slow
def test_a_port_in_use_is_refused() -> None:
    async def main() -> None:
        async with serving(make_engine()) as served:
            with pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{served.server.port}.*--http_port"):
                HttpServer(ServerConfig(http_port=served.server.port), profile_folder=Path("profiles"))

    asyncio.run(main())
