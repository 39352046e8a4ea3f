"""Which tiles `pallas_tpu.py` works on, and where it pays: what `tiles.json` says.

`benchmarks/tpu_tiles.py` writes that, by the compiler's estimates. Is no implementation.
"""

import dataclasses
import functools
import importlib.resources
import json
import math
from collections.abc import Sequence

import jax

from jetserve.quantize.qarray import QArray

SHAPE = (4096, 11008)
"""Of the weight that was looked at, the largest of Llama-2-7B."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """Of a matmul with up to `most_rows` rows of x.

    Attributes:
      rows, columns: of the result that a program computes.
      depth: rows of the weight that are in VMEM at once, about.
      cycles, einsum_cycles: that the compiler expects of the kernel and of XLA's einsum, with `most_rows` and `SHAPE`.
    """

    most_rows: int
    rows: int
    columns: int
    depth: int
    cycles: int
    einsum_cycles: int

    @property
    def pays(self) -> bool:
        """Whether the kernel is expected to be the faster one."""
        return self.cycles < self.einsum_cycles

    def takes(self, rows: int) -> bool:
        """Whether it is for so many rows. One of which `most_rows` take several is for more of them, too."""
        return rows <= self.most_rows or self.rows < self.most_rows

    def cycles_of(self, rows: int, K: int, N: int) -> int:
        """Of the kernel on another weight, in proportion; fewer rows take no less time."""
        return round(self.cycles * max(1, rows / self.most_rows) * K * N / math.prod(SHAPE))


def find(weight: QArray, rows: int) -> Tile | None:
    """The tile of the fewest rows that hold so many; None where none was looked at."""
    known = table().get(device_kind(), {}).get(kind(weight), ())
    return next((tile for tile in known if tile.takes(rows)), None)


def kind(weight: QArray) -> str:
    """How weights are told apart, as in "int4_blockwise, int8 activations"."""
    form = f"int{weight.bits}_{'blockwise' if weight.blockwise else 'per_channel'}"
    return f"{form}, int8 activations" if weight.quantize_activation else form


def device_kind() -> str:
    """Of the devices that are compiled for, as jax names it: "TPU v5 lite"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


@functools.cache
def table() -> dict[str, dict[str, Sequence[Tile]]]:
    """By a device's kind, as jax names it, and the weight's: tiles for more and more rows."""
    text = importlib.resources.files(__package__).joinpath("tiles.json").read_text()
    return {
        device: {name: [Tile(**tile) for tile in found] for name, found in kinds.items()}
        for device, kinds in json.loads(text).items()
    }
