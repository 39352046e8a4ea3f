"""A random Llama that the tests of every checkpoint format write down in their format and read back."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyLlama:
    """`weights` in float32 under Hugging Face's names and in its layout."""

    model: LlamaForCausalLM
    weights: dict[str, np.ndarray]

    def interleaved(self, name: str) -> np.ndarray:
        """A weight in the row order of llama.cpp and Meta, by llama.cpp's own formula (`LlamaModel.permute`)."""
        w = self.weights[name]
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads is None:
            return w
        return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)

    def meta_weights(self) -> dict[str, np.ndarray]:
        """The weights under Meta's names and in its layout."""
        found = {}
        for name in self.weights:
            meta = name.removeprefix("model.")
            for ours, theirs in META_NAMES.items():
                meta = meta.replace(ours, theirs)
            found[meta] = self.interleaved(name)
        return found


META_NAMES = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def damaged(data: bytes, rng: np.random.Generator, *, within: int) -> bytes:
    """A copy with a few of the first `within` bytes changed, one time in ten cut short as well."""
    found = bytearray(data)
    for at in rng.integers(min(within, len(data)), size=rng.integers(1, 4)):
        found[at] = rng.choice([0, 1, 127, 255])
    return bytes(found[: rng.integers(len(data))] if rng.random() < 0.1 else found)


@pytest.fixture(scope="session")
def damage() -> Callable[..., bytes]:
    return damaged


@pytest.fixture(scope="session")
def tiny() -> TinyLlama:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=96,
        vocab_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones as they are made, which would hide two norms that changed places
                parameter.uniform_(0.5, 1.5)
    weights = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    return TinyLlama(model=model, weights=weights)
