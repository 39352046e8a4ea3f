"""Normalization and rotation: every implementation against float64 arithmetic."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.kernels import select

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 37), (2, 5, 576), (0, 8)])
@pytest.mark.parametrize("name", select.implementations("rms_norm"))
def test_rms_norm(name: str, shape: tuple[int, ...], dtype: type) -> None:
    x = jnp.asarray(RNG.standard_normal(shape) * 30, dtype)
    scale = jnp.asarray(RNG.standard_normal(shape[-1]), dtype)
    y = select.call("rms_norm", x, scale, epsilon=1e-5, implementation=name)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2e-6 if dtype == jnp.float32 else 2**-7)


@pytest.mark.parametrize("name", select.implementations("rms_norm"))
def test_rms_norm_of_zeros_is_zeros(name: str) -> None:
    y = select.call("rms_norm", jnp.zeros((2, 16)), jnp.ones(16), epsilon=1e-5, implementation=name)
    assert not np.asarray(y).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("name", select.implementations("rope"))
def test_rope(name: str, tokens: int, dtype: type) -> None:
    q, k = (jnp.asarray(RNG.standard_normal((tokens, heads, 24)), dtype) for heads in (6, 2))
    positions = jnp.asarray(RNG.integers(0, 5000, tokens), jnp.int32)
    frequencies = jnp.asarray(1e4 ** -(np.arange(12) / 12), jnp.float32)
    rotated = select.call("rope", q, k, positions, frequencies, implementation=name)
    # The angle is what float32 makes of it; complex numbers rotate pairs.
    angles = np.asarray(positions, np.float32)[:, None] * np.asarray(frequencies)
    turn = np.exp(1j * angles.astype(np.float64))[:, None]
    for x, y in zip((q, k), rotated, strict=True):
        wide = np.asarray(x, np.float64)
        expected = (wide[..., :12] + 1j * wide[..., 12:]) * turn
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        found = np.asarray(y, np.float64)
        atol = 2e-6 if dtype == jnp.float32 else 2**-6
        np.testing.assert_allclose(found, np.concatenate([expected.real, expected.imag], axis=-1), atol=atol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (3, 37), (33, 1000), (0, 8)])
@pytest.mark.parametrize("name", select.implementations("argmax"))
def test_argmax(name: str, shape: tuple[int, int], dtype: type) -> None:
    x = jnp.asarray(RNG.integers(-9, 10, shape), dtype)  # with many that are equal
    found = select.call("argmax", x, implementation=name)
    assert found.dtype == jnp.int32
    assert found.tolist() == np.argmax(np.asarray(x), axis=-1).tolist()


@pytest.mark.parametrize("place", [0, 5, 16, 36])
@pytest.mark.parametrize("name", select.implementations("argmax"))
def test_argmax_of_what_is_not_finite(name: str, place: int) -> None:
    x = np.full((5, 37), -np.inf, np.float32)
    x[:4, 20] = 1.0
    x[0, place], x[1, place], x[2, place], x[3, place] = np.nan, np.inf, -np.inf, 2.0
    assert select.call("argmax", jnp.asarray(x), implementation=name).tolist() == [-1, -1, 20, place, -1]
