"""Attention over several devices: each attends with its own heads, for kernels that know of one device.

Is no implementation; those for TPUs share it.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from jetserve.kernels.attention import KVPages

HEADS = "tensor"
"""The mesh axis that splits heads."""


def on_own_heads(
    attend: Callable[..., jax.Array],
    q: jax.Array,
    pages: KVPages,
    slopes: jax.Array | None,
    *sequences: jax.Array,
) -> jax.Array:
    """attend(q [T, N, H], pages, slopes [N] or None, *sequences) of every device's part; the sequences are everyone's.

    Raises:
      NotImplementedError: if the devices do not divide the heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend(q, pages, slopes, *sequences)
    devices, N, K = mesh.shape[HEADS], q.shape[1], pages.values.shape[2] // 2
    if N % devices or K % devices:
        raise NotImplementedError(f"{N} query and {K} KV heads are no multiples of the {devices} devices")
    of_heads = PartitionSpec(None, HEADS)
    in_pages = PartitionSpec(None, None, HEADS)
    return jax.shard_map(
        attend,
        in_specs=(of_heads, in_pages, PartitionSpec(HEADS), *[PartitionSpec()] * len(sequences)),
        out_specs=of_heads,
        check_vma=False,
    )(q, pages, slopes, *sequences)
