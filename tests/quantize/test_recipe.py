"""Recipes: what every role becomes, and all that is refused before a byte is read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jetserve.method_config import Clip
from jetserve.models.base import Origin, Parameter, Role
from jetserve.parallel.rules import Axes
from jetserve.quantize.methods import rtn
from jetserve.quantize.qarray import QUANTIZE_TYPES, QuantizationConfig, dequantize, quantize
from jetserve.quantize.recipe import Action, Overlap, Recipe, Rule, Rules
from jetserve.quantize.recipe_file import parse_rules, read_rules


def parameter(role: Role, K: int = 64, N: int = 32) -> Parameter:
    axes = None if role is Role.FLOAT else Axes.parse("D -> F", {"D": K, "F": N})
    return Parameter(
        path=f"some.{role.value}",
        source=f"source.{role.value}",
        origin=Origin(names=(f"source.{role.value}",), height=N, start=0, stop=N, group=N),
        shape=(N,) if axes is None else axes.shape,
        axes=axes,
        linear=None,
        output_axes=(("F", N),),
        role=role,
        variable=nnx.Param(0),
    )


@pytest.mark.parametrize("symmetric", [None, True, False])
@pytest.mark.parametrize("name", QUANTIZE_TYPES)
def test_linears_take_the_type_embeddings_int8_per_channel_and_vectors_none(name: str, symmetric: bool | None) -> None:
    recipe = Recipe.from_settings(name, symmetric=symmetric, quantize_activation=True, source_quantized=False)
    plan = recipe.plan([parameter(role) for role in Role])
    linear = plan["some.linear"]
    assert linear.action is Action.ROUND
    assert linear.config is not None
    assert linear.config.name == name
    assert linear.config.symmetric is (symmetric is not False)
    assert linear.config.block_size == (64 if "blockwise" in name else None)
    assert linear.quantize_activation
    assert plan["some.embedding"].config == QuantizationConfig(bits=8)
    assert not plan["some.embedding"].quantize_activation
    assert plan["some.float"].action is Action.FLOAT


def test_unset_keeps_a_quantized_source_and_leaves_a_float_one() -> None:
    assert Recipe.from_settings(source_quantized=True).quantize_type == "keep"
    assert Recipe.from_settings(source_quantized=False).quantize_type == "none"
    kept = Recipe.from_settings(source_quantized=True, quantize_activation=True).target_for(parameter(Role.LINEAR))
    assert kept.action is Action.KEEP
    assert kept.quantize_activation


@pytest.mark.parametrize(
    ("K", "asked", "used"), [(576, None, 96), (576, 128, 96), (64, None, 64), (64, 32, 32), (1536, None, 128)]
)
def test_block_size_that_does_not_divide_becomes_the_largest_that_does(K: int, asked: int | None, used: int) -> None:
    recipe = Recipe.from_settings("int4_blockwise", block_size=asked, source_quantized=False)
    config = recipe.target_for(parameter(Role.LINEAR, K)).config
    assert config is not None
    assert config.block_size == used


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize_type": "int3"}, "int3.*int4_blockwise.*keep"),
        ({"quantize_type": "int4_blockwise", "block_size": 0}, "block_size is 0"),
        ({"quantize_type": "int4_blockwise", "block_size": 7}, "block_size is 7"),
        ({"quantize_type": "int4_per_channel", "block_size": 32}, "block_size is 32.*int4_per_channel"),
        ({"quantize_type": "none", "block_size": 32}, "block_size is 32.*no effect"),
        ({"quantize_type": "keep", "symmetric": False}, "symmetric is False.*no effect"),
        ({"quantize_type": "none", "quantize_activation": True}, "quantize_activation takes quantized weights"),
        ({"quantize_activation": True}, "quantize_activation takes quantized weights"),
    ],
)
def test_settings_without_a_sense_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.from_settings(**settings, source_quantized=False)


@pytest.mark.parametrize(("K", "block_size", "message"), [(64, 128, "fewer than the block size"), (100, 32, "divides")])
def test_a_block_size_that_cannot_be_had_names_the_tensor(K: int, block_size: int, message: str) -> None:
    recipe = Recipe.from_settings("int4_blockwise", block_size=block_size, source_quantized=False)
    with pytest.raises(ValueError, match=rf"source\.linear.*{message}"):
        recipe.plan([parameter(Role.LINEAR, K)])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", QUANTIZE_TYPES)
def test_rounding_rows_at_a_time_is_rounding_at_once(name: str, symmetric: bool) -> None:
    w = np.random.default_rng(0).standard_normal((50, 64), np.float32)
    config = QuantizationConfig.from_name(name, symmetric=symmetric).for_contracted_size(64)
    found, error = rtn.quantize_matrix(lambda a, b: w[a:b], w.shape, config, name="w", chunk_bytes=7 * 4 * 64)
    expected = quantize(w.T, config)
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.scale, expected.scale)
    assert (found.zero_point is None) == symmetric
    difference = np.linalg.norm(np.asarray(dequantize(expected)).T - w) / np.linalg.norm(w)
    assert error == pytest.approx(difference, rel=1e-5)


@pytest.mark.parametrize("quantize_type", ["none", "keep"])
def test_clipping_takes_weights_that_are_rounded(quantize_type: str) -> None:
    with pytest.raises(ValueError, match=f"clip is mse, but quantize type {quantize_type} rounds no weight"):
        Recipe.from_settings(quantize_type, clip=Clip.MSE, source_quantized=True)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int4_per_channel", "int4_blockwise"])
def test_clipping_lowers_the_error_of_weights_with_outliers(name: str, symmetric: bool) -> None:
    w = np.random.default_rng(0).standard_t(4, (20, 64)).astype(np.float32)
    config = QuantizationConfig.from_name(name, symmetric=symmetric).for_contracted_size(64)
    (_, plain), (clipped, error) = (
        rtn.quantize_matrix(lambda a, b: w[a:b], w.shape, config, clip=clip, name="w", chunk_bytes=7 * 4 * 64)
        for clip in Clip
    )
    assert error < 0.98 * plain
    assert error == pytest.approx(np.linalg.norm(np.asarray(dequantize(clipped)).T - w) / np.linalg.norm(w), rel=1e-5)


def test_a_nan_in_any_row_names_the_tensor() -> None:
    w = np.ones((50, 64), np.float32)
    w[41, 3] = np.nan
    with pytest.raises(ValueError, match=r"some\.name holds NaN"):
        rtn.quantize_matrix(
            lambda a, b: w[a:b], w.shape, QuantizationConfig(bits=4), name="some.name", chunk_bytes=7 * 4 * 64
        )


def test_zeros_have_no_error() -> None:
    zeros = np.zeros((8, 64), np.float32)
    rounded, error = rtn.quantize_matrix(lambda a, b: zeros[a:b], (8, 64), QuantizationConfig(bits=4), name="w")
    assert error == 0.0
    assert not np.asarray(rounded.values).any()


def write(path: Path, recipe: Any) -> Path:
    path.write_text(json.dumps(recipe) if path.suffix == ".json" else recipe)
    return path


def linears(*names: str) -> list[Parameter]:
    return [
        dataclasses.replace(parameter(Role.LINEAR), path=name, source=f"model.layers.{name}.weight") for name in names
    ]


def test_a_file_says_what_each_matrix_becomes(tmp_path: Path) -> None:
    file = write(
        tmp_path / "recipe.yaml",
        """
        patterns:
          "*.0.down": {type: int8_blockwise, block_size: 32, symmetric: false}
          "re:[01]\\\\.up": {type: int4_per_channel, method: rtn}
          1.down: skip
        """,
    )
    recipe = Recipe.from_settings("int4_blockwise", rules=read_rules(file), source_quantized=False)
    assert recipe.made == "rules"
    plan = recipe.plan([*linears("0.down", "0.up", "1.down", "1.up", "2.up"), parameter(Role.EMBEDDING)])
    assert plan["0.down"].config == QuantizationConfig(bits=8, block_size=32, symmetric=False)
    assert plan["0.up"].config == plan["1.up"].config == QuantizationConfig(bits=4)
    assert (plan["0.up"].method, plan["0.up"].action) == ("rtn", Action.ROUND)
    assert plan["1.down"].action is Action.FLOAT
    assert plan["2.up"].config == QuantizationConfig(bits=4, block_size=64)
    assert plan["some.embedding"].config == QuantizationConfig(bits=8)


def test_deepspeeds_settings_are_read_as_they_are(tmp_path: Path) -> None:
    file = write(
        tmp_path / "ds_config.json",
        {
            "weight_quantization": {
                "post_init_quant": {
                    "down": {"num_bits": 8, "group_size": 32, "group_dim": 1, "symmetric": False},
                    "*": {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": True},
                }
            }
        },
    )
    plan = Recipe.from_settings(rules=read_rules(file), source_quantized=False).plan(linears("0.down", "0.up"))
    assert plan["0.down"].config == QuantizationConfig(bits=8, block_size=32, symmetric=False)
    assert plan["0.up"].config == QuantizationConfig(bits=4, block_size=64)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("0.up", True),
        ("*up", True),
        ("*up.weight", True),
        ("model.layers.?.up", True),
        ("re:layers\\.\\d\\.up", True),
        ("re:^layers", False),
        ("layers.*", False),
        ("1.up", False),
    ],
)
def test_patterns(pattern: str, matches: bool) -> None:
    assert Rule(pattern=pattern, quantize_type="none").matches("model.layers.0.up.weight") is matches


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"gate": "skip"}, r"'gate' .* no matrix is left.*model\.layers\.0\.down\.weight"),
        ({"down": "skip", "*.0.*": {"type": "keep"}}, r"0\.down\.weight is matched by 'down' and '\*\.0\.\*'"),
    ],
)
def test_patterns_without_effect_and_double_matches_are_refused(tmp_path: Path, patterns: Any, message: str) -> None:
    rules = read_rules(write(tmp_path / "recipe.json", {"patterns": patterns}))
    with pytest.raises(ValueError, match=message):
        Recipe.from_settings(rules=rules, source_quantized=False).plan([*linears("0.down"), parameter(Role.FLOAT)])


def test_a_pattern_that_an_earlier_one_leaves_nothing_is_refused() -> None:
    inner = {"*": {"num_bits": 4}, "down": {"num_bits": 8}}
    rules = parse_rules({"weight_quantization": {"post_init_quant": inner}}, "recipe")
    with pytest.raises(ValueError, match="'down' of the recipe would have no effect"):
        Recipe.from_settings(rules=rules, source_quantized=False).plan(linears("0.down", "0.up"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[]", "holds a list; expected an object with 'patterns'"),
        ("a.json", "{", "is not a recipe"),
        ("a.yaml", "patterns: [", "is not a recipe"),
        ("a.yaml", "patterns: {a: skip, a: skip}", "'a' stands there twice"),
        ("a.json", '{"patterns": {"a": "skip", "a": "skip"}}', "'a' stands there twice"),
        ("a.json", '{"patterns": {}}', "no patterns"),
        ("a.json", '{"patterns": {"a": "leave"}}', "a: found 'leave'; expected an object with type"),
        ("a.json", '{"patterns": {"a": {"type": "int3"}}}', "a: quantize type is 'int3'"),
        ("a.json", '{"patterns": {"a": {"type": "int4_blockwise", "bits": 4}}}', "a: found .*expected an object"),
        ("a.json", '{"patterns": {"a": {"type": "int4_blockwise", "block_size": "64"}}}', "block_size is '64'"),
        ("a.json", '{"patterns": {"a": {"type": "int4_blockwise", "block_size": 48}}}', "block_size is 48"),
        ("a.json", '{"patterns": {"a": {"type": "none", "symmetric": true}}}', "would have no effect"),
        ("a.json", '{"patterns": {"a": {"type": "int4_blockwise", "method": "magic"}}}', "method is 'magic'.*rtn"),
        ("a.json", '{"patterns": {"re:(": "skip"}}', "no regular expression"),
        ("a.json", '{"weight_quantization": {"x": 1}}', "expected an object with post_init_quant alone"),
        ("a.json", '{"weight_quantization": {"post_init_quant": {"a": {"num_bits": 3}}}}', "num_bits is 3"),
        (
            "a.json",
            '{"weight_quantization": {"post_init_quant": {"a": {"num_bits": 4, "group_dim": 0}}}}',
            "group_dim is 0, groups of outputs",
        ),
    ],
)
def test_files_that_are_no_recipes_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rules(tmp_path / name)


def test_a_rule_has_the_method_of_the_command_unless_it_names_one() -> None:
    rules = Rules(rules=(Rule(pattern="source", quantize_type="int4_per_channel"),), overlap=Overlap.REFUSED)
    recipe = Recipe.from_settings("int8_per_channel", rules=rules, method="gptq", source_quantized=False)
    plan = recipe.plan([parameter(Role.LINEAR), parameter(Role.FLOAT)])
    assert plan["some.linear"].method == "gptq"
    named = Rules(
        rules=(Rule(pattern="source", quantize_type="int4_per_channel", method="gptq"),), overlap=Overlap.REFUSED
    )
    with pytest.raises(ValueError, match=r"'source' of the recipe has method gptq.*--quantize_method=gptq"):
        Recipe.from_settings("int8_per_channel", rules=named, source_quantized=False).plan([parameter(Role.LINEAR)])
