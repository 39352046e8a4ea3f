"""For CPUs: the C++ kernel over weights packed once.

Activations are quantized unless they are to stay exact: with a scale for every 32 of them, to int8 where they meet
4-bit weights, and to int16 where they meet 8-bit ones. The layout is that of `native/quantized_matmul.cc`: tiles of
`lanes` columns, steps of 32 along K.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.kernels import native
from jetserve.kernels.native.memory import Arena
from jetserve.quantize.qarray import QArray, Weight

PLATFORMS = frozenset({"cpu"})
PRIORITY = 20

STEP = 32
INT4_BIAS = 8
"""int4 values are stored unsigned, plus this."""
HALF_TOLERANCE = 2.0**-22
"""Relative. Scales and offsets that float16 holds up to the rounding of the float32 arithmetic that made them."""


_arena = Arena()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A quantized matrix [K, N] as the kernel reads it.

    Attributes:
      data: uint8 [tiles, bytes of a tile].
      bits: 4 or 8.
      block_size: g; for per-channel weights the padded K.
      shape: (K, N), without padding.
      is_half: whether scales and offsets are float16.
      has_offset: whether there are offsets, -scale * (zero point + bias). Weights of 4 bits have them.
      quantize_activation: whether activations are quantized.
    """

    data: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    is_half: bool = dataclasses.field(metadata={"static": True})
    has_offset: bool = dataclasses.field(metadata={"static": True})
    quantize_activation: bool = dataclasses.field(metadata={"static": True})

    @property
    def attributes(self) -> tuple[int, int, int, int]:
        """As the kernel takes them, `enum Attribute`."""
        return self.bits, self.block_size, int(self.is_half), int(self.has_offset)


def prepare(weight: Weight, *, exact_activations: bool = False) -> PackedWeight:
    """Packs a weight that is on one device."""
    lanes = native.lanes()
    if not isinstance(weight, QArray):
        raise NotImplementedError("the weight is not quantized")
    if len(weight.values.devices()) > 1:
        raise NotImplementedError("the weight is spread over several devices")
    if weight.values.ndim > (3 if weight.blockwise else 2):
        raise NotImplementedError("the weight has leading axes")
    if weight.input_order is not None:
        raise NotImplementedError("the weight takes its inputs in another order")
    if 0 in weight.shape:
        raise NotImplementedError("the weight is empty")
    if weight.block_size is not None and weight.block_size % STEP:
        raise NotImplementedError(f"block size {weight.block_size} is not a multiple of {STEP}")
    K, N = weight.shape
    tiles, padded = -(-N // lanes), -(-K // STEP) * STEP
    values = np.asarray(weight.values).astype(np.int8).reshape(K, N)
    values = np.pad(values, ((0, padded - K), (0, tiles * lanes - N)))
    scale = np.asarray(weight.scale, np.float32)
    shift = np.full_like(scale, INT4_BIAS if weight.bits == 4 else 0)
    if weight.zero_point is not None:
        shift += np.asarray(weight.zero_point, np.float32)
    heads = [scale, -scale * shift] if weight.bits == 4 or np.any(shift) else [scale]
    is_half = all(_fits_half(head) for head in heads)
    block_size = weight.block_size or padded
    blocks = padded // block_size

    def tiled(head: np.ndarray) -> np.ndarray:
        """[G, N] -> uint8 [tiles, G, bytes]."""
        head = np.pad(head.reshape(blocks, N), ((0, 0), (0, tiles * lanes - N)))
        head = head.reshape(blocks, tiles, lanes).astype(np.float16 if is_half else np.float32)
        return np.ascontiguousarray(head.swapaxes(0, 1)).view(np.uint8)

    packed = _pack(values, weight.bits, lanes).reshape(tiles, blocks, -1)
    data = np.concatenate([*(tiled(head) for head in heads), packed], axis=-1).reshape(tiles, -1)
    return PackedWeight(
        data=jax.device_put(_arena.copy(data), may_alias=True),
        bits=weight.bits,
        block_size=block_size,
        shape=(K, N),
        is_half=is_half,
        has_offset=len(heads) > 1,
        quantize_activation=weight.quantize_activation or not exact_activations,
    )


def _fits_half(a: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        half = a.astype(np.float16).astype(np.float32)
    return bool(np.all(np.abs(half - a) <= HALF_TOLERANCE * np.abs(a)))


def _pack(values: np.ndarray, bits: int, lanes: int) -> np.ndarray:
    """int8 [K, N] -> uint8 [tiles, steps, bytes]."""
    K, N = values.shape
    if bits == 4:
        nibbles = (values + np.int8(INT4_BIAS)).view(np.uint8).reshape(K // STEP, 4, 2, 4, N // lanes, lanes)
        packed: np.ndarray = nibbles[:, :, 0] | nibbles[:, :, 1] << 4  # [steps, 4 vectors, 4 rows, tiles, lanes]
    else:
        packed = values.view(np.uint8).reshape(K // STEP, 16, 2, N // lanes, lanes)
    return np.ascontiguousarray(packed.transpose(3, 0, 1, 4, 2)).reshape(N // lanes, K // STEP, -1)


def run(x: jax.Array, w: Weight | PackedWeight, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """[..., K] x [K, N] -> [..., N] in `out_dtype` (x's unless given)."""
    return multiply(x, [w], [None], out_dtype=out_dtype)[0]


def multiply(
    x: jax.Array,
    weights: Sequence[Weight | PackedWeight],
    biases: Sequence[jax.Array | None],
    *,
    out_dtype: jnp.dtype | None = None,
) -> list[jax.Array]:
    """x [..., K] times each of several weights [K, N] in one call, plus its bias [N] where it has one."""
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    if len(packed) < len(weights):
        raise NotImplementedError("the weight is not packed")
    if len({(w.quantize_activation, w.shape[0]) for w in packed}) > 1:
        raise NotImplementedError("the weights differ in how they take activations")
    K = packed[0].shape[0]
    missing = K - x.shape[-1]  # blocks of zeros may have been added to the weights
    if missing < 0 or any(missing % w.block_size for w in packed):
        raise ValueError(f"x has {x.shape[-1]} inputs; expected {K}, as the weight has rows")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
    rows = jnp.pad(rows, ((0, 0), (0, missing)))
    nothing = jnp.zeros(0, jnp.float32)
    operands = [
        operand
        for w, bias in zip(packed, biases, strict=True)
        for operand in (w.data, nothing if bias is None else bias.astype(jnp.float32))
    ]
    results = jax.ffi.ffi_call(
        "jetserve_quantized_matmul",
        [jax.ShapeDtypeStruct((rows.shape[0], w.shape[1]), jnp.float32) for w in packed],
    )(
        rows,
        *operands,
        attributes=np.array([w.attributes for w in packed], np.int64).reshape(-1),
        quantize_activation=packed[0].quantize_activation,
    )
    return [y.reshape(*x.shape[:-1], y.shape[-1]).astype(out_dtype or x.dtype) for y in results]
