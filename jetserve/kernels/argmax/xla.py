"""The reference. A NaN makes the maximum one."""

import jax
import jax.numpy as jnp

PLATFORMS = None
PRIORITY = 0


def run(x: jax.Array) -> jax.Array:
    """See the package."""
    return jnp.where(jnp.isfinite(jnp.max(x, axis=-1)), jnp.argmax(x, axis=-1), -1).astype(jnp.int32)
