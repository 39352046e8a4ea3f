"""The rules of sharding, over meshes of devices that are not there."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jetserve.checkpoint.abstract import abstract_weight
from jetserve.parallel.autotp import Split, explain
from jetserve.parallel.rules import Axes, Layout, bytes_per_device, fit_vector, fit_weight, kv_heads, weight_sharding
from jetserve.quantize.qarray import QArray, QuantizationConfig, dequantize, quantize

SIZES = {"D": 64, "N": 16, "K": 2, "H": 8, "F": 11 * 32, "V": 100, "E": 4}
BLOCKS = QuantizationConfig(bits=4, block_size=32, symmetric=False)


def mesh(devices: int, experts: int = 1) -> AbstractMesh:
    return AbstractMesh((1, devices, experts), ("data", "tensor", "expert"), axis_types=(AxisType.Auto,) * 3)


def axes(text: str, **sizes: int) -> Axes:
    return Axes.parse(text, {**SIZES, **sizes})


def layout(*weights: tuple[str, int | None], devices: int = 8, experts: int = 1) -> Layout:
    return Layout.of([(axes(text), block_size) for text, block_size in weights], mesh(devices, experts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "devices", "expected"),
    [
        (32, 8, 4, 8),  # they divide
        (32, 8, 16, 16),  # each twice
        (32, 1, 8, 8),  # multi-query
        (24, 8, 12, 24),  # neither divides the other
        (32, 32, 8, 32),
        (6, 3, 8, 3),  # the query heads do not divide: whole on every device
        (32, 8, 64, 8),
    ],
)
def test_kv_heads(num_heads: int, num_kv_heads: int, devices: int, expected: int) -> None:
    assert kv_heads(num_heads, num_kv_heads, devices) == expected


def test_repeated_heads_are_those_that_queries_read() -> None:
    held = kv_heads(24, 8, 12)
    copies = np.repeat(np.arange(8), held // 8)
    assert [copies[n * held // 24] for n in range(24)] == [n * 8 // 24 for n in range(24)]


def test_channels_are_padded_to_whole_blocks_of_every_device() -> None:
    made = layout(("D -> F", 32), ("F -> D", 32))
    assert made.shape(axes("F -> D")) == (16 * 32, 64)  # 11 blocks over 8 devices: 2 each
    assert made.shape(axes("D -> F")) == (64, 16 * 32)
    weight = abstract_weight((16 * 32, 64), BLOCKS, jnp.dtype("bfloat16"))
    shardings = weight_sharding(axes("F -> D"), weight, made)  # type: ignore[arg-type]
    assert isinstance(shardings, QArray)
    assert shardings.values.spec == PartitionSpec("tensor", None, None)
    assert shardings.values.shard_shape(weight.values.shape) == (2, 32, 64)
    assert shardings.zero_point.spec == shardings.scale.spec == PartitionSpec("tensor", None)


@pytest.mark.parametrize("block_size", [None, 32])
def test_without_blocks_padding_is_of_single_channels(block_size: int | None) -> None:
    made = layout(("D -> F", block_size), ("D -> V", None))
    assert (made.shape(axes("D -> F"))[1], made.shape(axes("D -> V"))[1]) == (352, 104)


def test_blocks_of_heads_are_never_cut() -> None:
    made = layout(("D -> N H", 32), ("N H -> D", 32))
    weight = abstract_weight((128, 64), BLOCKS, jnp.dtype("bfloat16"))
    shardings = weight_sharding(axes("N H -> D"), weight, made)  # type: ignore[arg-type]
    assert isinstance(shardings, QArray)
    assert shardings.values.spec == PartitionSpec(None, None, None)  # 16 inputs a device
    made = layout(("D -> N H", 32), ("N H -> D", 32), devices=4)
    shardings = weight_sharding(axes("N H -> D"), weight, made)  # type: ignore[arg-type]
    assert isinstance(shardings, QArray)
    assert shardings.values.spec == PartitionSpec("tensor", None, None)


@pytest.mark.parametrize(
    "config",
    [None, QuantizationConfig(bits=8, symmetric=False), QuantizationConfig(bits=4, block_size=32, symmetric=False)],
)
def test_a_fitted_mlp_computes_the_same(config: QuantizationConfig | None) -> None:
    rng = np.random.default_rng(0)
    block_size = None if config is None else config.block_size
    made = layout(("D -> F", block_size), ("F -> D", block_size))

    def make(text: str) -> tuple[np.ndarray, np.ndarray]:
        """A matrix as it is, and as the devices hold it."""
        plain = rng.standard_normal(axes(text).shape).astype(np.float32)
        if config is None:
            return plain, fit_weight(axes(text), plain, made)  # type: ignore[arg-type, return-value]
        weight = jax.tree.map(np.asarray, quantize(jnp.asarray(plain), config))
        return np.asarray(dequantize(weight)), np.asarray(dequantize(fit_weight(axes(text), weight, made)))

    (up, fitted_up), (down, fitted_down) = make("D -> F"), make("F -> D")
    bias = rng.standard_normal(352).astype(np.float32)
    fitted_bias = fit_vector(axes("D -> F").output, bias, made)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    expected = np.maximum(x @ up + bias, 0) @ down
    found = np.maximum(x @ fitted_up + fitted_bias, 0) @ fitted_down[: fitted_up.shape[1]]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_repeated_heads_have_their_scales() -> None:
    made = layout(("D -> N H", None), ("D -> K H", None))
    weight = quantize(jnp.asarray(np.random.default_rng(0).standard_normal((64, 16)), jnp.float32), BLOCKS)
    fitted = fit_weight(axes("D -> K H"), jax.tree.map(np.asarray, weight), made)
    assert fitted.shape == (64, 8 * 8)
    heads = np.asarray(dequantize(weight)).reshape(64, 2, 8)
    np.testing.assert_array_equal(np.asarray(dequantize(fitted)).reshape(64, 8, 8), np.repeat(heads, 4, axis=1))


def test_an_input_order_goes_on_through_the_padding() -> None:
    made = layout(("F -> D", 32))
    weight = quantize(jnp.ones((352, 64), jnp.float32), BLOCKS)
    order = np.random.default_rng(0).permutation(352).astype(np.int32)
    fitted = fit_weight(axes("F -> D"), jax.tree.map(np.asarray, dataclasses.replace(weight, input_order=order)), made)
    assert isinstance(fitted, QArray)
    np.testing.assert_array_equal(fitted.input_order[:352], order)
    np.testing.assert_array_equal(fitted.input_order[352:], np.arange(352, 512))


def test_explain() -> None:
    texts = ["D -> N H", "D -> K H", "N H -> D", "D -> F", "F -> D", "D -> V"]
    made = layout(*((text, 32) for text in texts[:-1]), (texts[-1], None))
    rows = []
    for layer in range(3):
        for text in texts:
            one = axes(text)
            config = QuantizationConfig(bits=8) if text == "D -> V" else BLOCKS
            weight = abstract_weight(made.shape(one), config, jnp.dtype("bfloat16"))
            shaped = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                weight,
                weight_sharding(one, weight, made),  # type: ignore[arg-type]
            )
            rows.append((f"layers.{layer}.{text}", one, shaped))
    plans = {plan.name.removeprefix("layers.{i}."): plan for plan in explain(rows, made)}
    assert list(plans) == texts
    assert all(plan.count == 3 for plan in plans.values())
    assert {text: plan.split for text, plan in plans.items()} == {
        "D -> N H": Split.COLUMN,
        "D -> K H": Split.COLUMN,
        "N H -> D": Split.REPLICATED,
        "D -> F": Split.COLUMN,
        "F -> D": Split.ROW,
        "D -> V": Split.VOCABULARY,
    }
    assert plans["D -> K H"].reason == "K / 8 = 1 a device, each of 2 4 times"
    assert plans["N H -> D"].reason == "16 inputs a device would cut blocks of 32"
    assert plans["F -> D"].reason == "F / 8 = 64 a device, 160 of zeros"
    assert {plan.shards for text, plan in plans.items() if text != "N H -> D"} == {8}
    assert plans["F -> D"].bytes_per_device == 64 * 64 // 2 + 2 * 2 * 64 * 4  # int4 values, scales and zero points


def test_experts_are_split_over_their_axis_and_within() -> None:
    made = layout(("D -> E F", 32), ("F -> E D", 32), devices=4, experts=2)
    weight = abstract_weight((64, 352), BLOCKS, jnp.dtype("bfloat16"))
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((4, *leaf.shape), leaf.dtype), weight)
    shardings = weight_sharding(axes("D -> E F"), stacked, made)
    assert isinstance(shardings, QArray)
    assert shardings.values.spec == PartitionSpec("expert", None, None, "tensor")


def test_bytes_count_int4_as_half() -> None:
    sharding = jax.sharding.NamedSharding(mesh(8), PartitionSpec("tensor"))
    for dtype, expected in ((jnp.int4, 4), (jnp.int8, 8), (jnp.bfloat16, 16)):
        assert bytes_per_device(jax.ShapeDtypeStruct((64,), dtype, sharding=sharding)) == expected
    assert math.isclose(bytes_per_device(jax.ShapeDtypeStruct((8,), jnp.int4, sharding=sharding)), 1)
