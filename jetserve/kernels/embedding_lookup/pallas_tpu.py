"""For TPUs: columns of a weight that `quantized_matmul/pallas_tpu.py` keeps in its own form."""

import jax
import jax.numpy as jnp

from jetserve.kernels.embedding_lookup import xla
from jetserve.kernels.split import SplitWeight
from jetserve.quantize.qarray import Weight

PLATFORMS = frozenset({"tpu"})
PRIORITY = 20


def run(ids: jax.Array, w: Weight | SplitWeight, *, dtype: jnp.dtype) -> jax.Array:
    """[T], [D, V] -> [T, D]."""
    if not isinstance(w, SplitWeight):
        raise NotImplementedError("the weight is as XLA takes it")
    return xla.run(ids, w.weight, dtype=dtype)
