"""For CPUs: the C++ kernel over weights packed once.

Activations stay in float32, or are quantized to int8 where the weight asks for it: then with a scale for every 32 of
them, finer than the reference's scale a token. The layout is that of `native/quantized_matmul.cc`: tiles of `lanes`
columns, steps of 32 along K.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.kernels import native
from jetserve.quantize.qarray import QArray, Weight

PLATFORMS = frozenset({"cpu"})
PRIORITY = 20

STEP = 32
INT4_BIAS = 8
"""int4 values are stored unsigned, plus this."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A quantized matrix [K, N] as the kernel reads it.

    Attributes:
      values: uint8 [tiles, steps, bytes of a step].
      scale: float32 [tiles, G, lanes].
      offset: -scale * (zero point + bias), of the scale's shape; of no elements where all are 0.
      bits: 4 or 8.
      block_size: g; for per-channel weights the padded K.
      shape: (K, N), without padding.
      quantize_activation: whether activations are quantized to int8.
    """

    values: jax.Array
    scale: jax.Array
    offset: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    quantize_activation: bool = dataclasses.field(metadata={"static": True})

    @property
    def padded(self) -> int:
        """K with padding."""
        return self.values.shape[1] * STEP

    @property
    def lanes(self) -> int:
        return self.scale.shape[-1]


def prepare(weight: Weight) -> PackedWeight:
    """Packs a weight that is on one device."""
    lanes = native.lanes()
    if not isinstance(weight, QArray):
        raise NotImplementedError("the weight is not quantized")
    if len(weight.values.devices()) > 1:
        raise NotImplementedError("the weight is spread over several devices")
    if weight.values.ndim > (3 if weight.blockwise else 2):
        raise NotImplementedError("the weight has leading axes")
    if weight.block_size is not None and weight.block_size % STEP:
        raise NotImplementedError(f"block size {weight.block_size} is not a multiple of {STEP}")
    K, N = weight.shape
    tiles, padded = -(-N // lanes), -(-K // STEP) * STEP

    def tiled(a: np.ndarray) -> np.ndarray:
        """[…, N] -> [tiles, …, lanes], a copy."""
        a = np.pad(a.reshape(-1, N), ((0, 0), (0, tiles * lanes - N)))
        return np.ascontiguousarray(a.reshape(-1, tiles, lanes).swapaxes(0, 1))

    values = np.asarray(weight.values).astype(np.int8).reshape(K, N)
    scale = np.asarray(weight.scale, np.float32)
    shift = np.full_like(scale, INT4_BIAS if weight.bits == 4 else 0)
    if weight.zero_point is not None:
        shift += np.asarray(weight.zero_point, np.float32)
    offset = tiled(-scale * shift) if np.any(shift) else np.empty(0, np.float32)
    return PackedWeight(
        values=jnp.asarray(_pack(np.pad(values, ((0, padded - K), (0, tiles * lanes - N))), weight.bits, lanes)),
        scale=jnp.asarray(tiled(scale)),
        offset=jnp.asarray(offset),
        bits=weight.bits,
        block_size=weight.block_size or padded,
        shape=(K, N),
        quantize_activation=weight.quantize_activation,
    )


def _pack(values: np.ndarray, bits: int, lanes: int) -> np.ndarray:
    """int8 [K, N] -> uint8 [tiles, steps, bytes]."""
    K, N = values.shape
    if bits == 4:
        nibbles = (values + np.int8(INT4_BIAS)).view(np.uint8).reshape(K // STEP, 4, 2, 4, N // lanes, lanes)
        packed: np.ndarray = nibbles[:, :, 0] | nibbles[:, :, 1] << 4  # [steps, 4 vectors, 4 rows, tiles, lanes]
    else:
        packed = values.view(np.uint8).reshape(K // STEP, 8, 4, N // lanes, lanes)
    return np.ascontiguousarray(packed.transpose(3, 0, 1, 4, 2)).reshape(N // lanes, K // STEP, -1)


def run(x: jax.Array, w: Weight | PackedWeight, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """[..., K] x [K, N] -> [..., N] in `out_dtype` (x's unless given)."""
    if not isinstance(w, PackedWeight):
        raise NotImplementedError("the weight is not packed")
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    rows = jnp.pad(rows, ((0, 0), (0, w.padded - rows.shape[1])))
    result = jax.ShapeDtypeStruct((rows.shape[0], w.shape[1]), jnp.float32)
    y = jax.ffi.ffi_call("jetserve_quantized_matmul", result)(
        rows,
        w.values,
        w.scale,
        w.offset,
        bits=w.bits,
        block=w.block_size,
        quantize_activation=w.quantize_activation,
    )
    return y.reshape(*x.shape[:-1], w.shape[1]).astype(out_dtype or x.dtype)
