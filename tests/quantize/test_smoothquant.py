"""SmoothQuant's scales against the paper's formula, and that 8-bit inputs lose less with them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.quantize.methods import smoothquant
from jetserve.quantize.qarray import QuantizationConfig, dequantize, quantize, quantize_activation


def make(experts: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Weights [E, 64, 48], and inputs [E, 200, 64] with three channels of outliers."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((experts, 200, 64))
    x[..., [3, 20, 50]] *= 60
    return rng.standard_normal((experts, 64, 48)).astype(np.float32), x.astype(np.float32)


def part(w: np.ndarray, x: np.ndarray) -> smoothquant.Part:
    return smoothquant.Part(w=jnp.asarray(w), largest=jnp.asarray(np.abs(x).max(axis=1)))


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.8, 1.0])
def test_the_papers_formula(smoothing: float) -> None:
    w, x = make()
    second = w[..., :8] * 5
    found = smoothquant.scales([part(w, x), part(second, x)], np.arange(64), smoothing, by_expert=False)
    weights = np.maximum(np.abs(w).max(axis=-1), np.abs(second).max(axis=-1))[0]
    expected = np.abs(x).max(axis=(0, 1)) ** smoothing / weights ** (1 - smoothing)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_inputs_of_8_bits_lose_less() -> None:
    (w,), (x,) = make()
    scales = np.asarray(smoothquant.scales([part(w[None], x[None])], np.arange(64), 0.5, by_expert=False))
    errors = []
    for s in (np.ones(64), scales):
        values, scale = quantize_activation(jnp.asarray(x / s))
        weight = np.asarray(dequantize(quantize(jnp.asarray(w * s[:, None]), QuantizationConfig(bits=8))))
        errors.append(np.linalg.norm(np.asarray(values * scale) @ weight - x @ w))
    assert errors[1] < 0.5 * errors[0]


def test_channels_experts_and_what_is_never_there() -> None:
    w, x = make(experts=3)
    x[..., 7] = 0
    w[1, 9] = 0
    own = np.asarray(smoothquant.scales([part(w, x)], np.arange(64), 0.5, by_expert=True))
    assert own.shape == (3, 64)
    assert (own[:, 7] == 1).all()
    assert own[1, 9] == 1
    alone = smoothquant.scales([part(w[2:], x[2:])], np.arange(64), 0.5, by_expert=False)
    np.testing.assert_allclose(own[2], alone, rtol=1e-6)
    halves = np.asarray(smoothquant.scales([part(w, x)], np.arange(64) % 32, 0.5, by_expert=False))
    assert halves.shape == (32,)
    assert halves[20] > 3 * np.median(halves)
