"""For CPUs: the C++ kernel, which writes the pages in place and walks them with a running softmax."""

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.kernels import native
from jetserve.kernels.attention import KVPages, RaggedBatch

PLATFORMS = frozenset({"cpu"})
PRIORITY = 20

TARGETS = {jnp.dtype(jnp.float32): "f32", jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.int8): "s8"}
HEAD_SIZE_STEP = 8
"""Heads are read in vectors of this many floats."""


def run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KVPages]:
    """See the package."""
    native.require_one_device()
    if q.shape[-1] % HEAD_SIZE_STEP:
        raise NotImplementedError(f"head size {q.shape[-1]} is not a multiple of {HEAD_SIZE_STEP}")
    if pages.values.dtype not in TARGETS:
        raise NotImplementedError(f"pages of {pages.values.dtype} are not among {', '.join(map(str, TARGETS))}")
    by_head = [jnp.zeros(0, jnp.float32) if a is None else a.astype(jnp.float32) for a in (alibi_slopes, sinks)]
    page_scale = jnp.zeros(0, jnp.float32) if pages.scale is None else pages.scale
    call = jax.ffi.ffi_call(
        f"jetserve_attention_{TARGETS[pages.values.dtype]}",
        (
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct(pages.values.shape, pages.values.dtype),
            jax.ShapeDtypeStruct(page_scale.shape, jnp.float32),
        ),
        # An alias of no elements is a constant that XLA would copy.
        input_output_aliases={3: 1} if pages.scale is None else {3: 1, 4: 2},
    )
    floats = [a.astype(jnp.float32) for a in (q, k, v)]
    out, values, new_scale = call(
        *floats,
        pages.values,
        page_scale,
        batch.positions,
        batch.query_starts,
        batch.page_table,
        *by_head,
        factor=np.float32(scale),
        cap=np.float32(soft_cap or 0),
        window=sliding_window or 0,
    )
    return out.astype(q.dtype), KVPages(values=values, scale=None if pages.scale is None else new_scale)
