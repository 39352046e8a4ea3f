"""The TPU kernels, compiled for every chip by the real compiler."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jetserve.config import MeshConfig
from jetserve.kernels import select
from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.kernels.quantized_matmul import pallas_tpu, tiles
from jetserve.parallel.mesh import make_mesh
from jetserve.plan.chips import CHIPS, find_topology
from jetserve.quantize.qarray import QArray

every_chip = pytest.mark.parametrize("chip", CHIPS)
CALL = 'custom_call_target="tpu_custom_call"'


def compile_for(chip: str, function: Callable[..., Any], *shapes: Any, **options: Any) -> jax.stages.Compiled:
    """For one device; `shapes` are trees of `jax.ShapeDtypeStruct`."""
    mesh = make_mesh(MeshConfig(), find_topology(f"{chip}:{CHIPS[chip].sizes[0]}").devices[:1])
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), select.platform("tpu"):
        return jax.jit(function, **options).lower(*placed).compile()


def shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@every_chip
@pytest.mark.parametrize(
    ("kv_heads", "int8", "rules"),
    [
        (8, False, {"sliding_window": 100, "soft_cap": 30.0}),
        (1, False, {}),
        (32, True, {"alibi_slopes": True}),
    ],
)
def test_decoding_attention(chip: str, kv_heads: int, int8: bool, rules: dict[str, Any]) -> None:
    """Compiles, in one kernel, and writes the pages in place."""
    S, N, H, pages, page_size = 8, 32, 128, 1024, 16
    values = shape(pages, page_size, 2 * kv_heads, H, dtype=jnp.int8 if int8 else jnp.bfloat16)
    cache = KVPages(values=values, scale=shape(*values.shape[:-1], dtype=jnp.float32) if int8 else None)
    batch = RaggedBatch(
        tokens=shape(S),
        positions=shape(S),
        query_starts=shape(S + 1),
        kv_lengths=shape(S),
        page_table=shape(S, 64),
        max_query_length=1,
    )
    q, kv = shape(S, N, H, dtype=jnp.bfloat16), shape(S, kv_heads, H, dtype=jnp.bfloat16)

    def step(q: jax.Array, k: jax.Array, v: jax.Array, cache: KVPages, batch: RaggedBatch) -> Any:
        settings = rules | ({"alibi_slopes": jnp.ones(N)} if "alibi_slopes" in rules else {})
        return select.call("attention", q, k, v, cache, batch, scale=0.1, implementation="pallas_tpu", **settings)

    compiled = compile_for(chip, step, q, kv, kv, cache, batch, donate_argnums=3)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    assert text.count(CALL) == 1
    assert memory.temp_size_in_bytes < values.size * values.dtype.itemsize
    assert memory.alias_size_in_bytes >= values.size * values.dtype.itemsize


@every_chip
@pytest.mark.parametrize(
    ("bits", "block_size", "rows", "zero_points", "dtype"),
    [
        (4, 128, 32, True, jnp.bfloat16),
        (4, 96, 512, False, jnp.bfloat16),
        (8, 128, 64, False, jnp.bfloat16),
        (4, 32, 32, True, jnp.int8),
    ],
)
def test_quantized_matmul(chip: str, bits: int, block_size: int, rows: int, zero_points: bool, dtype: Any) -> None:
    """Compiles, and reads integers: no float of every weight is made besides."""
    K, N = 12 * block_size, 4096
    scale = shape(K // block_size, N, dtype=jnp.float32)
    weight = QArray(
        values=shape(K // block_size, block_size, N, dtype=jnp.int4 if bits == 4 else jnp.int8),
        scale=scale,
        zero_point=scale if zero_points else None,
        block_size=block_size,
    )
    tile = tiles.Tile(most_rows=rows, rows=256, columns=512, depth=512, cycles=1, einsum_cycles=2)

    def multiply(x: jax.Array, w: QArray) -> jax.Array:
        return pallas_tpu.multiply(x, w, tile=tile, out_dtype=jnp.dtype(jnp.bfloat16))

    compiled = compile_for(chip, multiply, shape(rows, K, dtype=dtype), weight)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    call = next(line for line in text.splitlines() if CALL in line)
    assert f"s{bits}[{K // block_size},{block_size},{N}]" in call
    assert memory.temp_size_in_bytes < K * N


def test_tiles_are_of_chips_that_there_are() -> None:
    kinds = {find_topology(f"{name}:{chip.sizes[0]}").devices[0].device_kind for name, chip in CHIPS.items()}
    assert tiles.table()
    for kind, types in tiles.table().items():
        assert kind in kinds
        for found in types.values():
            assert [tile.most_rows for tile in found] == sorted(tile.most_rows for tile in found)
