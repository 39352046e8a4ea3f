"""The compiled steps themselves: that a TPU's program is what we meant. See `docs/tpu.md`."""

import re

import jax
import pytest

from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.plan import compile as plan_compile
from jetserve.plan import hlo
from jetserve.plan.config import PlanConfig
from jetserve.plan.run import prepare
from jetserve.plan.subject import Placed
from jetserve.testing import make_tiny_checkpoint

LAYERS, LINEARS_A_LAYER, BATCH, DEVICES = 2, 7, 8, 4
KERNEL = re.compile(r"%(quantized_matmul_int\d|decode_attention)[.\d]* = .* custom-call\((.*?)\), custom_call_target")
INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<dtype>\w+)\[(?P<shape>[\d,]*)\]\S* (?P<op>[\w\-]+)\((?P<operands>.*)"
)


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Placed:
    """A model that four chips share evenly, over a cache that is larger than its weights."""
    checkpoint = make_tiny_checkpoint(
        tmp_path_factory.mktemp("model"),
        hidden_size=1024,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=4096,
        num_hidden_layers=LAYERS,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    engine = EngineConfig(max_sequences=BATCH, max_length=2048, dtype="bfloat16", cache=CacheConfig())
    config = PlanConfig(
        checkpoint_path=str(checkpoint), topology="v5e:2x2", quantize_type="int4_blockwise", engine=engine
    )
    return prepare(config)[1]


@pytest.fixture(scope="module")
def decode(placed: Placed) -> jax.stages.Compiled:
    return plan_compile.lower(placed, tokens=BATCH, sequences=BATCH, decode=True).compile()


@pytest.fixture(scope="module", params=[MeshConfig(), MeshConfig(expert=8)], ids=["within", "over"])
def experts(request: pytest.FixtureRequest) -> str:
    """The program of a layer of Mixtral, its experts split or shared out: a decode step's."""
    engine = EngineConfig(mesh=request.param, max_sequences=BATCH, max_length=2048, dtype="bfloat16")
    config = PlanConfig(
        model_name="mixtral", size="8x7b", topology="v5e:2x4", quantize_type="int4_blockwise", engine=engine
    )
    placed = prepare(config)[1].with_layers(1)
    return text_of(plan_compile.lower(placed, tokens=BATCH, sequences=BATCH, decode=True).compile())


def text_of(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text is not None
    return text


def converted_weights(text: str) -> list[str]:
    """Instructions of their own, not within a fusion, that make another type of an int4 array of some size."""
    entry = text[text.index("\nENTRY ") :]
    found = {match["name"]: match for line in entry.splitlines() if (match := INSTRUCTION.match(line))}
    return [
        match[0]
        for match in found.values()
        if match["op"] in {"convert", "fusion"}
        and match["dtype"] not in {"s4"}
        and any(
            found[name]["dtype"] == "s4" and found[name]["shape"] == match["shape"]
            for name in re.findall(r"%([\w.\-]+)", match["operands"].split("), ")[0])
            if name in found
        )
    ]


def test_every_linear_layer_and_attention_is_a_kernel(decode: jax.stages.Compiled) -> None:
    kernels = KERNEL.findall(text_of(decode))
    names = [name for name, _ in kernels]
    assert names.count("quantized_matmul_int4") == LINEARS_A_LAYER * LAYERS
    assert names.count("decode_attention") == LAYERS


def test_int4_weights_stay_int4_until_they_are_multiplied(placed: Placed, decode: jax.stages.Compiled) -> None:
    text = text_of(decode)
    arrays = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    for name, operands in KERNEL.findall(text):
        dtypes = [arrays[operand] for operand in re.findall(r"%([\w.\-]+)", operands)]
        assert ("s4" in dtypes) == (name == "quantized_matmul_int4")
    assert converted_weights(text) == []
    prefill = plan_compile.lower(placed, tokens=64, sequences=BATCH, decode=False).compile()
    assert converted_weights(text_of(prefill)) == []


def test_two_sums_a_layer(decode: jax.stages.Compiled) -> None:
    """And two more a step, of the embedding that was looked up and of the logits; and each device's best token."""
    found = hlo.collectives(text_of(decode))
    gathers = [collective for collective in found if collective.kind == "all-gather"]
    assert [collective.kind for collective in found if collective not in gathers] == ["all-reduce"] * (2 * LAYERS + 2)
    assert len(gathers) <= 2
    assert all(collective.result_bytes <= 4 * DEVICES * BATCH for collective in gathers)


def test_experts_stay_where_they_are(experts: str) -> None:
    """They are kernels, over int4, and nothing but rows (and what few numbers route them) is sent between devices."""
    gate, up, of_a_value = 14336, 14336, 2
    assert max(found.result_bytes for found in hlo.collectives(experts)) <= 2 * BATCH * (gate + up) * of_a_value
    assert converted_weights(experts) == []
    assert [name for name, _ in KERNEL.findall(experts)].count("quantized_matmul_int4") == LINEARS_A_LAYER


def test_memory(placed: Placed, decode: jax.stages.Compiled) -> None:
    """Arguments are what they must be, and the cache is written where it lies."""
    memory = decode.memory_analysis()
    assert memory is not None
    ideal = placed.ideal_weights_bytes + placed.cache_bytes
    assert ideal <= memory.argument_size_in_bytes < 1.05 * ideal
    assert memory.alias_size_in_bytes >= placed.cache_bytes
    assert memory.temp_size_in_bytes < placed.cache_bytes / LAYERS / 4


def test_a_step_takes_what_the_last_one_returned(decode: jax.stages.Compiled) -> None:
    """Pages come back in the layout and the sharding in which they went in: nothing is compiled or moved in between."""
    (_, pages, _), _ = decode.input_formats
    _, _, returned = decode.output_formats
    assert jax.tree.leaves(pages) == jax.tree.leaves(returned)
