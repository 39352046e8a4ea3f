"""What would fit: the largest batch and cache of a plan, and the nearest plans that fit where one does not.

All by arithmetic over shapes, with what the compiler said a step needs besides; nothing is compiled.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jetserve.parallel.mesh import make_mesh
from jetserve.plan.chips import Topology, find_topology
from jetserve.plan.compile import TooBig
from jetserve.plan.config import PlanConfig
from jetserve.plan.estimate import bytes_per_token
from jetserve.plan.subject import Placed, Subject
from jetserve.quantize.qarray import QUANTIZE_TYPES

TEMP_SHARE = 0.03
"""Of a device's memory, assumed for a step that was not compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """Of a plan that does not fit: bytes a device that are missing, and changes of which each would make it fit."""

    missing_bytes: int
    changes: tuple[str, ...]


def largest(placed: Placed, limit_bytes: int, temp_bytes: int | None) -> dict[str, int]:
    """The largest batch at the plan's cache length, and the largest length at its batch; 0 where there is none."""
    temp = int(TEMP_SHARE * limit_bytes) if temp_bytes is None else temp_bytes
    engine, page_size = placed.config, placed.config.cache.page_size
    pages = int((limit_bytes - placed.weights_bytes - temp) / (bytes_per_token(placed) * page_size)) - 1
    length = pages // engine.max_sequences * page_size
    return {
        "largest_batch_size": max(0, pages // engine.pages_per_sequence),
        "largest_cache_length": max(0, min(length, placed.subject.config.max_position)),
    }


def advise(config: PlanConfig, topology: Topology, placed: Placed, failed: TooBig) -> Advice:
    """What would fit in place of a plan that does not."""
    return Advice(
        missing_bytes=failed.needed_bytes - failed.limit_bytes,
        changes=tuple(_changes(config, topology, placed, failed)),
    )


def _changes(config: PlanConfig, topology: Topology, placed: Placed, failed: TooBig) -> Iterator[str]:
    limit = failed.limit_bytes
    temp = max(failed.needed_bytes - placed.weights_bytes - placed.cache_bytes, int(TEMP_SHARE * limit))
    found = largest(placed, limit, temp)
    if found["largest_batch_size"]:
        yield f"--batch_size={found['largest_batch_size']}"
    if found["largest_cache_length"]:
        yield f"--max_cache_length={found['largest_cache_length']}"
    engine = config.engine
    if not engine.cache.quantize:
        small = dataclasses.replace(engine, cache=dataclasses.replace(engine.cache, quantize=True))
        if _needed(placed.subject.over(placed.mesh, small)) + temp <= limit:
            yield "--quantize_kv_cache"
    if config.checkpoint_path is None:
        for name in QUANTIZE_TYPES:
            other: dict[str, Any] = {"quantize_type": name, "block_size": None, "symmetric": None}
            subject = Subject.of(dataclasses.replace(config, **other))
            if name != placed.subject.quantize_type and _needed(subject.over(placed.mesh, engine)) + temp <= limit:
                yield f"--quantize_type={name}"
    for size in topology.chip.sizes:
        larger = find_topology(f"{topology.chip.name}:{size}")
        if len(larger.devices) > len(topology.devices):
            mesh = make_mesh(engine.mesh, larger.devices)
            if _needed(placed.subject.over(mesh, engine)) + temp <= limit:
                yield f"--topology={larger.name}"
                return


def _needed(placed: Placed) -> int:
    return placed.weights_bytes + placed.cache_bytes
