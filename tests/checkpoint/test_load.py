"""Loading on the fly: every weight is the rounded source in its place, and what does not fit is refused by name."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.load import LoadedModel, load_model, open_model
from jetserve.config import MeshConfig
from jetserve.kernels import select
from jetserve.models import base, llama
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.qarray import QUANTIZE_TYPES, QArray, QuantizationConfig, cast_values, quantize
from jetserve.testing import make_tiny_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", intermediate_size=96, attention_bias=True)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint whose tensors were changed by a function."""

    def make(edit: Callable[[dict[str, np.ndarray]], object], **config: object) -> Path:
        folder = make_tiny_checkpoint(tmp_path / "edited", **config)  # type: ignore[arg-type]
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def load(path: Path, mesh: Mesh, **settings: object) -> LoadedModel:
    """Loaded with weights as they are made, not as a kernel lays them out."""
    with select.choose(quantized_matmul="xla"):
        return load_model(path, mesh=mesh, dtype=jnp.dtype("float32"), **settings)  # type: ignore[arg-type]


def weights(loaded: LoadedModel) -> dict[str, object]:
    """By Hugging Face name."""
    return {p.source: p.variable.get_value() for p in base.parameters(loaded.model, llama.WEIGHTS)}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", QUANTIZE_TYPES)
def test_linears_are_the_rounded_source(source: Path, mesh: Mesh, name: str, symmetric: bool) -> None:
    loaded = load(source, mesh, quantize_type=name, symmetric=symmetric, quantize_activation=True)
    tensors = load_file(source / "model.safetensors")
    found = weights(loaded)
    assert found.keys() == tensors.keys()
    config = QuantizationConfig.from_name(name, symmetric=symmetric, quantize_activation=True)
    expected = cast_values(quantize(tensors[UP].T, config.for_contracted_size(64)), config.bits)
    jax.tree.map(np.testing.assert_array_equal, found[UP], expected)
    up = found[UP]
    assert isinstance(up, QArray)
    assert up.values.dtype == (jnp.int4 if config.bits == 4 else jnp.int8)
    for embedding in ("model.embed_tokens.weight", "lm_head.weight"):
        expected = quantize(tensors[embedding].T, QuantizationConfig(bits=8))
        jax.tree.map(np.testing.assert_array_equal, found[embedding], expected)
    for vector in ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
        np.testing.assert_array_equal(found[vector], tensors[vector])
    assert loaded.quantize_type == name
    assert loaded.report.by_type()[name].worst(1)[0].error > 0  # type: ignore[operator]


def test_report_counts_every_weight_and_its_bits(source: Path, mesh: Mesh) -> None:
    report = load(source, mesh, quantize_type="int4_blockwise", block_size=64).report
    assert report.weights == sum(tensor.size for tensor in load_file(source / "model.safetensors").values())
    by_type = report.by_type()
    assert {name: len(group.tensors) for name, group in by_type.items()} == {
        "int8_per_channel": 2,
        "int4_blockwise": 14,
        "float32": 13,
    }
    assert by_type["float32"].bits_per_weight == 32
    gate = next(t for t in report.tensors if t.name == UP)
    assert gate.bits == 64 * 96 * 4 + 96 * 32
    assert report.changed_block_sizes() == {(64, 32): 2}  # the down projections: 96 = 3 x 32
    assert json.dumps(report.as_dict())


def test_unset_type_of_floats_loads_floats_in_the_wanted_dtype(source: Path, mesh: Mesh) -> None:
    loaded = load_model(source, mesh=mesh, dtype=jnp.dtype("bfloat16"))
    assert loaded.quantize_type == "none"
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(loaded.model))} == {jnp.dtype("bfloat16")}
    assert loaded.tokenizer is not None
    assert loaded.config.num_layers == 2


def test_progress_sees_every_tensor(source: Path, mesh: Mesh) -> None:
    seen: list[int] = []

    def progress(work):  # type: ignore[no-untyped-def]
        seen.append(len(work))
        return work

    load(source, mesh, progress=progress)
    assert seen == [len(load_file(source / "model.safetensors"))]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(UP), rf"lacks 1 of .*{UP}"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight.*tie_word_embeddings"),
        (lambda t: t.update({"model.extra.weight": t[UP]}), "model.extra.weight.*another model"),
        (lambda t: t.update({UP: t[UP][:-1].copy()}), rf"{UP} has shape \[127, 64\].*\[128, 64\]"),
        (lambda t: t[UP].__setitem__((5, 5), np.inf), f"{UP} holds NaN or infinite"),
        (lambda t: t["model.norm.weight"].__setitem__(5, np.nan), "model.norm.weight holds NaN or infinite"),
        (lambda t: t.update({UP: t[UP].astype(np.int8)}), f"{UP}.*I8"),
    ],
)
@pytest.mark.parametrize("quantize_type", ["int4_blockwise", "none"])
def test_what_does_not_fit_is_refused_by_name(edited, mesh: Mesh, edit, message: str, quantize_type: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(edited(edit), mesh, quantize_type=quantize_type)


def test_rotary_frequencies_are_ignored(edited, mesh: Mesh) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(edited(lambda tensors: tensors.update({name: np.ones(4, np.float32)})), mesh)


def test_a_tied_head_must_be_the_embedding(edited, mesh: Mesh) -> None:
    def same(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def different(tensors: dict) -> None:
        same(tensors)
        tensors["lm_head.weight"][-1, -1] += 1

    loaded = load(edited(same, tie_word_embeddings=True), mesh, quantize_type="int8_per_channel")
    assert "lm_head.weight" not in weights(loaded)
    with pytest.raises(CheckpointError, match=r"ties the output head.*lm_head\.weight differs"):
        load(edited(different, tie_word_embeddings=True), mesh)


def test_refusals_come_before_reading(edited, mesh: Mesh) -> None:
    path = edited(lambda tensors: tensors[UP].__setitem__((0, 0), np.nan))
    with pytest.raises(ValueError, match="fewer than the block size 256"):
        load(path, mesh, quantize_type="int4_blockwise", block_size=256)


def test_an_unknown_architecture_names_those_that_are_built(source: Path, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "x")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'mamba'.*llama"):
        open_model(folder)


SHARDED = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jetserve.checkpoint.load import load_model
from jetserve.config import MeshConfig
from jetserve.convert import convert
from jetserve.kernels import select
from jetserve.models import base, llama
from jetserve.parallel.mesh import make_mesh
from jetserve.checkpoint.placement import shardings
from jetserve.parallel.rules import Layout
from jetserve.testing import make_tiny_checkpoint

folder = Path(sys.argv[1])
source = make_tiny_checkpoint(
    folder / "hf", hidden_size=256, intermediate_size=512, num_key_value_heads=8, attention_bias=True
)
devices = jax.devices()
assert len(devices) == 8
mesh, alone = make_mesh(MeshConfig()), make_mesh(MeshConfig(), devices[:1])
layout = Layout(mesh=mesh)
for quantize_type, block in (("int4_blockwise", 64), ("int8_per_channel", None), ("none", None)):
    convert(source, folder / quantize_type, quantize_type=quantize_type, block_size=block, progress=lambda work: work)
    with select.choose(quantized_matmul="xla"):
        flags = dict(dtype=jnp.dtype("float32"))
        expected = load_model(folder / quantize_type, mesh=alone, **flags)
        for path, settings in (
            (source, dict(quantize_type=quantize_type, block_size=block)), (folder / quantize_type, {})
        ):
            loaded = load_model(path, mesh=mesh, **flags, **settings)
            whole = {p.source: p.variable.get_value() for p in base.parameters(expected.model, llama.WEIGHTS)}
            for p in base.parameters(loaded.model, llama.WEIGHTS):
                weight = p.variable.get_value()
                wanted = shardings(p, weight, layout)
                def check(leaf, sharding, single):
                    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (p.source, leaf.sharding, sharding)
                    assert leaf.dtype == single.dtype
                    np.testing.assert_array_equal(leaf, single)
                jax.tree.map(check, weight, wanted, whole[p.source])
                if p.source.endswith("up_proj.weight"):
                    first = jax.tree.leaves(weight)[0]
                    assert first.addressable_shards[0].data.size == first.size // 8
print("sharded as expected")
"""


@pytest.mark.slow
def test_every_leaf_is_sharded_over_eight_devices(tmp_path: Path) -> None:
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "sharded as expected", result.stderr[-3000:]
