"""What weights' inputs are like: seen in any model, the same whether outputs are kept or computed again."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.checkpoint.load import load_model
from jetserve.config import MeshConfig
from jetserve.kernels import select
from jetserve.layers.linear import observe
from jetserve.models.base import Model
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize import calibrate
from jetserve.quantize.calibrate import Calibration, linears
from jetserve.testing import make_tiny_checkpoint

STAGES = [
    ("attention.q", "attention.k", "attention.v"),
    ("attention.o",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
]
WINDOWS = np.random.default_rng(0).integers(3, 300, (6, 24)).astype(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = make_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")
    with select.choose(quantized_matmul="xla"):
        return load_model(folder, mesh=make_mesh(MeshConfig(), jax.devices()[:1]), dtype=jnp.dtype("float32")).model


@pytest.mark.slow
@pytest.mark.parametrize("room", [calibrate.KEPT_BYTES, 0], ids=["kept", "computed again"])
def test_second_moments_are_those_of_what_layers_meet(model: Model, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(calibrate, "KEPT_BYTES", room)
    monkeypatch.setattr(calibrate, "STEP_TOKENS", 48)  # three batches of two windows
    monkeypatch.setattr(calibrate, "GRAM_BLOCK", 24)
    calibration = Calibration(model, WINDOWS)
    assert len(calibration.layers) == 2
    for layer in calibration.layers:
        assert calibration.stages(layer) == STAGES
        met: dict[int, list[np.ndarray]] = {}
        for args in calibration._arguments():
            seen: list[np.ndarray] = []
            with observe(lambda x, *_, seen=seen: seen.append(np.asarray(x))):  # type: ignore[misc]
                layer(*args)
            for number, x in enumerate(seen):
                met.setdefault(number, []).append(x)
        # As in use, a weight changes once it is done: what comes after it must see the new one.
        weight = linears(layer)["attention.o"].weight
        for number in range(len(STAGES)):
            x = np.concatenate(met[number]).astype(np.float64)
            found = np.asarray(calibration.second_moment(layer, number))
            expected = x.T @ x / WINDOWS.size
            assert number > 1 or np.allclose(calibration.largest(layer, number), np.abs(x).max(axis=0), rtol=1e-3)
            if number < 2:
                np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
            else:
                assert np.abs(found - expected).max() > 0.01 * np.abs(expected).max()
            if number == 1:
                weight.set_value(weight.get_value() * 0.5)
        calibration.advance(layer)
        weight.set_value(weight.get_value() * 2)
    assert np.isfinite(np.concatenate(calibration._states)).all()
