"""What every linear layer of a model would lose in each of several forms, before any is chosen.

The layers run in the floats of their source, so that what one loses depends on no choice made before it. Owns that
pass; what the losses are for is not known here.
"""

import collections
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.checkpoint.base import CheckpointReader
from jetserve.checkpoint.calibrated import PRECISION, forget, give
from jetserve.method_config import Clip
from jetserve.models.base import Model, Parameter, Role
from jetserve.quantize.budget import Form
from jetserve.quantize.calibrate import Calibration, linears
from jetserve.quantize.methods import awq, gptq
from jetserve.quantize.qarray import BLOCK_SIZE_MULTIPLE, QArray, QuantizationConfig


def forms(
    reader: CheckpointReader,
    parameters: Sequence[Parameter],
    model: Model,
    tokens: np.ndarray,
    candidates: Sequence[QuantizationConfig],
) -> Iterator[tuple[Parameter, dict[QuantizationConfig, Form]]]:
    """Every linear layer's weight, with the form of each candidate as it is fitted to it, layer after layer.

    A loss is the mean square of what rounding to nearest, with the scales of least error, changes in what the layer
    computes of the calibration tokens, over that of what it computes. Where none of them is seen to reach a layer, all
    its inputs count alike.

    Args:
      reader: the source.
      parameters: of the model.
      model: without memory; its layers are given their weights one by one, and lose them again.
      tokens: of calibration, int32 [S, L].
      candidates: those that can be fitted to a weight are measured for it.
    """
    by_layer = collections.defaultdict(list)
    for parameter in parameters:
        by_layer[parameter.layer].append(parameter)
    outside = by_layer.pop(None, [])
    for parameter in outside:
        give(parameter, reader.read(parameter.source).T)
    calibration = Calibration(model, tokens)
    forget(p for p in outside if p.axes is not None)
    for number, layer in enumerate(calibration.layers):
        found = by_layer[number]
        for parameter in found:
            give(parameter, reader.read(parameter.source).T)
        of = {id(p.variable): p for p in found if p.role is Role.LINEAR}
        modules = linears(layer)
        stages = [[of[id(modules[path].weight)] for path in stage] for stage in calibration.stages(layer)]
        for stage, group in enumerate(stages):
            hessian = calibration.second_moment(layer, stage)
            yield from ((p, _forms(p, hessian, candidates)) for p in group)
        met = {p.path for group in stages for p in group}
        for p in of.values():
            if p.path not in met:
                yield p, _forms(p, jnp.eye(p.shape[0]), candidates)
        calibration.advance(layer)
        forget(found)


def _forms(
    parameter: Parameter, hessian: jax.Array, candidates: Sequence[QuantizationConfig]
) -> dict[QuantizationConfig, Form]:
    w = parameter.variable.get_value()
    w = w.reshape(-1, *w.shape[-2:])  # [E, K, N]
    if not bool(jnp.all(jnp.isfinite(hessian))):
        hessian = jnp.eye(w.shape[1])
    hessians = jnp.broadcast_to(hessian, (len(w), *hessian.shape[-2:]))
    fitting = [config for config in candidates if config.block_size is None or w.shape[1] % BLOCK_SIZE_MULTIPLE == 0]
    fitted = {config.for_contracted_size(w.shape[1]) for config in fitting}
    return {config: _form(w, hessians, config) for config in sorted(fitted, key=repr)}


def _form(w: jax.Array, hessians: jax.Array, config: QuantizationConfig) -> Form:
    with jax.default_matmul_precision(PRECISION):
        rounded = [awq.quantize_matrix(matrix, h, config, Clip.MSE) for matrix, h in zip(w, hessians, strict=True)]
        whole: QArray = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rounded)
        loss = float(gptq.output_error(w, whole, hessians))
    return Form(bits=whole.size_in_bits - whole.values.size * (whole.bits - config.bits), loss=loss)
