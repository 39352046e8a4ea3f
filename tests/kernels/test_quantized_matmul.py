"""Every implementation of quantized matmuls on one list of cases (`testing.quantized_matmul_cases`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.kernels import select
from jetserve.kernels.quantized_matmul import cpu, xla
from jetserve.quantize.qarray import QArray, QuantizationConfig, dequantize, quantize
from jetserve.testing import MatmulCase, quantized_matmul_cases

CASES = quantized_matmul_cases()
every_implementation = pytest.mark.parametrize("name", ["xla", "dequantized", "cpu"])
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def run(name: str, case: MatmulCase, **options: bool) -> tuple[np.ndarray, np.ndarray]:
    """Found and expected; skips what the implementation refuses."""
    x, w, expected = case.build()
    try:
        prepared = select.prepare("quantized_matmul", w, implementation=name, **options)
        y = select.call("quantized_matmul", x, prepared, implementation=name)
    except NotImplementedError as reason:
        pytest.skip(f"{name} refuses: {reason}")
    assert (y.dtype, y.shape) == (x.dtype, expected.shape)
    return np.asarray(y, np.float64), expected


def check(found: np.ndarray, expected: np.ndarray, case: MatmulCase, tolerance: float = 2e-6) -> None:
    """Within `tolerance` of the size of each row; bfloat16 results within their own rounding besides."""
    assert np.isfinite(found).all()
    size = np.abs(expected).max(axis=-1, keepdims=True)
    relative = 2**-8 if case.dtype == "bfloat16" else 0
    assert (np.abs(found - expected) <= tolerance * np.sqrt(case.K) * size + relative * np.abs(expected)).all()
    if case.zero_row:
        assert not found.reshape(-1, case.N)[0].any()


@every_case
def test_reference(case: MatmulCase) -> None:
    check(*run("xla", case), case)


# The kernel's activations have finer scales than the reference's: both are near, neither is the other.
@every_case
@pytest.mark.parametrize("exact_activations", [False, True])
def test_cpu(case: MatmulCase, exact_activations: bool) -> None:
    rounded = 2e-3 if case.bits == 4 or case.quantize_activation else 2e-5
    is_exact = exact_activations and not case.quantize_activation
    check(*run("cpu", case, exact_activations=exact_activations), case, tolerance=2e-6 if is_exact else rounded)


# Dequantized weights are plain ones: one case of each type and dtype says it all.
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.rows in ((3,), (5,), (2, 3))], ids=lambda case: case.id
)
def test_dequantized(case: MatmulCase) -> None:
    check(*run("dequantized", case), case, tolerance=2e-3 if case.dtype == "bfloat16" else 2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_weights(dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 50)), dtype)
    w = jnp.asarray(np.random.default_rng(1).standard_normal((50, 7)), jnp.float32)
    y = select.call("quantized_matmul", x, w)
    assert (y.dtype, y.shape) == (x.dtype, (2, 3, 7))
    expected = np.asarray(x, np.float64) @ np.asarray(w.astype(dtype), np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=1e-4 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("name", ["xla", "dequantized"])
@pytest.mark.parametrize("block_size", [None, 32])
def test_the_result_has_the_dtype_asked_for(name: str, block_size: int | None) -> None:
    x, w, expected = MatmulCase(bits=8, block_size=block_size, dtype="bfloat16").build()
    prepared = select.prepare("quantized_matmul", w, implementation=name)
    y = select.call("quantized_matmul", x, prepared, implementation=name, out_dtype=jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("rows", [1, 5, 8, 33])
@pytest.mark.parametrize("quantize_activation", [False, True])
def test_rows_taken_in_turns(rows: int, quantize_activation: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As prompts are whose partial sums would not fit into memory at once."""
    case = MatmulCase(bits=4, block_size=32, zero_point="real", rows=(rows,), quantize_activation=quantize_activation)
    x, w, expected = case.build()
    lowered = {}
    for partial_sums in (2**26, 6 * 80 * 4):
        monkeypatch.setattr(xla, "MAX_PARTIAL_SUMS", partial_sums)
        lowered[partial_sums] = jax.jit(lambda x, w: xla.run(x, w)).lower(x, w).as_text()
        check(np.asarray(xla.run(x, w), np.float64), expected, case)
    turns = ["stablehlo.while" in text for text in lowered.values()]
    assert turns == [False, rows > 4]


def test_one_row_beyond_the_limit_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "MAX_PARTIAL_SUMS", 1)
    case = MatmulCase(bits=8, block_size=32, rows=(3,))
    x, w, expected = case.build()
    check(np.asarray(xla.run(x, w), np.float64), expected, case)


@pytest.mark.parametrize("block_size", [None, 32])
def test_one_hot_rows_give_the_weights_themselves(block_size: int | None) -> None:
    """No rounding of sums hides a wrong block, scale or zero point."""
    _, w, _ = MatmulCase(bits=4, block_size=block_size, zero_point="real", K=96, N=33).build()
    y = xla.run(jnp.eye(96, dtype=jnp.float32), w)
    np.testing.assert_allclose(y, dequantize(w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [None, 32])
def test_activations_of_any_size(block_size: int | None) -> None:
    """A row's scale is its own: tiny rows beside huge ones lose nothing."""
    config = QuantizationConfig(bits=8, block_size=block_size, quantize_activation=True)
    rng = np.random.default_rng(0)
    w = quantize(jnp.asarray(rng.standard_normal((64, 16)), jnp.float32), config)
    row = rng.standard_normal(64)
    x = jnp.asarray(np.stack([row * 1e-20, row, row * 1e20]), jnp.float32)
    y = np.asarray(xla.run(x, w), np.float64)
    np.testing.assert_allclose(y[0] * 1e20, y[1], rtol=1e-4)
    np.testing.assert_allclose(y[2] * 1e-20, y[1], rtol=1e-4)


every_weight = pytest.mark.parametrize(
    "case",
    [MatmulCase(bits=bits, block_size=block, rows=(5,)) for bits in (4, 8) for block in (None, 32)],
    ids=lambda case: case.id,
)


@every_weight
@pytest.mark.parametrize("exact_activations", [False, True])
@pytest.mark.parametrize("size", [0, 1])
def test_nan_stays_nan(case: MatmulCase, exact_activations: bool, size: int) -> None:
    """One of a row, or the whole of it: what comes out is no number that could pass for an answer."""
    x, w, _ = case.build()
    x = x.at[1, : case.K if size else 1].set(jnp.nan).at[3, 2].set(jnp.inf)
    y = np.asarray(cpu.run(x, cpu.prepare(w, exact_activations=exact_activations)))
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[3]).any()
    assert np.isfinite(y[[0, 2, 4]]).all()


@pytest.mark.parametrize("zero_point", [None, "real"])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_outliers_cost_the_others_no_precision(zero_point: str | None, rows: int) -> None:
    """Channels that are a thousand times greater, as trained models have them: at most one in 32 here."""
    case = MatmulCase(bits=4, block_size=32, zero_point=zero_point, rows=(rows,), K=160, N=50)
    x, w, _ = case.build()
    scales = np.ones(case.K, np.float32)
    scales[[5, 32, 159]] = [1000, 3000, -2000]
    x = np.asarray(x) * scales
    found, plain = (
        np.asarray(cpu.run(jnp.asarray(part), cpu.prepare(w)), np.float64)
        for part in (x, np.where(np.abs(scales) > 1, 0, x))
    )
    outliers = np.where(np.abs(scales) > 1, x, 0).astype(np.float64) @ np.asarray(dequantize(w), np.float64)
    assert np.abs(outliers).max() > 100 * np.abs(plain).max()
    assert (np.abs(found - plain - outliers) <= 1e-6 * np.abs(outliers).max()).all()


def test_exact_activations_of_one_sign() -> None:
    """The sum of stored values is great and that of the weights small: neither takes digits from the other."""
    w = QArray(values=jnp.zeros((4096, 8), jnp.int4), scale=jnp.ones(8))
    x = jnp.full((3, 4096), 1e8) + jnp.arange(4096)
    np.testing.assert_array_equal(cpu.run(x, cpu.prepare(w, exact_activations=True)), 0)


@every_implementation
@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_no_rows(name: str, lead: tuple[int, ...]) -> None:
    case = MatmulCase(bits=4, block_size=32)
    prepared = select.prepare("quantized_matmul", case.build()[1], implementation=name)
    x = jnp.zeros((*lead, case.K))
    assert select.call("quantized_matmul", x, prepared, implementation=name).shape == (*lead, case.N)


@pytest.mark.parametrize(("name", "change"), [("cpu", -1), ("cpu", 1), ("cpu", 32), ("xla", 1), ("dequantized", 1)])
@pytest.mark.parametrize("block_size", [None, 32])
def test_inputs_of_another_size_are_refused(name: str, block_size: int | None, change: int) -> None:
    case = MatmulCase(bits=8, block_size=block_size, K=64)
    prepared = select.prepare("quantized_matmul", case.build()[1], implementation=name)
    with pytest.raises((ValueError, TypeError)):
        select.call("quantized_matmul", jnp.ones((1, case.K + change)), prepared, implementation=name)


def test_the_best_implementation_takes_every_weight() -> None:
    """As it serves: prepared at load, called by the layers, whatever the platform chose."""
    for case in (
        MatmulCase(bits=4, block_size=32, zero_point="real"),
        MatmulCase(bits=8, block_size=None, quantize_activation=True),
    ):
        x, w, expected = case.build()
        y = select.call("quantized_matmul", x, select.prepare("quantized_matmul", w))
        error = np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)
        assert error < 0.02, case.id


def test_an_int8_container_of_int4_values_gives_the_same() -> None:
    x, w, _ = MatmulCase(bits=4, block_size=32).build()
    container = dataclasses.replace(w, values=w.values.astype(jnp.int8))
    assert isinstance(container, QArray)
    np.testing.assert_array_equal(xla.run(x, w), xla.run(x, container))
