"""Rounding: errors as published, bounds that hold for every weight, and ranges at both ends of float32."""

import dataclasses

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetserve.quantize.qarray import (
    INTEGER_RANGE,
    QUANTIZE_TYPES,
    QArray,
    QuantizationConfig,
    cast_values,
    dequantize,
    quantize,
    quantize_activation,
)

CONFIGS = [
    QuantizationConfig.from_name(name, block_size=32 if "blockwise" in name else None, symmetric=symmetric)
    for name in QUANTIZE_TYPES
    for symmetric in (True, False)
]
ASYMMETRIC = [config for config in CONFIGS if not config.symmetric]


def config_id(config: QuantizationConfig) -> str:
    return f"{config.name}-{'symmetric' if config.symmetric else 'asymmetric'}"


every_config = pytest.mark.parametrize("config", CONFIGS, ids=config_id)
every_asymmetric = pytest.mark.parametrize("config", ASYMMETRIC, ids=config_id)


def gaussian(K: int, N: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((K, N), np.float32)


def turned_back(w: np.ndarray, config: QuantizationConfig, **kwargs: object) -> tuple[QArray, np.ndarray]:
    qarray = quantize(jnp.asarray(w), config, **kwargs)
    qarray.check()
    return qarray, np.asarray(dequantize(qarray))


def relative_error(w: np.ndarray, back: np.ndarray) -> float:
    return float(np.linalg.norm(back - w) / np.linalg.norm(w))


def scale_of_each_weight(qarray: QArray, shape: tuple[int, int]) -> np.ndarray:
    scale = np.asarray(qarray.scale, np.float32)
    return np.broadcast_to(np.expand_dims(scale, -2), qarray.values.shape).reshape(shape)


# Errors


@pytest.mark.parametrize(
    ("bits", "block_size", "symmetric", "published"),
    [
        (8, None, True, 0.0083),
        (8, 128, True, 0.0066),
        (4, None, True, 0.150),
        (4, 128, True, 0.117),
        (4, 128, False, 0.0998),
    ],
)
def test_error_on_a_gaussian(bits: int, block_size: int | None, symmetric: bool, published: float) -> None:
    w = gaussian(2048, 2048)
    config = QuantizationConfig(bits=bits, block_size=block_size, symmetric=symmetric)
    _, back = turned_back(w, config)
    assert relative_error(w, back) == pytest.approx(published, rel=0.03)


@every_config
@hypothesis.given(
    w=hypothesis.extra.numpy.arrays(
        np.float32, (64, 2), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
    )
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_no_weight_moves_more_than_half_a_step(config: QuantizationConfig, w: np.ndarray) -> None:
    w = np.where(np.abs(w) < 2.0**-100, 0, w)  # scales stay normal
    qarray, back = turned_back(w, config)
    steps = scale_of_each_weight(qarray, w.shape)
    # A tie lands on either side within the rounding error of `w / scale`, a number up to 2 ** bits.
    assert (np.abs(w - back) <= steps * (0.5 + 2.0 ** (config.bits - 22))).all()
    low, high = INTEGER_RANGE[config.bits]
    assert low <= int(qarray.values.min()) <= int(qarray.values.max()) <= high


@every_config
def test_rounding_again_changes_nothing(config: QuantizationConfig) -> None:
    first, back = turned_back(gaussian(192, 40), config)
    second, again = turned_back(back, config)
    np.testing.assert_array_equal(second.values, first.values)
    np.testing.assert_allclose(again, back, rtol=1e-6)


@every_config
def test_finer_blocks_and_more_bits_never_hurt(config: QuantizationConfig) -> None:
    w = gaussian(256, 64)
    error = relative_error(w, turned_back(w, config)[1])
    if config.bits == 4:
        assert error > relative_error(w, turned_back(w, dataclasses.replace(config, bits=8))[1])
    if config.block_size is not None:
        assert error < relative_error(w, turned_back(w, dataclasses.replace(config, block_size=None))[1])


def test_halves_round_to_even() -> None:
    w = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.0]], np.float32).T
    qarray = quantize(jnp.asarray(w), QuantizationConfig(bits=4))
    assert float(qarray.scale[0]) == 1
    assert qarray.values[:, 0].tolist() == [0, 2, 2, 0, -2, -2, 7]


# Ranges


@every_config
def test_zeros_stay_zeros(config: QuantizationConfig) -> None:
    w = gaussian(128, 8)
    w[:, 3] = 0
    w[32:64] = 0
    qarray, back = turned_back(w, config)
    assert (back[:, 3] == 0).all()
    assert (back[32:64] == 0).all()
    assert (np.asarray(qarray.scale) > 0).all()
    assert turned_back(np.zeros_like(w), config)[1].tolist() == np.zeros_like(w).tolist()


@every_config
@pytest.mark.parametrize("constant", [2.5, -2.5, 1e30, -1e-30])
def test_constant_weights(config: QuantizationConfig, constant: float) -> None:
    w = np.full((64, 4), constant, np.float32)
    _, back = turned_back(w, config)
    np.testing.assert_allclose(back, w, rtol=1e-6)


@every_config
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_error_does_not_depend_on_the_size_of_weights(config: QuantizationConfig, size: float) -> None:
    w = gaussian(128, 8)
    large = w * np.float32(size)
    # In float64, because squares of 1e30 overflow.
    found = relative_error(large.astype(np.float64) / size, turned_back(large, config)[1].astype(np.float64) / size)
    assert found == pytest.approx(relative_error(w, turned_back(w, config)[1]), rel=1e-3)


@every_asymmetric
@pytest.mark.parametrize("mean", [0.0, 5.0, -5.0])
def test_zero_is_exact_when_asymmetric(config: QuantizationConfig, mean: float) -> None:
    w = gaussian(64, 4) + np.float32(mean)
    w[::5] = 0
    qarray, back = turned_back(w, config)
    assert (back[::5] == 0).all()
    zero_point = np.asarray(qarray.zero_point)
    low, high = INTEGER_RANGE[config.bits]
    assert (zero_point == np.round(zero_point)).all()
    assert low <= zero_point.min() <= zero_point.max() <= high


def test_blocks_have_scales_of_their_own() -> None:
    w = gaussian(64, 4)
    w[32:] *= 1000
    qarray, back = turned_back(w, QuantizationConfig(bits=8, block_size=32))
    assert qarray.values.shape == (2, 32, 4)
    assert relative_error(w[:32], back[:32]) < 0.01


# Refusals


@every_config
@pytest.mark.parametrize("size", [1e-40, 1e-38])
def test_a_range_whose_scale_is_subnormal_is_refused(config: QuantizationConfig, size: float) -> None:
    w = gaussian(64, 4)
    w[:, 2] = np.float32(size)
    with pytest.raises(ValueError, match=r"blk\.weight has a scale that underflows"):
        quantize(jnp.asarray(w), config, name="blk.weight")


@every_config
@pytest.mark.parametrize(
    ("bad", "dtype"), [(np.nan, np.float32), (np.inf, np.float32), (-np.inf, ml_dtypes.bfloat16), (np.nan, np.float16)]
)
def test_weights_that_are_not_finite_are_refused(config: QuantizationConfig, bad: float, dtype: type) -> None:
    w = gaussian(64, 4).astype(dtype)
    w[40, 1] = bad
    with pytest.raises(ValueError, match=r"q_proj\.weight holds NaN or infinite values"):
        quantize(jnp.asarray(w), config, name="q_proj.weight")


def test_a_range_beyond_float32_is_refused() -> None:
    w = np.full((32, 2), 3e38, np.float32)
    w[:16] *= -1
    with pytest.raises(ValueError, match="underflows or overflows float32"):
        quantize(jnp.asarray(w), QuantizationConfig(bits=4, symmetric=False))


@every_config
@pytest.mark.parametrize("size", [1e-6, 1e9])
def test_scales_that_float16_cannot_hold_are_refused(config: QuantizationConfig, size: float) -> None:
    w = jnp.asarray(gaussian(64, 4) * np.float32(size))
    quantize(w, config)
    with pytest.raises(ValueError, match="w has a scale that underflows or overflows float16"):
        quantize(w, config, scale_dtype=jnp.float16, name="w")


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"o has shape \(4,\); expected a matrix"):
        quantize(jnp.ones(4), QuantizationConfig(bits=8), name="o")
    with pytest.raises(ValueError, match="o has 86 contracted elements, which block size 32 does not divide"):
        quantize(jnp.ones((86, 4)), QuantizationConfig(bits=8, block_size=32), name="o")


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.bool_])
def test_integers_are_refused(dtype: type) -> None:
    with pytest.raises(ValueError, match=f"o has dtype {jnp.dtype(dtype)}; expected floats"):
        quantize(jnp.ones((64, 4), dtype), QuantizationConfig(bits=8), name="o")


def test_int8_values_under_an_int4_name_are_refused() -> None:
    qarray = quantize(jnp.asarray(gaussian(64, 4)), QuantizationConfig(bits=8))
    with pytest.raises(ValueError, match=r"down_proj holds values from -?\d+ to -?\d+, but int4 holds -8 to 7"):
        cast_values(qarray, 4, name="down_proj")


@pytest.mark.parametrize("value", [8, -9])
def test_one_value_too_large_for_int4_is_enough(value: int) -> None:
    values = np.zeros((4, 2), np.int8)
    values[3, 1] = value
    with pytest.raises(ValueError, match="but int4 holds"):
        cast_values(QArray(values=jnp.asarray(values), scale=jnp.ones(2)), 4)


@every_config
def test_the_cast_keeps_every_value(config: QuantizationConfig) -> None:
    qarray = quantize(jnp.asarray(gaussian(64, 4)), config)
    cast = cast_values(qarray, config.bits)
    assert cast.values.dtype == (jnp.int4 if config.bits == 4 else jnp.int8)
    np.testing.assert_array_equal(np.asarray(cast.values, np.int8), qarray.values)
    assert cast.config == config
    assert cast_values(cast, config.bits) is cast


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": jnp.zeros((2, 32, 4), jnp.int16)}, "values have dtype int16"),
        ({"values": jnp.zeros((1, 64, 4), jnp.int8)}, r"expected \[G, 32, N\]"),
        ({"scale": jnp.ones((4,))}, r"scale has shape \(4,\)"),
        ({"zero_point": jnp.ones((4,))}, r"zero_point has shape \(4,\)"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(change: dict, message: str) -> None:
    qarray = quantize(jnp.asarray(gaussian(64, 4)), QuantizationConfig(bits=8, block_size=32))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(qarray, **change).check()


# Dtypes


@every_config
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_floats_are_rounded_in_float32(config: QuantizationConfig, dtype: type) -> None:
    narrow = gaussian(64, 4).astype(dtype)
    found = quantize(jnp.asarray(narrow), config)
    expected = quantize(jnp.asarray(narrow.astype(np.float32)), config)
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.scale, expected.scale)


@every_config
@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16])
def test_values_are_computed_from_the_scale_that_is_stored(config: QuantizationConfig, scale_dtype: type) -> None:
    w = gaussian(64, 4)
    qarray = quantize(jnp.asarray(w), config, scale_dtype=scale_dtype)
    assert qarray.scale.dtype == scale_dtype
    low, high = INTEGER_RANGE[config.bits]
    shifted = w.reshape(qarray.values.shape) / np.expand_dims(np.asarray(qarray.scale, np.float32), -2)
    if qarray.zero_point is not None:
        assert qarray.zero_point.dtype == scale_dtype
        shifted = shifted + np.expand_dims(np.asarray(qarray.zero_point, np.float32), -2)
    np.testing.assert_array_equal(qarray.values, np.clip(np.round(shifted), low, high))


def test_dequantize_takes_experts_and_any_dtype() -> None:
    parts = [quantize(jnp.asarray(gaussian(64, 4, seed)), QuantizationConfig(bits=4, block_size=32)) for seed in (1, 2)]
    experts = QArray(
        values=jnp.stack([part.values for part in parts]),
        scale=jnp.stack([part.scale for part in parts]),
        block_size=32,
    )
    experts.check()
    assert experts.shape == (64, 4)
    back = dequantize(experts, jnp.bfloat16)
    assert (back.shape, back.dtype) == ((2, 64, 4), jnp.bfloat16)
    np.testing.assert_array_equal(back[1], dequantize(parts[1], jnp.bfloat16))


# Configs


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("name", QUANTIZE_TYPES)
def test_names_and_configs(name: str, symmetric: bool, rounded: bool) -> None:
    config = QuantizationConfig.from_name(name, symmetric=symmetric, quantize_activation=rounded)
    assert config.name == name
    assert config.block_size == (128 if name.endswith("blockwise") else None)
    assert (config.bits, config.symmetric, config.quantize_activation) == (int(name[3]), symmetric, rounded)


def test_bad_configs_are_refused() -> None:
    for block_size in (0, 7, -32, True, 33, 32.0, "32"):
        with pytest.raises(ValueError, match=f"block_size is {block_size!r}; expected a positive multiple of 32"):
            QuantizationConfig(bits=4, block_size=block_size)
    for bits in (2, 16, "4", None):
        with pytest.raises(ValueError, match=f"bits is {bits!r}; expected 4 or 8"):
            QuantizationConfig(bits=bits)
    with pytest.raises(ValueError, match="expected one of int8_per_channel, int4_per_channel"):
        QuantizationConfig.from_name("int4")
    with pytest.raises(ValueError, match="block_size is 64, but int8_per_channel has one scale a channel"):
        QuantizationConfig.from_name("int8_per_channel", block_size=64)


@pytest.mark.parametrize(
    ("asked", "size", "given"),
    [
        (128, 576, 96),
        (128, 1536, 128),
        (128, 64, 64),
        (64, 96, 32),
        (128, 11008 // 4, 64),
        (256, 29568, 224),
        (None, 86, None),
        (32, 32, 32),
    ],
)
def test_the_block_size_that_a_weight_gets(asked: int | None, size: int, given: int | None) -> None:
    fitting = [g for g in range(32, (asked or 0) + 1, 32) if size % g == 0]
    assert given == max(fitting, default=None)
    assert QuantizationConfig(bits=4, block_size=asked).for_contracted_size(size).block_size == given


@pytest.mark.parametrize("size", [86, 16, 100, 29568 // 8])
def test_no_block_size_fits(size: int) -> None:
    with pytest.raises(ValueError, match=f"divides the contracted size {size}; use a per-channel type"):
        QuantizationConfig(bits=4, block_size=128).for_contracted_size(size)


@every_config
def test_size_in_bits(config: QuantizationConfig) -> None:
    qarray = cast_values(quantize(jnp.asarray(gaussian(64, 4)), config), config.bits)
    scales = (1 if config.block_size is None else 2) * 4
    assert qarray.size_in_bits == 64 * 4 * config.bits + scales * 32 * (1 if config.symmetric else 2)
    assert qarray.shape == (64, 4)


# Activations


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_activations_are_rounded_per_token(dtype: type) -> None:
    x = np.stack([gaussian(1, 96)[0], np.zeros(96, np.float32), gaussian(1, 96)[0] * 1e-20, gaussian(1, 96)[0] * 1e20])
    x = jnp.asarray(x, dtype)
    values, scale = quantize_activation(x)
    assert (values.dtype, scale.dtype, scale.shape) == (jnp.int8, jnp.float32, (4, 1))
    assert float(scale[1, 0]) == 1
    assert not values[1].any()
    back = np.asarray(values, np.float32) * np.asarray(scale)
    assert (np.abs(back - np.asarray(x, np.float32)) <= 0.5001 * np.asarray(scale)).all()


def test_activations_too_small_for_a_scale_become_zeros() -> None:
    values, scale = quantize_activation(jnp.full((1, 8), 1e-44, jnp.float32))
    assert np.isfinite(np.asarray(scale)).all()
    np.testing.assert_allclose(np.asarray(values, np.float32) * scale, 0, atol=1e-37)
