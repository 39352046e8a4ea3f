"""Scales of inputs in every family of models: folded into what comes before, they must change nothing in floats."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from replay import Replay
from tiny_models import FAMILIES, MODELS, make, make_texts

from jetserve.quantize.calibrate import linears
from jetserve.quantize.folding import folds

NOT_SCALED = {
    "bloom": {"mlp.down"},
    "falcon": {"mlp.down"},
    "gpt2": {"mlp.down"},
    "gpt_neox": {"mlp.down"},
    "gpt_oss": {"mlp.experts.down"},
    "starcoder2": {"mlp.down"},
    "olmo2": {"attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"},
}
"""Those with nothing before them that could take scales: a GELU or a limit in between, or no norm."""
WITH_RELU = ("opt-plain", "opt-no_bias", "gpt2-unscaled-relu")
CASES = [name for name in MODELS if MODELS[name][1] == next(iter(FAMILIES[MODELS[name][0]].models))]
CASES += [
    *WITH_RELU[1:],
    "opt-untied-gelu",
    "llama-biases-head_dim",
    "falcon-newer-untied-linear_rope",
    "falcon-newer-one_norm",
]
CASES += ["falcon-alibi-sequential-biases", "stablelm-head_norms-parallel", "gpt_neox-sequential-tied-half_rotary"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_scaled_model_computes_what_it_did(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    replay = Replay(tmp_path, make_texts())
    expected = replay.whole()
    model = nnx.merge(replay._graph, replay._params)
    rng = np.random.default_rng(0)
    for layer in model.layers:
        before = {path: np.asarray(linear.weight.get_value()) for path, linear in linears(layer).items()}
        scaled: list[str] = []
        paths = {id(linear): path for path, linear in linears(layer).items()}
        for fold in folds(layer):
            count = int(fold.channels.max()) + 1
            experts = (fold.producer.weight.get_value().shape[0],) if fold.of_experts else ()
            fold.apply(jnp.asarray(rng.uniform(0.25, 4, (*experts, count)), jnp.float32))
            scaled += [paths[id(consumer)] for consumer in fold.consumers]
        assert len(scaled) == len(set(scaled))
        family = MODELS[name][0]
        missing = {"mlp.down"} if name == "opt-untied-gelu" else NOT_SCALED.get(family, set())
        assert set(before) - set(scaled) == (set() if name in WITH_RELU else missing)
        for path, linear in linears(layer).items():
            assert path not in scaled or np.abs(np.asarray(linear.weight.get_value()) - before[path]).max() > 0.01
    replay._params = nnx.state(model)
    for found, wanted in zip(replay.whole(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-4 * np.abs(wanted).max())
