"""AWQ's search against a plain one in numpy; channels that share a scale; inputs that are never there."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.method_config import Clip
from jetserve.quantize.methods import awq
from jetserve.quantize.qarray import QuantizationConfig, dequantize, quantize

TYPES = [
    QuantizationConfig(bits=4),
    QuantizationConfig(bits=4, block_size=32, symmetric=False),
]


def make(experts: int = 1, K: int = 64, N: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Weights [E, K, N], and second moments [E, K, K] of inputs of which a few are large."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((experts, 500, K)) @ (np.eye(K) + 0.1 * rng.standard_normal((K, K)))
    x[:, :, rng.permutation(K)[:5]] *= 30
    w = rng.standard_normal((experts, K, N))
    return w.astype(np.float32), (np.swapaxes(x, 1, 2) @ x / 500).astype(np.float32)


def part(w: np.ndarray, hessian: np.ndarray, config: QuantizationConfig) -> awq.Part:
    return awq.Part(w=jnp.asarray(w), hessian=jnp.asarray(hessian), config=config)


def error(w: np.ndarray, hessian: np.ndarray, scales: np.ndarray, config: QuantizationConfig) -> float:
    rounded = dequantize(quantize(jnp.asarray(w * scales[:, None]), config))
    difference = (np.asarray(rounded) / scales[:, None] - w).astype(np.float64)
    return float(np.sum(difference * (hessian.astype(np.float64) @ difference)))


@pytest.mark.parametrize("config", TYPES)
def test_the_scales_of_least_error_are_found(config: QuantizationConfig) -> None:
    (w,), (hessian,) = make()
    size = np.sqrt(np.diag(hessian))
    tried = [size**exponent for exponent in np.arange(awq.TRIES) / awq.TRIES]
    best = min(error(w, hessian, scales, config) for scales in tried)
    found = np.asarray(awq.search([part(w[None], hessian[None], config)], np.arange(len(w)), by_expert=False))
    assert found.shape == (len(w),)
    assert found.max() * found.min() == pytest.approx(1, rel=1e-4)
    assert error(w, hessian, found, config) == pytest.approx(best, rel=1e-3)
    assert best < 0.7 * error(w, hessian, np.ones(len(w)), config)


def test_inputs_of_one_channel_share_its_scale() -> None:
    w, hessian = make()
    channels = np.arange(64) // 16 * 8 + np.arange(64) % 8
    found = np.asarray(awq.search([part(w, hessian, TYPES[0])], channels, by_expert=False))
    assert found.shape == (32,)
    assert found.std() > 0.1


def test_experts_have_scales_of_their_own_or_share_them() -> None:
    w, hessian = make(experts=3)
    own = np.asarray(awq.search([part(w, hessian, TYPES[0])], np.arange(64), by_expert=True))
    for e in range(3):
        alone = awq.search([part(w[e : e + 1], hessian[e : e + 1], TYPES[0])], np.arange(64), by_expert=False)
        np.testing.assert_allclose(own[e], alone, rtol=1e-5)
    shared = np.asarray(awq.search([part(w, hessian, TYPES[0])], np.arange(64), by_expert=False))
    assert shared.shape == (64,)
    total = sum(error(w[e], hessian[e], shared, TYPES[0]) for e in range(3))
    assert total < 0.8 * sum(error(w[e], hessian[e], np.ones(64), TYPES[0]) for e in range(3))


@pytest.mark.parametrize("dead", ["one", "all"])
def test_inputs_that_are_never_there_have_finite_scales(dead: str) -> None:
    w, hessian = make()
    hessian[:, 3 if dead == "one" else slice(None)] = 0
    hessian[:, :, 3 if dead == "one" else slice(None)] = 0
    found = np.asarray(awq.search([part(w, hessian, TYPES[0])], np.arange(64), by_expert=False))
    assert np.isfinite(found).all()
    assert found.min() > 0
    assert dead == "one" or (found == 1).all()


def test_clipping_weighs_errors_by_the_inputs() -> None:
    (w,), (hessian,) = make()
    w[::7] *= 4
    diagonal = np.diag(np.diag(hessian))
    plain, clipped, blind = (
        awq.quantize_matrix(jnp.asarray(w), jnp.asarray(h), TYPES[0], clip)
        for h, clip in ((hessian, Clip.NONE), (hessian, Clip.MSE), (np.eye(64, dtype=np.float32), Clip.MSE))
    )
    errors = [
        float(np.sum(difference * (diagonal @ difference)))
        for difference in (np.asarray(dequantize(q)) - w for q in (plain, clipped, blind) if q is not None)
    ]
    assert errors[1] < 0.99 * min(errors[0], errors[2])


def test_a_second_moment_that_is_not_finite_is_refused() -> None:
    (w,), (hessian,) = make()
    hessian[2, 3] = np.nan
    assert awq.quantize_matrix(jnp.asarray(w), jnp.asarray(hessian), TYPES[0], Clip.NONE) is None
