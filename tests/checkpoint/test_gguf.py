"""GGUF files as llama.cpp's converter lays them out: every tensor against its source, every block format carried."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf as gguf_package
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as BlockType

from jetserve.checkpoint import gguf
from jetserve.checkpoint.base import CheckpointError, CheckpointReader, SourceKind
from jetserve.checkpoint.gguf_blocks import carry_over
from jetserve.quantize.qarray import dequantize

HF_TO_GGUF = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.LLAMA, 2)
LLAMA_KEYS = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
    "rope.dimension_count": 16,
}
CARRIED = (BlockType.Q4_0, BlockType.Q4_1, BlockType.Q8_0)
MAX_ERROR = 1e-6
"""Of a carried-over weight, relative to the largest one: a few roundings of float32."""


MAX_ROWS = 4096
"""Compared of a tensor, its last: an embedding takes seconds to dequantize."""


def gguf_name(name: str) -> str:
    return HF_TO_GGUF.get_name(name, try_suffixes=(".weight", ".bias"))


@pytest.fixture
def write(tiny, tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny Llama: `linear` is the type of its matrices, keyword arguments change the metadata."""

    def write(
        linear: BlockType = BlockType.F32,
        *,
        name: str = "tiny.gguf",
        arch: str = "llama",
        drop: tuple[str, ...] = (),
        extra: dict[str, np.ndarray] | None = None,
        **changes: object,
    ) -> Path:
        writer = gguf_package.GGUFWriter(tmp_path / name, arch)
        for key, value in (LLAMA_KEYS | {k.replace("__", "."): v for k, v in changes.items()}).items():
            if value is None:
                continue
            full = key if key.startswith("split.") else f"{arch}.{key}"
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            add[type(value)](full, value)
        for tensor in tiny.weights:
            if tensor not in drop:
                w = tiny.interleaved(tensor)
                kept = linear if w.ndim == 2 else BlockType.F32
                writer.add_tensor(gguf_name(tensor), gguf_package.quants.quantize(w, kept), raw_dtype=kept)
        for tensor, w in (extra or {}).items():
            writer.add_tensor(tensor, w)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


@pytest.fixture(scope="module")
def default_reader(default_gguf: Path) -> gguf.GgufReader:
    return gguf.open_reader(default_gguf)


def assert_carried_exactly(reader: CheckpointReader, name: str) -> None:
    qarray, rows = reader.read_quantized(name), reader.tensors[name].shape[0]
    assert qarray is not None
    qarray.check()
    assert qarray.block_size == 32
    assert qarray.shape == reader.tensors[name].shape[::-1]
    assert {leaf.dtype for leaf in (qarray.scale, qarray.zero_point) if leaf is not None} == {np.dtype(np.float32)}
    assert isinstance(qarray.values, np.ndarray)
    if reader.quantized_bits(name) == 4:
        assert qarray.values.min() >= -8
        assert qarray.values.max() <= 7
    first = max(rows - MAX_ROWS, 0)
    expected = reader.read_rows(name, first, rows)
    last_rows = jax.tree.map(lambda leaf: leaf[..., first:], qarray)
    error = np.abs(np.asarray(dequantize(last_rows)).T - expected).max()
    assert error <= MAX_ERROR * np.abs(expected).max()


@pytest.mark.parametrize("linear", [BlockType.F32, BlockType.F16, BlockType.BF16])
def test_floats_come_back_under_hugging_face_names_and_in_its_layout(write, tiny, linear: BlockType) -> None:
    reader = gguf.open_reader(write(linear))
    matrix = {BlockType.F32: np.float32, BlockType.F16: np.float16, BlockType.BF16: ml_dtypes.bfloat16}[linear]
    assert reader.tensors.keys() == tiny.weights.keys()
    assert reader.kind is SourceKind.FLOAT
    for name, w in tiny.weights.items():
        expected = w.astype(matrix if w.ndim == 2 else np.float32)
        found = reader.read(name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(reader.read_rows(name, 3, 21), expected[3:21])
        assert reader.tensors[name].shape == w.shape
        assert reader.tensors[name].nbytes == expected.nbytes
        assert reader.read_quantized(name) is None
        assert reader.quantized_bits(name) is None
        assert not reader.tensors[name].quantized


@pytest.mark.parametrize("linear", CARRIED)
def test_blocks_are_carried_over_exactly(write, tiny, linear: BlockType) -> None:
    reader = gguf.open_reader(write(linear))
    assert reader.kind is SourceKind.QUANTIZED
    for name, w in tiny.weights.items():
        if w.ndim == 1:
            assert reader.read_quantized(name) is None
            continue
        assert reader.tensors[name].quantized
        assert reader.quantized_bits(name) == (8 if linear == BlockType.Q8_0 else 4)
        # Quantizing acts within a row, so that it commutes with the permutation of rows.
        expected = gguf_package.quants.dequantize(gguf_package.quants.quantize(w, linear), linear)
        np.testing.assert_array_equal(reader.read(name), expected)
        np.testing.assert_array_equal(reader.read_rows(name, 3, 21), expected[3:21])
        assert_carried_exactly(reader, name)


@pytest.mark.parametrize("linear", [BlockType.Q5_0, BlockType.Q5_1])
def test_other_block_types_are_dequantized(write, tiny, linear: BlockType) -> None:
    reader = gguf.open_reader(write(linear))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert reader.kind is SourceKind.FLOAT
    assert reader.read_quantized(name) is None
    assert reader.tensors[name].quantized
    np.testing.assert_allclose(reader.read(name), tiny.weights[name], atol=0.01)


@pytest.mark.parametrize("block_type", CARRIED)
def test_random_matrices_of_any_scale_are_carried_over(block_type: BlockType) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((96, 256)).astype(np.float32) * np.exp2(rng.integers(-12, 6, (96, 1)))
    w = (w + rng.standard_normal((96, 256 // 32)).repeat(32, axis=1)).astype(np.float32)
    rows = gguf_package.quants.quantize(w, block_type)
    expected = gguf_package.quants.dequantize(rows, block_type)
    found = np.asarray(dequantize(carry_over(rows, block_type, name="w"))).T
    largest = np.abs(expected).reshape(96, -1, 32).max(axis=-1).repeat(32, axis=1)
    assert (np.abs(found - expected) <= MAX_ERROR * largest).all()


def block(block_type: BlockType, d: float, m: float = 0.0) -> np.ndarray:
    halves = np.array([d, m] if block_type == BlockType.Q4_1 else [d], np.float16)
    quants = np.arange(32 if block_type == BlockType.Q8_0 else 16, dtype=np.uint8) * 7
    return np.concatenate([halves.view(np.uint8), quants])[None]


@pytest.mark.parametrize("block_type", CARRIED)
@pytest.mark.parametrize("d", [0.0, -0.0, 2.0**-24, -0.5, 1.0])
def test_scales_that_are_zero_subnormal_or_negative(block_type: BlockType, d: float) -> None:
    rows = block(block_type, d, m=-3.0)
    qarray = carry_over(rows, block_type, name="w")
    assert (np.asarray(qarray.scale) != 0).all()
    np.testing.assert_allclose(
        np.asarray(dequantize(qarray)).T, gguf_package.quants.dequantize(rows, block_type), rtol=MAX_ERROR, atol=1e-12
    )


@pytest.mark.parametrize(("d", "m"), [(np.inf, 0), (np.nan, 0), (1, np.nan)])
def test_scales_that_are_not_finite_are_refused(d: float, m: float) -> None:
    with pytest.raises(CheckpointError, match="layer seven has 1 blocks whose scale or minimum is not finite"):
        carry_over(block(BlockType.Q4_1, d, m), BlockType.Q4_1, name="layer seven")


def test_the_config_says_what_a_llama_needs(write) -> None:
    config = gguf.open_reader(write()).hf_config
    assert config == {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": pytest.approx(1e-5, rel=1e-6),
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
        "vocab_size": 128,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_variants_of_the_config(write) -> None:
    def config(**changes: object) -> dict[str, object]:
        return dict(gguf.open_reader(write(**changes)).hf_config)

    assert config(drop=("lm_head.weight",))["tie_word_embeddings"] is True
    assert config(rope__freq_base=None)["rope_theta"] == 10000.0
    assert config(attention__key_length=16, attention__value_length=16)["head_dim"] == 16
    window = config(attention__sliding_window=128)
    assert (window["model_type"], window["sliding_window"]) == ("mistral", 128)
    linear = config(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert "rope_scaling" not in config(rope__scaling__type="none")
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    reader = gguf.open_reader(write(extra={"rope_freqs.weight": factors}))
    assert reader.hf_config["rope_scaling"] == {"rope_type": "precomputed", "factors": factors.tolist()}
    assert not any("rope" in name for name in reader.tensors)


def test_biases_are_permuted_like_their_weights(write) -> None:
    bias = np.arange(64, dtype=np.float32)
    stored = bias.reshape(4, 2, 8).swapaxes(1, 2).reshape(64)
    reader = gguf.open_reader(write(extra={"blk.0.attn_q.bias": stored, "blk.0.attn_v.bias": bias[:32]}))
    np.testing.assert_array_equal(reader.read("model.layers.0.self_attn.q_proj.bias"), bias)
    np.testing.assert_array_equal(reader.read("model.layers.0.self_attn.v_proj.bias"), bias[:32])
    assert reader.hf_config["attention_bias"] is True


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        gguf.open_reader(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": "mamba"}, ["'mamba'", "expected one of llama"]),
        ({"expert_count": 8}, ["llama.expert_count is 8"]),
        ({"attention__scale": 0.1}, ["llama.attention.scale"]),
        ({"attention__head_count_kv": [2, 1]}, ["head_count_kv", "layer to layer"]),
        ({"block_count": None}, ["llama.block_count is None"]),
        ({"block_count": "two"}, ["llama.block_count is 'two'"]),
        ({"attention__layer_norm_rms_epsilon": None}, ["layer_norm_rms_epsilon"]),
        ({"rope__dimension_count": 8}, ["rope.dimension_count is 8", "head size is 16"]),
        ({"attention__head_count": 5}, ["embedding_length of 64", "5 heads"]),
        ({"attention__head_count": 8, "rope__dimension_count": 8}, ["blk.0.attn_k.weight has 32 rows", "expected 16"]),
        ({"rope__scaling__type": "yarn"}, ["'yarn'", "linear"]),
        ({"rope__scaling__type": "linear"}, ["factor None"]),
        ({"extra": {"rope_freqs.weight": np.ones(4, np.float32)}}, ["4 factors", "expected 8"]),
        ({"extra": {"blk.0.ffn_gate_inp.weight": np.ones(4, np.float32)}}, ["blk.0.ffn_gate_inp.weight"]),
        ({"extra": {"blk.0.attn_q.weight2": np.ones(4, np.float32)}}, ["blk.0.attn_q.weight2"]),
        ({"extra": {"x.weight": np.ones(4, np.int32)}}, ["type I32", "x.weight"]),
        ({"drop": ("model.embed_tokens.weight",)}, ["token_embd.weight"]),
        ({"split__count": 3}, ["one of 3 parts", "llama-gguf-split --merge"]),
        ({"name": "tiny-00001-of-00002.gguf"}, ["one of 2 parts", "llama-gguf-split --merge"]),
    ],
)
def test_models_that_are_not_supported_are_refused(write, changes: dict[str, object], words: list[str]) -> None:
    refused(write(**changes), "tiny", *words)


def damaged(path: Path, edit: Callable[[bytearray], bytes | bytearray]) -> Path:
    path.write_bytes(edit(bytearray(path.read_bytes())))
    return path


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.05, 0.002])
def test_truncated_files_are_refused(write, kept: float) -> None:
    path = damaged(write(), lambda data: data[: int(len(data) * kept)])
    refused(path, "truncated or damaged", str(path.stat().st_size))


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", ["is empty"]),
        (b"GGUF", ["version 0"]),
        (b"PK\x03\x04", ["not a GGUF file", "PK"]),
        (b"tjgg" + bytes(8), ["GGJT", "convert"]),
        (b"GGUF" + struct.pack("<I", 1), ["version 1", "expected 2 or 3"]),
        (b"GGUF" + struct.pack("<I", 9), ["version 9", "expected 2 or 3"]),
        (b"GGUF" + struct.pack(">I", 3), ["big-endian"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS"]),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, head: bytes, words: list[str]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head)
    refused(path, "x.gguf", *words)


def test_overlapping_tensors_and_unknown_types_are_refused(write) -> None:
    path = write()
    needle = b"output_norm.weight"

    def offset_to_zero(data: bytearray) -> bytearray:
        at = data.index(needle) + len(needle) + 4 + 8 + 4  # past the dimensions and the type
        data[at : at + 8] = bytes(8)
        return data

    def unknown_type(data: bytearray) -> bytearray:
        at = data.index(needle) + len(needle) + 4 + 8
        data[at : at + 4] = struct.pack("<I", 999)
        return data

    refused(damaged(path, offset_to_zero), "overlaps")
    refused(damaged(path, unknown_type), "999")


def test_damaged_files_are_read_or_refused_but_raise_nothing_else(write, damage) -> None:
    path = write()
    data, rng, refusals = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(150):
        path.write_bytes(damage(data, rng, within=2500))
        try:
            reader = gguf.open_reader(path)
        except CheckpointError:
            refusals += 1
        else:
            for name in reader.tensors:
                reader.read(name)
    assert 50 < refusals < 150


def test_a_folder_opens_its_only_file(write, tmp_path: Path) -> None:
    file = write()
    assert gguf.matches(file)
    assert gguf.matches(tmp_path)
    assert gguf.open_reader(tmp_path).path == file
    write(name="other.gguf")
    assert not gguf.matches(tmp_path)
    refused(tmp_path, "2 .gguf files", "other.gguf", "path of the file")


def test_fingerprint_names_and_rows(write) -> None:
    path = write()
    reader = gguf.open_reader(path)
    before = reader.fingerprint()
    assert before == gguf.open_reader(path).fingerprint()
    assert reader.tokenizer() is None
    with pytest.raises(KeyError, match=r"no\.such"):
        reader.read("no.such")
    with pytest.raises(ValueError, match="it has 64"):
        reader.read_rows("model.norm.weight", 60, 65)
    damaged(path, lambda data: data[:-1] + b"\x7f")
    assert gguf.open_reader(path).fingerprint() != before


def test_the_default_models_config_and_tokenizer(default_reader: gguf.GgufReader) -> None:
    config = default_reader.hf_config
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (576, 30, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["rms_norm_eps"] == 9.999999747378752e-06
    assert config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    assert default_reader.kind is SourceKind.QUANTIZED
    assert len(default_reader.tensors) == 272
    tokenizer = default_reader.tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Paris", add_special_tokens=False)) == "Paris"


@pytest.mark.parametrize(
    "module",
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"],
)
def test_the_default_models_layers_are_carried_over(default_reader: gguf.GgufReader, module: str) -> None:
    assert_carried_exactly(default_reader, f"model.layers.17.{module}.weight")


def test_the_default_models_embedding_is_carried_over(default_reader: gguf.GgufReader) -> None:
    assert default_reader.quantized_bits("model.embed_tokens.weight") == 8
    assert_carried_exactly(default_reader, "model.embed_tokens.weight")
