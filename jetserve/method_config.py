"""How linear layers are rounded, and what a method learns from: frozen, validated, plain data.

Knows nothing of flags, jax or files, nor of the methods themselves (`quantize.methods`).
"""

import dataclasses
import enum
import math
from pathlib import Path
from typing import ClassVar


def check_positive(name: str, value: int) -> None:
    """Raises ValueError for what is no integer of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected an integer of 1 or more")


class Clip(enum.Enum):
    """How the scale of a group of weights is chosen: to span their range, or for the least squared error."""

    NONE = "none"
    MSE = "mse"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RTNConfig:
    """Rounding to nearest, each weight for itself."""

    NAME: ClassVar[str] = "rtn"

    clip: Clip = Clip.NONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """The text that a method learns from what the inputs of weights are like.

    Attributes:
      file: plain text, or JSONL or Parquet with a "text", a "prompt" or "messages" a line; one that does not exist
        may be `owner/name/FILE` of a data set on the hub.
      texts: in place of a file.
      samples: windows, spread evenly over the text. None is as many as there are, up to 128.
      length: tokens of each. None is 2048, or what the model was made for if that is less.
    """

    file: Path | None = None
    texts: tuple[str, ...] = ()
    samples: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        if (self.file is None) == (not self.texts):
            raise ValueError("expected either a calibration file or texts")
        for name, value in (("samples", self.samples), ("length", self.length)):
            if value is not None:
                check_positive(f"calibration {name}", value)


class Scaling(enum.Enum):
    """How the inputs of linear layers are scaled, by scales that are taken out of what comes before them."""

    NONE = "none"
    AWQ = "awq"
    SMOOTHQUANT = "smoothquant"


SMOOTHING = 0.5


def _check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing is {smoothing}; expected a number from 0 to 1, such as {SMOOTHING}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQConfig:
    """GPTQ (see `quantize.methods.gptq`).

    Attributes:
      calibration: what it learns from.
      clip: how scales are chosen; squared errors count by the mean square of their input.
      scaling: of inputs, before anything is rounded.
      smoothing: `SmoothQuantConfig`'s, where that is how inputs are scaled.
      act_order: rounds the rows with the largest inputs first. Blocks then take their scales from the weights as they
        were, so that rows keep their places.
      static_groups: whether blocks take their scales from the weights as they were also without act_order, and not from
        the weights as they are once all earlier blocks are rounded.
      damping: added to the diagonal of the inputs' second moment, in units of its mean.
      sweeps: how often scales and integers are gone over again once all are there (see `quantize.refinement`).
      strict: whether a weight that it cannot do is an error, and not rounded to nearest and reported.
    """

    NAME: ClassVar[str] = "gptq"

    calibration: CalibrationConfig
    clip: Clip = Clip.NONE
    scaling: Scaling = Scaling.NONE
    smoothing: float = SMOOTHING
    act_order: bool = False
    static_groups: bool = False
    damping: float = 0.01
    sweeps: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        if self.sweeps < 0:
            raise ValueError(f"sweeps is {self.sweeps}; expected 0 or more")
        if not 0 < self.damping < 1:
            raise ValueError(f"damping is {self.damping}; expected a number between 0 and 1, such as 0.01")
        _check_smoothing(self.smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AWQConfig:
    """AWQ (see `quantize.methods.awq`): inputs are scaled, then weights rounded to nearest.

    Attributes:
      calibration: what it learns from.
      clip: how scales are chosen; squared errors count by the mean square of their input.
      strict: whether a linear layer whose inputs cannot be scaled is an error, and not just reported.
    """

    NAME: ClassVar[str] = "awq"
    scaling: ClassVar[Scaling] = Scaling.AWQ

    calibration: CalibrationConfig
    clip: Clip = Clip.NONE
    strict: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmoothQuantConfig:
    """SmoothQuant (see `quantize.methods.smoothquant`): inputs are scaled, then weights rounded to nearest.

    Attributes:
      calibration: what it learns from.
      clip: how scales are chosen; squared errors count by the mean square of their input.
      smoothing: from 0 to 1, how much of the inputs' unevenness goes into the weights.
      strict: whether a linear layer whose inputs cannot be scaled is an error, and not just reported.
    """

    NAME: ClassVar[str] = "smoothquant"
    scaling: ClassVar[Scaling] = Scaling.SMOOTHQUANT

    calibration: CalibrationConfig
    clip: Clip = Clip.NONE
    smoothing: float = SMOOTHING
    strict: bool = False

    def __post_init__(self) -> None:
        _check_smoothing(self.smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """The type of every linear layer chosen by what it would lose, within a size.

    `target_bits`: of the linear layers, a weight, scales and zero points among them. `method`: what all are rounded by.
    """

    NAME: ClassVar[str] = "auto"

    target_bits: float
    method: GPTQConfig

    def __post_init__(self) -> None:
        if not 0 < self.target_bits < math.inf:
            raise ValueError(f"target bits is {self.target_bits}; expected bits a weight, such as 4.25")


CalibratedMethod = GPTQConfig | AWQConfig | SmoothQuantConfig
MethodConfig = RTNConfig | CalibratedMethod
ROUND_TO_NEAREST = RTNConfig()
