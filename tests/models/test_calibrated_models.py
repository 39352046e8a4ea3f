"""Calibration in every family of models: no model has code for it, so each must show its layers and their inputs."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tiny_models import FIRST, VOCABULARY, make

from jetserve.checkpoint import calibrated
from jetserve.checkpoint.source import make_weight
from jetserve.conversion_plan import make_conversion_plan
from jetserve.method_config import AWQConfig, CalibrationConfig, GPTQConfig, SmoothQuantConfig
from jetserve.models.base import Role
from jetserve.quantize.qarray import dequantize

METHOD = GPTQConfig(calibration=CalibrationConfig(texts=("made below",)))
AWQ = AWQConfig(calibration=METHOD.calibration)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_every_linear_layer_is_done_or_told(name: str, tmp_path: Path) -> None:
    make(name, tmp_path / "hf")
    plan = make_conversion_plan(tmp_path / "hf", quantize_type="int8_per_channel", method=METHOD)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (3, 40)).astype(np.int32)
    work = calibrated.Work(reader=plan.reader, parameters=plan.parameters, targets=plan.targets, config=METHOD)
    made = list(calibrated.weights(work, plan.model, tokens, finished=lambda name: None, keep=lambda: None))
    assert sorted(weight.report.name for _, weight in made) == sorted(p.source for p in plan.parameters)
    for parameter, weight in made:
        assert weight.report.fallback is None
        if parameter.role is Role.LINEAR:
            assert weight.report.output_error is not None
            assert 0 < weight.report.output_error < 1e-3
        else:
            assert weight.report.output_error is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "unscaled"),
    [
        ("llama-plain", AWQ, ()),
        ("mixtral-plain", AWQ, ()),
        ("bloom-plain", AWQ, ("mlp.down",)),
        ("gemma-plain", AWQ, ()),
        ("mixtral-plain", SmoothQuantConfig(calibration=METHOD.calibration), ()),
    ],
)
def test_what_is_scaled_is_as_near_and_what_is_not_is_told(
    name: str, method: AWQConfig | SmoothQuantConfig, unscaled: tuple[str, ...], tmp_path: Path
) -> None:
    make(name, tmp_path / "hf")
    plan = make_conversion_plan(tmp_path / "hf", quantize_type="int8_per_channel", method=method)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (3, 40)).astype(np.int32)
    work = calibrated.Work(reader=plan.reader, parameters=plan.parameters, targets=plan.targets, config=method)
    made = list(calibrated.weights(work, plan.model, tokens, finished=lambda name: None, keep=lambda: None))
    scaled = 0
    for parameter, weight in made:
        told = weight.report.fallback
        if parameter.path.endswith(tuple(f"{path}.weight" for path in unscaled) or ("nothing",)):
            assert told == "not scaled: nothing before it can take the scales"
        else:
            assert told is None
        if parameter.role is Role.LINEAR:
            assert weight.report.output_error is not None
            assert 0 < weight.report.output_error < 1e-3
            floats = np.asarray(plan.reader.read(parameter.source), np.float32).T
            found = np.asarray(dequantize(weight.array))
            scaled += np.abs(found - floats).max() > 0.1 * np.abs(floats).max()
    assert scaled > 0
    if not unscaled:
        return
    strict = dataclasses.replace(work, config=dataclasses.replace(method, strict=True))
    with pytest.raises(ValueError, match=r"cannot be done by awq. Without --strict it would be not scaled"):
        list(calibrated.weights(strict, plan.model, tokens, finished=lambda name: None, keep=lambda: None))


@pytest.mark.slow
def test_an_expert_that_no_token_reaches_is_rounded_and_told(tmp_path: Path) -> None:
    make("mixtral-plain", tmp_path / "hf")
    plan = make_conversion_plan(tmp_path / "hf", quantize_type="int8_per_channel", method=METHOD)
    tokens = np.full((1, 8), 7, np.int32)  # the same token everywhere goes to the same experts
    work = calibrated.Work(reader=plan.reader, parameters=plan.parameters, targets=plan.targets, config=METHOD)
    made = list(calibrated.weights(work, plan.model, tokens, finished=lambda name: None, keep=lambda: None))
    experts = [(p, w) for p, w in made if p.axes is not None and p.axes.experts is not None]
    assert experts
    for parameter, weight in experts:
        assert weight.report.fallback is not None
        assert "experts: no token of the calibration text reaches it" in weight.report.fallback
        nearest = make_weight(plan.reader, parameter, plan.targets[parameter.path]).array
        found = np.asarray(dequantize(weight.array)).reshape(parameter.shape[0], parameter.axes.experts, -1)
        expected = np.asarray(dequantize(nearest)).reshape(found.shape)
        same = [bool(np.array_equal(found[:, e], expected[:, e])) for e in range(parameter.axes.experts)]
        assert 0 < sum(same) < len(same)
        assert np.abs(found).max(axis=(0, 2)).min() > 0
