"""GGUF's block formats Q4_0, Q4_1 and Q8_0 carried over exactly into quantized arrays in the matmul's form.

Owns the bytes of a block (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h); knows nothing of files or
names.

Letters: N output channels (rows), K contracted axis, G = K / 32 blocks of a row.
"""

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from jetserve.checkpoint.base import CheckpointError
from jetserve.quantize.qarray import QArray

BLOCK_SIZE = 32
"""Weights that share a scale, in all of these formats."""

CARRIED_BITS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q8_0: 8,
}

_BLOCK_BYTES = {
    GGMLQuantizationType.Q4_0: 2 + 16,  # d, nibbles
    GGMLQuantizationType.Q4_1: 2 + 2 + 16,  # d, m, nibbles
    GGMLQuantizationType.Q8_0: 2 + 32,  # d, int8
}


def carry_over(rows: np.ndarray, block_type: GGMLQuantizationType, *, name: str) -> QArray:
    """The rows of a matrix as a QArray with the same weights: uint8 [N, bytes of a row] -> values [G, 32, N].

    Q4_0 is `(q - 8) * d`, Q8_0 is `q * d`; d may be negative. Q4_1 is `q * d + m`, here `((q - 8) - (-8 - m / d)) * d`
    with the real zero point `-8 - m / d`. A block with d = 0 holds one constant: scale 1, values 0, zero point -m.

    Args:
      rows: the tensor's bytes.
      block_type: one of `CARRIED_BITS`.
      name: of the tensor, for errors.

    Returns:
      Numpy leaves: values int8 (from -8 to 7 for 4 bits), scale and zero point float32 [G, N].

    Raises:
      CheckpointError: if a scale or minimum is not finite.
    """
    blocks = rows.reshape(len(rows), -1, _BLOCK_BYTES[block_type])  # [N, G, bytes]
    scale: Any = _halves(blocks, 0, name)  # [G, N]
    constant = scale == 0
    zero_point: Any = None
    if block_type == GGMLQuantizationType.Q8_0:
        values: Any = _transposed(blocks[..., 2:]).view(np.int8)
    else:
        asymmetric = block_type == GGMLQuantizationType.Q4_1
        values = _unpacked_nibbles(blocks[..., 4 if asymmetric else 2 :])
        if asymmetric:
            minimum = _halves(blocks, 2, name)
            zero_point = np.where(constant, -minimum, -8 - minimum / np.where(constant, 1, scale))
    if constant.any():
        scale = np.where(constant, np.float32(1), scale)
        values *= ~constant[:, None, :]
    return QArray(values=values, scale=scale, zero_point=zero_point, block_size=BLOCK_SIZE)


def _halves(blocks: np.ndarray, offset: int, name: str) -> np.ndarray:
    """The float16 at a byte of every block, as float32: [N, G, bytes] -> [G, N]. Its subnormals are normal there."""
    raw = np.ascontiguousarray(blocks[..., offset : offset + 2])
    values = np.ascontiguousarray(raw.view(np.float16)[..., 0].T).astype(np.float32)
    if not np.isfinite(values).all():
        count = int((~np.isfinite(values)).sum())
        raise CheckpointError(f"{name} has {count} blocks whose scale or minimum is not finite; get the file again")
    return values


def _transposed(packed: np.ndarray) -> np.ndarray:
    """[N, G, bytes] -> contiguous [G, bytes, N]."""
    return np.ascontiguousarray(packed.transpose(1, 2, 0))


def _unpacked_nibbles(packed: np.ndarray) -> np.ndarray:
    """[N, G, 16] -> int8 [G, 32, N], -8 to 7: the low nibbles are a block's first half, the high ones its second."""
    turned = _transposed(packed)
    values = np.empty((turned.shape[0], BLOCK_SIZE, turned.shape[2]), np.uint8)
    np.bitwise_and(turned, 0x0F, out=values[:, : BLOCK_SIZE // 2])
    np.right_shift(turned, 4, out=values[:, BLOCK_SIZE // 2 :])
    values -= 8  # wraps, which is what int8 means by it
    return values.view(np.int8)
