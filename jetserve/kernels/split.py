"""Weights that several devices share, where each works on its own part (`jax.shard_map`). Knows no operation."""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jetserve.quantize.qarray import QArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitWeight:
    """A weight over several devices.

    Attributes:
      weight: of all of them together.
      experts, contracted, output: the mesh axes that split its matrices, their rows and their columns; None for none.
    """

    weight: QArray
    experts: str | None = dataclasses.field(default=None, metadata={"static": True})
    contracted: str | None = dataclasses.field(metadata={"static": True})
    output: str | None = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N), of all devices together."""
        return self.weight.shape

    @property
    def specs(self) -> QArray:
        """How each leaf of the weight is split, in its own structure."""
        weight = self.weight
        lead = (self.experts,) * (weight.values.ndim - (3 if weight.blockwise else 2))
        blocks = (self.contracted,) if weight.blockwise else ()
        rows = None if weight.blockwise else self.contracted
        values: Any = PartitionSpec(*lead, *blocks, rows, self.output)
        side: Any = PartitionSpec(*lead, *blocks, self.output)
        return dataclasses.replace(
            weight,
            values=values,
            scale=side,
            zero_point=None if weight.zero_point is None else side,
        )


def split(weight: QArray) -> QArray | SplitWeight:
    """The weight, or its shapes, with how devices share it; on one device as it is."""
    sharding = weight.values.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return weight
    matrix = 3 if weight.blockwise else 2
    ahead = weight.values.ndim - matrix
    axes = (*sharding.spec, *[None] * weight.values.ndim)
    return SplitWeight(
        weight=weight,
        experts=axes[0] if ahead else None,
        contracted=axes[ahead],
        output=axes[ahead + matrix - 1],
    )
