"""Chooses the type of every linear layer by what it would lose, within a size: rules as of a recipe file.

Owns the types that are tried. The losses are `checkpoint.measured`'s, the choice is `quantize.budget`'s.
"""

import logging
import re
from pathlib import Path

from jetserve.checkpoint import calibrated, measured
from jetserve.checkpoint.load import Progress
from jetserve.conversion_plan import make_conversion_plan
from jetserve.method_config import AutoConfig
from jetserve.models.base import Role
from jetserve.quantize import budget
from jetserve.quantize.budget import Form
from jetserve.quantize.qarray import QuantizationConfig
from jetserve.quantize.recipe import Overlap, Rule, Rules

logger = logging.getLogger(__name__)

CANDIDATES = (
    QuantizationConfig(bits=4),
    QuantizationConfig(bits=4, symmetric=False),
    *(
        QuantizationConfig(bits=4, block_size=block_size, symmetric=symmetric)
        for block_size in (128, 64, 32)
        for symmetric in (True, False)
    ),
    QuantizationConfig(bits=8),
)
OTHERS = "int4_per_channel"
"""The type of what no rule is made for: embeddings, which it leaves at 8 bits."""


def choose(source: Path, config: AutoConfig, *, progress: Progress) -> Rules:
    """A rule for every linear layer of a source.

    Raises:
      CheckpointError, ValueError: as `make_conversion_plan` and `calibrated.windows`; and for a size that is too small.
    """
    plan = make_conversion_plan(source, quantize_type=OTHERS, method=config.method)
    linears = [parameter for parameter in plan.parameters if parameter.role is Role.LINEAR]
    tokens = calibrated.windows(
        plan.targets, config.method, plan.reader.tokenizer(), max_length=plan.model.config.max_position
    )
    found: dict[str, dict[QuantizationConfig, Form]] = {}
    forms = measured.forms(plan.reader, plan.parameters, plan.model, tokens, CANDIDATES)
    for _, (parameter, measurements) in zip(progress(linears), forms, strict=True):
        found[parameter.source] = measurements
    weights = sum(parameter.shape[0] * parameter.shape[1] for parameter in linears)
    smallest = sum(min(form.bits for form in measurements.values()) for measurements in found.values())
    if config.target_bits * weights < smallest:
        raise ValueError(
            f"target bits is {config.target_bits}, but the linear layers of {source} take {smallest / weights:.3f} bits"
            " a weight at least; ask for as much or more"
        )
    listed = {name: list(measurements.values()) for name, measurements in found.items()}
    chosen = budget.choose(listed, config.target_bits * weights)
    bits = sum(listed[name][number].bits for name, number in chosen.items())
    logger.info("types chosen for %d linear layers: %.3f bits a weight", len(chosen), bits / weights)
    return Rules(
        rules=tuple(_rule(name, list(found[name])[number]) for name, number in chosen.items()), overlap=Overlap.REFUSED
    )


def _rule(name: str, config: QuantizationConfig) -> Rule:
    return Rule(
        pattern=f"re:^{re.escape(name)}$",
        quantize_type=config.name,
        block_size=config.block_size,
        symmetric=config.symmetric,
    )
