"""The benchmark: its keys and its block, that its numbers fit together, and that none of them holds a compilation."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jetserve import benchmark, offline
from jetserve.benchmark import Benchmark, CompileWatch, Round, Texts
from jetserve.config import CacheConfig, EngineConfig, ModelSource, OfflineConfig
from jetserve.default_model import default_cache_dir
from jetserve.engine.build import build_engine
from jetserve.engine.engine import Engine
from jetserve.testing import make_tiny_checkpoint

LIMITS = EngineConfig(max_sequences=4, max_step_tokens=32)
CONTRACT = {
    "task",
    "batch_size",
    "time_to_first_token_ms",
    "prefill_tokens_per_second",
    "time_per_output_token_ms",
    "decode_tokens_per_second",
    "peak_memory_bytes",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return ModelSource(checkpoint_path=str(folder), cache_dir=default_cache_dir())


@pytest.fixture(scope="module")
def engine(source: ModelSource) -> Engine:
    limits = EngineConfig(max_sequences=4, max_step_tokens=32, cache=CacheConfig(prefix_caching=False))
    return build_engine(source, limits, max_length=128)


def config(input_tokens: int = 40, output_tokens: int = 8) -> OfflineConfig:
    return OfflineConfig(task="benchmark", input_tokens=input_tokens, output_tokens=output_tokens)


def test_the_block_and_the_summary(source: ModelSource, capsys: pytest.CaptureFixture[str]) -> None:
    assert offline.run(config(), source, LIMITS, max_length=None) == 0
    *block, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert summary.keys() >= CONTRACT
    assert (summary["task"], summary["batch_size"]) == ("benchmark", 4)
    assert (summary["input_tokens"], summary["output_tokens"]) == (40, 8)
    for key in CONTRACT - {"task", "batch_size"}:
        assert summary[key] > 0
    assert summary["decode_tokens_per_second"] == pytest.approx(4000 / summary["time_per_output_token_ms"])
    assert summary["prefill_tokens_per_second"] == pytest.approx(40_000 / summary["time_to_first_token_ms"])
    assert summary["batch_time_to_first_token_ms"] > 0
    assert summary["peak_memory_of"] in ("device", "process")
    assert summary["peak_memory_bytes"] > 50e6

    assert len(block) == 5
    assert block[0] == "*** Performance stats:"
    number = r"(\d+\.\d+)"
    patterns = [
        f"Throughput per token including tokenize: {number} msecs",
        f"Start to ready to generate: {number} secs",
        rf"Tokenize and generate (\d+) \(bs=4\) tokens: {number} secs",
        f"Start to finish: {number} secs",
    ]
    found = [re.fullmatch(pattern, line) for pattern, line in zip(patterns, block[1:], strict=True)]
    assert all(found)
    per_token, ready, (tokens, generate), finish = [
        values if len(values) > 1 else values[0]
        for values in ([float(group) for group in match.groups()] for match in found if match)
    ]
    assert per_token == pytest.approx(1000 * generate / tokens, rel=0.02)
    assert tokens >= summary["rounds"] * 4 * 8
    assert ready + generate < finish


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_round_counts_every_token(engine: Engine, batch_size: int) -> None:
    before = engine.stats()
    found = Benchmark(engine, batch_size=batch_size, input_tokens=40, output_tokens=8).round()
    after = engine.stats()
    assert not engine.has_work
    assert after.prompt_tokens - before.prompt_tokens == 40 * (batch_size + 1)
    assert after.output_tokens - before.output_tokens == found.batch_tokens + 1
    assert after.prefix_cache_hit_tokens == 0
    assert found.decode_steps == 7
    assert len(found.batch_first_tokens) == batch_size
    assert found.batch_tokens >= 8 * batch_size
    assert found.tokenize + max(found.batch_first_tokens) + found.decode <= found.batch
    assert found.decode > 0.5 * (found.batch - found.tokenize - max(found.batch_first_tokens))


def test_when_the_cache_ends_a_sequence_early_only_full_steps_count(engine: Engine) -> None:
    """Each prompt takes four steps: the first sequence has its tokens long before the last begins."""
    found = Benchmark(engine, batch_size=2, input_tokens=120, output_tokens=8).round()
    assert 0 < found.decode_steps < 7
    with pytest.raises(RuntimeError, match="no step decoded them all: raise --max_cache_length"):
        Benchmark(engine, batch_size=4, input_tokens=120, output_tokens=2).round()
    engine.fail("over")


def test_medians() -> None:
    def make(first: float, decode: float) -> Round:
        return Round(
            first_token=first,
            batch_first_tokens=(first, 2 * first),
            decode=decode,
            decode_steps=10,
            tokenize=0.1,
            batch=2.0,
            batch_tokens=22,
        )

    rounds = [make(0.5, 0.1), make(0.25, 0.2), make(9.0, 0.4)]
    found = benchmark.summarize(rounds, 2, 100)
    assert found["time_to_first_token_ms"] == pytest.approx(500)
    assert found["prefill_tokens_per_second"] == pytest.approx(200)
    assert found["time_per_output_token_ms"] == pytest.approx(20)
    assert found["decode_tokens_per_second"] == pytest.approx(100)
    assert found["batch_prefill_tokens_per_second"] == pytest.approx(200)
    assert found["rounds"] == 3
    assert benchmark.block(rounds, 2, ready=1.5, finish=9.25) == (
        "*** Performance stats:\n"
        "Throughput per token including tokenize: 90.909 msecs\n"
        "Start to ready to generate: 1.500 secs\n"
        "Tokenize and generate 66 (bs=2) tokens: 6.000 secs\n"
        "Start to finish: 9.250 secs"
    )


@pytest.mark.parametrize("tokens", [1, 7, 100, 1000])
def test_texts_give_as_many_tokens_as_wanted_and_never_the_same(engine: Engine, tokens: int) -> None:
    texts = Texts(engine.tokenizer, tokens, seed=0)
    found = [texts.make() for _ in range(4)]
    prompts = {texts.prompt(text) for text in found}
    assert {len(prompt) for prompt in prompts} == {tokens}
    if tokens > 1:
        assert len(prompts) == 4
    for text in found:
        assert len(texts.encode_all(text)) < 1.5 * tokens + 60, "most of what is tokenized is used"


def test_the_watch_sees_what_is_compiled_while_it_is_entered() -> None:
    def compile_one(k: int) -> None:
        jax.jit(lambda x: x * k + 1)(jnp.ones(3)).block_until_ready()

    jnp.ones(3).block_until_ready()
    compile_one(1)
    with CompileWatch() as watch:
        compile_one(2)
    assert watch.programs >= 1
    assert watch.seconds > 0
    seen = watch.programs
    compile_one(3)
    assert watch.programs == seen


def test_a_round_with_a_compilation_is_discarded_and_too_many_end_the_benchmark(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Benchmark(engine, batch_size=1, input_tokens=8, output_tokens=4)
    bench.round()
    real, calls = Benchmark.round, 0
    compiling: set[int] = set()

    def round_(self: Benchmark) -> Round:
        nonlocal calls
        calls += 1
        if calls in compiling:
            jax.jit(lambda x: x + calls)(jnp.ones(3)).block_until_ready()
        return real(self)

    monkeypatch.setattr(Benchmark, "round", round_)
    monkeypatch.setattr(benchmark, "MAX_ROUNDS", 4)
    compiling = {2, 3}
    assert len(list(bench.measured())) == 4
    assert calls == 6
    compiling = set(range(100))
    with pytest.raises(RuntimeError, match="compiled in 3 rounds after the warm-up; expected none"):
        list(bench.measured())


@pytest.mark.parametrize(
    ("settings", "limits", "max_length", "message"),
    [
        (config(output_tokens=1), LIMITS, None, "--output_tokens is 1; expected at least 2"),
        (config(input_tokens=0), LIMITS, None, "--input_tokens is 0; expected at least 1"),
        (config(), LIMITS, 47, "are 48 together, but --max_cache_length is 47"),
        (config(input_tokens=510), LIMITS, None, "are 518 together, but the model was made for up to 512"),
        (config(), EngineConfig(max_sequences=4, max_queue=3), None, "batch of 4 is more than may wait at once"),
        (config(), EngineConfig(max_sequences=4, cache=CacheConfig(num_pages=11)), None, "take 12"),
    ],
)
def test_settings_that_cannot_be_measured(
    source: ModelSource, settings: OfflineConfig, limits: EngineConfig, max_length: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        benchmark.run(settings, source, limits, max_length=max_length)


@pytest.mark.parametrize("limits", [{"cache": CacheConfig(num_pages=12)}, {"cache": CacheConfig(quantize=True)}])
def test_the_limits_asked_for_are_the_ones_measured(source: ModelSource, limits: dict[str, Any]) -> None:
    found = benchmark.run(config(), source, EngineConfig(max_sequences=4, max_step_tokens=32, **limits), max_length=48)
    assert found.summary["quantize_kv_cache"] == limits["cache"].quantize
    assert found.summary["time_per_output_token_ms"] > 0


def test_peak_memory_is_of_this_process_on_a_cpu() -> None:
    found, what = benchmark.peak_memory()
    if jax.default_backend() == "cpu":
        assert what == "process"
        status = Path("/proc/self/status")
        if status.exists():
            peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
            assert peak is not None
            assert found == pytest.approx(1024 * int(peak[1]), rel=0.2)
