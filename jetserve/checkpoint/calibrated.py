"""From a source's tensors to a model's weights by a method that looks at what the weights' inputs are like.

Goes through the model layer by layer, with the weights of one layer in memory. Each group of weights is rounded after
those before it, so that what its inputs are like holds the errors made so far. Owns that order, and what happens to
weights that the method cannot do: they are rounded to nearest, and say so.
"""

import collections
import dataclasses
import enum
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetserve.checkpoint import hub
from jetserve.checkpoint.base import CheckpointReader
from jetserve.checkpoint.scaled import scale_layer
from jetserve.checkpoint.source import HostWeight, make_weight, quantized_weight
from jetserve.method_config import CalibratedMethod, GPTQConfig, MethodConfig, RTNConfig, Scaling
from jetserve.models.base import Model, Parameter
from jetserve.quantize.calibrate import Calibration, linears
from jetserve.quantize.dataset import calibration_windows
from jetserve.quantize.methods import awq, gptq
from jetserve.quantize.qarray import QUANTIZE_TYPES, QArray, QuantizationConfig, by_expert, dequantize, quantize
from jetserve.quantize.recipe import Target
from jetserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NEVER_MET = "no linear layer was seen to take it"
NOT_DEFINITE = "the second moment of its inputs is not finite, or no damping makes it positive definite"
NO_TOKENS = "no token of the calibration text reaches it"
TO_NEAREST = "rounded to nearest"
UNBOUNDED = "its weights grow beyond all bounds"

PRECISION = "float32"
"""Of matmuls; TPUs multiply in bfloat16 otherwise, which is coarser than the errors that are looked for."""

Finished = Callable[[str], QArray | np.ndarray | None]
"""The weight of a name if an earlier run finished it, else None."""
Made = tuple[Parameter, HostWeight]


def windows(
    targets: Mapping[str, Target], config: CalibratedMethod, tokenizer: Tokenizer | None, *, max_length: int
) -> np.ndarray:
    """The calibration tokens, int32 [S, L].

    Raises:
      ValueError: as `calibration_windows`, and if there is nothing that the method could do.
    """
    if not any(target.method == config.NAME for target in targets.values()):
        raise ValueError(
            f"method {config.NAME} rounds linear layers, but none of them is to be rounded by it; ask for one of"
            f" {', '.join(QUANTIZE_TYPES)} with --quantize_type"
        )
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer beside it, which calibration text takes")
    calibration = config.calibration
    if calibration.file is not None:
        calibration = dataclasses.replace(calibration, file=hub.local_texts(calibration.file))
    return calibration_windows(calibration, tokenizer, max_length=max_length)


def describe(method: MethodConfig, tokens: np.ndarray | None) -> dict[str, Any]:
    """The method for a manifest; what only decides how a conversion ends is left out."""
    if isinstance(method, RTNConfig) or tokens is None:
        return {"name": method.NAME, "clip": method.clip.value}
    settings = {name: value for name, value in vars(method).items() if name not in ("calibration", "strict")}
    return {
        "name": method.NAME,
        **{name: value.value if isinstance(value, enum.Enum) else value for name, value in settings.items()},
        "samples": tokens.shape[0],
        "length": tokens.shape[1],
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be made of what.

    Attributes:
      reader: the source.
      parameters: of the model.
      targets: what every parameter becomes, by its path.
      config: of the method.
      remarks: what of it could not be done for a weight, and why, by the parameter's path.
    """

    reader: CheckpointReader
    parameters: Sequence[Parameter]
    targets: Mapping[str, Target]
    config: CalibratedMethod
    remarks: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_nearest(self, parameter: Parameter) -> HostWeight:
        """A weight without the method."""
        return make_weight(self.reader, parameter, self.targets[parameter.path])


def weights(
    work: Work, model: Model, tokens: np.ndarray, *, finished: Finished, keep: Callable[[], None]
) -> Iterator[Made]:
    """Makes every weight of a model that is not finished.

    Args:
      work: what is to be made.
      model: that `work.parameters` are of, without memory. Its layers are given their weights one by one, and lose
        them again.
      tokens: of calibration, int32 [S, L].
      finished: what need not be made again.
      keep: called when all that was yielded is worth being kept: after each layer.

    Raises:
      CheckpointError, ValueError: as `make_weight`; with `strict` also for a weight that the method cannot do.
    """
    by_layer = collections.defaultdict(list)
    for parameter in work.parameters:
        by_layer[parameter.layer].append(parameter)
    outside = by_layer.pop(None, [])
    yield from _plainly(outside, work, finished)
    calibration = Calibration(model, tokens)
    forget(p for p in outside if p.axes is not None)
    for number, layer in enumerate(calibration.layers):
        yield from _layer(layer, by_layer[number], calibration, work, finished)
        keep()
        if number + 1 < len(calibration.layers):
            calibration.advance(layer)
        forget(by_layer[number])


def _plainly(parameters: Sequence[Parameter], work: Work, finished: Finished) -> Iterator[Made]:
    """Weights that the method has nothing to do with, each made and given to the model."""
    for parameter in parameters:
        found = finished(parameter.source)
        if found is None:
            weight = work.to_nearest(parameter)
            found = weight.array
            yield parameter, weight
        give(parameter, found)


def _layer(
    layer: nnx.Module, parameters: Sequence[Parameter], calibration: Calibration, work: Work, finished: Finished
) -> Iterator[Made]:
    by_method = [p for p in parameters if work.targets[p.path].method == work.config.NAME]
    done = {p.source: array for p in parameters if (array := finished(p.source)) is not None}
    if work.config.scaling is not Scaling.NONE and len(done) < len(parameters):
        for parameter in parameters:
            give(parameter, work.reader.read(parameter.source).T)
        reader, remarks = scale_layer(layer, parameters, calibration, work.reader, work.targets, work.config)
        work = dataclasses.replace(work, reader=reader, remarks=remarks)
    yield from _plainly([p for p in parameters if p not in by_method], work, done.get)
    for parameter in by_method:
        found = done.get(parameter.source)
        give(parameter, work.reader.read(parameter.source).T if found is None else found)
    modules, stages = linears(layer), calibration.stages(layer)
    by_variable = {id(p.variable): p for p in parameters}
    groups = [[by_variable[id(modules[path].weight)] for path in stage] for stage in stages]
    met = {p.path for group in groups for p in group}
    left = {p.path for p in by_method if p.source not in done}
    for parameter in by_method:
        if parameter.path in left - met:
            weight = _fall_back(parameter, NEVER_MET, work)
            give(parameter, weight.array)
            yield parameter, weight
    for number, group in enumerate(groups):
        todo = [p for p in group if p.path in left]
        if todo:
            yield from _group(todo, calibration.second_moment(layer, number), work)


def _group(parameters: Sequence[Parameter], hessian: jax.Array, work: Work) -> Iterator[Made]:
    """Weights that take the same input; of several experts, each by the tokens that were sent to it."""
    hessians = hessian[None] if hessian.ndim == 2 else hessian
    with jax.default_matmul_precision(PRECISION):
        prepared = [_prepared(h, work.config) if bool(jnp.trace(h) != 0) else None for h in hessians]
    for parameter in parameters:
        with jax.default_matmul_precision(PRECISION):
            weight = _rounded(parameter, hessians, prepared, work)
        give(parameter, weight.array)
        yield parameter, weight


def _prepared(hessian: jax.Array, config: CalibratedMethod) -> gptq.Factor | jax.Array | None:
    """What the method takes of a second moment; None if that is unusable."""
    if isinstance(config, GPTQConfig):
        return gptq.factorize(hessian, gptq.Options.of(config))
    return hessian if bool(jnp.all(jnp.isfinite(hessian))) else None


def _matrix(
    w: jax.Array, prepared: gptq.Factor | jax.Array | None, quantization: QuantizationConfig, config: CalibratedMethod
) -> QArray | None:
    """A matrix [K, N] rounded by the method; None if it cannot be."""
    if prepared is None:
        return None
    if isinstance(prepared, gptq.Factor):
        assert isinstance(config, GPTQConfig)
        return gptq.quantize_matrix(w, prepared, quantization, gptq.Options.of(config))
    return awq.quantize_matrix(w, prepared, quantization, config.clip)


def _rounded(
    parameter: Parameter, hessians: jax.Array, prepared: Sequence[gptq.Factor | jax.Array | None], work: Work
) -> HostWeight:
    target = work.targets[parameter.path]
    config, value = target.config, parameter.variable.get_value()
    assert config is not None
    w = value.reshape(len(prepared), *value.shape[-2:])
    found = [_matrix(matrix, one, config, work.config) for matrix, one in zip(w, prepared, strict=True)]
    reasons = [_reason(h, one) for h, one, q in zip(hessians, prepared, found, strict=True) if q is None]
    if len(reasons) == len(found):
        return _fall_back(parameter, reasons[0], work)
    whole = [quantize(matrix, config) if q is None else q for matrix, q in zip(w, found, strict=True)]
    rounded = jax.tree.map(lambda *leaves: jnp.stack(leaves), *whole)
    weight = quantized_weight(
        _side_by_side(rounded),
        config.bits,
        parameter,
        error=float(_relative_error(w, rounded)),
        output_error=float(gptq.output_error(w, rounded, hessians)),
        asked=target.asked_block_size,
    )
    if reasons:
        return _told(weight, f"{TO_NEAREST} in {len(reasons)} of {len(found)} experts: {reasons[0]}", work)
    remark = work.remarks.get(parameter.path)
    return weight if remark is None else _told(weight, remark, work)


def _reason(hessian: jax.Array, prepared: gptq.Factor | jax.Array | None) -> str:
    if prepared is not None:
        return UNBOUNDED
    return NOT_DEFINITE if bool(jnp.trace(hessian) != 0) else NO_TOKENS


def _side_by_side(experts: QArray) -> QArray:
    """On the host, [E, K, N] as [K, E * N], the form in which experts are stored."""

    def join(leaf: jax.Array) -> np.ndarray:
        return np.moveaxis(np.asarray(leaf), 0, -2).reshape(*leaf.shape[1:-1], -1)

    return jax.tree.map(join, experts)


def _fall_back(parameter: Parameter, reason: str, work: Work) -> HostWeight:
    return _told(work.to_nearest(parameter), f"{TO_NEAREST}: {reason}", work)


def _told(weight: HostWeight, remark: str, work: Work) -> HostWeight:
    """A weight that the method, or a part of it, was not used for. Raises ValueError where that is not wanted."""
    name = weight.report.name
    if work.config.strict:
        raise ValueError(f"{name} cannot be done by {work.config.NAME}. Without --strict it would be {remark}")
    logger.warning("%s is %s", name, remark)
    return dataclasses.replace(weight, report=dataclasses.replace(weight.report, fallback=remark))


@jax.jit
def _relative_error(w: jax.Array, rounded: QArray) -> jax.Array:
    return jnp.linalg.norm(dequantize(rounded) - w) / jnp.maximum(jnp.linalg.norm(w), 1e-30)


def give(parameter: Parameter, array: QArray | np.ndarray) -> None:
    """Gives the model a weight in float32, for the layers before and after it to be run."""
    w = dequantize(array) if isinstance(array, QArray) else jnp.asarray(np.asarray(array, np.float32))
    experts = None if parameter.axes is None else parameter.axes.experts
    parameter.variable.set_value(w if experts is None else by_expert(w, experts))


def forget(parameters: Iterator[Parameter] | Sequence[Parameter]) -> None:
    for parameter in parameters:
        parameter.variable.set_value(jax.ShapeDtypeStruct(parameter.variable.get_value().shape, jnp.float32))
