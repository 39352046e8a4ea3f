"""OpenAI's API over a tiny model, spoken to by OpenAI's own client: what is answered."""

import asyncio
from typing import Any

import pytest
from grpc_parts import loaded, make_engine
from http_parts import HELLO, MODEL, Served, play

from jetserve.types import Request, SamplingParams


def tokenizer() -> Any:
    return loaded().tokenizer


def reference(prompt: list[int], max_tokens: int = 8, **sampling: Any) -> str:
    """What the engine answers by itself."""
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling}, max_tokens=max_tokens)
    request = Request(request_id="r", prompt_token_ids=tuple(prompt), sampling=params)
    return "".join(output.text for output in make_engine().run([request]))


def hello(text: str = "hello") -> list[int]:
    return tokenizer().encode(text, add_special_tokens=True)


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


def test_a_chat_is_answered_with_text_reason_and_usage() -> None:
    prompt = tokenizer().apply_chat_template(HELLO)

    async def scene(served: Served) -> None:
        answer = await served.chat()
        (choice,) = answer.choices
        assert choice.message.content == reference(prompt)
        assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "length", 0)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 8)
        assert answer.usage.total_tokens == len(prompt) + 8
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer.id.startswith("chatcmpl-")
        assert (answer.object, answer.model) == ("chat.completion", MODEL)
        again = await served.chat(model=MODEL)
        assert again.choices[0].message.content == choice.message.content
        assert again.usage.prompt_tokens_details.cached_tokens > 0
        assert again.id != answer.id
        assert again.system_fingerprint == answer.system_fingerprint

    play(scene)


@pytest.mark.slow
def test_a_streamed_chat_is_the_same_in_pieces() -> None:
    async def scene(served: Served) -> None:
        fields = {"temperature": 1.5, "seed": 11, "max_tokens": 40, "n": 2}
        whole = await served.chat(**fields)
        stream = await served.chat(**fields, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        texts = ["", ""]
        reasons: list[list[str]] = [[], []]
        for chunk in chunks[:-1]:
            assert (chunk.object, chunk.usage) == ("chat.completion.chunk", None)
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
        assert texts == [choice.message.content for choice in whole.choices]
        assert texts[0] != texts[1]
        assert reasons == [["length"], ["length"]]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 80

    play(scene)


def test_no_stream_carries_half_a_character() -> None:
    """The bias makes the model draw among the three bytes of the euro sign: some orders of them are characters."""
    euro = tokenizer().encode("€", add_special_tokens=False)
    assert len(euro) == 3
    bias = {str(token): 100 for token in euro}

    async def scene(served: Served) -> None:
        fields = {"logit_bias": bias, "max_tokens": 30, "temperature": 2.0, "seed": 1}
        whole = await served.complete(**fields)
        stream = await served.complete(**fields, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
        assert "".join(pieces) == whole.choices[0].text
        assert all(piece.encode().decode() == piece for piece in pieces)
        assert any(ord(character) > 127 for character in whole.choices[0].text.replace("\ufffd", ""))

    play(scene)


@pytest.mark.slow
def test_completions_take_texts_and_tokens_one_or_several() -> None:
    expected = reference(hello())
    other = reference(hello("other"))

    async def scene(served: Served) -> None:
        for prompt in ("hello", hello(), ["hello"], [hello()]):
            assert [c.text for c in (await served.complete(prompt=prompt)).choices] == [expected]
        both = await served.complete(prompt=["hello", "other"], n=2)
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in both.choices] == [expected, expected, other, other]
        assert both.usage.prompt_tokens == len(hello()) + len(hello("other"))
        assert both.usage.completion_tokens == 32
        stream = await served.complete(prompt=["hello", "other"], stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [expected, other]
        assert (await served.complete(max_tokens=None)).usage.completion_tokens == 16
        echoed = await served.complete(echo=True)
        assert echoed.choices[0].text == "hello" + expected
        assert await text_of(await served.complete(echo=True, stream=True, prompt=hello())) == "hello" + expected

    play(scene)


@pytest.mark.slow
def test_a_chat_may_fill_the_cache() -> None:
    async def scene(served: Served) -> None:
        answer = await served.chat(max_tokens=None)
        assert answer.usage.total_tokens == 480
        assert answer.choices[0].finish_reason == "length"
        assert (await served.chat(max_tokens=None, max_completion_tokens=3)).usage.completion_tokens == 3

    play(scene)


@pytest.mark.slow
def test_sampling_is_the_requests_own() -> None:
    async def scene(served: Served) -> None:
        greedy = (await served.complete(max_tokens=12)).choices[0].text
        seeded = {"temperature": 1.5, "seed": 7, "top_p": 0.95}
        expected = reference(hello(), 12, **seeded)
        assert expected != greedy
        assert (await served.complete(max_tokens=12, **seeded)).choices[0].text == expected
        for extra in ({"top_k": 1}, {"min_p": 1.0}):
            assert (await served.complete(max_tokens=12, temperature=5, extra_body=extra)).choices[0].text == greedy
        assert (await served.complete(max_tokens=12, extra_body={"top_k": -1})).choices[0].text == greedy
        biased = await served.complete(max_tokens=3, logit_bias={"77": 100})
        assert biased.choices[0].text == tokenizer().decode([77]) * 3
        penal = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
        penalized = await served.complete(max_tokens=12, extra_body=penal)
        assert penalized.choices[0].text == reference(hello(), 12, **penal)
        default = [(await served.complete(temperature=None, max_tokens=20)).choices[0].text for _ in range(3)]
        assert len(set(default)) > 1  # OpenAI's temperature is 1

    play(scene)


def test_stops_end_an_answer() -> None:
    text = reference(hello(), 30)
    stop = text[5:7]

    async def scene(served: Served) -> None:
        for given in (stop, [stop, "never to be seen"]):
            (choice,) = (await served.complete(max_tokens=30, stop=given)).choices
            assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
        stream = await served.complete(max_tokens=30, stop=stop, stream=True)
        assert await text_of(stream) == text[: text.index(stop)]
        bias = {"logit_bias": {"2": 100}}
        (choice,) = (await served.complete(extra_body={"ignore_eos": False}, **bias)).choices
        assert (choice.text, choice.finish_reason) == ("", "stop")
        minimum = await served.complete(extra_body={"ignore_eos": False, "min_tokens": 4}, **bias)
        assert minimum.usage.completion_tokens == 5
        ends = await served.complete(extra_body={"stop_token_ids": [77]}, logit_bias={"77": 100})
        assert (ends.choices[0].text, ends.choices[0].finish_reason) == ("", "stop")

    play(scene)


@pytest.mark.slow
def test_logprobs_of_a_chat() -> None:
    async def scene(served: Served) -> None:
        answer = await served.chat(logprobs=True, top_logprobs=3)
        (choice,) = answer.choices
        entries = choice.logprobs.content
        assert len(entries) == 8
        spelled = bytes(byte for entry in entries for byte in entry.bytes if entry.token != "<|im_end|>")
        assert spelled.decode("utf-8", "replace") == choice.message.content
        for entry in entries:
            assert len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].token == entry.token  # greedy
            assert entry.logprob <= 0
        stream = await served.chat(logprobs=True, top_logprobs=3, stream=True)
        streamed = [e async for chunk in stream for c in chunk.choices for e in (c.logprobs.content or [])]
        assert [entry.token for entry in streamed] == [entry.token for entry in entries]
        assert (await served.chat(logprobs=True)).choices[0].logprobs.content[0].top_logprobs == []
        assert (await served.chat()).choices[0].logprobs is None

    play(scene)


@pytest.mark.slow
def test_logprobs_do_not_tell_the_token_that_ended_the_answer() -> None:
    async def scene(served: Served) -> None:
        fields = {"logit_bias": {"2": 100}, "extra_body": {"ignore_eos": False}}
        assert (await served.chat(logprobs=True, **fields)).choices[0].logprobs.content == []
        assert (await served.complete(logprobs=0, **fields)).choices[0].logprobs.tokens == []

    play(scene)


@pytest.mark.slow
def test_logprobs_of_a_completion() -> None:
    euro = {str(tokenizer().encode("€", add_special_tokens=False)[0]): 100}

    async def scene(served: Served) -> None:
        (choice,) = (await served.complete(logprobs=2, logit_bias={"77": 100, "78": 100})).choices
        table = choice.logprobs
        assert "".join(table.tokens) == choice.text
        assert table.text_offset == list(range(8))
        for token, logprob, top in zip(table.tokens, table.token_logprobs, table.top_logprobs, strict=True):
            assert top[token] == logprob
            assert 2 <= len(top) <= 3
        (partial,) = (await served.complete(logprobs=0, logit_bias=euro, max_tokens=2)).choices
        assert all(token.startswith("bytes:\\x") for token in partial.logprobs.tokens)
        stream = await served.complete(logprobs=2, logit_bias={"77": 100, "78": 100}, stream=True)
        chunks = [chunk async for chunk in stream]
        assert [offset for c in chunks for offset in c.choices[0].logprobs.text_offset] == list(range(8))

    play(scene)


@pytest.mark.slow
def test_messages_may_be_parts_and_roles_of_every_kind() -> None:
    same = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}]

    async def scene(served: Served) -> None:
        answers = [(await served.chat(messages=m)).choices[0].message.content for m in (same, plain)]
        assert answers[0] == answers[1] == reference(tokenizer().apply_chat_template(plain))
        # What came may be sent back as it came.
        message = (await served.chat()).choices[0].message
        await served.chat(messages=[*HELLO, message.model_dump(), *HELLO])

    play(scene)


@pytest.mark.slow
def test_a_last_message_may_be_continued() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The answer"}]
    text = tokenizer().render_chat(begun, add_generation_prompt=False)
    prompt = tokenizer().encode(text[: text.rindex("The answer") + 10], add_special_tokens=False)

    async def scene(served: Served) -> None:
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        answer = await served.chat(messages=begun, extra_body=extra)
        assert answer.choices[0].message.content == reference(prompt)
        assert answer.usage.prompt_tokens == len(prompt)

    play(scene)


@pytest.mark.slow
def test_fifty_answers_at_once_are_each_their_own() -> None:
    texts = [f"prompt number {i} " * (1 + i % 3) for i in range(50)]
    expected = [reference(hello(text), 3 + i % 6) for i, text in enumerate(texts)]

    async def scene(served: Served) -> None:
        calls = [served.complete(prompt=text, max_tokens=3 + i % 6, stream=True) for i, text in enumerate(texts)]
        streams = await asyncio.gather(*calls)
        assert await asyncio.gather(*map(text_of, streams)) == expected

    play(scene)


def test_models_tokens_and_versions() -> None:
    async def scene(served: Served) -> None:
        (model,) = (await served.openai.models.list()).data
        assert model.id == MODEL
        assert (await served.openai.models.retrieve(MODEL)).id == MODEL
        tokens = (await served.post("/tokenize", {"prompt": "hello €"})).json()
        assert tokens["tokens"] == hello("hello €")
        assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 480)
        chat = {"messages": HELLO, "return_token_strs": True}
        told = (await served.post("/tokenize", chat)).json()
        assert told["tokens"] == tokenizer().apply_chat_template(HELLO)
        assert "".join(told["token_strs"]) == tokenizer().render_chat(HELLO)
        assert (await served.post("/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": "hello €"}
        assert (await served.http.get("/version")).json()["version"]

    play(scene)
