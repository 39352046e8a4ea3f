"""From a source's tensors to a model's weights: names matched strictly, then one weight made at a time, on the host.

Serves both loading and conversion, so that both make the very same weights. Knows no format and no devices' layout.
"""

import dataclasses
import re
from collections.abc import Sequence

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jetserve.checkpoint.base import CheckpointError, CheckpointReader, TensorInfo
from jetserve.checkpoint.files import some
from jetserve.checkpoint.parts import stored_transposed
from jetserve.models.base import Parameter, Role
from jetserve.quantize.methods import rtn
from jetserve.quantize.qarray import QArray
from jetserve.quantize.recipe import Action, Target
from jetserve.quantize.report import TensorReport

HEAD = "lm_head.weight"
IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn(ention)?\.(masked_)?bias)$")
"""Tensors that old checkpoints carry and that follow from the config: frequencies, and masks of GPT-2's family."""

ROWS_BYTES = 16 * 2**20
"""Of float32 rows compared or checked at once."""

_BF16_EXPONENT = np.uint16(0x7F80)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostWeight:
    """One weight on the host: `array` a QArray of numpy arrays (int8 containers), a matrix [K, N] or a vector.

    `bits` is that of its quantized values, None for floats.
    """

    array: QArray | np.ndarray
    bits: int | None
    report: TensorReport


def check_tensors(reader: CheckpointReader, parameters: Sequence[Parameter]) -> None:
    """Checks that a source holds exactly a model's weights, in their shapes.

    Reads none, but for an untied head, and biases that the model lacks.

    Raises:
      CheckpointError: naming tensors that are unknown, missing, wanted twice, or of another shape.
    """
    taken: dict[str, Parameter] = {}
    for parameter in parameters:
        if parameter.source in taken:
            raise CheckpointError(
                f"both {taken[parameter.source].path} and {parameter.path} of the model take {parameter.source};"
                " expected one of them to: the model's WEIGHTS table is wrong"
            )
        taken[parameter.source] = parameter
    by_tensor = {name: parameter for parameter in parameters for name in parameter.origin.names}
    missing = by_tensor.keys() - reader.tensors.keys()
    if missing:
        hint = "; if its head is its embedding, set tie_word_embeddings in the config" if missing == {HEAD} else ""
        raise CheckpointError(
            f"{reader.path} lacks {len(missing)} of the model's {len(by_tensor)} tensors: {some(missing, 10)}{hint}"
        )
    unknown = {name for name in reader.tensors if name not in by_tensor and not IGNORED.search(name)}
    if HEAD in unknown:
        _check_tied_head(reader, parameters)
        unknown.remove(HEAD)
    # Tools give every layer that they quantize a bias, of zeros where the model has none.
    unknown -= {name for name in unknown if name.endswith(".bias") and not reader.read(name).any()}
    if unknown:
        raise CheckpointError(
            f"{reader.path} has {len(unknown)} tensors that a model of type {reader.hf_config.get('model_type')!r} does"
            f" not: {some(unknown, 10)}. Its config.json may be that of another model"
        )
    for name, parameter in by_tensor.items():
        found, expected = reader.tensors[name].shape, (parameter.origin.height, *parameter.shape[-2::-1])
        if stored_transposed(reader, name, parameter.origin):
            expected = expected[::-1]
        if found != expected:
            raise CheckpointError(
                f"{reader.path}: {name} has shape {list(found)}; by its config, {list(expected)} is"
                " expected. Its config.json may be that of another model"
            )


def _check_tied_head(reader: CheckpointReader, parameters: Sequence[Parameter]) -> None:
    """Of a model with tied embeddings: the head that stands in the file must be the embedding."""
    embedding = next(p.source for p in parameters if p.role is Role.EMBEDDING)
    shape = reader.tensors[embedding].shape
    equal = reader.tensors[HEAD].shape == shape
    step = max(1, ROWS_BYTES // (4 * shape[1]))
    for start in range(0, shape[0] if equal else 0, step):
        span = start, min(start + step, shape[0])
        if not np.array_equal(reader.read_rows(HEAD, *span), reader.read_rows(embedding, *span)):
            equal = False
            break
    if not equal:
        raise CheckpointError(
            f"{reader.path}: the config ties the output head to the embedding, but {HEAD} differs from {embedding};"
            " set tie_word_embeddings to false in config.json to use it, or remove the tensor"
        )


def make_weight(reader: CheckpointReader, parameter: Parameter, target: Target) -> HostWeight:
    """Reads one tensor and makes of it what the plan says, holding no more than a few rows besides source and result.

    The reader has every parameter under its own name (`parts.in_parts`).

    Raises:
      CheckpointError: for a tensor that is no float, or holds NaN or infinite values, by its name.
      ValueError: as `rtn.quantize_matrix` does.
    """
    name = parameter.source
    info = reader.tensors[name]
    if target.action is Action.KEEP and parameter.role is not Role.FLOAT:
        kept = reader.read_quantized(name)
        if kept is not None:
            kept = dataclasses.replace(kept, quantize_activation=target.quantize_activation)
            return _kept(kept, reader.quantized_bits(name), parameter, reader)
    if target.config is not None:
        rounded, error = rtn.quantize_matrix(
            lambda start, stop: _floats(reader.read_rows(name, start, stop), reader, name),
            (info.shape[0], info.shape[1]),
            target.config,
            clip=target.clip,
            name=name,
        )
        return quantized_weight(rounded, target.config.bits, parameter, error=error, asked=target.asked_block_size)
    array = _floats(reader.read(name), reader, name).T
    _check_finite(array.T, reader, name)
    return HostWeight(array=array, bits=None, report=_float_report(parameter, array.dtype, info))


def _kept(kept: QArray, bits: int | None, parameter: Parameter, reader: CheckpointReader) -> HostWeight:
    where = f"{reader.path}: {parameter.source}"
    if bits is None or kept.shape != parameter.shape:
        raise CheckpointError(f"{where} is quantized with shape {kept.shape}; expected {parameter.shape}")
    kept.check()
    for part in (kept.scale,) if kept.zero_point is None else (kept.scale, kept.zero_point):
        if not np.isfinite(part).all():
            raise CheckpointError(f"{where} has a scale or a zero point that is NaN or infinite; get the file again")
    return quantized_weight(kept, bits, parameter)


def quantized_weight(
    qarray: QArray,
    bits: int,
    parameter: Parameter,
    *,
    error: float | None = None,
    output_error: float | None = None,
    asked: int | None = None,
) -> HostWeight:
    """A quantized weight with its report; the arguments are those of `TensorReport`, `asked` the block size."""
    config = dataclasses.replace(qarray.config, bits=bits)
    size = qarray.size_in_bits - qarray.values.size * (qarray.bits - bits)
    report = TensorReport(
        name=parameter.source,
        type_name=config.name,
        weights=qarray.values.size,
        bits=size,
        block_size=config.block_size,
        asked_block_size=asked if asked != config.block_size else None,
        error=error,
        output_error=output_error,
    )
    return HostWeight(array=qarray, bits=bits, report=report)


def _float_report(parameter: Parameter, dtype: np.dtype, info: TensorInfo) -> TensorReport:
    count = int(np.prod(parameter.shape))
    return TensorReport(
        name=parameter.source,
        type_name=dtype.name,
        weights=count,
        bits=count * dtype.itemsize * 8,
        dequantized_from=info.type_name if info.quantized else None,
    )


def _floats(array: np.ndarray, reader: CheckpointReader, name: str) -> np.ndarray:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise CheckpointError(
            f"{reader.path}: {name} holds {array.dtype} values; expected a float tensor. If the checkpoint is quantized"
            " by a method that is not read, use the model's unquantized checkpoint"
        )
    return array


def _check_finite(rows: np.ndarray, reader: CheckpointReader, name: str) -> None:
    """Checks a float tensor a few rows at a time."""
    step = max(1, ROWS_BYTES // (4 * max(1, rows[:1].size)))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if part.dtype == ml_dtypes.bfloat16:  # numpy's own functions are slow on it
            finite = bool(((part.view(np.uint16) & _BF16_EXPONENT) != _BF16_EXPONENT).all())
        else:
            finite = bool(np.isfinite(part).all())
        if not finite:
            raise CheckpointError(f"{reader.path}: {name} holds NaN or infinite values; get the checkpoint again")
