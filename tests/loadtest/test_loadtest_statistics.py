"""Statistics against numbers worked out by hand."""

import pytest

from jetserve.loadtest.config import Goals
from jetserve.loadtest.statistics import Record, meets, report, summary_ms


def record(**fields: object) -> Record:
    """Sent 0.1 s late, three tokens in two messages: TTFT 0.5 s, latency 0.9 s, TPOT 0.2 s."""
    values = {
        "index": 0,
        "scheduled": 1.0,
        "sent": 1.1,
        "arrivals": (1.5, 1.9),
        "ended": 2.0,
        "prompt_tokens": 10,
        "output_tokens": 3,
    }
    return Record(**{**values, **fields})  # type: ignore[arg-type]


FAILED = {"failure": "HTTP 429", "arrivals": (), "output_tokens": 0, "prompt_tokens": 0}


def test_latencies_count_from_the_planned_arrival() -> None:
    one = record()
    assert (one.ttft, one.latency, one.tpot) == pytest.approx((0.5, 0.9, 0.2))
    assert one.gaps == pytest.approx([0.4])


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    one = record(arrivals=(1.5,), output_tokens=1)
    assert (one.tpot, one.gaps) == (None, [])
    assert one.latency == pytest.approx(0.5)
    result = report([one], Goals(tpot_ms=1.0))
    assert (result["tpot_ms"], result["itl_ms"]) == (None, None)
    assert result["goodput"]["share"] == 1.0


def test_percentiles_are_linear_between_neighbours() -> None:
    found = summary_ms([i / 1000 for i in range(1, 102)])  # 1 to 101 ms: a step a percent
    assert found == pytest.approx({"mean": 51, "p50": 51, "p90": 91, "p99": 100})
    assert summary_ms([0.001, 0.003]) == pytest.approx({"mean": 2, "p50": 2, "p90": 2.8, "p99": 2.98})
    assert summary_ms([None]) is None


def test_failed_requests_are_in_no_latency_and_no_throughput() -> None:
    records = [
        record(scheduled=0.0, arrivals=(0.1, 0.3), ended=0.3),
        record(index=1, scheduled=1.0, ended=4.0, **FAILED | {"arrivals": (3.0,), "output_tokens": 50}),
        record(index=2, scheduled=1.0, ended=1.1, **FAILED),
        record(index=3, scheduled=1.0, ended=1.1, **FAILED | {"failure": "timeout"}),
    ]
    result = report(records, Goals())
    assert (result["requests"], result["completed"], result["failed"]) == (4, 1, 3)
    assert result["failures"] == {"HTTP 429": 2, "timeout": 1}
    assert result["seconds"] == pytest.approx(4.0)  # to the end of the last one, failed or not
    assert (result["prompt_tokens"], result["output_tokens"]) == (10, 3)
    assert result["output_tokens_per_second"] == pytest.approx(3 / 4)
    assert result["requests_per_second"] == pytest.approx(1 / 4)
    assert result["latency_ms"]["p99"] == pytest.approx(300)
    assert "goodput" not in result


def test_nothing_answered_is_a_report_too() -> None:
    result = report([record(ended=1.0, **FAILED)], Goals(ttft_ms=1))
    assert (result["completed"], result["ttft_ms"], result["output_tokens_per_second"]) == (0, None, 0.0)
    assert result["goodput"] == {"goals": {"ttft_ms": 1}, "share": 0.0, "requests_per_second": 0.0}


@pytest.mark.parametrize(
    ("goals", "met"),
    [
        (Goals(), True),
        (Goals(ttft_ms=501, tpot_ms=201, latency_ms=901), True),
        (Goals(ttft_ms=499), False),
        (Goals(tpot_ms=199), False),
        (Goals(ttft_ms=501, latency_ms=899), False),
    ],
)
def test_a_goal_is_met_by_all_of_it(goals: Goals, met: bool) -> None:
    assert meets(record(), goals) is met
    assert not meets(record(**FAILED), goals)


def test_goodput_is_over_all_requests() -> None:
    records = [record(scheduled=0.0, arrivals=(0.1 * i, 2.0), ended=2.0) for i in range(1, 5)] + [record(**FAILED)]
    assert report(records, Goals(ttft_ms=250))["goodput"] == {
        "goals": {"ttft_ms": 250},
        "share": pytest.approx(0.4),
        "requests_per_second": pytest.approx(1.0),
    }
