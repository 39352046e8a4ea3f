"""Hugging Face folders as transformers writes them, and what is wrong with the ones that must be refused."""

import json
import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jetserve.checkpoint import huggingface
from jetserve.checkpoint.base import CheckpointError, SourceKind
from jetserve.checkpoint.safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    """Folders "single" and "sharded" in float32, "bfloat16" and "float16"."""
    root = tmp_path_factory.mktemp("huggingface")
    tiny.model.save_pretrained(root / "single")
    tiny.model.save_pretrained(root / "sharded", max_shard_size="50KB")
    for name in ("bfloat16", "float16"):
        folder = root / name
        shutil.copytree(root / "single", folder)
        tensors = {key: torch.from_numpy(w).to(getattr(torch, name)) for key, w in tiny.weights.items()}
        save_file(tensors, folder / "model.safetensors")
    return root


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A sharded checkpoint to damage."""
    return shutil.copytree(saved / "sharded", tmp_path / "copy")


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.mark.parametrize("name", ["single", "sharded", "bfloat16", "float16"])
def test_every_tensor_is_read_as_it_was_written(saved: Path, tiny, name: str) -> None:
    reader = huggingface.open_reader(saved / name)
    dtype = np.dtype({"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}.get(name, np.float32))
    assert reader.tensors.keys() == tiny.weights.keys()
    assert reader.kind is SourceKind.FLOAT
    for key, w in tiny.weights.items():
        found = reader.read(key)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, w.astype(dtype))
        assert not found.flags.owndata, "expected a view of the file"
        np.testing.assert_array_equal(reader.read_rows(key, 1, 7), w[1:7].astype(dtype))
        assert reader.tensors[key].shape == w.shape
        assert reader.tensors[key].nbytes == w.size * dtype.itemsize
        assert reader.read_quantized(key) is None
        assert reader.quantized_bits(key) is None
    assert reader.hf_config["model_type"] == "llama"
    assert reader.tokenizer() is None


def test_the_sharded_folder_has_several_shards(saved: Path) -> None:
    assert len(list((saved / "sharded").glob("*.safetensors"))) > 3


def test_unknown_names_and_rows_beyond_the_end(saved: Path) -> None:
    reader = huggingface.open_reader(saved / "single")
    for method in (reader.read, reader.read_quantized, reader.quantized_bits):
        with pytest.raises(KeyError, match=r"no\.such"):
            method("no.such")
    for start, stop in ((0, 65), (-1, 2), (5, 4)):
        with pytest.raises(ValueError, match="it has 64"):
            reader.read_rows("model.norm.weight", start, stop)


def test_the_fingerprint_follows_weights_config_and_tokenizer(folder: Path) -> None:
    prints = {huggingface.open_reader(folder).fingerprint()}
    assert huggingface.open_reader(folder).fingerprint() in prints
    edit_json(folder / "config.json", rope_theta=5.0)
    prints.add(huggingface.open_reader(folder).fingerprint())
    (folder / "tokenizer_config.json").write_text("{}")
    prints.add(huggingface.open_reader(folder).fingerprint())
    with first_shard(folder).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    prints.add(huggingface.open_reader(folder).fingerprint())
    assert len(prints) == 4


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        huggingface.open_reader(folder)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_shard_is_named_with_its_tensors(folder: Path) -> None:
    shard = first_shard(folder)
    tensor = min(SafetensorsFile(shard).entries)
    shard.unlink()
    refused(folder, shard.name, tensor, "lacks 1 of the")


def test_a_truncated_shard_is_refused(folder: Path) -> None:
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(folder, shard.name, "truncated", "100 bytes are missing")


@pytest.mark.parametrize("length", [0, 5, 300])
def test_a_shard_cut_in_its_header_is_refused(folder: Path, length: int) -> None:
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:length])
    refused(folder, shard.name, "Get the file again" if length else "empty")


def test_a_git_lfs_pointer_is_named_as_one(folder: Path) -> None:
    first_shard(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(folder, "Git LFS pointer", "git lfs pull")


def test_index_and_shards_must_agree(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    name, shard = next(item for item in index["weight_map"].items() if item[0].endswith("input_layernorm.weight"))
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, shard, "does not place there", name)
    index["weight_map"] |= {name: shard, "model.ghost.weight": shard}
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, shard, "lacks tensors", "model.ghost.weight")


def test_a_shard_that_the_index_does_not_name_is_refused(folder: Path) -> None:
    shutil.copy(first_shard(folder), folder / "model-00009-of-00009.safetensors")
    refused(folder, "model-00009-of-00009.safetensors", "does not name")


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    name = min(SafetensorsFile(first).entries)
    save_file({name: torch.zeros(2)}, second)
    refused(folder, name, first.name, second.name, "once")


def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path) -> None:
    edit_json(folder / INDEX, weight_map={"a": "../../other/model.safetensors"})
    refused(folder, INDEX, "weight_map")


def test_many_files_need_an_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    refused(folder, "safetensors files", INDEX)


def test_a_single_file_beside_an_index_of_others_is_ambiguous(folder: Path) -> None:
    shutil.copy(first_shard(folder), folder / "model.safetensors")
    refused(folder, "model.safetensors", INDEX, "remove")


def test_config_missing_broken_or_without_a_type(folder: Path) -> None:
    config = folder / "config.json"
    edit_json(config, model_type=None)
    refused(folder, "config.json", "model_type")
    config.write_text('{"model_type": ')
    refused(folder, "config.json", "not valid JSON")
    config.write_text('{"model_type": "llama", "model_type": "bloom"}')
    refused(folder, "model_type", "twice")
    config.write_text("[]")
    refused(folder, "config.json", "list")
    config.unlink()
    refused(folder, "has no config.json")


def test_settings_of_quantized_weights_beside_float_ones_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    refused(folder, "quantization_config", "awq", "no tensor of")
    edit_json(folder / "config.json", quantization_config=None)
    huggingface.open_reader(folder)
    (folder / "quantize_config.json").write_text("{}")
    refused(folder, "quantize_config.json", "'unknown'", "unquantized")


def test_pickles_are_refused(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    refused(folder, "no *.safetensors", "config.json")
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x02.")
    refused(folder, "pytorch_model.bin", "safe_serialization")


def test_integers_are_listed_but_not_read_as_weights(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    save_file({"a.weight": torch.zeros(4, 4, dtype=torch.int8)}, folder / "model.safetensors")
    reader = huggingface.open_reader(folder)
    assert reader.tensors["a.weight"].type_name == "I8"
    with pytest.raises(CheckpointError, match=r"a\.weight has dtype I8"):
        reader.read("a.weight")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        ({"a": {"dtype": "F32"}}, "expected dtype, shape and data_offsets"),
        ({"a": ENTRY | {"dtype": "F6_E3M2"}}, "a has dtype 'F6_E3M2'"),
        ({"a": ENTRY | {"shape": [-2]}}, "expected sizes"),
        ({"a": ENTRY | {"shape": [3]}}, "expected 12"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, "b starts at byte 4 and overlaps"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [16, 24]}}, "hole"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 16]}}, "8 bytes after its last tensor"),
        (json.dumps({"a": ENTRY})[:-1].encode() + b', "a": {}}', "'a' stands there twice"),
    ],
)
def test_malformed_safetensors_headers_are_refused(tmp_path: Path, header: object, words: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, bytes(24))
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert words in str(caught.value)
    assert "x.safetensors" in str(caught.value)


def test_damaged_safetensors_are_read_or_refused_but_raise_nothing_else(tmp_path: Path, damage) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4, 4), "b": torch.ones(3)}, path)
    data, rng, refusals = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(300):
        path.write_bytes(damage(data, rng, within=200))
        try:
            file = SafetensorsFile(path)
        except CheckpointError:
            refusals += 1
        else:
            for name in file.entries:
                file.read(name)
    assert 100 < refusals < 300


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = np.arange(3, dtype=np.float32)
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    for pad in range(4):
        file = SafetensorsFile(write_raw(tmp_path / f"{pad}.safetensors", header + b" " * pad, values.tobytes()))
        np.testing.assert_array_equal(file.read("a"), values)
        assert file.read("a").flags.aligned


def test_matches(saved: Path, tmp_path: Path) -> None:
    assert huggingface.matches(saved / "single")
    assert huggingface.matches(saved / "sharded")
    assert not huggingface.matches(tmp_path)
    assert not huggingface.matches(saved / "single" / "model.safetensors")
