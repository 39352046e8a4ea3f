"""What the tests against other projects' tools share: a small model, and logits of weights in any form."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jetserve.checkpoint.load import load_model
from jetserve.config import EngineConfig, MeshConfig
from jetserve.engine.runner import Runner
from jetserve.parallel.mesh import make_mesh
from jetserve.testing import make_tiny_checkpoint

TOKENS = np.random.default_rng(1).integers(3, 320, 48)
TOLERANCE = 1e-3
"""Of logits, against weights that the tool dequantized itself."""
TEXTS = [
    f"The quick brown fox jumps over {count} lazy dogs, and the answer is the sum of it all. " * 4
    for count in range(16)
]


def make_source(folder: Path) -> Path:
    """A float model: layers of 128 and 256 inputs."""
    return make_tiny_checkpoint(
        folder, hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4
    )


def float_logits(source: Path, weights: Mapping[str, torch.Tensor]) -> np.ndarray:
    """transformers', of the source with some weights replaced, by their names."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    state = model.state_dict()
    assert weights.keys() <= state.keys()
    for name, weight in weights.items():
        state[name].copy_(weight.float())
    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    return logits


def our_logits(path: Path) -> np.ndarray:
    """jetserve's, of a checkpoint as it is."""
    loaded = load_model(path, mesh=make_mesh(MeshConfig(tensor=1)), dtype=jnp.dtype("float32"))
    config = EngineConfig(max_sequences=1, max_length=64, max_step_tokens=64, mesh=MeshConfig(tensor=1))
    runner = Runner(loaded.model, config, make_mesh(config.mesh))
    return np.concatenate([np.asarray(rows)[:count] for count, rows in runner.evaluate(TOKENS.tolist())])
