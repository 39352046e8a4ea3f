"""AWQ checkpoints in AutoAWQ's "gemm" layout, 4 bits.

| X.qweight | int32 [K, N / 8] | along N, interleaved |
| X.qzeros  | int32 [G, N / 8] | the same             |
| X.scales  | float [G, N]     |                      |

`W[k, n] = scales[k // g, n] (q[k, n] - z[k // g, n])`. Some models (BLOOM, Falcon, GPT-NeoX) carry a vector
`P.act.scales` [K] by which their activation's output is divided; the layer after it in P takes that upon itself, and is
then only dequantized. Owns this format; the settings' spelling is `quantization_settings`'.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.files import some
from jetserve.checkpoint.packed import FLOAT_TYPES, PackedLayer, Shards, expect, signed, span, stems, unpack
from jetserve.checkpoint.quantization_settings import Settings

METHOD = "awq"
BITS = 4
FIELDS = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where the columns of a word are in it, the least significant field first."""
AFTER_ACTIVATION = ("dense_4h_to_h", "down_proj", "fc_out", "c_proj")
"""What architectures call the layer after the activation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AwqLayer(PackedLayer):
    """See the module. `divisor` is the name of the vector that its input is divided by, or None."""

    divisor: str | None = None

    @property
    def fits(self) -> bool:
        return self.divisor is None and super().fits

    def floats(self, start: int, stop: int) -> np.ndarray:
        w = super().floats(start, stop)
        return w if self.divisor is None else w / self.shards.read(self.divisor).astype(np.float32)

    def values(self, start: int, stop: int) -> np.ndarray:
        return self._columns("qweight", start, stop)

    def scale(self, start: int, stop: int) -> np.ndarray:
        return self.shards.read(f"{self.stem}.scales")[:, start:stop]

    def zero_point(self, start: int, stop: int) -> np.ndarray | None:
        return self._columns("qzeros", start, stop)

    def _columns(self, part: str, start: int, stop: int) -> np.ndarray:
        chosen, within = span(start, stop, BITS)
        fields = unpack(self.shards.read(f"{self.stem}.{part}")[:, chosen], BITS, axis=1)
        ordered = fields.reshape(len(fields), -1, len(FIELDS))[..., FIELDS].reshape(fields.shape)
        return signed(ordered[:, within], BITS)

    def group_of_row(self) -> np.ndarray | None:
        return None


def layers(shards: Shards, settings: Settings) -> Mapping[str, PackedLayer]:
    """Every layer that has a `qweight`, by its name.

    Raises:
      CheckpointError: for settings and tensors that are not read, or contradict each other.
    """
    settings.expect_only("format", ("gemm",), absent="gemm")
    found = {stem: _layer(shards, settings, stem) for stem in stems(shards, ".qweight")}
    for activation in [stem for stem in stems(shards, ".scales") if stem not in found]:
        module = activation.rpartition(".")[0]
        after = [stem for name in AFTER_ACTIVATION if (stem := f"{module}.{name}") in found]
        if len(after) != 1:
            raise CheckpointError(
                f"{shards.where(f'{activation}.scales')} divides an activation, but of the layers that could follow it"
                f" {some(after) or 'none'} is there; expected one of {', '.join(AFTER_ACTIVATION)}"
            )
        layer = found[after[0]]
        divisor = expect(shards, f"{activation}.scales", FLOAT_TYPES, layer.shape[1:])
        found[after[0]] = dataclasses.replace(layer, divisor=divisor[0], parts=layer.parts + divisor)
    return found


def _layer(shards: Shards, settings: Settings, stem: str) -> AwqLayer:
    weight, zeros, scales = (f"{stem}.{part}" for part in ("qweight", "qzeros", "scales"))
    parts = expect(shards, weight, ("I32",), (None, None)) + expect(shards, scales, FLOAT_TYPES, (None, None))
    (K, packed), (G, N) = shards.entries[weight].shape, shards.entries[scales].shape
    bits = settings.layer_bits(stem, packed * 32 / N, shards.where(weight))
    if bits != BITS:
        raise CheckpointError(f"{shards.where(weight)} has {bits} bits; expected {BITS}, as AWQ's gemm layout has them")
    parts += expect(shards, zeros, ("I32",), (G, packed))
    settings.check_group_size(stem, K, G, shards.where(scales))
    return AwqLayer(
        shards=shards, stem=stem, type_name=f"awq int{bits}", shape=(N, K), bits=bits, groups=G, parts=parts
    )
