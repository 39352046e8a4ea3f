"""The engine on a tiny model: what must agree with what, and every way in which a request can end."""

import dataclasses
import itertools
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_parts import (
    END,
    GREEDY,
    PLAIN,
    VOCABULARY,
    Answer,
    Setup,
    alone,
    ask,
    checkpoint,
    collect,
    make_engine,
    mixed_requests,
    prompt_of,
    run,
    runner_of,
    staggered,
    tokenizer,
    tokens_of,
)

from jetserve.checkpoint.load import load_model
from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.engine import build, sampling
from jetserve.engine.engine import Engine
from jetserve.engine.runner import Runner
from jetserve.engine.scheduler import QueueFullError
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.qarray import QUANTIZE_TYPES
from jetserve.testing import make_tiny_checkpoint
from jetserve.tokenizer import Tokenizer
from jetserve.types import FinishReason, Guide, GuideKind, Request, SamplingParams

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_args, **_kwargs: compiled.append(event) if event.startswith("/jax/core/compile") else None
)


FAST = [
    PLAIN,
    Setup(quantize_type="int8_per_channel", quantize_cache=True),
    Setup(quantize_type="int4_blockwise", symmetric=False),
    Setup(quantize_type="int4_blockwise", symmetric=False, quantize_cache=True, kernel="xla"),
    Setup(quantize_type="int8_blockwise", quantize_activation=True, kernel="xla"),
]
ALL = [
    Setup(quantize_type=name, symmetric=symmetric, quantize_cache=quantize_cache, kernel=kernel)
    for name, symmetric, quantize_cache, kernel in itertools.product(
        QUANTIZE_TYPES, (True, False), (False, True), (None, "xla")
    )
]
every_setup = pytest.mark.parametrize(
    "setup",
    [*FAST, *(pytest.param(setup, marks=pytest.mark.slow) for setup in ALL if setup not in FAST)],
    ids=lambda setup: setup.id,
)


# What must agree


@every_setup
def test_what_must_agree(setup: Setup) -> None:
    """Prefill = decode, alone = in a batch, chunked = whole, prefix hit = miss, preempted = not."""
    with setup.context():
        requests = mixed_requests()
        expected = alone(setup, requests)
        assert len({tuple(tokens) for tokens in expected.values()}) == len(requests)

        assert tokens_of(run(make_engine(setup), requests)) == expected
        assert staggered(make_engine(setup), requests) == expected
        assert tokens_of(run(make_engine(setup, prefix_caching=False), requests)) == expected

        chunked = make_engine(setup, max_step_tokens=8)
        assert tokens_of(run(chunked, requests)) == expected

        again = run(chunked, requests)
        assert tokens_of(again) == expected
        for request in requests:
            cached = again[request.request_id, 0].last.usage.cached_tokens
            assert cached == (len(request.prompt_token_ids) - 1) // 8 * 8

        few = make_engine(setup, pages=14)
        assert tokens_of(run(few, requests)) == expected
        assert few.stats().preemptions > 0

        continued = [
            dataclasses.replace(
                request,
                prompt_token_ids=(*request.prompt_token_ids, *expected[request.request_id][:-1]),
                sampling=dataclasses.replace(request.sampling, max_tokens=1),
            )
            for request in requests
        ]
        last = tokens_of(run(make_engine(setup), continued))
        assert last == {name: tokens[-1:] for name, tokens in expected.items()}


def test_a_seed_gives_the_same_text_in_a_batch_of_32() -> None:
    requests = mixed_requests(32, max_tokens=6)
    engine = make_engine(max_sequences=32)
    together = tokens_of(run(engine, requests))
    assert together == alone(PLAIN, requests)
    assert tokens_of(run(make_engine(max_sequences=32), requests[::-1])) == together


def test_no_seed_gives_another_text_each_time() -> None:
    params = dataclasses.replace(GREEDY, temperature=1.0)
    engine = make_engine()
    assert ask(engine, prompt_of(5), params).tokens != ask(engine, prompt_of(5), params).tokens


def test_samples_of_one_request_are_those_of_consecutive_seeds() -> None:
    params = dataclasses.replace(GREEDY, temperature=1.0, seed=40, n=3)
    engine = make_engine()
    request = Request(request_id="three", prompt_token_ids=prompt_of(20), sampling=params)
    answers = run(engine, [request])
    assert list(answers) == [("three", 0), ("three", 1), ("three", 2)]
    for index in range(3):
        one = ask(make_engine(), prompt_of(20), dataclasses.replace(params, seed=40 + index, n=1))
        assert answers["three", index].tokens == one.tokens
        assert answers["three", index].text == one.text
        assert answers["three", index].last.usage == dataclasses.replace(
            one.last.usage, cached_tokens=answers["three", index].last.usage.cached_tokens
        )


def test_warm_up_compiles_everything() -> None:
    runner = Runner(
        load_model(checkpoint(), mesh=make_mesh(MeshConfig(), jax.devices()[:1]), dtype=jnp.float32).model,
        EngineConfig(max_sequences=3, max_length=40, max_step_tokens=40, cache=CacheConfig(page_size=8)),
        make_mesh(MeshConfig(), jax.devices()[:1]),
    )
    progress = []
    runner.warm_up(lambda done, total: progress.append((done, total)))
    assert [done for done, _ in progress] == list(range(progress[0][1] + 1))
    sizes = runner._step.programs, sampling.sample._cache_size()
    compiled.clear()
    engine = Engine(runner, tokenizer())
    kinds = [
        GREEDY,
        SamplingParams(max_tokens=9, seed=1),
        SamplingParams(max_tokens=5, top_k=4, top_p=0.5, min_p=0.1, repetition_penalty=1.2, n=2),
        SamplingParams(max_tokens=5, logprobs=20, logit_bias={5: 3.0}, stop=("zz",), stop_token_ids=(7,), min_tokens=3),
        dataclasses.replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.5, logprobs=0),
        dataclasses.replace(GREEDY, max_tokens=1),
        SamplingParams(temperature=0, max_tokens=9, guide=Guide(kind=GuideKind.JSON_OBJECT)),
    ]
    requests = [
        Request(request_id=f"{i}-{length}", prompt_token_ids=prompt_of(length), sampling=params)
        for i, params in enumerate(kinds)
        for length in (1, 17, 39)
    ]
    run(engine, requests)
    for request in requests:
        run(engine, [request])
    assert not compiled
    assert sizes == (runner._step.programs, sampling.sample._cache_size())


def test_a_warm_up_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine.runner, "_step", lambda *_args, **_settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.warm_up()


@pytest.mark.parametrize("quantize", [False, True], ids=["float", "int8"])
def test_the_pages_have_the_type_that_was_asked_for(quantize: bool) -> None:
    """Whatever the weights are: here they are floats."""
    runner = runner_of(Setup(quantize_cache=quantize))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(runner._cache)} == (
        {"int8", "float32"} if quantize else {"float32"}
    )


# How a request ends


def test_length() -> None:
    answer = ask(make_engine(), prompt_of(9))
    assert (answer.reason, len(answer.tokens)) == (FinishReason.LENGTH, 12)
    assert answer.text == tokenizer().decode(answer.tokens)
    usage = answer.last.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (9, 12, 0)


def test_one_token() -> None:
    answer = ask(make_engine(), prompt_of(9), dataclasses.replace(GREEDY, max_tokens=1))
    assert (answer.reason, len(answer.tokens), len(answer.outputs)) == (FinishReason.LENGTH, 1, 1)


def test_a_full_cache_ends_a_sequence() -> None:
    answer = ask(make_engine(), prompt_of(71), dataclasses.replace(GREEDY, max_tokens=50))
    assert (answer.reason, len(answer.tokens)) == (FinishReason.LENGTH, 1)
    answer = ask(make_engine(), prompt_of(60), dataclasses.replace(GREEDY, max_tokens=50))
    assert (answer.reason, len(answer.tokens)) == (FinishReason.LENGTH, 12)


def test_outgrowing_all_pages_ends_a_sequence() -> None:
    answer = ask(make_engine(pages=3), prompt_of(20), dataclasses.replace(GREEDY, max_tokens=50))
    assert (answer.reason, len(answer.tokens)) == (FinishReason.LENGTH, 4)


def test_end_of_sequence_as_the_very_first_token() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logit_bias={END: 100.0})
    answer = ask(make_engine(), prompt_of(9), params)
    assert (answer.reason, answer.tokens, answer.text) == (FinishReason.STOP, [END], "")
    assert answer.last.usage.output_tokens == 1
    ignoring = ask(make_engine(), prompt_of(9), dataclasses.replace(params, ignore_eos=True))
    assert (ignoring.reason, ignoring.tokens, ignoring.text) == (FinishReason.LENGTH, [END] * 12, "")
    later = ask(make_engine(), prompt_of(9), dataclasses.replace(params, min_tokens=4))
    assert later.reason is FinishReason.STOP
    assert [token == END for token in later.tokens] == [False] * 4 + [True]


def test_stop_token_ids() -> None:
    plain = ask(make_engine(), prompt_of(9))
    stop = next(token for i, token in enumerate(plain.tokens) if i > 2 and token not in plain.tokens[:i])
    answer = ask(make_engine(), prompt_of(9), dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
    length = plain.tokens.index(stop) + 1
    assert (answer.reason, answer.tokens) == (FinishReason.STOP, plain.tokens[:length])
    assert answer.text == tokenizer().decode(plain.tokens[: length - 1])


def readable() -> tuple[tuple[int, ...], Answer, int]:
    """A prompt, its answer, and the index of an output token that is letters and followed by more of them."""
    letters = re.compile(rb"[ -~]+")
    for seed in range(200):
        answer = ask(make_engine(), prompt_of(6, seed))
        texts = [tokenizer().token_text(token) for token in answer.tokens]
        for i in range(2, 10):
            if letters.fullmatch(texts[i]) and letters.fullmatch(texts[i + 1]):
                stop = (texts[i][-1:] + texts[i + 1][:1]).decode()
                before = tokenizer().decode(answer.tokens[: i + 1])[:-1]
                if answer.text.find(stop) == len(before):
                    return prompt_of(6, seed), answer, i
    raise AssertionError("no prompt gives readable text")


def test_a_stop_string_that_spans_tokens() -> None:
    prompt, plain, i = readable()
    before = tokenizer().decode(plain.tokens[: i + 1])
    stop = before[-1] + tokenizer().decode(plain.tokens[i + 1 : i + 2])[0]
    params = dataclasses.replace(GREEDY, stop=("never", stop), logprobs=0)
    answer = ask(make_engine(), prompt, params)
    assert (answer.reason, answer.text, answer.tokens) == (FinishReason.STOP, before[:-1], plain.tokens[: i + 2])
    # Nothing of it was shown before it was known not to be one.
    for length in range(1, len(answer.outputs) + 1):
        assert before[:-1].startswith("".join(output.text for output in answer.outputs[:length]))
    assert len([entry for output in answer.outputs for entry in output.logprobs]) == len(answer.tokens)


def test_a_stop_string_before_min_tokens_does_not_stop() -> None:
    """The string is part of the text then; one that comes later stops."""
    prompt, plain, i = readable()
    stop = tokenizer().decode(plain.tokens[i : i + 1])
    params = dataclasses.replace(GREEDY, stop=(stop,), min_tokens=12)
    answer = ask(make_engine(), prompt, params)
    assert answer.tokens == plain.tokens
    assert answer.reason is FinishReason.LENGTH
    assert answer.text == plain.text


def test_text_held_back_is_given_at_the_end() -> None:
    prompt, plain, _ = readable()
    assert plain.text
    answer = ask(make_engine(), prompt, dataclasses.replace(GREEDY, stop=(plain.text[-1] + "never",)))
    assert (answer.text, answer.reason) == (plain.text, FinishReason.LENGTH)


def test_an_id_that_the_tokenizer_lacks_has_no_text() -> None:
    """Models pad their vocabularies."""
    with tempfile.TemporaryDirectory() as folder:
        smaller = Tokenizer.from_folder(make_tiny_checkpoint(Path(folder), vocab_size=300))
    engine = Engine(runner_of(PLAIN), smaller)
    prompt = tuple(token % 300 for token in prompt_of(9))
    answer = ask(engine, prompt, dataclasses.replace(GREEDY, logit_bias={310: 100.0}))
    assert (answer.tokens, answer.text, answer.reason) == ([310] * 12, "", FinishReason.LENGTH)


def test_cancel() -> None:
    engine = make_engine()
    requests = mixed_requests(4)
    for request in requests:
        engine.submit(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, n=2)))
    outputs = [output for _ in range(4) for output in engine.step()]
    ended = engine.cancel("r1")
    assert [(output.request_id, output.index, output.finish_reason) for output in ended] == [
        ("r1", 0, FinishReason.CANCELLED),
        ("r1", 1, FinishReason.CANCELLED),
    ]
    assert engine.cancel("r1") == engine.cancel("unknown") == []
    while engine.has_work:
        outputs += engine.step()
    answers = collect(outputs + ended)
    assert len(answers) == 8
    assert {answer.reason for (name, _), answer in answers.items() if name != "r1"} == {FinishReason.LENGTH}
    assert engine.stats().pages_used == 0
    assert engine.stats().finished == {FinishReason.CANCELLED: 2, FinishReason.LENGTH: 6}


def test_cancelling_a_prompt_that_is_half_read_frees_its_pages() -> None:
    engine = make_engine(max_step_tokens=8)
    engine.submit(Request(request_id="long", prompt_token_ids=prompt_of(60), sampling=GREEDY))
    assert [engine.step() for _ in range(3)] == [[], [], []]
    assert engine.stats().pages_used == 8
    (ended,) = engine.cancel("long")
    assert (ended.finish_reason, ended.usage.output_tokens) == (FinishReason.CANCELLED, 0)
    assert (engine.has_work, engine.stats().pages_used) == (False, 0)


def test_a_long_prompt_holds_others_for_no_more_than_a_chunk() -> None:
    """While it is read, in chunks, every step brings a token for all that had begun."""
    engine = make_engine(max_step_tokens=8)
    lengths = {"a": 3, "b": 5}
    for name, length in lengths.items():
        engine.submit(Request(request_id=name, prompt_token_ids=prompt_of(length), sampling=GREEDY))
    engine.step()
    engine.submit(Request(request_id="long", prompt_token_ids=prompt_of(60), sampling=GREEDY))
    for _ in range(60 // (8 - len(lengths)) - 1):
        tokens = {output.request_id: len(output.token_ids) for output in engine.step()}
        assert tokens == {"a": 1, "b": 1}
    assert {output.request_id for output in engine.step()} == {"a", "b", "long"}
    run(engine, [])


def test_deadline() -> None:
    engine = make_engine()
    late = Request(request_id="late", prompt_token_ids=prompt_of(9), sampling=GREEDY, deadline=time.monotonic() - 1)
    other = Request(request_id="other", prompt_token_ids=prompt_of(9), sampling=GREEDY)
    answers = run(engine, [late, other])
    assert (answers["late", 0].reason, answers["late", 0].tokens) == (FinishReason.DEADLINE, [])
    assert answers["other", 0].reason is FinishReason.LENGTH
    soon = dataclasses.replace(other, request_id="soon", deadline=time.monotonic() + 0.05)
    engine.submit(soon)
    outputs = list(engine.step())
    time.sleep(0.06)
    outputs += engine.step()
    assert [output.finish_reason for output in outputs] == [None, FinishReason.DEADLINE]
    assert outputs[-1].usage.output_tokens == 1
    assert engine.stats().pages_used == 0


def lose(engine: Engine) -> Callable[..., Any]:
    """A `Runner.run` that fails when the pages have been given away already."""

    def run(*_: Any) -> Any:
        for leaf in jax.tree.leaves(engine.runner._cache):
            leaf.delete()
        raise RuntimeError("device lost")

    return run


def test_a_step_that_fails_ends_those_it_computed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_sequences=2)
    requests = mixed_requests(5)
    expected = alone(PLAIN, requests, max_sequences=2)
    cached = ask(engine, prompt_of(20)).tokens
    late = dataclasses.replace(requests[4], request_id="late", deadline=time.monotonic() + 0.01)
    two = dataclasses.replace(requests[0], sampling=dataclasses.replace(requests[0].sampling, n=2))
    for request in (requests[1], two, *requests[2:], late):  # the second sample of "r0" waits
        engine.submit(request)
    engine.step()
    time.sleep(0.02)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", lose(engine))
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
    failed = engine.fail("device lost")
    assert {(output.request_id, output.index, output.finish_reason, output.error) for output in failed} == {
        ("late", 0, FinishReason.DEADLINE, None),
        ("r1", 0, FinishReason.ERROR, "device lost"),
        ("r0", 0, FinishReason.ERROR, "device lost"),
        ("r0", 1, FinishReason.ERROR, "device lost"),
    }
    assert (engine.stats().running, engine.stats().waiting, engine.stats().pages_used) == (0, 3, 0)
    assert tokens_of(run(engine, [])) == {name: expected[name] for name in ("r2", "r3", "r4")}
    again = ask(engine, prompt_of(20))
    assert (again.tokens, again.last.usage.cached_tokens) == (cached, 0)


def test_an_exception_over_one_answer_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    requests = mixed_requests(4)
    expected = alone(PLAIN, requests)
    for request in requests:
        engine.submit(request)
    outputs = [output for _ in range(3) for output in engine.step()]
    stream = next(stream for sequence, stream in engine._streams.items() if sequence.request_id == "r1")
    monkeypatch.setattr(stream, "_detokenizer", None)
    while engine.has_work:
        outputs += engine.step()
    answers = collect(outputs)
    assert answers["r1", 0].reason is FinishReason.ERROR
    assert "NoneType" in answers["r1", 0].last.error
    assert engine.stats().pages_used == 0
    others = {name: tokens for name, tokens in tokens_of(answers).items() if name != "r1"}
    assert others == {name: tokens for name, tokens in expected.items() if name != "r1"}


def test_a_failure_before_anything_was_planned_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_sequences=2)
    for request in mixed_requests(4):
        engine.submit(request)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "_secure_pages", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert {output.request_id for output in engine.fail("bug")} == {f"r{i}" for i in range(4)}
    assert (engine.has_work, engine.stats().pages_used) == (False, 0)


# What is refused


@pytest.mark.parametrize("sampling_params", [GREEDY, dataclasses.replace(GREEDY, temperature=1.0, seed=1)])
def test_logits_that_are_not_numbers_end_their_request_alone(
    sampling_params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    step = engine.runner._step

    def broken(*args: Any, **settings: Any) -> tuple[jax.Array, jax.Array, Any]:
        logits, _, cache = step(*args, **settings)
        logits = logits.at[0].set(jnp.nan)
        return logits, sampling.best_tokens(logits), cache

    monkeypatch.setattr(engine.runner, "_step", broken)
    outputs = list(
        engine.run([Request(request_id=name, prompt_token_ids=(5, 6), sampling=sampling_params) for name in "ab"])
    )
    last = {output.request_id: output for output in outputs if output.finished}
    assert last["a"].finish_reason is FinishReason.ERROR
    assert "NaN" in last["a"].error
    assert last["a"].usage.output_tokens == 0
    # "b" moves up to the first row once "a" is gone, and meets the same end there: it is the row that is broken.
    assert last["b"].finish_reason is FinishReason.ERROR
    assert last["b"].usage.output_tokens == 1
    assert engine.stats().pages_used == 0


def test_requests_that_cannot_be_served_are_refused() -> None:
    engine = make_engine()

    def submit(prompt: tuple[int, ...], **settings: Any) -> None:
        engine.submit(Request(request_id="x", prompt_token_ids=prompt, sampling=SamplingParams(**settings)))

    with pytest.raises(ValueError, match="has 72 tokens; expected at most 71, so that one more fits in 72"):
        submit(prompt_of(72))
    for token in (-1, VOCABULARY):
        with pytest.raises(ValueError, match=f"prompt holds token id {token}; expected 0 to 319"):
            submit((5, token))
    with pytest.raises(ValueError, match="logit_bias holds token id 320"):
        submit((5,), logit_bias={VOCABULARY: 1.0})
    with pytest.raises(ValueError, match="stop_token_ids holds token id 999"):
        submit((5,), stop_token_ids=(999,))
    few = make_engine(pages=8)
    with pytest.raises(ValueError, match=r"has 64 tokens; expected at most 63.*--num_pages"):
        few.submit(Request(request_id="x", prompt_token_ids=prompt_of(64)))
    assert not engine.has_work
    submit((5,))
    with pytest.raises(ValueError, match="request 'x' sample 0"):
        submit((6,))


def test_a_full_queue_refuses_and_keeps_what_it_has() -> None:
    engine = make_engine(max_queue=3)
    requests = mixed_requests(5)
    for request in requests[:3]:
        engine.submit(request)
    with pytest.raises(QueueFullError, match="the queue is full"):
        engine.submit(requests[3])
    assert len(tokens_of(run(engine, []))) == 3
    assert requests[3].request_id in tokens_of(run(engine, [requests[3]]))


# What is reported


def test_logprobs_are_the_models_own() -> None:
    prompt = prompt_of(20)
    engine = make_engine()
    params = dataclasses.replace(GREEDY, temperature=0.5, seed=3, logprobs=4, logit_bias={9: 2.0}, presence_penalty=0.5)
    answer = ask(engine, prompt, params)
    none = ask(make_engine(), prompt, dataclasses.replace(params, logprobs=None))
    assert none.tokens == answer.tokens
    assert all(output.logprobs == () for output in none.outputs)
    rows = [np.asarray(logits[:count]) for count, logits in engine.runner.evaluate((*prompt, *answer.tokens))]
    expected = jax.nn.log_softmax(np.concatenate(rows), axis=-1)[len(prompt) - 1 : -1]
    found = [entry for output in answer.outputs for entry in output.logprobs]
    for token, entry, row in zip(answer.tokens, found, np.asarray(expected), strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-3)
        best = np.argsort(-row)[:4]
        assert [id_ for id_, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], row[best], atol=1e-3)


def test_stats() -> None:
    engine = make_engine()
    requests = mixed_requests(3)
    for request in requests:
        engine.submit(request)
    assert (engine.stats().waiting, engine.stats().running) == (3, 0)
    engine.step()
    assert engine.stats().running == 3
    assert 0 < engine.stats().pages_used <= engine.stats().pages_total == 72
    run(engine, [])
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.output_tokens) == (36, 36)
    assert stats.finished == {FinishReason.LENGTH: 3}
    assert stats.steps >= 12


@pytest.mark.slow
def test_too_few_pages_for_the_full_length_are_told(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_model(checkpoint(), mesh=make_mesh(MeshConfig(), jax.devices()[:1]), dtype=jnp.float32)
    config = EngineConfig(max_sequences=1, cache=CacheConfig(page_size=8, num_pages=4))
    assert build.make_engine(loaded, config, max_length=64).max_length == 32
    assert "holds 32 tokens (--num_pages)" in caplog.text
    assert "--max_cache_length is 64" in caplog.text
