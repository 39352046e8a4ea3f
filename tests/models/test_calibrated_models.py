"""Calibration in every family of models: no model has code for it, so each must show its layers and their inputs."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import FIRST, VOCABULARY, make

from jetserve.checkpoint import calibrated
from jetserve.config import CalibrationConfig, GPTQConfig
from jetserve.conversion_plan import make_conversion_plan
from jetserve.models.base import Role

METHOD = GPTQConfig(calibration=CalibrationConfig(texts=("made below",)))


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
        report = weight.report
        is_expert = parameter.axes is not None and parameter.axes.experts is not None
        assert (report.fallback == calibrated.NEVER_MET) == is_expert, report
        if parameter.role is Role.LINEAR and not is_expert:
            assert report.output_error is not None
            assert 0 < report.output_error < 1e-3
        else:
            assert report.output_error is None
