"""What is published of each TPU, as one table, and the device topologies that libtpu compiles for.

Numbers are a *device's*, as jax counts them: a chip, but for tpu7x, whose chips are two devices. Knows nothing of
models.
"""

import dataclasses
import importlib.util
import math

import jax
from jax.experimental import topologies

GIB = 2**30
EXTRA = "pip install 'jetserve[tpu]'"
CHIPS_OF_A_HOST = 4
"""libtpu takes whole hosts unless told that they are smaller."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Published peaks of one device.

    Attributes:
      name: as topologies begin, "v5e".
      devices: that jax sees of one chip.
      hbm_bytes: that the compiler lets a program use, by the message of one that does not fit.
      hbm_bytes_per_second: read from its memory.
      bf16_ops_per_second: multiplications and additions.
      int8_ops_per_second: the same on int8 operands; the bf16 rate where no faster one is published.
      ici_bytes_per_second: sent to its neighbours over all links together: half of the published sum of both ways.
      hertz: of the clock that the compiler counts by: the peak over what its matrix units do in a cycle.
      sizes: some that can be rented.
      source: where these are published.
    """

    name: str
    devices: int = 1
    hbm_bytes: int
    hbm_bytes_per_second: float
    bf16_ops_per_second: float
    int8_ops_per_second: float
    ici_bytes_per_second: float
    hertz: float
    sizes: tuple[str, ...]
    source: str


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            hbm_bytes=int(15.75 * GIB),
            hbm_bytes_per_second=819e9,
            bf16_ops_per_second=197e12,
            int8_ops_per_second=393e12,
            ici_bytes_per_second=200e9,
            hertz=1.50e9,
            sizes=("1x1", "2x2", "2x4", "4x4", "4x8", "8x8"),
            source="https://cloud.google.com/tpu/docs/v5e",
        ),
        Chip(
            name="v6e",
            hbm_bytes=int(31.24 * GIB),
            hbm_bytes_per_second=1638e9,
            bf16_ops_per_second=918e12,
            int8_ops_per_second=1836e12,
            ici_bytes_per_second=400e9,
            hertz=1.75e9,
            sizes=("1x1", "2x2", "2x4", "4x4", "4x8", "8x8"),
            source="https://cloud.google.com/tpu/docs/v6e",
        ),
        Chip(
            name="v5p",
            hbm_bytes=int(95.73 * GIB),
            hbm_bytes_per_second=2765e9,
            bf16_ops_per_second=459e12,
            int8_ops_per_second=918e12,
            ici_bytes_per_second=600e9,
            hertz=1.75e9,
            sizes=("1x1x1", "2x1x1", "2x2x1", "2x2x2", "2x2x4", "4x4x4"),
            source="https://cloud.google.com/tpu/docs/v5p",
        ),
        Chip(
            name="tpu7x",
            devices=2,
            hbm_bytes=int(94.74 * GIB),
            hbm_bytes_per_second=7380e9 / 2,
            bf16_ops_per_second=2307e12 / 2,
            int8_ops_per_second=2307e12 / 2,
            ici_bytes_per_second=600e9 / 2,
            hertz=2.20e9,
            sizes=("1x1x1", "2x2x1", "2x2x2", "2x2x4", "4x4x4"),
            source="https://cloud.google.com/tpu/docs/tpu7x",
        ),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices that programs are compiled for: `name` as in "v5e:2x4"."""

    name: str
    chip: Chip
    devices: tuple[jax.Device, ...]

    @property
    def num_chips(self) -> int:
        return len(self.devices) // self.chip.devices


def known() -> str:
    """For errors: the chips and some of their sizes. Other sizes that libtpu knows do as well."""
    return "; ".join(f"{chip.name}:{{{','.join(chip.sizes)}}}" for chip in CHIPS.values())


def find_topology(name: str) -> Topology:
    """The devices of a topology, none of which has to be there.

    Raises:
      ValueError: for a name that libtpu does not know, naming those that it does.
      RuntimeError: if libtpu is not installed.
    """
    chip_name, colon, size = name.partition(":")
    if chip_name not in CHIPS or not colon:
        raise ValueError(f"topology is {name!r}; expected CHIP:SIZE, of {known()}")
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(f"libtpu, the TPU compiler, is not installed: {EXTRA}, or pip install libtpu")
    bounds = tuple(int(part) for part in size.split("x") if part.isdigit())
    alone = {"chips_per_host_bounds": [*bounds, 1, 1][:3]} if math.prod(bounds) < CHIPS_OF_A_HOST else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **alone)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise ValueError(f"topology is {name!r}, which libtpu refuses ({error}); it knows {known()}") from error
    return Topology(name=name, chip=CHIPS[chip_name], devices=tuple(found.devices))
