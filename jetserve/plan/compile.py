"""Compiles a step for devices that are not there, and reads from the compiler what it takes.

Knows nothing of what fits is worth, or of prices.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jetserve.engine.step import empty_batch
from jetserve.kernels import select
from jetserve.kernels.attention.xla import KV_CHUNK
from jetserve.plan import hlo
from jetserve.plan.subject import Placed

_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
DEPTHS = (1, 2)
"""Layers of the programs that are compiled in place of one with all layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What the compiler says of one step.

    Attributes:
      tokens, sequences: of the batch.
      argument_bytes: of weights, pages and the batch, as a device lays them out.
      temp_bytes: of what a step needs besides, and what it returns without the pages, which it updates in place.
      collectives: how many of each kind.
      collective_bytes: that a device sends for them in all.
      cycles: that the compiler expects, without
      kernel_bytes: that kernels read of which it knows no cycles.
    """

    tokens: int
    sequences: int
    argument_bytes: int
    temp_bytes: int
    collectives: Mapping[str, int]
    collective_bytes: float
    cycles: int
    kernel_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TooBig:
    """A step whose program the devices cannot hold, in bytes a device."""

    needed_bytes: int
    limit_bytes: int


def lower(placed: Placed, *, tokens: int, sequences: int, decode: bool) -> jax.stages.Lowered:
    """A step of one shape, for the platform of its devices."""
    everywhere = NamedSharding(placed.mesh, PartitionSpec())
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
        empty_batch(placed.config, tokens, sequences, 1 if decode else tokens),
    )
    with select.platform(placed.mesh.devices.flat[0].platform):
        return placed.step().lower(placed.cache, batch)


def compile_step(placed: Placed, *, tokens: int, sequences: int, decode: bool) -> Program | TooBig:
    """Compiles a step of one shape with all its layers.

    Raises:
      jax.errors.JaxRuntimeError: if the compiler fails for another reason than memory.
    """
    lowered = lower(placed, tokens=tokens, sequences=sequences, decode=decode)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = _OUT_OF_MEMORY.search(str(error))
        if found is None:
            raise
        needed, unit, limit, limit_unit = found.groups()
        return TooBig(needed_bytes=_bytes(needed, unit), limit_bytes=_bytes(limit, limit_unit))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    found_collectives = hlo.collectives(text)
    return Program(
        tokens=tokens,
        sequences=sequences,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=dict(collections.Counter(c.kind for c in found_collectives)),
        collective_bytes=sum(c.bytes_sent(placed.mesh.size) for c in found_collectives),
        cycles=hlo.cycles(text, unknown_trips=-(-placed.config.max_length // KV_CHUNK)),
        kernel_bytes=hlo.kernel_bytes(text),
    )


def compile_layers(placed: Placed, *, tokens: int, sequences: int, decode: bool) -> Program | TooBig:
    """The same from programs with one and with two layers: what the second adds, every further one does.

    Layers are alike, and the compiler takes a minute for ten of them. What a layer needs besides its arguments, the
    next one uses again.
    """
    layers = placed.subject.config.num_layers
    if layers <= max(DEPTHS):
        return compile_step(placed, tokens=tokens, sequences=sequences, decode=decode)
    programs = []
    for depth in DEPTHS:
        program = compile_step(placed.with_layers(depth), tokens=tokens, sequences=sequences, decode=decode)
        if isinstance(program, TooBig):
            return program
        programs.append(program)
    one, two = programs
    more = layers - 2

    def grown(small: float, large: float) -> int:
        return round(large + (large - small) * more)

    kinds = sorted({*one.collectives, *two.collectives})
    return dataclasses.replace(
        two,
        argument_bytes=grown(one.argument_bytes, two.argument_bytes),
        temp_bytes=max(one.temp_bytes, two.temp_bytes),
        collectives={kind: grown(one.collectives.get(kind, 0), two.collectives.get(kind, 0)) for kind in kinds},
        collective_bytes=grown(one.collective_bytes, two.collective_bytes),
        cycles=grown(one.cycles, two.cycles),
        kernel_bytes=grown(one.kernel_bytes, two.kernel_bytes),
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNIT[unit])
