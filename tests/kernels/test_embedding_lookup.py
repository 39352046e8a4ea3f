"""Rows of an embedding that is kept as the head's matrix."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.kernels import select
from jetserve.kernels.split import SplitWeight
from jetserve.quantize.qarray import QuantizationConfig, cast_values, dequantize, quantize

IDS = jnp.asarray([0, 9, 9, 3, 1], jnp.int32)
CONFIGS = {
    "plain": None,
    **{
        f"int{bits}-{block_size}-{symmetric}": QuantizationConfig(bits=bits, block_size=block_size, symmetric=symmetric)
        for bits in (8, 4)
        for block_size in (None, 32)
        for symmetric in (True, False)
    },
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("implementation", list(select.implementations("embedding_lookup")))
def test_rows_are_the_columns_of_the_matrix(implementation: str, name: str, dtype: type) -> None:
    w = jnp.asarray(np.random.default_rng(0).standard_normal((64, 10)), jnp.float32)
    config = CONFIGS[name]
    if config is not None:
        w = cast_values(quantize(w, config), config.bits)
    whole = w.astype(dtype) if config is None else dequantize(w, dtype)
    try:
        prepared = select.prepare("quantized_matmul", w, implementation=implementation)
        rows = select.call("embedding_lookup", IDS, prepared, dtype=dtype, implementation=implementation)
    except NotImplementedError as reason:
        pytest.skip(f"{implementation} refuses: {reason}")
    assert (rows.shape, rows.dtype) == ((5, 64), dtype)
    # Where a zero point was folded into an offset, the last bit may differ.
    tolerance = 0 if implementation == "xla" else 2**-7 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(
        np.asarray(rows, np.float32), np.asarray(whole, np.float32).T[np.asarray(IDS)], atol=tolerance, rtol=tolerance
    )


def test_columns_of_a_weight_that_devices_split() -> None:
    w = quantize(jnp.asarray(np.random.default_rng(0).standard_normal((64, 10)), jnp.float32), CONFIGS["int8-32-True"])
    split = SplitWeight(weight=w, contracted=None, output="tensor")
    rows = select.call("embedding_lookup", IDS, split, dtype=jnp.float32, implementation="pallas_tpu")
    np.testing.assert_array_equal(rows, np.asarray(dequantize(w)).T[np.asarray(IDS)])


def test_it_takes_what_matmuls_prepared() -> None:
    """A tied head shares its array with the embedding."""
    w = quantize(
        jnp.asarray(np.random.default_rng(0).standard_normal((64, 10)), jnp.float32), CONFIGS["int8-None-True"]
    )
    prepared = select.prepare("quantized_matmul", w)
    rows = select.call("embedding_lookup", IDS, prepared, dtype=jnp.float32)
    np.testing.assert_allclose(rows, np.asarray(dequantize(w)).T[np.asarray(IDS)], rtol=1e-6)
