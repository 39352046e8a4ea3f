"""Sharded = unsharded, and what sharding costs: run by `test_sharding.py` where there are eight devices."""

import collections
import contextlib
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import foreign
from safetensors.numpy import load_file

from jetserve.checkpoint.load import LoadedModel, load_model
from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.engine.engine import Engine
from jetserve.engine.runner import Runner
from jetserve.kernels import select
from jetserve.models import base
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.qarray import QUANTIZE_TYPES, QArray
from jetserve.testing import make_tiny_checkpoint
from jetserve.types import Request, SamplingParams, TokenLogprobs

LAYERS = 2
REFERENCE = {"quantized_matmul": "xla", "attention": "xla", "embedding_lookup": "xla"}
EVEN = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_key_value_heads": 8}
"""Sizes that eight devices divide into whole heads and whole blocks of 32."""
PROMPTS = [tuple(np.random.default_rng(i).integers(3, 320, n).tolist()) for i, n in enumerate((37, 9))]

COLLECTIVE = re.compile(r"= .*? (all-reduce|all-to-all|all-gather|collective-permute|reduce-scatter)(?:-start)?\(")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    quantize_type: str = "none"
    symmetric: bool = True
    quantize_activation: bool = False

    @property
    def id(self) -> str:
        names = [self.quantize_type, *(["asymmetric"] if not self.symmetric else [])]
        return "-".join(names + (["a8"] if self.quantize_activation else []))

    @property
    def settings(self) -> dict[str, Any]:
        if self.quantize_type == "none":
            return {}
        block_size = 32 if self.quantize_type.endswith("blockwise") else None
        return {**dataclasses.asdict(self), "block_size": block_size}


TYPES = [Weights()] + [
    Weights(quantize_type=name, symmetric=symmetric) for name in QUANTIZE_TYPES for symmetric in (True, False)
]
W8A8 = [Weights(quantize_type=name, quantize_activation=True) for name in ("int8_per_channel", "int4_blockwise")]
every_type = pytest.mark.parametrize("weights", [*TYPES, *W8A8], ids=lambda weights: weights.id)

Make = Callable[..., tuple[LoadedModel, Runner]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A model on a mesh of as many devices as asked for."""
    assert jax.device_count() == 8
    folders: dict[str, Path] = {}

    def load(
        weights: Weights, devices: int, *, mesh: MeshConfig | None = None, quantize_cache: bool = False, **shape: Any
    ) -> tuple[LoadedModel, Runner]:
        shape = {**EVEN, **shape}
        folder = folders.setdefault(str(shape), tmp_path_factory.mktemp("model"))
        make_tiny_checkpoint(folder, num_hidden_layers=LAYERS, **shape)
        mesh = make_mesh(mesh or MeshConfig(), jax.devices()[:devices])
        loaded = load_model(folder, mesh=mesh, dtype=jnp.float32, **weights.settings)
        cache = CacheConfig(page_size=8, quantize=quantize_cache)
        config = EngineConfig(max_sequences=2, max_length=64, max_step_tokens=16, cache=cache)
        return loaded, Runner(loaded.model, config, mesh)

    return load


@pytest.fixture(autouse=True)
def reference_kernels(request: pytest.FixtureRequest) -> Any:
    best = request.node.get_closest_marker("best_kernels") is not None
    with contextlib.nullcontext() if best else select.choose(**REFERENCE):
        yield


def answers_of(loaded: LoadedModel, runner: Runner) -> dict[str, list[TokenLogprobs]]:
    """Of a batch that is prefilled in chunks and decoded, half greedy and half by a seed."""
    assert loaded.tokenizer is not None
    found = collections.defaultdict(list)
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=i % 2, seed=i, max_tokens=8, logprobs=20, ignore_eos=True),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    for output in Engine(runner, loaded.tokenizer).run(requests):
        found[output.request_id] += output.logprobs
    return found


def check_same(one: tuple[LoadedModel, Runner], many: tuple[LoadedModel, Runner], tolerance: float = 1e-4) -> None:
    """The same tokens, and the same logprobs of the best twenty and of what was drawn."""
    expected, found = answers_of(*one), answers_of(*many)
    for name, entries in expected.items():
        assert [entry.token_id for entry in found[name]] == [entry.token_id for entry in entries]
        for entry, other in zip(entries, found[name], strict=True):
            assert other.logprob == pytest.approx(entry.logprob, abs=tolerance)
            np.testing.assert_allclose([p for _, p in other.top], [p for _, p in entry.top], atol=tolerance)


def collectives(runner: Runner, **bucket: Any) -> dict[str, int]:
    text = runner.lower_step(**bucket).compile().as_text()
    return dict(collections.Counter(match[1] for line in text.splitlines() if (match := COLLECTIVE.search(line))))


@every_type
def test_sharded_is_unsharded(weights: Weights, make: Make) -> None:
    # An activation that rounds to the other side moves a logit more than the order of a sum does.
    check_same(make(weights, 1), make(weights, 8), tolerance=0.2 if weights.quantize_activation else 1e-4)


@every_type
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_collectives(weights: Weights, decode: bool, make: Make) -> None:
    """Two all-reduces a layer, one or two of the embedding (values and scales), none of the head.

    The best token of each device's part of the vocabulary takes the other three, of a few bytes. Rounding activations
    takes the largest of the whole token: two more a layer.
    """
    _, runner = make(weights, 8)
    found = collectives(runner, tokens=2 if decode else 16, sequences=2, decode=decode)
    a_layer = 4 if weights.quantize_activation else 2
    embedding = 1 if weights.quantize_type == "none" else 2
    assert found == {"all-reduce": a_layer * LAYERS + embedding + 1, "all-gather": 2}


@every_type
def test_every_leaf_is_sharded(weights: Weights, make: Make) -> None:
    """Each device holds an eighth, but for scales that have no axis left to cut, norms, and nothing else."""
    loaded, runner = make(weights, 8)
    module = base.find(loaded.hf_config["model_type"])
    for parameter in base.parameters(loaded.model, module.WEIGHTS):
        weight = parameter.variable.get_value()
        for leaf in jax.tree.leaves(weight):
            held = math.prod(leaf.addressable_shards[0].data.shape)
            row_parallel = parameter.path.endswith(("attention.o.weight", "mlp.down.weight"))
            no_axis = isinstance(weight, QArray) and not weight.blockwise and row_parallel and leaf.ndim == 1
            whole = parameter.role is base.Role.FLOAT or no_axis
            assert held == leaf.size // (1 if whole else 8), parameter.path
    for leaf in jax.tree.leaves(runner._cache):
        assert math.prod(leaf.addressable_shards[0].data.shape) == leaf.size // 8


@pytest.mark.parametrize(
    ("weights", "shape"),
    [
        (TYPES[0], {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        (TYPES[0], {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 321}),
        (Weights(quantize_type="int4_blockwise", symmetric=False), {"num_key_value_heads": 2}),
        (Weights(quantize_type="int4_blockwise", symmetric=False), {"head_dim": 16, "intermediate_size": 480}),
        (
            Weights(quantize_type="int8_per_channel"),
            {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
        ),
        (Weights(quantize_type="int4_per_channel"), {"intermediate_size": 100, "tie_word_embeddings": True}),
    ],
    ids=lambda value: value.id if isinstance(value, Weights) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_sizes_that_devices_do_not_divide(weights: Weights, shape: dict[str, Any], make: Make) -> None:
    check_same(make(weights, 1, **shape), make(weights, 8, **shape))


def test_a_mesh_with_a_data_axis(make: Make) -> None:
    weights = Weights(quantize_type="int4_blockwise", symmetric=False)
    check_same(make(weights, 1), make(weights, 8, mesh=MeshConfig(data=2)))


def test_int8_pages(make: Make) -> None:
    one, many = make(Weights(), 1, quantize_cache=True), make(Weights(), 8, quantize_cache=True)
    check_same(one, many, tolerance=5e-2)


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2)], ids=["tensor", "data"])
def test_inputs_in_another_order(mesh: MeshConfig, tmp_path: Path) -> None:
    """GPTQ's act-order: the gathered activations of a layer that is cut along its inputs come from every device."""
    source = make_tiny_checkpoint(tmp_path / "source", num_hidden_layers=LAYERS, **EVEN)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    weights, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    foreign.write_folder(tmp_path / "gptq", weights, foreign.gptq, settings, act_order=True, config=config)
    shutil.copy(source / "tokenizer.json", tmp_path / "gptq")
    found = []
    for devices, shape in ((1, MeshConfig()), (8, mesh)):
        on = make_mesh(shape, jax.devices()[:devices])
        loaded = load_model(tmp_path / "gptq", mesh=on, dtype=jnp.float32)
        assert loaded.model.layers[0].mlp.down.input_order is not None
        engine = EngineConfig(max_sequences=2, max_length=64, max_step_tokens=16, cache=CacheConfig(page_size=8))
        found.append((loaded, Runner(loaded.model, engine, on)))
    check_same(*found)


@pytest.mark.best_kernels
def test_with_the_kernels_that_serve(make: Make) -> None:
    """Whatever the platform's best are, they give about the same numbers; here the CPU's, over eight devices."""
    weights = Weights(quantize_type="int4_blockwise")
    with select.choose(**REFERENCE):
        expected = first_logprobs(make(weights, 1)[1])
    found = first_logprobs(make(weights, 8)[1])
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.02


def first_logprobs(runner: Runner) -> np.ndarray:
    rows = [np.asarray(logits[:count]) for count, logits in runner.evaluate(PROMPTS[1])]
    return np.asarray(jax.nn.log_softmax(np.concatenate(rows), axis=-1))


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="data=3 x tensor=2 x expert=1 takes 6 devices, but there are 8"):
        make_mesh(MeshConfig(data=3))
