"""Over several devices: each multiplies rows with its own part of the experts, and what is split is summed once.

Left to itself, XLA gathers experts whose blocks are split: it does not see that a loop over blocks can be each
device's own.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jetserve.kernels.grouped_matmul import xla
from jetserve.kernels.split import SplitWeight, split
from jetserve.quantize.qarray import QArray, Weight

PLATFORMS = None
PRIORITY = 10


def prepare(weight: Weight, *, exact_activations: bool = False) -> Weight | SplitWeight:
    """The weight as it is, and how devices share it."""
    del exact_activations  # they are left as they are unless the weight says otherwise
    return split(weight) if isinstance(weight, QArray) else weight


def run(
    x: jax.Array, w: Weight | SplitWeight, group_sizes: jax.Array, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """See the package."""
    return apart(xla.run, x, w, group_sizes, out_dtype=out_dtype)


def apart(
    on_one_device: Callable[..., jax.Array],
    x: jax.Array,
    w: Weight | SplitWeight,
    group_sizes: jax.Array,
    *,
    out_dtype: jnp.dtype | None,
) -> jax.Array:
    """The operation, by one that takes what a device holds: (x, weight, group_sizes, *, out_dtype)."""
    out_dtype = out_dtype or x.dtype
    if not isinstance(w, SplitWeight):
        return on_one_device(x, w, group_sizes, out_dtype=out_dtype)
    x = jnp.pad(x, ((0, 0), (0, w.shape[0] - x.shape[1])))  # blocks of zeros may have been added to w
    weight = w.weight
    if weight.quantize_activation:
        # By whole rows, before they are split.
        x, weight = xla.rounded(x), dataclasses.replace(weight, quantize_activation=False)
    multiply = functools.partial(on_one_device, out_dtype=out_dtype)

    def part(x: jax.Array, weight: QArray, group_sizes: jax.Array) -> jax.Array:
        if w.experts is None:
            y = multiply(x, weight, group_sizes)
        else:
            y = _own_experts(multiply, x, weight, group_sizes, w.experts)
        summed = tuple(axis for axis in (w.experts, w.contracted) if axis is not None)
        return jax.lax.psum(y, summed) if summed else y

    return jax.shard_map(
        part,
        in_specs=(PartitionSpec(None, w.contracted), w.specs, PartitionSpec()),
        out_specs=PartitionSpec(None, w.output),
        check_vma=False,
    )(x, weight, group_sizes)


def _own_experts(
    multiply: Callable[..., jax.Array], x: jax.Array, weight: QArray, group_sizes: jax.Array, axis: str
) -> jax.Array:
    """Of a device that holds some of the experts: what they make of their rows, and zeros for the rows of others."""
    count = weight.values.shape[0]
    first = jax.lax.axis_index(axis) * count
    own = jax.lax.dynamic_slice_in_dim(group_sizes, first, count)
    start = jnp.sum(jnp.where(jnp.arange(group_sizes.shape[0]) < first, group_sizes, 0))
    y = multiply(jnp.roll(x, -start, axis=0), weight, own)  # its rows come first
    y = jnp.where(jnp.arange(x.shape[0])[:, None] < jnp.sum(own), y, 0)
    return jnp.roll(y, start, axis=0)
