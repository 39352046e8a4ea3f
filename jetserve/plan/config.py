"""What `python -m jetserve.plan` is asked, as plain data."""

import dataclasses
from pathlib import Path

from jetserve.config import EngineConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """One plan.

    Attributes:
      model_name, size: of a preset; or
      checkpoint_path: of any format. Only its description is read.
      topology: such as "v5e:2x4".
      quantize_type, block_size, symmetric, quantize_activation: as `load.load_model` takes them.
      engine: limits; `max_sequences` and `max_length` are the batch and the cache's length that are planned.
      dollars_per_chip_hour: None asks for no price.
      explain: whether to tell how every weight is split.
      all_layers: whether to compile them all, and not to reckon with what one and two of them take.
    """

    model_name: str | None = None
    size: str | None = None
    checkpoint_path: str | None = None
    topology: str
    quantize_type: str | None = None
    block_size: int | None = None
    symmetric: bool | None = None
    quantize_activation: bool = False
    engine: EngineConfig
    dollars_per_chip_hour: float | None = None
    explain: bool = False
    all_layers: bool = False

    def __post_init__(self) -> None:
        if (self.checkpoint_path is None) == (self.model_name is None):
            raise ValueError("a plan takes a model: --model_name with --size, or --checkpoint_path, and not both")
        if (self.model_name is None) != (self.size is None):
            raise ValueError("--model_name and --size belong together; expected both or none")
        if self.dollars_per_chip_hour is not None and not self.dollars_per_chip_hour > 0:
            raise ValueError(f"--price_per_hour is {self.dollars_per_chip_hour}; expected dollars above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plans side by side, and the PNG that shows them."""

    plans: tuple[PlanConfig, ...]
    plot: Path | None = None
