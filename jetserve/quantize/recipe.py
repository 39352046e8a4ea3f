"""What each parameter of a model becomes: kept, a float, or rounded to one of the quantized types.

Owns the user's settings (`Recipe`) and the plan made from them, where everything that can be refused is refused before
a byte is read. Knows nothing of files, nor of how rounding is done (`methods/`).
"""

import dataclasses
import enum
from collections.abc import Sequence

from jetserve.models.base import Parameter, Role
from jetserve.quantize.qarray import BLOCK_SIZE_MULTIPLE, QUANTIZE_TYPES, QuantizationConfig

NONE = "none"
KEEP = "keep"
TYPE_NAMES = (*QUANTIZE_TYPES, NONE, KEEP)

EMBEDDING_CONFIG = QuantizationConfig(bits=8)
"""Of embeddings and output heads wherever linear layers are quantized, whatever those become."""


class Action(enum.Enum):
    """What is done to one parameter: carried over as the source has it, made a float, or rounded."""

    KEEP = "keep"
    FLOAT = "float"
    ROUND = "round"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What one parameter becomes. `config` is there when it is rounded, with the block size that it really gets."""

    action: Action
    config: QuantizationConfig | None = None
    quantize_activation: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings for a whole model.

    Attributes:
      quantize_type: one of `TYPE_NAMES`.
      linear: of linear layers, where `quantize_type` is one of `QUANTIZE_TYPES`; else None.
      block_size: as asked for, or None if it was not. What was asked for must fit; the default adapts.
      quantize_activation: whether linear layers quantize their other operand as they run.
    """

    quantize_type: str
    linear: QuantizationConfig | None = None
    block_size: int | None = None
    quantize_activation: bool = False

    @classmethod
    def from_settings(
        cls,
        quantize_type: str | None = None,
        *,
        block_size: int | None = None,
        symmetric: bool | None = None,
        quantize_activation: bool = False,
        source_quantized: bool,
    ) -> "Recipe":
        """The recipe that a user's settings ask for; None everywhere means "unset".

        An unset type is `keep` for a quantized source and `none` for a float one; unset `symmetric` is True.

        Raises:
          ValueError: for an unknown type, and for settings that could take no effect.
        """
        if quantize_type is None:
            quantize_type = KEEP if source_quantized else NONE
        if quantize_type not in TYPE_NAMES:
            raise ValueError(f"quantize type is {quantize_type!r}; expected one of {', '.join(TYPE_NAMES)}")
        if quantize_type in QUANTIZE_TYPES:
            linear = QuantizationConfig.from_name(
                quantize_type,
                block_size=block_size,
                symmetric=symmetric is not False,
                quantize_activation=quantize_activation,
            )
            return cls(
                quantize_type=quantize_type,
                linear=linear,
                block_size=block_size,
                quantize_activation=quantize_activation,
            )
        for name, value in (("block_size", block_size), ("symmetric", symmetric)):
            if value is not None:
                raise ValueError(
                    f"{name} is {value}, but quantize type {quantize_type} rounds no weight, so it would have no"
                    f" effect; drop it, or ask for one of {', '.join(QUANTIZE_TYPES)}"
                )
        if quantize_activation and (quantize_type == NONE or not source_quantized):
            raise ValueError(
                f"quantize_activation takes quantized weights, but quantize type {quantize_type} leaves those of this"
                f" checkpoint in floating point; ask for one of {', '.join(QUANTIZE_TYPES)}, or drop it"
            )
        return cls(quantize_type=quantize_type, quantize_activation=quantize_activation)

    def config_for(self, parameter: Parameter) -> QuantizationConfig | None:
        """How a parameter is rounded, or None if it is not.

        Raises:
          ValueError: if the block size cannot be had for it, naming the tensor.
        """
        if self.linear is None or parameter.role is Role.FLOAT:
            return None
        if parameter.role is Role.EMBEDDING:
            return EMBEDDING_CONFIG
        size = parameter.shape[0]
        if self.block_size is not None and self.block_size > size:
            raise ValueError(
                f"{parameter.source} has {size} contracted elements, fewer than the block size {self.block_size}; ask"
                f" for a block size that is a multiple of {BLOCK_SIZE_MULTIPLE} up to {size}, or for a per-channel type"
            )
        try:
            return self.linear.for_contracted_size(size)
        except ValueError as error:
            raise ValueError(f"{parameter.source}: {error}") from error

    def target_for(self, parameter: Parameter) -> Target:
        """What a parameter becomes. Raises as `config_for` does."""
        if self.quantize_type == KEEP:
            linear = parameter.role is Role.LINEAR
            return Target(action=Action.KEEP, quantize_activation=self.quantize_activation and linear)
        config = self.config_for(parameter)
        if config is None:
            return Target(action=Action.FLOAT)
        return Target(action=Action.ROUND, config=config, quantize_activation=config.quantize_activation)

    def plan(self, parameters: Sequence[Parameter]) -> dict[str, Target]:
        """What every parameter becomes, by its path. Raises as `config_for` does: before anything is read."""
        return {parameter.path: self.target_for(parameter) for parameter in parameters}
