"""Rounding to nearest: one weight at a time, a few rows at a time, needing no data.

Owns the bound on memory while a weight is rounded. The arithmetic is `qarray.quantize`'s.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.method_config import Clip
from jetserve.quantize import clipping
from jetserve.quantize.qarray import QArray, QuantizationConfig, dequantize, quantize

CHUNK_BYTES = 4 * 2**20
"""Of the float32 form of the rows taken at once: what stays in a processor's cache is rounded twice as fast."""


def quantize_matrix(
    read_rows: Callable[[int, int], np.ndarray],
    shape: tuple[int, int],
    config: QuantizationConfig,
    *,
    clip: Clip = Clip.NONE,
    name: str,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[QArray, float]:
    """Rounds a matrix that is read in Hugging Face's layout, the transpose of a QArray's.

    Args:
      read_rows: rows [start, stop) of the source, [n, K], any float dtype.
      shape: (N, K) of the source.
      config: its block size must divide K.
      clip: how scales are chosen.
      name: of the tensor, for errors.
      chunk_bytes: of float32 held at once.

    Returns:
      A QArray of numpy arrays with values in an int8 container, and the relative error: the Frobenius norm of what
      rounding changed over that of the matrix.

    Raises:
      ValueError: as `quantize` does, naming the tensor.
    """
    N, K = shape
    g = config.block_size
    values = np.empty((K, N) if g is None else (K // g, g, N), np.int8)
    scale = np.empty((N,) if g is None else (K // g, N), np.float32)
    zero_point = None if config.symmetric else np.empty_like(scale)
    step = max(1, chunk_bytes // (4 * K))
    squared_error = squared_norm = 0.0
    for start in range(0, N, step):
        rows = jnp.asarray(read_rows(start, min(start + step, N)))
        part = quantize(rows.T, config, name=name)
        if clip is Clip.MSE:
            part = clipping.with_best_scales(rows.T, part, config)
        errors = _squares(rows, part)
        squared_error += float(errors[0])
        squared_norm += float(errors[1])
        stop = start + rows.shape[0]
        values[..., start:stop] = part.values
        scale[..., start:stop] = part.scale
        if zero_point is not None:
            zero_point[..., start:stop] = part.zero_point
    error = math.sqrt(squared_error / squared_norm) if squared_norm else 0.0
    qarray = QArray(
        values=values,  # type: ignore[arg-type]
        scale=scale,  # type: ignore[arg-type]
        zero_point=zero_point,  # type: ignore[arg-type]
        block_size=g,
        quantize_activation=config.quantize_activation,
    )
    return qarray, error


@jax.jit
def _squares(rows: jax.Array, rounded: QArray) -> tuple[jax.Array, jax.Array]:
    """[n, K] -> the sums of squares of the rounding errors and of the weights."""
    w = rows.T.astype(jnp.float32)
    difference = dequantize(rounded) - w
    return jnp.sum(difference * difference), jnp.sum(w * w)
