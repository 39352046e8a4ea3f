"""The sampler against plain numpy: which tokens each setting leaves, and with which probabilities."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.engine import sampling
from jetserve.engine.sampling import Row, resolve_seed
from jetserve.types import SamplingParams

V, LENGTH, ROWS = 48, 32, 256
"""Of every call here, so that one program serves all; rows are many because each is one draw."""


def row(params: SamplingParams | None = None, *, seed: int = 0, **fields: Any) -> Row:
    given: dict[str, Any] = {"tokens": (1, 2, 3), "prompt_length": 3, **fields}
    return Row(params=params or SamplingParams(), seed=seed, **given)


def run(logits: np.ndarray | jax.Array, batch: sampling.SamplingBatch) -> sampling.Sampled:
    logits = jnp.asarray(logits)
    return jax.device_get(sampling.sample(logits, sampling.best_tokens(logits), batch))


def sample(logits: np.ndarray, rows: list[Row]) -> sampling.Sampled:
    """One row of logits for each row, or one for all."""
    full = np.zeros((ROWS, V), np.float32)
    full[: len(rows)] = logits
    return run(full, sampling.make_batch(rows, ROWS, LENGTH, V))


def draws(logits: np.ndarray, params: SamplingParams, **fields: Any) -> np.ndarray:
    """ROWS tokens by as many seeds."""
    return sample(logits, [row(params, seed=seed, **fields) for seed in range(ROWS)]).tokens


def gaussian(seed: int = 0, std: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(V) * std).astype(np.float32)


def expected_left(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Which tokens may come: temperature first, then top-k, top-p of what it leaves, min-p; ties all stay."""
    scaled = logits.astype(np.float64) / params.temperature
    best_first = sorted(range(V), key=lambda token: -scaled[token])
    if params.top_k:
        last = scaled[best_first[min(params.top_k, V) - 1]]
        best_first = [token for token in best_first if scaled[token] >= last]
    weights = np.exp(scaled[best_first] - scaled.max())
    if params.top_p < 1:
        last = scaled[best_first[np.argmax(np.cumsum(weights) >= params.top_p * weights.sum())]]
        best_first = [token for token in best_first if scaled[token] >= last]
    return {token for token in best_first if np.exp(scaled[token] - scaled.max()) >= params.min_p}


cut_off = jax.jit(sampling.cut_off)


def left(logits: np.ndarray, params: SamplingParams) -> set[int]:
    weights = cut_off(jnp.asarray(logits[None]), sampling.make_batch([row(params)], 1, LENGTH, V))
    return set(np.flatnonzero(np.asarray(weights[0])).tolist())


SETTINGS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": V},
    {"top_k": 10**9},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"top_p": 0.8, "temperature": 0.3},
    {"top_p": 0.8, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.05, "temperature": 0.5},
    {"top_k": 9, "top_p": 0.6},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.2, "temperature": 1.7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_the_cut_offs_leave(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    for seed in range(5):
        logits = gaussian(seed)
        assert left(logits, params) == expected_left(logits, params)
    assert set(draws(gaussian(), params).tolist()) <= expected_left(gaussian(), params)


def test_ties_all_stay() -> None:
    logits = np.full(V, -5, np.float32)
    logits[[3, 4, 5, 6]] = 2.0
    assert left(logits, SamplingParams(top_k=2)) == {3, 4, 5, 6}
    assert left(logits, SamplingParams(top_p=0.3)) == {3, 4, 5, 6}
    assert left(np.zeros(V, np.float32), SamplingParams(top_k=1)) == set(range(V))


def test_settings_are_each_rows_own() -> None:
    """A batch of every setting gives what each gives alone."""
    rows = [row(SamplingParams(**settings), seed=i) for i, settings in enumerate(SETTINGS)]
    together = sample(gaussian(), rows).tokens[: len(rows)]
    assert together.tolist() == [int(sample(gaussian(), [one]).tokens[0]) for one in rows]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.6, top_k=6)], ids=["all", "six"])
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = gaussian(1, std=1.0)
    positions = range(3, 23)  # 20 draws of each seed
    counts = np.zeros(V)
    for position in positions:
        counts += np.bincount(draws(logits, params, tokens=(1,) * position), minlength=V)
    allowed = sorted(expected_left(logits, params))
    weights = np.exp(logits[allowed].astype(np.float64) / params.temperature)
    expected = counts.sum() * weights / weights.sum()
    assert counts[allowed].sum() == counts.sum() == ROWS * len(positions)
    chi_square = ((counts[allowed] - expected) ** 2 / expected).sum()
    freedom = len(allowed) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_a_seed_gives_the_same_token_in_any_row() -> None:
    logits = gaussian()
    rows = [row(seed=7 if i in (0, 100, ROWS - 1) else i + 1000) for i in range(ROWS)]
    tokens = sample(logits, rows).tokens
    assert tokens[0] == tokens[100] == tokens[ROWS - 1] == sample(logits, [row(seed=7)]).tokens[0]
    assert len(set(tokens.tolist())) > 10


def test_seeds_differ_in_all_their_bits_and_by_position() -> None:
    logits = np.zeros(V, np.float32)
    for seeds in ([0, 1, 2, 3], [2**32, 2**33, 2**63, 2**64 - 1]):
        texts = {
            tuple(int(sample(logits, [row(seed=seed, tokens=(1,) * n)]).tokens[0]) for n in range(1, 9))
            for seed in seeds
        }
        assert len(texts) == 4
        assert all(len(set(text)) > 2 for text in texts)


def test_seeds_of_a_request() -> None:
    assert [resolve_seed(SamplingParams(seed=5), index) for index in range(3)] == [5, 6, 7]
    assert resolve_seed(SamplingParams(seed=-1), 0) == 2**64 - 1
    assert resolve_seed(SamplingParams(seed=2**64 - 1), 1) == 0
    drawn = {resolve_seed(SamplingParams(), 0) for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**64 for seed in drawn)


def test_temperature_zero_is_the_argmax() -> None:
    rows = [row(SamplingParams(temperature=0, top_k=3, top_p=0.5), seed=i) for i in range(20)]
    logits = np.stack([gaussian(i) for i in range(20)])
    assert sample(logits, rows).tokens[:20].tolist() == logits.argmax(axis=-1).tolist()
    assert sampling.best_tokens(jnp.asarray(logits)).tolist() == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-40, 1e-38, 1e-30, 1e-3])
def test_tiny_temperatures_are_nearly_greedy(temperature: float) -> None:
    logits = gaussian()
    assert set(draws(logits, SamplingParams(temperature=temperature)).tolist()) == {int(logits.argmax())}


# Penalties and bias


def adjusted(logits: np.ndarray, one: Row) -> np.ndarray:
    """What the penalties make of the logits, in plain loops."""
    out, p = logits.astype(np.float64), one.params
    for token in set(one.tokens):
        out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
    output = list(one.tokens[one.prompt_length :])
    for token in set(output):
        out[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    for token, bias in p.logit_bias.items():
        out[token] += bias
    out[list(one.banned)] = -np.inf
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 5.0},
        {"repetition_penalty": 0.2},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {0: 100.0}},
        {"logit_bias": {V - 1: 4.0, 5: -100.0, 0: 3.5}},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    ],
    ids=str,
)
def test_penalties_and_bias(settings: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, **settings)
    rng = np.random.default_rng(0)
    rows, logits = [], []
    for i in range(60):
        tokens = tuple(rng.integers(0, V, rng.integers(1, LENGTH + 1)).tolist())
        prompt_length = int(rng.integers(1, len(tokens) + 1))
        banned = (0, 7) if i % 3 == 0 else ()
        rows.append(row(params, tokens=tokens, prompt_length=prompt_length, banned=banned))
        logits.append(gaussian(i, std=1.0))
    expected = [int(adjusted(one, r).argmax()) for one, r in zip(logits, rows, strict=True)]
    assert sample(np.stack(logits), rows).tokens[:60].tolist() == expected


def test_penalties_apply_before_the_cut_offs() -> None:
    logits = gaussian()
    best, second = np.argsort(-logits)[:2].tolist()
    params = SamplingParams(top_k=1, logit_bias={best: -100.0})
    assert set(draws(logits, params).tolist()) == {second}


def test_banned_tokens_never_come() -> None:
    logits = np.full(V, -50, np.float32)
    logits[:3] = 50.0
    banned = (0, 1)
    assert set(draws(logits, SamplingParams(temperature=100), banned=(*banned, *range(3, V))).tolist()) == {2}
    assert set(draws(logits, SamplingParams(logit_bias={0: 100.0}), banned=banned).tolist()) == {2}


# Guides


def masked(logits: np.ndarray, params: SamplingParams, allowed: set[int], **fields: Any) -> sampling.Sampled:
    """ROWS draws from the tokens of a mask."""
    batch = sampling.make_batch([row(params, seed=seed, **fields) for seed in range(ROWS)], ROWS, LENGTH, V)
    words = np.zeros((ROWS, 2), np.uint32)
    for token in allowed:
        words[:, token // 32] |= np.uint32(1 << token % 32)
    full = jnp.asarray(np.broadcast_to(logits, (ROWS, V)))
    return run(full, dataclasses.replace(batch, allowed=words))


@pytest.mark.parametrize("settings", [*SETTINGS, {"temperature": 0}], ids=str)
def test_a_mask_applies_before_the_cut_offs(settings: dict[str, Any]) -> None:
    params, logits, allowed = SamplingParams(**settings, logprobs=1), gaussian(), {0, 7, 31, 32, 40, V - 1}
    found = masked(logits, params, allowed)
    only = np.where(np.isin(np.arange(V), [*allowed]), logits, -np.inf)
    left_over = {int(only.argmax())} if params.temperature == 0 else expected_left(only, params) & allowed
    assert set(found.tokens.tolist()) <= left_over
    if len(left_over) > 1:
        assert len(set(found.tokens.tolist())) > 1
    own = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
    np.testing.assert_allclose(found.logprob, own[found.tokens], atol=1e-5)


def test_a_mask_that_allows_nothing_gives_no_token() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(logit_bias={3: 100.0})):
        assert set(masked(gaussian(), params, set()).tokens.tolist()) == {sampling.NO_TOKEN}


def test_what_is_banned_comes_if_nothing_else_may() -> None:
    assert set(masked(gaussian(), SamplingParams(), {5}, banned=(5,)).tokens.tolist()) == {5}
    assert set(masked(gaussian(), SamplingParams(), {5, 6}, banned=(5,)).tokens.tolist()) == {6}


# Logprobs


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = np.stack([gaussian(i) for i in range(8)])
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=2.0, logit_bias={4: 3.0}, logprobs=20)
    found = sample(logits, [row(params, seed=i) for i in range(8)])
    expected = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))
    for i in range(8):
        assert found.logprob[i] == pytest.approx(expected[i, found.tokens[i]], abs=1e-5)
        best = np.argsort(-expected[i])[:20]
        assert found.top_ids[i].tolist() == best.tolist()
        np.testing.assert_allclose(found.top_logprobs[i], expected[i, best], atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_extreme_logits(settings: dict[str, Any]) -> None:
    huge = gaussian()
    huge[[4, 9]] = 1e30
    assert set(draws(huge, SamplingParams(**settings)).tolist()) <= {4, 9}
    masked = np.full(V, -np.inf, np.float32)
    masked[[11, 12]] = 0.5
    found = sample(masked, [row(SamplingParams(**settings, logprobs=2), seed=i) for i in range(20)])
    assert set(found.tokens[:20].tolist()) <= {11, 12}
    np.testing.assert_allclose(found.logprob[:20], np.log(0.5), atol=1e-6)
    assert set(draws(np.full(V, -1e30, np.float32), SamplingParams(**settings)).tolist()) <= set(range(V))


def test_which_rows_are_plain_greedy() -> None:
    greedy = SamplingParams(temperature=0)
    assert row(greedy).is_plain_greedy
    changed = [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {1: 1.0}},
    ]
    for change in changed:
        assert not row(dataclasses.replace(greedy, **change)).is_plain_greedy
    assert not row(greedy, banned=(2,)).is_plain_greedy
    assert row(dataclasses.replace(greedy, top_k=3, top_p=0.5, seed=1)).is_plain_greedy
