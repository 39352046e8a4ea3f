"""What became of a model's weights: types, sizes in bits, rounding errors. Plain data for logs and reports."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorReport:
    """One tensor.

    Attributes:
      name: its Hugging Face name.
      type_name: one of `QUANTIZE_TYPES`, or a float dtype.
      weights: how many elements it has.
      bits: of values, scales and zero points together, an int4 counted as 4.
      block_size: None where there are no blocks.
      asked_block_size: where it was rounded with another one than asked for, because that does not divide it.
      error: relative Frobenius error of rounding; None where nothing was rounded.
      output_error: of a calibrated method: the mean square of what rounding changed in the products with the inputs,
        over that of the products.
      fallback: of a calibrated method: what was done in its place, or left out, and why.
      dequantized_from: the source's type, where that was quantized but became a float.
    """

    name: str
    type_name: str
    weights: int
    bits: int
    block_size: int | None = None
    asked_block_size: int | None = None
    error: float | None = None
    output_error: float | None = None
    fallback: str | None = None
    dequantized_from: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightReport:
    """Every tensor of a model, tied ones once."""

    tensors: tuple[TensorReport, ...]

    @property
    def weights(self) -> int:
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def bits(self) -> int:
        return sum(tensor.bits for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights if an int4 takes half a byte."""
        return -(-self.bits // 8)

    @property
    def bits_per_weight(self) -> float:
        return self.bits / max(1, self.weights)

    def by_type(self) -> dict[str, "WeightReport"]:
        """The tensors of each type, in the order they were met."""
        groups: dict[str, list[TensorReport]] = collections.defaultdict(list)
        for tensor in self.tensors:
            groups[tensor.type_name].append(tensor)
        return {name: WeightReport(tensors=tuple(tensors)) for name, tensors in groups.items()}

    def changed_block_sizes(self) -> dict[tuple[int, int], int]:
        """(asked for, used) -> the number of tensors."""
        changed = collections.Counter(
            (tensor.asked_block_size, tensor.block_size)
            for tensor in self.tensors
            if tensor.asked_block_size is not None and tensor.block_size is not None
        )
        return dict(changed)

    def dequantized(self) -> dict[str, int]:
        """Source types that could not be carried over -> the number of tensors made floats."""
        return dict(collections.Counter(t.dequantized_from for t in self.tensors if t.dequantized_from is not None))

    def fallbacks(self) -> dict[str, int]:
        """What was done in place of a calibrated method, or left out of it, and why -> the number of tensors."""
        return dict(collections.Counter(t.fallback for t in self.tensors if t.fallback is not None))

    def worst(self, count: int) -> list[TensorReport]:
        """The tensors of the largest rounding errors."""
        rounded = [tensor for tensor in self.tensors if tensor.error is not None]
        return sorted(rounded, key=lambda tensor: -(tensor.error or 0.0))[:count]

    def as_dict(self) -> Mapping[str, Any]:
        """For JSON."""
        return {
            "weights": self.weights,
            "bits_per_weight": self.bits_per_weight,
            "bytes": self.nbytes,
            "types": {
                name: {
                    "tensors": len(group.tensors),
                    "weights": group.weights,
                    "bits_per_weight": group.bits_per_weight,
                }
                for name, group in self.by_type().items()
            },
            "block_sizes_changed": [
                {"asked": asked, "used": used, "tensors": count}
                for (asked, used), count in self.changed_block_sizes().items()
            ],
            "dequantized": self.dequantized(),
            "fallbacks": self.fallbacks(),
            "worst": [
                {"name": tensor.name, "error": tensor.error, "output_error": tensor.output_error}
                for tensor in self.worst(5)
            ],
        }
