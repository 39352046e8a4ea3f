"""How fast a step can be at best, by what it must read, compute and send; and what a budget of memory holds.

A roofline: no step is faster, and real ones are slower. Knows nothing of compilers.
"""

import dataclasses

from jetserve.plan.chips import Chip
from jetserve.plan.subject import Placed

SCORES_AND_VALUES = 2
"""Matmuls of attention."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of a step on each of a device's means. The sum of traffic and the slower of the other two is the step's.

    Attributes:
      memory: reading the weights once, and every sequence's keys and values at their full length.
      compute: multiplications.
      links: what collectives send, at the bandwidth of all links together.
    """

    memory: float
    compute: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute) + self.links


def roofline(
    placed: Placed, chip: Chip, *, tokens: int, sequences: int, kv_length: int, collective_bytes: float
) -> Roofline:
    """Of a step of `tokens` tokens of `sequences` sequences with `kv_length` keys each."""
    integers = any(config is not None and config.quantize_activation for config in placed.subject.quantization.values())
    rate = chip.int8_ops_per_second if integers else chip.bf16_ops_per_second
    model = placed.subject.config
    devices = placed.mesh.shape["tensor"]
    operations = 2 * (placed.matmul_weights * tokens + placed.head_weights * sequences)
    heads = model.sizes["N"] / devices
    attention = SCORES_AND_VALUES * 2 * tokens * kv_length * heads * model.head_size * model.num_layers
    attention /= chip.bf16_ops_per_second
    cache = sequences * kv_length * bytes_per_token(placed) / chip.hbm_bytes_per_second
    return Roofline(
        memory=placed.bytes_read / chip.hbm_bytes_per_second + cache,
        compute=operations / rate + attention,
        links=collective_bytes / chip.ici_bytes_per_second,
    )


def bytes_per_token(placed: Placed) -> float:
    """Of the cache, on a device."""
    pages = placed.config.num_pages + 1
    return placed.cache_bytes / (pages * placed.config.cache.page_size)
