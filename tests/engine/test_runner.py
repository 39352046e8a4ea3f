"""The compiled step itself: what it does with the KV pages."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jetserve.checkpoint.load import load_model
from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.engine.runner import Runner
from jetserve.kernels import native, select
from jetserve.parallel.mesh import make_mesh
from jetserve.testing import make_tiny_checkpoint

INSTRUCTION = re.compile(r"^ *(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z-]+)\(")
MOVES_NOTHING = {"parameter", "custom-call", "get-tuple-element", "tuple"}


@pytest.mark.slow
@pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("quantize_cache", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_the_pages_are_updated_in_place(tmp_path: Path, quantize_cache: bool, decode: bool) -> None:
    """Of every layer: page buffers go in, through the kernel and out again, and nothing else in the program makes one.

    The kernel itself refuses to run when its pages are not the buffer that it was given.
    """
    mesh = make_mesh(MeshConfig(tensor=1), jax.devices()[:1])
    loaded = load_model(
        make_tiny_checkpoint(tmp_path), quantize_type="int4_blockwise", mesh=mesh, dtype=jnp.dtype("float32")
    )
    config = EngineConfig(max_sequences=4, max_length=64, cache=CacheConfig(quantize=quantize_cache))
    with select.choose(attention="cpu"):
        runner = Runner(loaded.model, config, mesh)
        text = runner.lower_step(tokens=4 if decode else 16, sequences=4, decode=decode).compile().as_text()
    pages = f"[{config.num_pages + 1},{config.cache.page_size},"
    found = [match.groups() for line in text.splitlines() if (match := INSTRUCTION.match(line))]
    of_pages = [opcode for shape, opcode in found if pages in shape]
    buffers = loaded.config.num_layers * (2 if quantize_cache else 1)  # values, and scales of int8 ones
    assert of_pages.count("parameter") == text.count("may-alias") == buffers
    assert of_pages.count("custom-call") == loaded.config.num_layers
    assert set(of_pages) <= MOVES_NOTHING
