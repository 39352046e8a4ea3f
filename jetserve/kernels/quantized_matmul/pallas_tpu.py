"""For TPUs: blockwise weights that stay integers until they are in VMEM, scaled where they are summed.

XLA's einsum holds the partial sums of all blocks before it scales them; here each is scaled and added as it is made. A
program is a tile of rows and one of columns, and walks the blocks, several of them a turn. Over several devices each
works on its own part of the weight, and rows that are split are summed once.

`tiles` knows how large tiles are, and where the compiler expects the einsum to be faster: there it is the einsum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from jetserve.kernels.quantized_matmul import tiles, xla
from jetserve.kernels.split import SplitWeight, split
from jetserve.quantize.qarray import QArray, Weight, quantize_activation

PLATFORMS = frozenset({"tpu"})
PRIORITY = 20

ROW_STEP = 32
"""Rows come in this many: a tile of int8, two of bfloat16."""
MOST_UNROLLED = 2**17
"""Sums of a tile, up to which several blocks of a turn are worked on at once."""
SUMS = 4
"""Of a tile, in float32, that are in VMEM at once."""
VMEM_BYTES = 48 * 2**20
"""That the kernel may use; devices have 64 MiB or more."""


def prepare(weight: Weight, *, exact_activations: bool = False) -> QArray | SplitWeight:
    """The weight as it is, and how devices share it."""
    del exact_activations  # they are left as they are unless the weight says otherwise
    if not isinstance(weight, QArray):
        raise NotImplementedError("the weight is not quantized")
    _check(weight)
    return split(weight)


def run(x: jax.Array, w: Weight | SplitWeight, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """[..., K] x [K, N] -> [..., N] in `out_dtype` (x's unless given)."""
    if not isinstance(w, QArray | SplitWeight):
        raise NotImplementedError("the weight is not quantized")
    weight = w if isinstance(w, QArray) else w.weight
    _check(weight)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    T = rows.shape[0]
    tile = tiles.find(weight, T)
    if tile is None or not tile.pays:
        return xla.run(x, weight, out_dtype=out_dtype)
    step = ROW_STEP if tile.rows >= T else tile.rows
    # Blocks of zeros may have been added to w.
    rows = jnp.pad(rows, ((0, -T % step), (0, weight.shape[0] - rows.shape[1])))
    x_scale = None
    if weight.quantize_activation:
        rows, x_scale = quantize_activation(rows)
    # A sum over devices is of `out_dtype`, half of float32's traffic.
    on_one_device = functools.partial(
        multiply, tile=tile, out_dtype=out_dtype if x_scale is None else jnp.dtype(jnp.float32)
    )
    y = _split(on_one_device, rows, w) if isinstance(w, SplitWeight) else on_one_device(rows, w)
    if x_scale is not None:
        y = (y * x_scale).astype(out_dtype)
    return y[:T].reshape(*x.shape[:-1], y.shape[-1])


def _check(weight: QArray) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    if weight.block_size is None:
        raise NotImplementedError("of per-channel weights XLA's einsum is one matmul, and expected to be faster")
    if weight.values.ndim != 3 or weight.input_order is not None:
        raise NotImplementedError("the weight has leading axes, or an input order")


def _split(on_one_device: Any, x: jax.Array, w: SplitWeight) -> jax.Array:
    def part(x: jax.Array, weight: QArray) -> jax.Array:
        y = on_one_device(x, weight)
        return y if w.contracted is None else jax.lax.psum(y, w.contracted)

    return jax.shard_map(
        part,
        in_specs=(PartitionSpec(None, w.contracted), w.specs),
        out_specs=PartitionSpec(None, w.output),
        check_vma=False,
    )(x, w.weight)


def rows_at_once(rows: int, dtype: jnp.dtype, w: QArray, tile: tiles.Tile) -> int:
    """Of so many rows of x, those that a program takes: fewer than the tile's where all their blocks do not fit VMEM.

    They divide `rows`, a multiple of `ROW_STEP`; 0 where not even that many fit.
    """
    G, g, N = w.values.shape
    columns = min(tile.columns, N)
    sides = w.scale.dtype.itemsize * (1 if w.zero_point is None else 2)
    # Twice, since the next is fetched while one is worked on.
    whole = 2 * columns * (G * sides + max(tile.depth, g) * w.bits // 8)
    of_a_row = 2 * G * g * dtype.itemsize + SUMS * columns * 4
    steps = range(ROW_STEP, min(rows, tile.rows) + 1, ROW_STEP)
    return max((T for T in steps if rows % T == 0 and whole + T * of_a_row <= VMEM_BYTES), default=0)


def multiply(x: jax.Array, w: QArray, *, tile: tiles.Tile, out_dtype: jnp.dtype) -> jax.Array:
    """[T, K] x [K, N] -> [T, N] on one device."""
    G, g, N = w.values.shape
    T, columns = rows_at_once(x.shape[0], x.dtype, w, tile), min(tile.columns, N)
    if not T:
        raise NotImplementedError(f"of a weight with {G * g} rows not even {ROW_STEP} rows of x fit the device's VMEM")
    blocks = max(b for b in range(1, max(1, tile.depth // g) + 1) if G % b == 0)  # of a turn
    arrays = [x.reshape(-1, G, g).swapaxes(0, 1), w.values]  # a block is a leading index
    sides = [side for side in (w.scale, w.zero_point) if side is not None]
    return pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, has_zero_point=w.zero_point is not None),
        grid=(x.shape[0] // T, pl.cdiv(N, columns), G // blocks),
        in_specs=[
            pl.BlockSpec((G, T, g), lambda t, n, k: (0, t, 0)),
            pl.BlockSpec((blocks, g, columns), lambda t, n, k: (k, 0, n)),
            *[pl.BlockSpec((G, columns), lambda t, n, k: (0, n)) for side in sides],
        ],
        out_specs=pl.BlockSpec((T, columns), lambda t, n, k: (t, n)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], N), out_dtype),
        scratch_shapes=[pltpu.VMEM((T, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.size * N,
            bytes_accessed=x.size * x.dtype.itemsize + w.size_in_bits // 8 + x.shape[0] * N * out_dtype.itemsize,
            transcendentals=0,
        ),
        metadata={"estimated_cycles": str(tile.cycles_of(x.shape[0], G * g, N))},  # which XLA does not estimate
        name=f"quantized_matmul_int{w.bits}",
    )(*arrays, *sides)


def _kernel(*refs: Any, blocks: int, has_zero_point: bool) -> None:
    """One turn: x [G, T, g], values [blocks, g, N], scale and zero point [G, N] -> sum [T, N]."""
    x_ref, values_ref, scale_ref = refs[:3]
    zero_ref = refs[3] if has_zero_point else None
    out_ref, sum_ref = refs[-2:]
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _start() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(i: Any, total: jax.Array) -> jax.Array:
        block = k * blocks + i
        x = x_ref[block]
        y = jnp.dot(
            x,
            values_ref[i].astype(x.dtype),
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
        ).astype(jnp.float32)
        if zero_ref is not None:
            y -= jnp.sum(x.astype(jnp.float32), axis=-1, keepdims=True) * zero_ref[pl.ds(block, 1)].astype(jnp.float32)
        return total + y * scale_ref[pl.ds(block, 1)].astype(jnp.float32)

    unroll = blocks if sum_ref.size <= MOST_UNROLLED and blocks <= 16 else 1
    sum_ref[...] = jax.lax.fori_loop(0, blocks, add, sum_ref[...], unroll=unroll)

    @pl.when(k == pl.num_programs(2) - 1)
    def _end() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)
