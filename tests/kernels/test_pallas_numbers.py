"""The TPU kernels' numbers, by jax's interpreter of TPU kernels."""

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_attention import Case, Problem

from jetserve.kernels.attention import pallas_tpu as attention

pytestmark = pytest.mark.slow


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
