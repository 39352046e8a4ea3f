"""For CPUs: one call, which takes each angle's sine and cosine once, where XLA takes them for every head."""

import jax
import jax.numpy as jnp

from jetserve.kernels import native

PLATFORMS = frozenset({"cpu"})
PRIORITY = 20


def run(
    q: jax.Array, k: jax.Array, positions: jax.Array, inverse_frequencies: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    native.require_one_device()
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, k)]
    call = jax.ffi.ffi_call("jetserve_rope", results)
    rotated = call(q.astype(jnp.float32), k.astype(jnp.float32), positions, inverse_frequencies.astype(jnp.float32))
    return rotated[0].astype(q.dtype), rotated[1].astype(k.dtype)
