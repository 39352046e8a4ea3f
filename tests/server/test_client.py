"""The Python client against a served tiny model."""

import asyncio
import contextlib
import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_parts import Served, make_engine, play, until

from jetserve.client import Client, Prompt, to_message
from jetserve.types import FinishReason, Guide, GuideKind, Request, SamplingParams

LONG = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)


def with_client(use: Callable[[Client, Served], None], *, token: str | None = None, **settings: Path) -> None:
    """Runs `use` on a thread beside the server."""

    async def scene(served: Served) -> None:
        with Client(f"127.0.0.1:{served.server.port}", token=token) as client:
            await asyncio.to_thread(use, client, served)

    play(scene, **settings)


def test_answers_are_the_engines_own_whatever_the_form_of_the_prompt() -> None:
    engine = make_engine()
    sampling = SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=9, ignore_eos=True, logprobs=2, n=2)
    messages = [{"role": "user", "content": "hello"}]
    tokenizer = engine.tokenizer
    prompts = {
        "text": ("hello", tokenizer.encode("hello", add_special_tokens=True)),
        "tokens": ([7, 8, 9], [7, 8, 9]),
        "chat": (messages, tokenizer.apply_chat_template(messages)),
    }
    expected = {}
    for name, (_, tokens) in prompts.items():
        outputs = list(engine.run([Request(request_id="r", prompt_token_ids=tuple(tokens), sampling=sampling)]))
        for index in range(2):
            mine = [output for output in outputs if output.index == index]
            text = "" if name == "tokens" else "".join(output.text for output in mine)
            expected[name, index] = ([token for output in mine for token in output.token_ids], text)

    def use(client: Client, _served: Served) -> None:
        assert client.is_live()
        for name, (prompt, tokens) in prompts.items():
            for index, answer in enumerate(client.generate_samples(prompt, sampling)):
                assert (list(answer.token_ids), answer.text) == expected[name, index]
                assert answer.finish_reason is FinishReason.LENGTH
                assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (len(tokens), 9)
                assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
                assert all(len(entry.top) == 2 for entry in answer.logprobs)
        greedy = client.generate("hello", dataclasses.replace(LONG, max_tokens=4))
        assert client.generate("hello").token_ids[:4] == greedy.token_ids  # greedy unless told otherwise

    with_client(use)


def test_guided_answers_have_their_form() -> None:
    sampling = SamplingParams(temperature=1.5, max_tokens=60)
    cases: dict[GuideKind, tuple[str, str]] = {
        GuideKind.JSON_OBJECT: ("", "[{].*"),
        GuideKind.JSON_SCHEMA: ('{"enum": [12, "x"]}', '12|"x"'),
        GuideKind.REGEX: ("[a-f]{4}", "[a-f]{4}"),
        GuideKind.GRAMMAR: ('start: "yes" | "no"', "yes|no"),
    }

    def use(client: Client, _served: Served) -> None:
        for kind, (source, expected) in cases.items():
            guided = dataclasses.replace(sampling, guide=Guide(kind=kind, source=source))
            for answer in client.generate_samples("hello", dataclasses.replace(guided, n=3)):
                assert re.fullmatch(expected, answer.text, re.DOTALL)
                assert answer.finish_reason is FinishReason.STOP or kind is GuideKind.JSON_OBJECT

    with_client(use)


def test_an_iterator_that_is_closed_ends_its_request() -> None:
    async def scene(served: Served) -> None:
        def use() -> None:
            client = Client(f"127.0.0.1:{served.server.port}")
            with client, contextlib.closing(client.stream("hello", LONG, request_id="mine")) as outputs:
                assert next(outputs).request_id == "mine"

        await asyncio.to_thread(use)
        await until(lambda: served.engine.stats().finished == {FinishReason.CANCELLED: 1})

    play(scene)


def test_errors_are_grpcs_with_the_servers_words() -> None:
    def use(client: Client, _served: Served) -> None:
        for prompt, settings, code in (
            ("word " * 600, {}, grpc.StatusCode.INVALID_ARGUMENT),
            ("hello", {"timeout_seconds": 0.0005}, grpc.StatusCode.DEADLINE_EXCEEDED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                client.generate(prompt, LONG, **settings)
            assert refused.value.code() is code
        with pytest.raises(ValueError, match="not empty"):
            client.generate("")

    with_client(use)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "prompt is ''; expected a text, token ids or messages, not empty"),
        ([1, {"role": "user", "content": "x"}], "messages[0] is 1; expected a message"),
        ([{"role": "user"}], "messages[0].content is None; expected a text"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "messages[0].content is [{"),
        ([7, 2**40], "prompt[1] is 1099511627776; expected a token id"),
        ([7, "x"], "prompt[1] is 'x'; expected a token id"),
        ("\ud800", "text_content is "),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(prompt: Prompt, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        to_message(prompt, LONG)


def test_a_setting_that_the_protocol_cannot_carry_is_refused() -> None:
    for settings, words in (
        ({"seed": 2**63}, "seed is 9223372036854775808; expected an integer of 64 bits"),
        ({"top_k": 2**40}, "top_k is 1099511627776; expected"),
    ):
        with pytest.raises(ValueError, match=words):
            to_message("hello", dataclasses.replace(LONG, **settings))
    with Client("127.0.0.1:9") as client, pytest.raises(ValueError, match=r"priority is 4294967296; expected"):
        client.stream("hello", LONG, priority=2**32)


def test_a_token_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    short = dataclasses.replace(LONG, max_tokens=3)
    with_client(lambda client, _: len(client.generate("hello", short).token_ids), token="secret", api_key_file=file)


def test_importing_it_takes_no_jax() -> None:
    code = "import sys, jetserve.client; sys.exit(any(name in sys.modules for name in ('jax', 'flax')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
