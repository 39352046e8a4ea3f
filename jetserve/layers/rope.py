"""Rotary position embedding and its scalings; `kernels/rope` says how heads are rotated."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.kernels import select

POSITIVE = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Of a config's rope parameters, those that are divided by or taken to a power."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotation of pairs of channels: `inverse_frequencies` in radians a position, one a pair.

    Where there are fewer than H/2, only the first channels of a head are rotated, two for each of them. What is rotated
    is multiplied by `magnitude`.
    """

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0

    @classmethod
    def from_hf(cls, head_size: int, theta: float, scaling: Mapping[str, Any] | None) -> "Rope":
        """From `rope_theta` and `rope_scaling` of a Hugging Face config, for the channels of a head that are rotated.

        Raises:
          ValueError: for a scaling that is not built, naming it, and for heads that do not split into pairs.
        """
        if head_size % 2:
            raise ValueError(f"head_dim is {head_size}; expected an even number, of channels rotated in pairs")
        for name, value in {"rope_theta": theta, **(scaling or {})}.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in POSITIVE and value is not None and not (is_number and 0 < value < math.inf):
                raise ValueError(f"the model's config has {name}={value!r} for its rotation; expected a number above 0")
        frequencies = theta ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
        magnitude = 1.0
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
        if scaling is None or kind == "default":
            pass
        elif kind == "linear":
            frequencies = frequencies / scaling["factor"]
        elif kind == "llama3":
            frequencies = _llama3(frequencies, scaling)
        elif kind == "yarn":
            frequencies, magnitude = _yarn(frequencies, theta, scaling)
        elif kind == "precomputed":
            frequencies = frequencies / np.asarray(scaling["factors"], np.float64)
        else:
            raise ValueError(
                f"rope scaling is {kind!r}; expected default, linear, llama3 or yarn (others are not built)"
            )
        return cls(inverse_frequencies=tuple(frequencies.tolist()), magnitude=magnitude)

    def __call__(self, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotates q [T, N, H] and k [T, K, H] by positions [T]."""
        rotated = 2 * len(self.inverse_frequencies)
        if rotated == q.shape[-1]:
            return self._rotate(q, k, positions)
        first = self._rotate(q[..., :rotated], k[..., :rotated], positions)
        q, k = (jnp.concatenate([x, y[..., rotated:]], axis=-1) for x, y in zip(first, (q, k), strict=True))
        return q, k

    def _rotate(self, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k = select.call("rope", q, k, positions, jnp.asarray(self.inverse_frequencies, jnp.float32))
        return (q, k) if self.magnitude == 1.0 else (q * self.magnitude, k * self.magnitude)


def _llama3(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Llama 3.1's: long wavelengths slowed by the factor, short ones kept, those between blended."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if low >= high:
        raise ValueError(f"rope's low_freq_factor is {low} and its high_freq_factor {high}; expected less and more")
    rotations = original * frequencies / (2 * math.pi)
    blend = np.clip((rotations - low) / (high - low), 0, 1)
    return frequencies / scaling["factor"] * (1 - blend) + frequencies * blend


def _yarn(frequencies: np.ndarray, theta: float, scaling: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """YaRN's (Peng et al. 2023): pairs that turn seldom within the original length slowed, those that turn often kept.

    Returns the frequencies, and the magnitude that sharpens attention.
    """
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    size = 2 * len(frequencies)

    def pair(rotations: float) -> float:
        """Which one turns so many times."""
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    slowed = np.clip((np.arange(len(frequencies)) - low) / ((high - low) or 1e-3), 0, 1)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    found = scaling.get("attention_factor")
    if found is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        found = magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return frequencies / factor * slowed + frequencies * (1 - slowed), magnitude(1.0) if found is None else found
