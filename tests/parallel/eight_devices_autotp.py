"""Functions that declare nothing, sharded over eight devices: run by `test_autotp.py` where there are so many."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from parallel import user_models

from jetserve.config import MeshConfig
from jetserve.parallel.autotp import shard
from jetserve.parallel.mesh import make_mesh
from jetserve.plan import hlo


@pytest.mark.parametrize("name", user_models.MODELS)
def test_equal_results_and_as_few_collectives_as_by_hand(name: str) -> None:
    model, mesh = user_models.MODELS[name](), make_mesh(MeshConfig())
    run = jax.jit(model.function)
    expected = run(model.params, *model.args)
    paths, structure = jax.tree_util.tree_flatten_with_path(model.params)
    by_hand = jax.tree.unflatten(
        structure,
        [NamedSharding(mesh, user_models.by_hand(jax.tree_util.keystr(path), leaf.ndim)) for path, leaf in paths],
    )
    for shardings in (by_hand, shard(model.function, model.params, *model.args, mesh=mesh)):
        params = jax.device_put(model.params, shardings)
        text = run.lower(params, *model.args).compile().as_text()
        assert text is not None
        assert [found.kind for found in hlo.collectives(text)] == ["all-reduce"] * model.all_reduces
        np.testing.assert_allclose(run(params, *model.args), expected, rtol=1e-4, atol=1e-5)
