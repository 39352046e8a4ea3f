"""Recipes: what every role becomes, and all that is refused before a byte is read."""

import numpy as np
import pytest
from flax import nnx

from jetserve.models.base import Origin, Parameter, Role
from jetserve.parallel.rules import Axes
from jetserve.quantize.methods import rtn
from jetserve.quantize.qarray import QUANTIZE_TYPES, QuantizationConfig, dequantize, quantize
from jetserve.quantize.recipe import Action, Recipe


def parameter(role: Role, K: int = 64, N: int = 32) -> Parameter:
    axes = None if role is Role.FLOAT else Axes.parse("D -> F", {"D": K, "F": N})
    return Parameter(
        path=f"some.{role.value}",
        source=f"source.{role.value}",
        origin=Origin(names=(f"source.{role.value}",), height=N, start=0, stop=N, group=N),
        shape=(N,) if axes is None else axes.shape,
        axes=axes,
        output_axes=(("F", N),),
        role=role,
        variable=nnx.Param(0),
    )


@pytest.mark.parametrize("symmetric", [None, True, False])
@pytest.mark.parametrize("name", QUANTIZE_TYPES)
def test_linears_take_the_type_embeddings_int8_per_channel_and_vectors_none(name: str, symmetric: bool | None) -> None:
    recipe = Recipe.from_settings(name, symmetric=symmetric, quantize_activation=True, source_quantized=False)
    plan = recipe.plan([parameter(role) for role in Role])
    linear = plan["some.linear"]
    assert linear.action is Action.ROUND
    assert linear.config is not None
    assert linear.config.name == name
    assert linear.config.symmetric is (symmetric is not False)
    assert linear.config.block_size == (64 if "blockwise" in name else None)
    assert linear.quantize_activation
    assert plan["some.embedding"].config == QuantizationConfig(bits=8)
    assert not plan["some.embedding"].quantize_activation
    assert plan["some.float"].action is Action.FLOAT


def test_unset_keeps_a_quantized_source_and_leaves_a_float_one() -> None:
    assert Recipe.from_settings(source_quantized=True).quantize_type == "keep"
    assert Recipe.from_settings(source_quantized=False).quantize_type == "none"
    kept = Recipe.from_settings(source_quantized=True, quantize_activation=True).target_for(parameter(Role.LINEAR))
    assert kept.action is Action.KEEP
    assert kept.quantize_activation


@pytest.mark.parametrize(
    ("K", "asked", "used"), [(576, None, 96), (576, 128, 96), (64, None, 64), (64, 32, 32), (1536, None, 128)]
)
def test_block_size_that_does_not_divide_becomes_the_largest_that_does(K: int, asked: int | None, used: int) -> None:
    recipe = Recipe.from_settings("int4_blockwise", block_size=asked, source_quantized=False)
    config = recipe.config_for(parameter(Role.LINEAR, K))
    assert config is not None
    assert config.block_size == used


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize_type": "int3"}, "int3.*int4_blockwise.*keep"),
        ({"quantize_type": "int4_blockwise", "block_size": 0}, "block_size is 0"),
        ({"quantize_type": "int4_blockwise", "block_size": 7}, "block_size is 7"),
        ({"quantize_type": "int4_per_channel", "block_size": 32}, "block_size is 32.*int4_per_channel"),
        ({"quantize_type": "none", "block_size": 32}, "block_size is 32.*no effect"),
        ({"quantize_type": "keep", "symmetric": False}, "symmetric is False.*no effect"),
        ({"quantize_type": "none", "quantize_activation": True}, "quantize_activation takes quantized weights"),
        ({"quantize_activation": True}, "quantize_activation takes quantized weights"),
    ],
)
def test_settings_without_a_sense_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.from_settings(**settings, source_quantized=False)


@pytest.mark.parametrize(("K", "block_size", "message"), [(64, 128, "fewer than the block size"), (100, 32, "divides")])
def test_a_block_size_that_cannot_be_had_names_the_tensor(K: int, block_size: int, message: str) -> None:
    recipe = Recipe.from_settings("int4_blockwise", block_size=block_size, source_quantized=False)
    with pytest.raises(ValueError, match=rf"source\.linear.*{message}"):
        recipe.plan([parameter(Role.LINEAR, K)])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", QUANTIZE_TYPES)
def test_rounding_rows_at_a_time_is_rounding_at_once(name: str, symmetric: bool) -> None:
    w = np.random.default_rng(0).standard_normal((50, 64), np.float32)
    config = QuantizationConfig.from_name(name, symmetric=symmetric).for_contracted_size(64)
    found, error = rtn.quantize_matrix(lambda a, b: w[a:b], w.shape, config, name="w", chunk_bytes=7 * 4 * 64)
    expected = quantize(w.T, config)
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.scale, expected.scale)
    assert (found.zero_point is None) == symmetric
    difference = np.linalg.norm(np.asarray(dequantize(expected)).T - w) / np.linalg.norm(w)
    assert error == pytest.approx(difference, rel=1e-5)


def test_a_nan_in_any_row_names_the_tensor() -> None:
    w = np.ones((50, 64), np.float32)
    w[41, 3] = np.nan
    with pytest.raises(ValueError, match=r"some\.name holds NaN"):
        rtn.quantize_matrix(
            lambda a, b: w[a:b], w.shape, QuantizationConfig(bits=4), name="some.name", chunk_bytes=7 * 4 * 64
        )


def test_zeros_have_no_error() -> None:
    zeros = np.zeros((8, 64), np.float32)
    rounded, error = rtn.quantize_matrix(lambda a, b: zeros[a:b], (8, 64), QuantizationConfig(bits=4), name="w")
    assert error == 0.0
    assert not np.asarray(rounded.values).any()
