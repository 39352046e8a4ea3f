"""For CPUs: columns of a weight that `quantized_matmul/cpu.py` packed."""

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.kernels.quantized_matmul.cpu import PackedWeight
from jetserve.quantize.qarray import Weight

PLATFORMS = frozenset({"cpu"})
PRIORITY = 20


def run(ids: jax.Array, w: Weight | PackedWeight, *, dtype: jnp.dtype) -> jax.Array:
    """[T], [D, V] -> [T, D]."""
    if not isinstance(w, PackedWeight):
        raise NotImplementedError("the weight is not packed")
    K, N = w.shape
    rows = jax.ffi.ffi_call("jetserve_embedding_lookup", jax.ShapeDtypeStruct((ids.shape[0], K), jnp.float32))(
        ids.astype(jnp.int32), w.data, attributes=np.array(w.attributes, np.int64), columns=np.int64(N)
    )
    return rows.astype(dtype)
