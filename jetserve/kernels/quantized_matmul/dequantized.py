"""For CPUs without a kernel of their own: weights dequantized to float32 once at load.

XLA's CPU backend converts integer weights element by element on every call, which costs 10 to 20 times the float32
matmul, so the memory that quantization saves is spent here to get the speed back.
"""

import jax
import jax.numpy as jnp

from jetserve.kernels.quantized_matmul import xla
from jetserve.quantize.qarray import QArray, Weight, dequantize

PLATFORMS = frozenset({"cpu"})
PRIORITY = 10


def prepare(weight: Weight, *, exact_activations: bool = False) -> jax.Array:
    """float32 [K, N]; activations stay exact in any case."""
    del exact_activations
    if not isinstance(weight, QArray):
        return weight
    if weight.quantize_activation:
        raise NotImplementedError("activations are to be quantized, which takes integer weights")
    return _dequantize(weight)


_dequantize = jax.jit(dequantize)


def run(x: jax.Array, w: Weight, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """[..., K] x [K, N] -> [..., N]."""
    if isinstance(w, QArray):
        raise NotImplementedError("the weight is not dequantized")
    # Blocks of zeros may have been added to w.
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, w.shape[0] - x.shape[-1])])
    return xla.run(x, w, out_dtype=out_dtype)
