"""What is asked and when: lengths, prompts, arrivals, and what is no load test."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from jetserve.loadtest.config import Goals, LoadTestConfig, Server
from jetserve.loadtest.workload import Lengths, file_asks, poisson_arrivals, random_asks
from jetserve.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("text", "lowest", "highest", "mean"),
    [("7", 7, 7, 7), ("uniform:10,20", 10, 20, 15), ("lognormal:100,0.5,300", 1, 300, 111)],
)
def test_lengths_are_drawn_from_their_distribution(text: str, lowest: int, highest: int, mean: float) -> None:
    rng = random.Random(1)
    drawn = [Lengths.parse(text).draw(rng) for _ in range(5000)]
    assert lowest <= min(drawn) <= max(drawn) <= highest
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.03)
    assert Lengths.parse("lognormal:1,3,2").draw(rng) in (1, 2)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "1.5", "nan", "inf", "uniform:1", "uniform:9,3", "lognormal:9,0,10", "lognormal:9,1", "zipf:1,2"],
)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no length.*expected a number such as 128, uniform:"):
        Lengths.parse(text)


def test_arrivals_have_the_rate_and_follow_the_seed() -> None:
    def take(seed: int) -> list[float]:
        return list(itertools.islice(poisson_arrivals(50.0, random.Random(seed)), 10_001))

    times = take(3)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.05)
    # An exponential distribution's standard deviation is its mean.
    assert (sum((gap - 1 / 50) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(1 / 50, rel=0.05)
    assert times == take(3) != take(4)


def test_random_prompts_have_their_lengths_and_follow_the_seed() -> None:
    def take(seed: int) -> list[Any]:
        lengths = Lengths.parse("uniform:3,9"), Lengths.parse("12")
        return list(itertools.islice(random_asks(GREEDY, random.Random(seed), *lengths), 50))

    asks = take(1)
    assert asks == take(1) != take(2)
    assert {len(ask.prompt) for ask in asks} == set(range(3, 10))
    assert all(ask.sampling.max_tokens == 12 and ask.sampling.ignore_eos for ask in asks)
    assert len({ask.prompt for ask in asks}) == 50


def test_a_file_is_read_in_order_and_again(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    count, asks = file_asks(file, GREEDY, random.Random(0), None)
    first, second, third = itertools.islice(asks, 3)
    assert count == 2
    assert (first.prompt, first.sampling.max_tokens, first.sampling.ignore_eos) == ("a", 3, False)
    assert second.prompt == [{"role": "user", "content": "b"}]
    assert third == first
    _, asks = file_asks(file, GREEDY, random.Random(0), Lengths.parse("5"))
    assert [(ask.sampling.max_tokens, ask.sampling.ignore_eos) for ask in itertools.islice(asks, 2)] == [(5, True)] * 2


@pytest.mark.parametrize(("content", "words"), [("\n", "no prompts"), ('{"prompt": "a"}\n{"x": 1}\n', "line 2")])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=words):
        file_asks(file, GREEDY, random.Random(0), None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "neither of --request_rate and --concurrency"),
        ({"request_rate": 1.0, "concurrency": 1}, "both of --request_rate and --concurrency"),
        ({"request_rate": 0.0}, "request_rate is 0.0"),
        ({"concurrency": 1, "duration": -1.0}, "duration is -1.0"),
        ({"concurrency": 1, "timeout_seconds": float("inf")}, "timeout_seconds is inf"),
        ({"concurrency": 1, "prompts_file": Path("x"), "input_tokens": Lengths.parse("3")}, "--input_tokens"),
    ],
)
def test_what_is_no_load_test_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoadTestConfig(server=Server(url="grpc://x:1"), sampling=GREEDY, **settings)


def test_a_goal_that_cannot_be_met_is_refused() -> None:
    with pytest.raises(ValueError, match="goal_ttft_ms is 0"):
        Goals(ttft_ms=0)
