"""Rotary position embedding and its scalings; `kernels/rope` says how heads are rotated."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.kernels import select


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotation of pairs of channels: `inverse_frequencies` in radians a position, one a pair.

    Where there are fewer than H/2, only the first channels of a head are rotated, two for each of them.
    """

    inverse_frequencies: tuple[float, ...]

    @classmethod
    def from_hf(cls, head_size: int, theta: float, scaling: Mapping[str, Any] | None) -> "Rope":
        """From `rope_theta` and `rope_scaling` of a Hugging Face config, for the channels of a head that are rotated.

        Raises:
          ValueError: for a scaling that is not built, naming it, and for heads that do not split into pairs.
        """
        if head_size % 2:
            raise ValueError(f"head_dim is {head_size}; expected an even number, of channels rotated in pairs")
        frequencies = theta ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
        if scaling is None or kind == "default":
            pass
        elif kind == "linear":
            frequencies = frequencies / scaling["factor"]
        elif kind == "llama3":
            frequencies = _llama3(frequencies, scaling)
        elif kind == "precomputed":
            frequencies = frequencies / np.asarray(scaling["factors"], np.float64)
        else:
            raise ValueError(f"rope scaling is {kind!r}; expected default, linear or llama3 (others are not built)")
        return cls(inverse_frequencies=tuple(frequencies.tolist()))

    def __call__(self, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotates q [T, N, H] and k [T, K, H] by positions [T]."""
        rotated = 2 * len(self.inverse_frequencies)
        frequencies = jnp.asarray(self.inverse_frequencies, jnp.float32)
        if rotated == q.shape[-1]:
            return select.call("rope", q, k, positions, frequencies)
        first = select.call("rope", q[..., :rotated], k[..., :rotated], positions, frequencies)
        q, k = (jnp.concatenate([x, y[..., rotated:]], axis=-1) for x, y in zip(first, (q, k), strict=True))
        return q, k


def _llama3(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Llama 3.1's: long wavelengths slowed by the factor, short ones kept, those between blended."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = original * frequencies / (2 * math.pi)
    blend = np.clip((rotations - low) / (high - low), 0, 1)
    return frequencies / scaling["factor"] * (1 - blend) + frequencies * blend
