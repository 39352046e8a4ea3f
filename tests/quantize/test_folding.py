"""Scales between two layers that no family of models has in this form; all others are in `test_scaled_models`."""

import jax.numpy as jnp
import numpy as np

from jetserve.layers.moe import GatedExperts
from jetserve.quantize.folding import folds


def test_experts_with_biases_compute_what_they_did() -> None:
    experts = GatedExperts({"D": 8, "E": 3, "F": 6}, activation="silu", bias=True)
    rng = np.random.default_rng(0)
    for linear in (experts.gate, experts.up, experts.down):
        for variable in (linear.weight, linear.bias):
            assert variable is not None
            variable.set_value(jnp.asarray(rng.standard_normal(variable.get_value().shape), jnp.float32))
    rows, sizes = jnp.asarray(rng.standard_normal((9, 8)), jnp.float32), jnp.array([4, 2, 3], jnp.int32)
    expected = experts(rows, sizes)
    (fold,) = folds(experts)
    fold.apply(jnp.asarray(rng.uniform(0.25, 4, (3, 6)), jnp.float32))
    np.testing.assert_allclose(experts(rows, sizes), expected, rtol=1e-4, atol=1e-4)
