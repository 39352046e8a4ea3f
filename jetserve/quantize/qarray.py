"""Quantized weights: what they are, how they are made by rounding, how they are turned back into floats.

Owns `QuantizationConfig` (what is wanted) and `QArray` (what is there). Knows nothing of models, files or devices;
matmuls over these arrays live in `kernels.quantized_matmul`.

Letters: K contracted axis, N output axis, g block size along K, G = K / g blocks.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DEFAULT_BLOCK_SIZE = 128
BLOCK_SIZE_MULTIPLE = 32

INTEGER_RANGE = {4: (-8, 7), 8: (-128, 127)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """How weights are to be quantized.

    Attributes:
      bits: 4 or 8.
      block_size: weights along K that share a scale; None shares one over the whole of K (per-channel).
      symmetric: whether the zero point is 0 for all.
      quantize_activation: whether matmuls quantize their other operand to int8, per token, as they run (W8A8, W4A8).
    """

    bits: int
    block_size: int | None = None
    symmetric: bool = True
    quantize_activation: bool = False

    def __post_init__(self) -> None:
        if self.bits not in INTEGER_RANGE:
            raise ValueError(f"bits is {self.bits!r}; expected 4 or 8")
        if self.block_size is not None:
            valid = isinstance(self.block_size, int) and not isinstance(self.block_size, bool) and self.block_size > 0
            if not valid or self.block_size % BLOCK_SIZE_MULTIPLE:
                raise ValueError(
                    f"block_size is {self.block_size!r}; expected a positive multiple of {BLOCK_SIZE_MULTIPLE}"
                    f" such as {DEFAULT_BLOCK_SIZE}"
                )

    @classmethod
    def from_name(
        cls,
        name: str,
        *,
        block_size: int | None = None,
        symmetric: bool = True,
        quantize_activation: bool = False,
    ) -> "QuantizationConfig":
        """The config of one of `QUANTIZE_TYPES`, such as "int4_blockwise" (block size 128 unless given).

        Raises:
          ValueError: if the name is unknown, or a block size is given to a per-channel type.
        """
        if name not in QUANTIZE_TYPES:
            raise ValueError(f"quantize type is {name!r}; expected one of {', '.join(QUANTIZE_TYPES)}")
        bits, form = name.removeprefix("int").split("_", 1)
        if form == "per_channel":
            if block_size is not None:
                raise ValueError(f"block_size is {block_size}, but {name} has one scale a channel; drop one of the two")
        elif block_size is None:
            block_size = DEFAULT_BLOCK_SIZE
        return cls(bits=int(bits), block_size=block_size, symmetric=symmetric, quantize_activation=quantize_activation)

    @property
    def name(self) -> str:
        """One of `QUANTIZE_TYPES`."""
        return f"int{self.bits}_{'per_channel' if self.block_size is None else 'blockwise'}"

    def for_contracted_size(self, size: int) -> "QuantizationConfig":
        """This config with the block size that a weight with `size` contracted elements really gets.

        A block size that does not divide `size` becomes the largest multiple of 32 up to it that does (576: 96).

        Raises:
          ValueError: if no multiple of 32 divides `size`.
        """
        if self.block_size is None or size % self.block_size == 0:
            return self
        for block_size in range(min(self.block_size, size) // 32 * 32, 0, -BLOCK_SIZE_MULTIPLE):
            if size % block_size == 0:
                return dataclasses.replace(self, block_size=block_size)
        raise ValueError(
            f"no block size up to {self.block_size} that is a multiple of {BLOCK_SIZE_MULTIPLE} divides the contracted"
            f" size {size}; use a per-channel type for this weight"
        )


QUANTIZE_TYPES = ("int8_per_channel", "int4_per_channel", "int8_blockwise", "int4_blockwise")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QArray:
    """A quantized matrix W [K, N] in the form that its matmul reads: `W = (values - zero_point) * scale`.

    With an input order, row i of that is row `input_order[i]` of W, so that blocks are rows that lie apart in W (GPTQ's
    act-order). Then `x @ W` is `x[..., input_order]` times the rows as they are held.

    Attributes:
      values: int4 or int8; per-channel `[K, N]`, blockwise `[G, g, N]`. Further axes may lead (experts).
      scale: float; per-channel `[N]`, blockwise `[G, N]`. Never zero, never non-finite.
      zero_point: of the scale's shape and dtype, integer-valued or real; None means 0.
      block_size: g, or None for per-channel (with leading axes the shapes alone do not tell).
      input_order: int32 [K], a permutation; None where rows are held in W's order.
      quantize_activation: whether matmuls quantize their other operand to int8, per token, as they run.

    The leaves may also be numpy arrays, `jax.ShapeDtypeStruct`s or shardings: the class checks nothing at construction
    because jax builds such trees; `check` does.
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    input_order: jax.Array | None = None
    block_size: int | None = dataclasses.field(default=None, metadata={"static": True})
    quantize_activation: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def blockwise(self) -> bool:
        return self.block_size is not None

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == jnp.int4 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        K = self.values.shape[-2] * (self.values.shape[-3] if self.blockwise else 1)
        return K, self.values.shape[-1]

    @property
    def config(self) -> QuantizationConfig:
        return QuantizationConfig(
            bits=self.bits,
            block_size=self.block_size,
            symmetric=self.zero_point is None,
            quantize_activation=self.quantize_activation,
        )

    def columns(self, index: Any) -> "QArray":
        """Those of some outputs, a slice or indices: [K, N] -> [K, n]. The input order is that of all of them."""
        cut = jax.tree.map(lambda leaf: leaf[..., index], dataclasses.replace(self, input_order=None))
        return dataclasses.replace(cut, input_order=self.input_order)

    @property
    def size_in_bits(self) -> int:
        """Bits that all leaves hold (`nbytes` counts an int4 as a byte)."""
        side = [leaf for leaf in (self.scale, self.zero_point, self.input_order) if leaf is not None]
        return self.values.size * self.bits + sum(a.size * a.dtype.itemsize * 8 for a in side)

    def check(self) -> None:
        """Checks the invariants of shape and dtype.

        Raises:
          ValueError: naming what does not fit.
        """
        if self.values.dtype not in (jnp.int4, jnp.int8):
            raise ValueError(f"values have dtype {self.values.dtype}; expected int4 or int8")
        if self.blockwise and self.values.shape[-2] != self.block_size:
            raise ValueError(f"values have shape {self.values.shape}; expected [G, {self.block_size}, N]")
        expected = self.values.shape[:-2] + self.values.shape[-1:]
        if self.scale.shape != expected:
            raise ValueError(
                f"scale has shape {self.scale.shape} beside values {self.values.shape}; expected {expected}"
            )
        if self.zero_point is not None and self.zero_point.shape != self.scale.shape:
            raise ValueError(f"zero_point has shape {self.zero_point.shape}; expected the scale's, {self.scale.shape}")
        if self.input_order is not None and self.input_order.shape != self.shape[:1]:
            raise ValueError(f"input_order has shape {self.input_order.shape}; expected {self.shape[:1]}")


Weight = jax.Array | QArray


def by_expert(weight: Any, experts: int) -> Any:
    """A weight of several experts, [K, E * N], with their axis ahead, [E, K, N], whether plain or quantized."""

    def ahead(leaf: Any) -> Any:
        return xp.moveaxis(leaf.reshape(*leaf.shape[:-1], experts, -1), -2, 0)

    xp = np if isinstance(jax.tree.leaves(weight)[0], np.ndarray) else jnp
    return jax.tree.map(ahead, weight)


def fit_range(
    w: jax.Array, config: QuantizationConfig, *, scale_dtype: jnp.dtype = jnp.float32, shrink: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array | None]:
    """The scale and zero point that let the integers span the range of every group of weights.

    Args:
      w: float32 [..., g, N], groups along g.
      config: its bits and symmetry.
      scale_dtype: the scale is rounded to it before the zero point is computed from it.
      shrink: of the range, at most 1, [..., N] or a scalar; what lies outside will be clipped.

    Returns:
      scale [..., N] in `scale_dtype`, 1 for a range of zero; zero point float32 [..., N], or None if symmetric.
    """
    low, high = INTEGER_RANGE[config.bits]
    if config.symmetric:
        # From -absmax to absmax even where all weights have one sign.
        value_range, steps = jnp.max(jnp.abs(w), axis=-2) * shrink, high
        lowest = None
    else:
        # The range always holds 0.0, so that 0.0 stays exact and the zero point fits the integers.
        lowest = jnp.minimum(jnp.min(w, axis=-2), 0.0) * shrink
        value_range, steps = jnp.maximum(jnp.max(w, axis=-2), 0.0) * shrink - lowest, high - low
    scale = jnp.where(value_range == 0, 1.0, value_range / steps).astype(scale_dtype)
    return scale, None if lowest is None else jnp.round(low - lowest / scale.astype(jnp.float32))


def round_to(w: jax.Array, scale: jax.Array, zero_point: jax.Array | None, bits: int) -> jax.Array:
    """The nearest integers, half to even, as float32: w [..., g, N] with scale and zero point [..., N]."""
    shifted = w / jnp.expand_dims(scale.astype(jnp.float32), -2)
    if zero_point is not None:
        shifted += jnp.expand_dims(zero_point, -2)
    return jnp.clip(jnp.round(shifted), *INTEGER_RANGE[bits])


@functools.partial(jax.jit, static_argnames=("config", "scale_dtype"))
def _round_to_nearest(w: jax.Array, config: QuantizationConfig, scale_dtype: jnp.dtype) -> tuple[QArray, jax.Array]:
    """[K, N] -> (QArray in an int8 container, whether every scale is usable)."""
    w = w.astype(jnp.float32)
    if config.block_size is not None:
        w = w.reshape(-1, config.block_size, w.shape[-1])  # [G, g, N]
    scale, zero_point = fit_range(w, config, scale_dtype=scale_dtype)
    # A subnormal scale counts as underflowed: devices flush it to zero, and its reciprocal overflows. They flush
    # subnormal weights too, whose range then looks like that of zeros; their bits tell.
    zero = jnp.max(jnp.abs(w), axis=-2) == 0
    flushed = zero & jnp.any(jax.lax.bitcast_convert_type(w, jnp.uint32) << 1 != 0, axis=-2)
    usable = jnp.all(jnp.isfinite(scale) & (scale >= jnp.finfo(scale_dtype).tiny) & ~flushed)
    qarray = QArray(
        values=round_to(w, scale, zero_point, config.bits).astype(jnp.int8),
        scale=scale,
        zero_point=None if zero_point is None else zero_point.astype(scale_dtype),
        block_size=config.block_size,
        quantize_activation=config.quantize_activation,
    )
    return qarray, usable


def quantize(
    w: jax.Array, config: QuantizationConfig, *, scale_dtype: jnp.dtype = jnp.float32, name: str = "weight"
) -> QArray:
    """Rounds a float matrix to the nearest quantized one (half to even, in float32 arithmetic).

    Args:
      w: [K, N], any float dtype.
      config: its block size must divide K (see `for_contracted_size`).
      scale_dtype: the scale is rounded to it *before* the values are computed from it.
      name: of the tensor, for errors.

    Returns:
      A QArray whose values are in an int8 container even for 4 bits; `cast_values` makes them int4.

    Raises:
      ValueError: for a matrix of the wrong rank or of no floats, a block size that does not divide K, NaN or infinite
        weights, and ranges so small that a scale underflows.
    """
    if w.ndim != 2:
        raise ValueError(f"{name} has shape {w.shape}; expected a matrix [K, N]")
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {w.dtype}; expected floats, such as float32 or bfloat16")
    if config.block_size is not None and w.shape[0] % config.block_size:
        raise ValueError(
            f"{name} has {w.shape[0]} contracted elements, which block size {config.block_size} does not divide"
        )
    qarray, usable = _round_to_nearest(w, config, jnp.dtype(scale_dtype))
    if not bool(usable):
        finite = bool(jnp.all(jnp.isfinite(w.astype(jnp.float32))))
        reason = (
            f"has a scale that underflows or overflows {jnp.dtype(scale_dtype).name}"
            if finite
            else "holds NaN or infinite values"
        )
        raise ValueError(f"{name} {reason}; it cannot be quantized to {config.name}. Check the source checkpoint")
    return qarray


def cast_values(qarray: QArray, bits: int, *, name: str = "weight") -> QArray:
    """The same array with its int8 container cast to the true integer type, checked before.

    Raises:
      ValueError: if a value does not fit `bits`: `astype(int4)` would wrap it without a word (127 -> -1).
    """
    if bits == 8 or qarray.values.dtype == jnp.int4:
        return qarray
    low, high = INTEGER_RANGE[bits]
    found = jnp.min(qarray.values), jnp.max(qarray.values)
    if int(found[0]) < low or int(found[1]) > high:
        raise ValueError(
            f"{name} holds values from {int(found[0])} to {int(found[1])}, but int{bits} holds {low} to {high}: this is"
            " an int8 tensor under an int4 name. Load it as int8, or convert it from its source again"
        )
    return dataclasses.replace(qarray, values=qarray.values.astype(jnp.int4))


def dequantize(qarray: QArray, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """W as a plain matrix [..., K, N], computed in float32."""
    w = qarray.values.astype(jnp.float32)
    if qarray.zero_point is not None:
        w -= jnp.expand_dims(qarray.zero_point.astype(jnp.float32), -2)
    w *= jnp.expand_dims(qarray.scale.astype(jnp.float32), -2)
    if qarray.blockwise:
        w = w.reshape(*w.shape[:-3], -1, w.shape[-1])
    if qarray.input_order is not None:
        w = jnp.zeros_like(w).at[..., qarray.input_order, :].set(w)
    return w.astype(dtype)


def quantize_activation(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 per token: [..., K] -> values int8 [..., K], scale float32 [..., 1] (1 for rows of zeros)."""
    x = x.astype(jnp.float32)
    range_ = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.where(range_ == 0, 1.0, range_ / 127)
    return jnp.round(x / scale).astype(jnp.int8), scale
