"""The TPU kernels' numbers on the shared cases and some of their own, by jax's interpreter of TPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_attention import Case, Problem
from test_grouped_matmul import EXPERTS, KINDS, SIZES, K, check_every_row
from test_quantized_matmul import CASES, check, run

from jetserve.config import MeshConfig
from jetserve.kernels.attention import pallas_tpu as attention
from jetserve.kernels.quantized_matmul import pallas_tpu, tiles
from jetserve.kernels.split import SplitWeight
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.qarray import QuantizationConfig
from jetserve.testing import MatmulCase

pytestmark = pytest.mark.slow
TILE = tiles.Tile(most_rows=1, rows=32, columns=128, depth=64, cycles=0, einsum_cycles=1)
"""Smaller than the weights, so that every loop turns."""


@pytest.mark.parametrize(
    "case",
    [
        Case(sequences=((13, 1), (150, 1), (0, 1)), head_size=128, empty=1, padding=1, page_size=16),
        Case(sequences=((0, 1),), head_size=128, kv_heads=1),
        Case(sequences=((40, 1), (7, 1)), head_size=256, kv_heads=2),
        Case(sequences=((150, 1), (3, 1)), head_size=128, page_size=16, sliding_window=40),
        Case(sequences=((100, 1), (3, 1)), head_size=128, soft_cap=2.0, alibi=True, sliding_window=5),
        Case(sequences=((100, 1), (3, 1)), head_size=128, heads=16, kv_heads=16, int8=True, empty=1, padding=1),
        Case(sequences=((100, 1), (3, 1)), head_size=128, kv_heads=1, int8=True, sliding_window=9, alibi=True),
        Case(sequences=((150, 1), (3, 1)), head_size=128, page_size=16, dtype="bfloat16"),
        Case(sequences=((100, 1), (3, 1)), head_size=128, dtype="bfloat16", int8=True, soft_cap=2.0),
    ],
    ids=lambda case: case.id,
)
def test_decoding(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one chunk of pages and over several, with NaN wherever no token was written."""
    monkeypatch.setattr(attention, "MOST_PAGES", 4)
    problem = Problem.make(case)
    with pltpu.force_tpu_interpret_mode():
        found, _ = problem.run("pallas_tpu", case)
    expected = problem.expected(case)
    assert np.isfinite(found).all()
    tolerance = 0.03 if case.int8 or case.dtype == "bfloat16" else 1e-5
    assert np.abs(found[: len(expected)] - expected).max() < tolerance


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.block_size and case.rows != (1,)], ids=lambda case: case.id
)
def test_blockwise_matmul(case: MatmulCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "find", lambda weight, rows: TILE)
    with pltpu.force_tpu_interpret_mode():
        check(*run("pallas_tpu", case), case)


@pytest.mark.parametrize(("contracted", "output"), [("tensor", None), (None, "tensor"), (None, None)])
def test_matmul_over_a_mesh(contracted: str | None, output: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one device: the way of the parts, whose sum over several is XLA's."""
    case = MatmulCase(bits=4, block_size=32, zero_point="integer")
    x, w, expected = case.build()
    monkeypatch.setattr(tiles, "find", lambda weight, rows: TILE)
    weight = SplitWeight(weight=w, contracted=contracted, output=output)
    with pltpu.force_tpu_interpret_mode(), jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        y = jax.jit(pallas_tpu.run)(x, weight)
    check(np.asarray(y, np.float64), expected, case)


@pytest.mark.parametrize(
    "config", [kind for kind in KINDS if kind and kind.block_size], ids=lambda c: f"{c.name}-{c.symmetric}"
)
def test_experts(config: QuantizationConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    multiply = pallas_tpu.multiply
    monkeypatch.setattr(
        pallas_tpu, "multiply", lambda x, *args, **kw: shapes.append(x.shape) or multiply(x, *args, **kw)
    )
    monkeypatch.setattr(tiles, "find", lambda weight, rows: TILE)
    with pltpu.force_tpu_interpret_mode():
        check_every_row("pallas_tpu", config)
    assert shapes == [(-(-rows // 32) * 32, EXPERTS * K) for rows in SIZES]


def test_a_device_that_was_not_looked_at_takes_the_einsum() -> None:
    case = MatmulCase(bits=4, block_size=32)
    x, w, expected = case.build()
    assert "pallas_call" not in str(jax.make_jaxpr(pallas_tpu.run)(x, w))
    check(np.asarray(pallas_tpu.run(x, w), np.float64), expected, case)
    assert not tiles.table().get(jnp.zeros(1).device.device_kind)
