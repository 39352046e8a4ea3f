"""Fused tensors and experts: every parameter gets its rows, whatever the source holds them in."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetserve.checkpoint.base import CheckpointError, SourceKind, TensorInfo
from jetserve.checkpoint.parts import in_parts, renamed
from jetserve.checkpoint.source import check_tensors
from jetserve.layers.linear import Linear
from jetserve.models import base
from jetserve.models.base import Source
from jetserve.quantize.methods import rtn
from jetserve.quantize.qarray import QArray, QuantizationConfig, by_expert, dequantize

SIZES = {"D": 32, "N": 4, "K": 2, "H": 3, "F": 6, "E": 5}
CONFIG = QuantizationConfig(bits=8, block_size=32, symmetric=False)


@dataclasses.dataclass(frozen=True)
class Shape:
    sizes: Mapping[str, int]


class Fused(nnx.Module):
    """Queries, keys and values with biases, and the same of every expert."""

    def __init__(self) -> None:
        self.config = Shape(SIZES)
        self.q, self.k, self.v = (Linear(f"D -> {heads} H", SIZES, bias=True) for heads in "NKK")
        self.up = Linear("D -> E F", SIZES)


class Memory:
    """A reader of arrays in memory, as floats or quantized."""

    def __init__(self, tensors: dict[str, np.ndarray], quantized: bool = False) -> None:
        self.path, self.hf_config = Path("memory"), {"model_type": "fused"}
        self._tensors, self._quantized = tensors, quantized
        self.tensors = {
            name: TensorInfo(shape=w.shape, type_name="F32", nbytes=w.nbytes, quantized=quantized and w.ndim == 2)
            for name, w in tensors.items()
        }

    @property
    def kind(self) -> SourceKind:
        return SourceKind.QUANTIZED if self._quantized else SourceKind.FLOAT

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._tensors[name][start:stop]

    def quantized_bits(self, name: str) -> int | None:
        return 8 if self.tensors[name].quantized else None

    def read_quantized(self, name: str) -> QArray | None:
        w = self._tensors[name]
        return (
            rtn.quantize_matrix(lambda a, b: w[a:b], w.shape, CONFIG, name=name)[0]
            if self.quantized_bits(name)
            else None
        )

    def tokenizer(self) -> None:
        return None

    def fingerprint(self) -> str:
        return ""


RNG = np.random.default_rng(0)
PARTS = {
    name: RNG.standard_normal((SIZES[heads] * SIZES["H"], 32)).astype(np.float32)
    for name, heads in zip("qkv", "NKK", strict=True)
}
BIASES = {name: w[:, 0].copy() for name, w in PARTS.items()}
EXPERTS = [RNG.standard_normal((SIZES["F"], 32)).astype(np.float32) for _ in range(SIZES["E"])]


def fuse(parts: Mapping[str, np.ndarray], per: str | None) -> np.ndarray:
    """As the formats describe it: for each group, its rows of q, then of k, then of v."""
    groups = 1 if per is None else SIZES[per]
    return np.concatenate([np.split(parts[name], groups)[g] for g in range(groups) for name in "qkv"])


def table(per: str | None, transposed: bool = False) -> dict[str, Any]:
    names = {
        f"{name}.{kind}": Source(f"h.qkv.{kind}", part=i, per=per, transposed=transposed)
        for i, name in enumerate("qkv")
        for kind in ("weight", "bias")
    }
    return {**names, "up.weight": Source("experts.{e}.up.weight")}


def source(per: str | None, transposed: bool = False, quantized: bool = False) -> Memory:
    fused = fuse(PARTS, per)
    tensors = {"h.qkv.weight": fused.T if transposed else fused, "h.qkv.bias": fuse(BIASES, per)}
    return Memory({**tensors, **{f"experts.{e}.up.weight": w for e, w in enumerate(EXPERTS)}}, quantized)


@pytest.mark.parametrize(("per", "transposed"), [(None, False), ("K", False), (None, True)])
def test_every_parameter_gets_its_rows(per: str | None, transposed: bool) -> None:
    parameters = base.parameters(Fused(), table(per, transposed))
    raw = source(per, transposed)
    check_tensors(raw, parameters)
    reader = in_parts(raw, parameters)
    assert reader.tensors.keys() == {p.source for p in parameters}
    for name, w in PARTS.items():
        np.testing.assert_array_equal(reader.read(f"h.qkv.{name}.weight"), w)
        np.testing.assert_array_equal(reader.read_rows(f"h.qkv.{name}.weight", 1, 5), w[1:5])
        np.testing.assert_array_equal(reader.read(f"h.qkv.{name}.bias"), BIASES[name])
        assert reader.tensors[f"h.qkv.{name}.weight"].shape == w.shape
    np.testing.assert_array_equal(reader.read("experts.up.weight"), np.concatenate(EXPERTS))
    np.testing.assert_array_equal(reader.read_rows("experts.up.weight", 4, 20), np.concatenate(EXPERTS)[4:20])


@pytest.mark.parametrize("per", [None, "K"])
def test_a_quantized_tensor_is_cut_with_its_scales(per: str | None) -> None:
    parameters = base.parameters(Fused(), table(per, transposed=True))
    raw = source(per, quantized=True)
    check_tensors(raw, parameters)
    reader = in_parts(raw, parameters)
    for name, w in {
        **{f"h.qkv.{name}.weight": w for name, w in PARTS.items()},
        "experts.up.weight": np.concatenate(EXPERTS),
    }.items():
        found, expected = (
            reader.read_quantized(name),
            rtn.quantize_matrix(lambda a, b, w=w: w[a:b], w.shape, CONFIG, name="")[0],
        )
        assert found is not None
        assert reader.quantized_bits(name) == 8
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.scale, expected.scale)
        np.testing.assert_array_equal(found.zero_point, expected.zero_point)
    assert reader.read_quantized("h.qkv.q.bias") is None


def test_a_single_expert_is_read_by_the_name_of_its_tensor() -> None:
    class Single(nnx.Module):
        def __init__(self) -> None:
            self.config = Shape({**SIZES, "E": 1})
            self.up = Linear("D -> E F", self.config.sizes)

    parameters = base.parameters(Single(), {"up.weight": Source("experts.{e}.up.weight")})
    raw = Memory({"experts.0.up.weight": EXPERTS[0]})
    check_tensors(raw, parameters)
    [parameter] = parameters
    np.testing.assert_array_equal(in_parts(raw, parameters).read(parameter.source), EXPERTS[0])


def test_experts_are_rounded_each_for_itself() -> None:
    joined = np.concatenate(EXPERTS)
    rounded = by_expert(rtn.quantize_matrix(lambda a, b: joined[a:b], joined.shape, CONFIG, name="")[0], SIZES["E"])
    assert rounded.values.shape == (5, 1, 32, 6)
    assert rounded.scale.shape == (5, 1, 6)
    for e, w in enumerate(EXPERTS):
        alone = rtn.quantize_matrix(lambda a, b, w=w: w[a:b], w.shape, CONFIG, name="")[0]
        np.testing.assert_array_equal(dequantize(rounded)[e], dequantize(alone))
    np.testing.assert_array_equal(by_expert(jnp.asarray(joined.T), SIZES["E"])[3], EXPERTS[3].T)


def test_a_fused_tensor_of_another_size_is_named() -> None:
    parameters = base.parameters(Fused(), table("K"))
    raw = source("K")
    cut = Memory({name: w[:-1] if name == "h.qkv.weight" else w for name, w in raw._tensors.items()})
    with pytest.raises(CheckpointError, match=r"h.qkv.weight has shape \[23, 32\]; by its config, \[24, 32\]"):
        check_tensors(cut, parameters)
    without = Memory({name: w for name, w in raw._tensors.items() if name != "experts.3.up.weight"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of the model's 7 tensors: experts\.3\.up\.weight"):
        check_tensors(without, parameters)


def test_a_checkpoint_without_a_prefix_gets_it() -> None:
    weights = {
        "embed.weight": "model.embed.weight",
        "layers.{i}.norm.scale": Source("model.h.{i}.norm.weight", alias="model.h.{i}.ln.weight"),
        "head.weight": "head.weight",
    }
    usual = ["model.embed.weight", "model.h.0.norm.weight", "model.h.11.norm.weight", "head.weight"]
    for found in (usual, ["embed.weight", "h.0.norm.weight", "h.11.ln.weight", "head.weight"]):
        reader = renamed(Memory({name: np.full(2, i) for i, name in enumerate(found)}), weights)
        assert list(reader.tensors) == usual
        assert [reader.read(name)[0] for name in usual] == [0, 1, 2, 3]
        assert [reader.read_rows(name, 1, 2)[0] for name in usual] == [0, 1, 2, 3]
    strange = Memory({"model.embed.weight": np.ones(1), "h.0.norm.weight": np.ones(1)})
    assert renamed(strange, weights) is strange


@pytest.mark.parametrize(
    "change",
    [
        {"k.weight": Source("h.qkv.weight", part=3, per="K")},
        {"k.weight": Source("h.qkv.weight", part=0, per="K")},
        {"k.weight": Source("h.qkv.weight", part=1, per="E")},
    ],
)
def test_parts_that_make_no_whole_are_refused(change: dict[str, Source]) -> None:
    with pytest.raises(ValueError, match=r"WEIGHTS table takes h\.qkv\.weight"):
        base.parameters(Fused(), {**table("K"), **change})
