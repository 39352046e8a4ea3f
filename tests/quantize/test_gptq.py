"""GPTQ against a naive one in numpy, and what it must never do: give NaN, or touch what no input touches."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.method_config import CalibrationConfig, Clip, GPTQConfig
from jetserve.quantize.methods import gptq
from jetserve.quantize.qarray import QArray, QuantizationConfig, dequantize, quantize
from jetserve.quantize.refinement import refine

TYPES = [
    QuantizationConfig(bits=bits, block_size=block_size, symmetric=symmetric)
    for bits in (4, 8)
    for block_size in (None, 32)
    for symmetric in (True, False)
]
ORDERS = [
    gptq.Options(),
    gptq.Options(act_order=True),
    gptq.Options(static_groups=True, damping=0.1),
]

QUICK = [(TYPES[0], ORDERS[0]), (TYPES[3], ORDERS[0]), (TYPES[3], ORDERS[1])]


def naive_range(w: np.ndarray, config: QuantizationConfig) -> tuple[np.ndarray, np.ndarray]:
    """[g, N] -> scale and zero point [N]."""
    if config.symmetric:
        highest = np.abs(w).max(axis=0)
        return np.where(highest == 0, 1, highest / (2 ** (config.bits - 1) - 1)), np.zeros(w.shape[1])
    lowest, highest = np.minimum(w.min(axis=0), 0), np.maximum(w.max(axis=0), 0)
    scale = np.where(highest == lowest, 1, (highest - lowest) / (2**config.bits - 1))
    return scale, np.round(-(2 ** (config.bits - 1)) - lowest / scale)


def naive(w: np.ndarray, x: np.ndarray, config: QuantizationConfig, options: gptq.Options) -> tuple[np.ndarray, ...]:
    """The paper's algorithm in float64, one column at a time: integers, scales and zero points, and W dequantized."""
    w, K = w.astype(np.float64).copy(), w.shape[0]
    hessian = x.astype(np.float64).T @ x / len(x)
    dead = np.diag(hessian) == 0
    damping = options.damping * np.diag(hessian).mean()
    hessian[dead, dead] = 1
    w[dead] = 0
    order = np.argsort(-np.where(dead, 0, np.diag(hessian)), kind="stable") if options.act_order else np.arange(K)
    hessian = (hessian + damping * np.eye(K))[np.ix_(order, order)]
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    g = config.block_size or K
    static = config.block_size is None or options.act_order or options.static_groups
    ranges = [naive_range(w[start : start + g], config) for start in range(0, K, g)]
    values, low = np.zeros(w.shape), -(2 ** (config.bits - 1))
    w = w[order]
    for i, k in enumerate(order):
        if not static and i % g == 0:
            ranges[i // g] = naive_range(w[i : i + g], config)
        scale, zero_point = ranges[k // g]
        values[k] = np.clip(np.round(w[i] / scale + zero_point), low, -low - 1)
        error = (w[i] - (values[k] - zero_point) * scale) / upper[i, i]
        w[i:] -= np.outer(upper[i, i:], error)
    return values, np.array([r[0] for r in ranges]), np.array([r[1] for r in ranges])


def make(K: int = 96, N: int = 24, tokens: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """A weight [K, N], and correlated inputs [tokens, K], two of which are never there."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, K)) @ (np.eye(K) + 0.3 * rng.standard_normal((K, K)))
    x *= rng.uniform(0.2, 3, K)
    x[:, [5, 40]] = 0
    return rng.standard_normal((K, N)).astype(np.float32), x.astype(np.float32)


def hessian_of(x: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(x.T @ x / len(x))


def run(w: np.ndarray, x: np.ndarray, config: QuantizationConfig, options: gptq.Options) -> QArray:
    factor = gptq.factorize(hessian_of(x), options)
    assert factor is not None
    found = gptq.quantize_matrix(jnp.asarray(w), factor, config, options)
    assert found is not None
    found.check()
    return found


@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(config, options, marks=[] if (config, options) in QUICK else pytest.mark.slow)
        for config in TYPES
        for options in ORDERS
    ],
    ids=lambda value: f"{value.name}-{value.symmetric}" if isinstance(value, QuantizationConfig) else "",
)
def test_equals_the_naive_one_and_beats_rounding(config: QuantizationConfig, options: gptq.Options) -> None:
    w, x = make()
    found = run(w, x, config, options)
    values, scale, zero_point = naive(w, x, config, options)
    assert (found.zero_point is None) == config.symmetric
    np.testing.assert_allclose(np.asarray(found.scale).reshape(scale.shape), scale, rtol=1e-4)
    # A weight halfway between two integers may fall to the other side in float32, and its later rows follow.
    same = np.asarray(found.values).reshape(w.shape) == values
    assert same.mean() > (0.97 if config.bits == 4 else 0.9)
    naive_w = ((values.reshape(len(scale), -1, w.shape[1]) - zero_point[:, None]) * scale[:, None]).reshape(w.shape)
    rounded = np.asarray(dequantize(quantize(jnp.asarray(w), config)))
    error, expected, of_rounding = (
        np.square(x @ (d - w)).mean() for d in (np.asarray(dequantize(found)), naive_w, rounded)
    )
    assert error == pytest.approx(expected, rel=0.02)
    assert error < 0.8 * of_rounding


def test_clipping_changes_the_output_less() -> None:
    w, x = make()
    w[3] *= 4  # outliers, which all others would pay for
    errors = [
        float(gptq.output_error(jnp.asarray(w), run(w, x, TYPES[0], gptq.Options(clip=clip)), hessian_of(x)))
        for clip in Clip
    ]
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("config", TYPES[:4], ids=lambda c: f"{c.name}-{c.symmetric}")
def test_sweeps_change_the_output_less(config: QuantizationConfig) -> None:
    w, x = make()
    errors = []
    for sweeps in (0, 1, 3):
        found = run(w, x, config, gptq.Options(clip=Clip.MSE, sweeps=sweeps))
        low, high = int(jnp.min(found.values)), int(jnp.max(found.values))
        assert -8 <= low <= high <= 7
        errors.append(float(gptq.output_error(jnp.asarray(w), found, hessian_of(x))))
    assert errors[2] < errors[1] < 0.98 * errors[0]


def test_a_sweep_finds_the_scale_that_is_right() -> None:
    w, _ = make()
    exact = quantize(jnp.asarray(w), QuantizationConfig(bits=4, block_size=32, symmetric=False))
    off = dataclasses.replace(exact, scale=exact.scale * 1.3)
    found = refine(dequantize(exact), off, jnp.eye(96), bits=4, sweeps=1)
    np.testing.assert_allclose(found.scale, exact.scale, rtol=1e-5)
    np.testing.assert_array_equal(found.values, exact.values)


def test_rows_without_input_become_zeros() -> None:
    w, x = make()
    found = np.asarray(dequantize(run(w, x, QuantizationConfig(bits=4, block_size=32), gptq.Options())))
    assert not found[[5, 40]].any()
    assert found[[4, 41]].any()


def test_uncorrelated_inputs_are_plain_rounding() -> None:
    w, _ = make()
    config = QuantizationConfig(bits=4)
    factor = gptq.factorize(jnp.eye(96), gptq.Options())
    assert factor is not None
    found = gptq.quantize_matrix(jnp.asarray(w), factor, config, gptq.Options())
    assert found is not None
    np.testing.assert_array_equal(found.values, quantize(jnp.asarray(w), config).values)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
def test_few_tokens_take_more_damping_and_give_no_nan(scale: float) -> None:
    w, x = make(tokens=3)
    found = run(w, x * np.float32(scale), QuantizationConfig(bits=4, block_size=32), gptq.Options(damping=1e-7))
    assert np.isfinite(np.asarray(dequantize(found))).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_sample_that_is_not_finite_is_told(poison: float) -> None:
    hessian = np.eye(96, dtype=np.float32)
    hessian[7, 7] = poison
    assert gptq.factorize(jnp.asarray(hessian), gptq.Options()) is None


def test_constant_and_empty_blocks() -> None:
    w, x = make()
    w[:32], w[32:64] = 0, 0.5
    found = run(w, x, QuantizationConfig(bits=4, block_size=32, symmetric=False), gptq.Options())
    back = np.asarray(dequantize(found))
    assert np.isfinite(back).all()
    assert np.abs(back[:32]).max() < 1e-6


def test_damping_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="damping is 0"):
        GPTQConfig(calibration=CalibrationConfig(texts=("a",)), damping=0)
