"""One layer with the inputs of its linear layers scaled, in floats, before anything of it is rounded.

Owns which weights take part, and that whatever is made of them afterwards is made of what they became. How good scales
are found is the methods' business, what they are taken out of `quantize.folding`'s.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetserve.checkpoint.base import CheckpointReader
from jetserve.checkpoint.parts import Replaced
from jetserve.models.base import Parameter
from jetserve.quantize.calibrate import Calibration, linears
from jetserve.quantize.folding import folds
from jetserve.quantize.methods import awq
from jetserve.quantize.recipe import Action, Target

NOTHING_BEFORE = "not scaled: nothing before it can take the scales"
CARRIED_OVER = "not scaled: a weight beside or before it is carried over as the source quantized it"
NOT_FINITE = "not scaled: the second moment of its inputs is not finite"


def scale_layer(
    layer: nnx.Module,
    parameters: Sequence[Parameter],
    calibration: Calibration,
    reader: CheckpointReader,
    targets: Mapping[str, Target],
    method: str,
) -> tuple[CheckpointReader, dict[str, str]]:
    """Gives a layer the scales that rounding to nearest is best with.

    Args:
      layer: with the floats of its source.
      parameters: its own.
      calibration: with the states before it.
      reader: the source.
      targets: what becomes of the parameters, by their paths.
      method: that is to round what is scaled.

    Returns:
      The source with the layer's floats as they are now, and why weights that the method is to round are not scaled, by
      their paths.
    """
    of = {id(p.variable): p for p in parameters}
    modules = linears(layer)
    stage_of = {
        of[id(modules[path].weight)].path: number
        for number, stage in enumerate(calibration.stages(layer))
        for path in stage
    }
    reasons = {p.path: NOTHING_BEFORE for p in parameters if targets[p.path].method == method}
    found = []
    for fold in folds(layer):
        takers = [of[id(consumer.weight)] for consumer in fold.consumers]
        found.append((fold, [p for p in takers if p.path in reasons and p.path in stage_of]))
    needed = sorted({stage_of[p.path] for _, takers in found for p in takers})
    moments = {number: calibration.second_moment(layer, number) for number in needed}
    calibration.begin_again()
    chosen = []
    for fold, takers in found:
        parts = [_part(p, moments[stage_of[p.path]], targets[p.path]) for p in takers]
        hindrance = _hindrance([of[id(variable)] for variable in fold.variables], parts, reader, targets)
        reasons.update({p.path: hindrance for p in takers} if hindrance else {})
        if parts and hindrance is None:
            chosen.append((fold, awq.search(parts, fold.channels, by_expert=fold.of_experts)))
            for p in takers:
                del reasons[p.path]
    for fold, scales in chosen:
        fold.apply(scales)
    changed = [of[id(variable)] for fold, _ in chosen for variable in fold.variables]
    return Replaced(reader, {p.source: _as_read(p) for p in changed}), reasons


def _part(parameter: Parameter, hessian: jax.Array, target: Target) -> awq.Part:
    w = parameter.variable.get_value()
    assert target.config is not None
    hessians = hessian.reshape(-1, *hessian.shape[-2:])
    return awq.Part(w=w.reshape(len(hessians), *w.shape[-2:]), hessian=hessians, config=target.config)


def _hindrance(
    members: Sequence[Parameter], parts: Sequence[awq.Part], reader: CheckpointReader, targets: Mapping[str, Target]
) -> str | None:
    """Why those that a fold would change must stay as they are."""
    if any(targets[p.path].action is Action.KEEP and reader.quantized_bits(p.source) is not None for p in members):
        return CARRIED_OVER
    return None if all(bool(jnp.all(jnp.isfinite(part.hessian))) for part in parts) else NOT_FINITE


def _as_read(parameter: Parameter) -> np.ndarray:
    """A parameter's floats in Hugging Face's layout; experts one below the other."""
    value = np.asarray(parameter.variable.get_value())
    return np.moveaxis(value, 0, 1).reshape(parameter.shape).T if value.ndim == 3 else value.T
