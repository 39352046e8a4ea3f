"""The device side of the KV cache: one `KVPages` a layer, allocated in its sharding.

Which page belongs to whom is `pages.py`'s.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jetserve.config import EngineConfig
from jetserve.kernels.attention import KVPages
from jetserve.models.base import ModelConfig
from jetserve.parallel.rules import kv_heads


def abstract_cache(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> tuple[KVPages, ...]:
    """Shapes, dtypes and shardings of every layer's pages.

    KV heads are sharded, repeated where the mesh does not divide them and the query heads allow it (`rules.kv_heads`).
    """
    devices = mesh.shape["tensor"]
    heads = kv_heads(model.sizes["N"], model.num_kv_heads, devices)
    axis = "tensor" if heads % devices == 0 else None
    shape = (config.num_pages + 1, config.cache.page_size, 2 * heads, model.head_size)

    def leaf(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
        spec = PartitionSpec(None, None, axis, None)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec[: len(shape)])))

    if config.cache.quantize:
        pages = KVPages(values=leaf(shape, jnp.int8), scale=leaf(shape[:-1], jnp.float32))
    else:
        pages = KVPages(values=leaf(shape, jnp.dtype(config.dtype)))
    return (pages,) * model.num_layers


def make_cache(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> tuple[KVPages, ...]:
    """Pages of zeros on the devices."""
    shapes = abstract_cache(model, config, mesh)

    def zeros() -> tuple[KVPages, ...]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()
