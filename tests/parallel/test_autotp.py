"""Shardings that are found for functions which declare nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from parallel import user_models

from jetserve.parallel.autotp import shard

MESH: Any = AbstractMesh((1, 8, 1), ("data", "tensor", "expert"), axis_types=(AxisType.Auto,) * 3)


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def specs(function: Callable[..., Any], params: Any, *args: Any) -> Any:
    return jax.tree.map(lambda sharding: tuple(sharding.spec), shard(function, params, *args, mesh=MESH))


@pytest.mark.slow
@pytest.mark.parametrize("name", user_models.MODELS)
def test_modules_are_split_as_by_hand(name: str) -> None:
    model = user_models.MODELS[name]()
    found = shard(model.function, model.params, *model.args, mesh=MESH)
    for (path, sharding), leaf in zip(
        jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(model.params), strict=True
    ):
        expected = user_models.by_hand(jax.tree_util.keystr(path), leaf.ndim)
        assert PartitionSpec(*sharding.spec) == expected, path


def test_a_bias_follows_its_weight() -> None:
    params = {"up": shape(64, 256), "bias": shape(256), "down": shape(256, 64), "last": shape(64)}

    def mlp(p: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"] + p["last"]

    assert specs(mlp, params, shape(4, 64)) == {
        "up": (None, "tensor"),
        "bias": ("tensor",),
        "down": ("tensor", None),
        "last": (None,),
    }


def test_layers_of_a_scan_are_split_alike() -> None:
    params = {"up": shape(3, 64, 256), "down": shape(3, 256, 64)}

    def stack(p: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return x + jax.nn.relu(x @ weights["up"]) @ weights["down"], None

        return jax.lax.scan(layer, x, p)[0]

    assert specs(stack, params, shape(4, 64)) == {"up": (None, None, "tensor"), "down": (None, "tensor", None)}


def test_heads_are_not_cut() -> None:
    """Twelve heads of 32 channels: eight devices would divide the 384 channels, but not the heads."""
    params = {"q": shape(64, 384), "k": shape(64, 384), "v": shape(64, 384), "o": shape(384, 64)}

    def attention(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = ((x @ p[name]).reshape(4, 12, 32) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("tnh,snh->nts", q, k), axis=-1)
        return jnp.einsum("nts,snh->tnh", weights, v).reshape(4, 384) @ p["o"]

    found = specs(attention, params, shape(4, 64))
    assert (found["q"], found["k"]) == ((None, None), (None, None))


def test_what_needs_a_dimension_whole_keeps_it() -> None:
    assert specs(lambda p, x: jnp.sort(x @ p, axis=-1), shape(64, 256), shape(4, 64)) == (None, None)
    assert specs(lambda p, x: jnp.cumsum(x @ p, axis=0), shape(64, 256), shape(4, 64)) == (None, "tensor")
    assert specs(lambda p, x: x @ p, shape(64, 100), shape(4, 64)) == (None, None)  # 8 does not divide it


@pytest.mark.slow
def test_on_eight_devices(run_on_eight_devices: Callable[[Path], None]) -> None:
    run_on_eight_devices(Path(__file__).with_name("eight_devices_autotp.py"))
