"""The reference, in float32."""

import jax
import jax.numpy as jnp

PLATFORMS = None
PRIORITY = 0


def run(
    q: jax.Array, k: jax.Array, positions: jax.Array, inverse_frequencies: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]  # [T, 1, H/2]

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    return rotate(q), rotate(k)
