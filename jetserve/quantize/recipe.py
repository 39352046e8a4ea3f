"""What each parameter of a model becomes: kept, a float, or rounded to one of the quantized types.

Owns the user's settings (`Recipe`) and the plan made from them, where everything that can be refused is refused before
a byte is read. Knows nothing of files (`recipe_file`), nor of how rounding is done (`methods/`).
"""

import dataclasses
import enum
import fnmatch
import re
from collections.abc import Sequence

from jetserve.method_config import Clip
from jetserve.models.base import Parameter, Role
from jetserve.quantize import methods
from jetserve.quantize.qarray import BLOCK_SIZE_MULTIPLE, QUANTIZE_TYPES, QuantizationConfig

NONE = "none"
KEEP = "keep"
TYPE_NAMES = (*QUANTIZE_TYPES, NONE, KEEP)
ROUND_TO_NEAREST = "rtn"
"""The method where none is named."""
RULES = "rules"
"""What stands for a type where a recipe file decides tensor by tensor."""

EMBEDDING_CONFIG = QuantizationConfig(bits=8)
"""Of embeddings and output heads wherever linear layers are quantized, whatever those become."""


class Action(enum.Enum):
    """What is done to one parameter: carried over as the source has it, made a float, or rounded."""

    KEEP = "keep"
    FLOAT = "float"
    ROUND = "round"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What one parameter becomes.

    `config` and `method` are there when it is rounded, with the block size that it really gets; `asked_block_size` is
    the one that was asked for, by the type's default or by the user. `clip`: how its scales are chosen.
    """

    action: Action
    config: QuantizationConfig | None = None
    method: str | None = None
    clip: Clip = Clip.NONE
    asked_block_size: int | None = None
    quantize_activation: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What matrices become whose Hugging Face name a pattern matches.

    Attributes:
      pattern: a glob of the name, with or without its ".weight", where it holds `*` or `?`; a regular expression, found
        anywhere in it, where it begins with "re:"; else a part of it.
      quantize_type: one of `TYPE_NAMES`.
      method: the name of a file in `methods/`; None for the recipe's.
      block_size: of blockwise types; None for the default.
      symmetric: None for the default, True.
    """

    pattern: str
    quantize_type: str
    method: str | None = None
    block_size: int | None = None
    symmetric: bool | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for settings that cannot be, or could take no effect."""
        _base(self.quantize_type, self.block_size, self.symmetric, quantize_activation=False)
        if self.method is not None and self.method not in methods.names():
            raise ValueError(f"method is {self.method!r}; expected one of {', '.join(methods.names())}")
        if self.pattern.startswith("re:"):
            try:
                re.compile(self.pattern.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"the pattern is no regular expression: {error}") from error

    def matches(self, name: str) -> bool:
        if self.pattern.startswith("re:"):
            return re.search(self.pattern.removeprefix("re:"), name) is not None
        if any(character in self.pattern for character in "*?"):
            return any(fnmatch.fnmatchcase(form, self.pattern) for form in (name, name.removesuffix(".weight")))
        return self.pattern in name


class Overlap(enum.Enum):
    """What it means if several rules match a name."""

    REFUSED = "refused"
    FIRST_COUNTS = "first counts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of a recipe file, in its order."""

    rules: tuple[Rule, ...]
    overlap: Overlap

    def assign(self, names: Sequence[str]) -> dict[str, Rule]:
        """The rule of every name that has one.

        Raises:
          ValueError: for a rule that no name is left for, and for names that several match where that is refused.
        """
        found: dict[str, Rule] = {}
        for name in names:
            matching = [rule for rule in self.rules if rule.matches(name)]
            if len(matching) > 1 and self.overlap is Overlap.REFUSED:
                raise ValueError(
                    f"{name} is matched by {' and '.join(repr(rule.pattern) for rule in matching)} of the recipe;"
                    " expected one: narrow the patterns"
                )
            if matching:
                found[name] = matching[0]
        unused = [rule.pattern for rule in self.rules if rule not in found.values()]
        if unused:
            raise ValueError(
                f"{', '.join(map(repr, unused))} of the recipe would have no effect: no matrix is left for it to match."
                f" Matrices have names such as {', '.join(names[:3])}"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings for a whole model.

    Attributes:
      quantize_type: one of `TYPE_NAMES`.
      linear: of linear layers, where `quantize_type` is one of `QUANTIZE_TYPES`; else None.
      block_size: as asked for, or None if it was not. What was asked for must fit; the default adapts.
      rules: of a recipe file, for the matrices that they match; None if there is none.
      method: of linear layers, where no rule says otherwise: the name of a file in `methods/`.
      clip: how scales of linear layers are chosen.
      quantize_activation: whether linear layers quantize their other operand as they run.
    """

    quantize_type: str
    linear: QuantizationConfig | None = None
    block_size: int | None = None
    rules: Rules | None = None
    method: str = ROUND_TO_NEAREST
    clip: Clip = Clip.NONE
    quantize_activation: bool = False

    @classmethod
    def from_settings(
        cls,
        quantize_type: str | None = None,
        *,
        block_size: int | None = None,
        symmetric: bool | None = None,
        quantize_activation: bool = False,
        rules: Rules | None = None,
        method: str = ROUND_TO_NEAREST,
        clip: Clip = Clip.NONE,
        source_quantized: bool,
    ) -> "Recipe":
        """The recipe that a user's settings ask for; None everywhere means "unset".

        An unset type is `keep` for a quantized source and `none` for a float one; unset `symmetric` is True.

        Raises:
          ValueError: for an unknown type, and for settings that could take no effect.
        """
        if quantize_type is None:
            quantize_type = KEEP if source_quantized else NONE
        linear = _base(quantize_type, block_size, symmetric, quantize_activation)
        if quantize_activation and linear is None and (quantize_type == NONE or not source_quantized) and rules is None:
            raise ValueError(
                f"quantize_activation takes quantized weights, but quantize type {quantize_type} leaves those of this"
                f" checkpoint in floating point; ask for one of {', '.join(QUANTIZE_TYPES)}, or drop it"
            )
        if clip is not Clip.NONE and linear is None and rules is None:
            raise ValueError(
                f"clip is {clip.value}, but quantize type {quantize_type} rounds no weight, so it would have no effect;"
                f" drop it, or ask for one of {', '.join(QUANTIZE_TYPES)}"
            )
        return cls(
            quantize_type=quantize_type,
            linear=linear,
            block_size=block_size if linear is not None else None,
            rules=rules,
            method=method,
            clip=clip,
            quantize_activation=quantize_activation,
        )

    @property
    def made(self) -> str:
        """What the model is said to be: its type, or `RULES`."""
        return self.quantize_type if self.rules is None else RULES

    def target_for(self, parameter: Parameter, rule: Rule | None = None) -> Target:
        """What a parameter becomes, by a rule if it has one.

        Raises:
          ValueError: if the block size cannot be had for it, naming the tensor.
        """
        if parameter.role is Role.FLOAT:
            return Target(action=Action.KEEP if self.quantize_type == KEEP else Action.FLOAT)
        activation = self.quantize_activation and parameter.role is Role.LINEAR
        if rule is not None:
            config = _base(rule.quantize_type, rule.block_size, rule.symmetric, activation)
            quantize_type, asked, method = rule.quantize_type, rule.block_size, rule.method or self.method
        elif self.linear is not None and parameter.role is Role.EMBEDDING:
            config, quantize_type, asked, method = EMBEDDING_CONFIG, self.quantize_type, None, ROUND_TO_NEAREST
        else:
            config, quantize_type, asked, method = self.linear, self.quantize_type, self.block_size, self.method
        if parameter.role is not Role.LINEAR:
            method = ROUND_TO_NEAREST
        if config is None:
            action = Action.KEEP if quantize_type == KEEP else Action.FLOAT
            return Target(action=action, quantize_activation=activation and action is Action.KEEP)
        return Target(
            action=Action.ROUND,
            config=_fitted(config, asked, parameter),
            method=method,
            clip=self.clip if parameter.role is Role.LINEAR else Clip.NONE,
            asked_block_size=config.block_size,
            quantize_activation=config.quantize_activation,
        )

    def plan(self, parameters: Sequence[Parameter]) -> dict[str, Target]:
        """What every parameter becomes, by its path, decided before anything is read.

        Raises:
          ValueError: as `target_for` and `Rules.assign` do, and for rules with a method that nothing is known for.
        """
        for rule in () if self.rules is None else self.rules.rules:
            if rule.method not in (None, ROUND_TO_NEAREST, self.method):
                raise ValueError(
                    f"{rule.pattern!r} of the recipe has method {rule.method}, which takes calibration text: convert"
                    f" with --quantize_method={rule.method}"
                )
        matrices = [parameter.source for parameter in parameters if parameter.role is not Role.FLOAT]
        rules = {} if self.rules is None else self.rules.assign(matrices)
        return {parameter.path: self.target_for(parameter, rules.get(parameter.source)) for parameter in parameters}


def _base(
    quantize_type: str, block_size: int | None, symmetric: bool | None, quantize_activation: bool
) -> QuantizationConfig | None:
    """The config of a type, before it is fitted to a weight; None for types that round nothing.

    Raises:
      ValueError: for an unknown type, and for settings that could take no effect.
    """
    if quantize_type not in TYPE_NAMES:
        raise ValueError(f"quantize type is {quantize_type!r}; expected one of {', '.join(TYPE_NAMES)}")
    if quantize_type in QUANTIZE_TYPES:
        return QuantizationConfig.from_name(
            quantize_type,
            block_size=block_size,
            symmetric=symmetric is not False,
            quantize_activation=quantize_activation,
        )
    for name, value in (("block_size", block_size), ("symmetric", symmetric)):
        if value is not None:
            raise ValueError(
                f"{name} is {value}, but quantize type {quantize_type} rounds no weight, so it would have no effect;"
                f" drop it, or ask for one of {', '.join(QUANTIZE_TYPES)}"
            )
    return None


def _fitted(config: QuantizationConfig, asked: int | None, parameter: Parameter) -> QuantizationConfig:
    """With the block size that a weight gets. What was asked for must not be larger than the weight."""
    size = parameter.shape[0]
    if asked is not None and asked > size:
        raise ValueError(
            f"{parameter.source} has {size} contracted elements, fewer than the block size {asked}; ask for a block"
            f" size that is a multiple of {BLOCK_SIZE_MULTIPLE} up to {size}, or for a per-channel type"
        )
    try:
        return config.for_contracted_size(size)
    except ValueError as error:
        raise ValueError(f"{parameter.source}: {error}") from error
