"""Every implementation of the grouped matmul against the sum written out, for every kind of weight."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.kernels import select
from jetserve.quantize.qarray import QuantizationConfig, by_expert, cast_values, dequantize, quantize

K, N, EXPERTS = 64, 32, 5
UNEVEN = (3, 0, 11, 1, 5)
SIZES = {
    20: [UNEVEN, (0, 0, 20, 0, 0), (20, 0, 0, 0, 0), (0, 0, 0, 0, 20)],
    200: [(2, 150, 40, 1, 7)],
    1: [(0, 0, 0, 1, 0)],
}
"""Rows of every expert, by the rows of all: one program each."""
KINDS = [None] + [
    QuantizationConfig(bits=bits, block_size=block_size, symmetric=symmetric)
    for bits, block_size, symmetric in itertools.product((8, 4), (None, 32), (True, False))
]


def by_hand(x: np.ndarray, matrices: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    parts = np.split(x, np.cumsum(sizes)[:-1])
    return np.concatenate([part @ w for part, w in zip(parts, matrices, strict=True)])


def check_every_row(implementation: str, config: QuantizationConfig | None) -> None:
    """Whichever expert it belongs to, and however many others do."""
    rng = np.random.default_rng(0)
    plain = jnp.asarray(rng.standard_normal((K, EXPERTS * N)), jnp.float32)
    weight = by_expert(plain if config is None else cast_values(quantize(plain, config), config.bits), EXPERTS)
    matrices = np.asarray(weight if config is None else dequantize(weight), np.float64)
    with select.choose(grouped_matmul=implementation):
        prepared = select.prepare("grouped_matmul", weight, exact_activations=True)
        run = jax.jit(lambda *args: select.call("grouped_matmul", *args))
        for rows, several in SIZES.items():
            x = rng.standard_normal((rows, K)).astype(np.float32)
            for sizes in several:
                expected = by_hand(x, matrices, sizes)
                found = run(x, prepared, jnp.asarray(sizes, jnp.int32))
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("config", KINDS, ids=lambda c: "float" if c is None else f"{c.name}-{c.symmetric}")
@pytest.mark.parametrize("implementation", select.implementations("grouped_matmul"))
def test_every_row_meets_its_experts_matrix(implementation: str, config: QuantizationConfig | None) -> None:
    check_every_row(implementation, config)


def test_activations_are_rounded_where_that_is_asked_for() -> None:
    rng = np.random.default_rng(0)
    config = QuantizationConfig(bits=8, quantize_activation=True)
    weight = by_expert(quantize(jnp.asarray(rng.standard_normal((K, EXPERTS * N)), jnp.float32), config), EXPERTS)
    x = rng.standard_normal((20, K)).astype(np.float32)
    rounded = select.call("grouped_matmul", x, weight, jnp.asarray(UNEVEN, jnp.int32), implementation="xla")
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    expected = by_hand(np.round(x / scale) * scale, np.asarray(dequantize(weight)), UNEVEN)
    np.testing.assert_allclose(rounded, expected, atol=1e-3)


def test_weights_that_no_kernel_packs_are_multiplied_as_they_are() -> None:
    weight = by_expert(quantize(jnp.ones((K, 3 * 5)), QuantizationConfig(bits=8)), 3)
    prepared = select.prepare("grouped_matmul", weight)
    found = select.call("grouped_matmul", jnp.ones((6, K)), prepared, jnp.asarray([1, 2, 3], jnp.int32))
    np.testing.assert_allclose(found, np.full((6, 5), K), rtol=1e-5)
