"""Sharded = unsharded for one model of every family: run by `test_models.py` where there are eight devices."""

from pathlib import Path

import jax
import numpy as np
import pytest
from replay import Piece, Replay
from tiny_models import FIRST, make, make_texts

from jetserve.kernels import select

REFERENCE = dict.fromkeys(
    (
        "quantized_matmul",
        "attention",
        "embedding_lookup",
        "rms_norm",
        "rope",
        "projections",
        "grouped_matmul",
        "argmax",
    ),
    "xla",
)
STEPS = [[Piece(sequence=0, start=0, stop=28)], [Piece(sequence=0, start=28, stop=29)]]


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        *((name, 1) for name in FIRST),
        *((name, 4) for name in ("mixtral-plain", "gpt_oss-plain", "qwen2_moe-plain")),
        ("qwen3_moe-plain", 8),
    ],
)
def test_sharded_is_unsharded(name: str, experts: int, tmp_path: Path) -> None:
    assert jax.device_count() == 8
    make(name, tmp_path)
    settings = {"quantize_type": "int4_blockwise", "block_size": 32, "symmetric": False}
    texts = make_texts()[1:2]
    with select.choose(**REFERENCE):
        expected = Replay(tmp_path, texts, **settings).run(STEPS)[0]
    with select.choose(**REFERENCE | {"grouped_matmul": "split"}):
        found = Replay(tmp_path, texts, devices=8, experts=experts, **settings).run(STEPS)[0]
    np.testing.assert_allclose(found, expected, atol=1e-3)
