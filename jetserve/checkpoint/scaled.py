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
from jetserve.method_config import AWQConfig, CalibratedMethod, Scaling
from jetserve.models.base import Parameter
from jetserve.quantize.calibrate import Calibration, linears
from jetserve.quantize.folding import Fold, folds
from jetserve.quantize.methods import awq, smoothquant
from jetserve.quantize.recipe import Action, Target

NOTHING_BEFORE = "not scaled: nothing before it can take the scales"
CARRIED_OVER = "not scaled: a weight beside or before it is carried over as the source quantized it"
NOT_FINITE = "not scaled: some of its inputs are not finite, or too large to be squared"


def scale_layer(
    layer: nnx.Module,
    parameters: Sequence[Parameter],
    calibration: Calibration,
    reader: CheckpointReader,
    targets: Mapping[str, Target],
    config: CalibratedMethod,
) -> tuple[CheckpointReader, dict[str, str]]:
    """Scales the inputs of a layer's linear layers.

    Args:
      layer: with the floats of its source.
      parameters: its own.
      calibration: with the states before it.
      reader: the source.
      targets: what becomes of the parameters, by their paths.
      config: of the method that is to round what is scaled, and tells how to scale.

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
    reasons = {p.path: NOTHING_BEFORE for p in parameters if targets[p.path].method == config.NAME}
    found = []
    for fold in folds(layer):
        takers = [of[id(consumer.weight)] for consumer in fold.consumers]
        found.append((fold, [p for p in takers if p.path in reasons and p.path in stage_of]))
    needed = sorted({stage_of[p.path] for _, takers in found for p in takers})
    measure = calibration.second_moment if config.scaling is Scaling.AWQ else calibration.largest
    measured = {number: measure(layer, number) for number in needed}
    calibration.begin_again()
    chosen = []
    for fold, takers in found:
        statistics = [measured[stage_of[p.path]] for p in takers]
        hindrance = _hindrance([of[id(variable)] for variable in fold.variables], statistics, reader, targets)
        for p in takers:
            if hindrance is None:
                del reasons[p.path]
            else:
                reasons[p.path] = hindrance
        if takers and hindrance is None:
            chosen.append((fold, _scales(fold, takers, statistics, targets, config)))
    for fold, scales in chosen:
        fold.apply(scales)
    changed = [of[id(variable)] for fold, _ in chosen for variable in fold.variables]
    return Replaced(reader, {p.source: _as_read(p) for p in changed}), reasons


def _hindrance(
    members: Sequence[Parameter],
    statistics: Sequence[jax.Array],
    reader: CheckpointReader,
    targets: Mapping[str, Target],
) -> str | None:
    """Why the parameters that a fold would change must stay as they are."""
    if any(targets[p.path].action is Action.KEEP and reader.quantized_bits(p.source) is not None for p in members):
        return CARRIED_OVER
    return None if all(bool(jnp.all(jnp.isfinite(statistic))) for statistic in statistics) else NOT_FINITE


def _scales(
    fold: Fold,
    takers: Sequence[Parameter],
    statistics: Sequence[jax.Array],
    targets: Mapping[str, Target],
    config: CalibratedMethod,
) -> jax.Array:
    """By the method of `config`, from the statistic of every taker's inputs that it wants."""
    if config.scaling is Scaling.AWQ:
        searched = []
        for p, hessian in zip(takers, statistics, strict=True):
            quantization = targets[p.path].config
            assert quantization is not None
            searched.append(
                awq.Part(w=_experts(p), hessian=hessian.reshape(-1, *hessian.shape[-2:]), config=quantization)
            )
        return awq.search(searched, fold.channels, by_expert=fold.of_experts)
    assert not isinstance(config, AWQConfig)
    parts = [
        smoothquant.Part(w=_experts(p), largest=largest.reshape(-1, largest.shape[-1]))
        for p, largest in zip(takers, statistics, strict=True)
    ]
    return smoothquant.scales(parts, fold.channels, config.smoothing, by_expert=fold.of_experts)


def _experts(parameter: Parameter) -> jax.Array:
    """[E, K, N], E being 1 where there are none."""
    w = parameter.variable.get_value()
    return w.reshape(-1, *w.shape[-2:])


def _as_read(parameter: Parameter) -> np.ndarray:
    """A parameter's floats in Hugging Face's layout; experts one below the other."""
    value = np.asarray(parameter.variable.get_value())
    return np.moveaxis(value, 0, 1).reshape(parameter.shape).T if value.ndim == 3 else value.T
