"""Random models: of the recipe's types, the same for the same seed, and of a magnitude that models can run with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetserve.checkpoint.random_weights import random_model
from jetserve.config import MeshConfig
from jetserve.kernels import select
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.qarray import QUANTIZE_TYPES, QArray, dequantize

HF_CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", QUANTIZE_TYPES)
def test_quantized(name: str, symmetric: bool) -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with select.choose(quantized_matmul="xla"):
        models = [
            random_model(
                HF_CONFIG, quantize_type=name, symmetric=symmetric, mesh=mesh, dtype=jnp.dtype("float32"), seed=seed
            )
            for seed in (0, 0, 1)
        ]
    up, again, other = (loaded.model.layers[0].mlp.up.weight.get_value() for loaded in models)
    assert isinstance(up, QArray)
    up.check()
    assert up.config.name == name
    assert up.config.symmetric is symmetric
    jax.tree.map(np.testing.assert_array_equal, up, again)
    assert (np.asarray(up.values) != np.asarray(other.values)).any()
    assert float(jnp.std(dequantize(up))) == pytest.approx(128**-0.5, rel=0.1)
    assert models[0].report.by_type()[name].weights


def test_floats_take_the_dtype() -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    loaded = random_model(HF_CONFIG, mesh=mesh, dtype=jnp.dtype("bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(loaded.model))} == {jnp.dtype("bfloat16")}
    assert loaded.report.bits_per_weight == 16
