"""Meta's folders, one file or two, against the Hugging Face weights they were made of; pickles that must not be run."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from jetserve.checkpoint import meta
from jetserve.checkpoint.base import CheckpointError, SourceKind
from jetserve.checkpoint.torch_file import TorchFile

PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "vocab_size": -1,
    "multiple_of": 32,
}
ROW_PARALLEL = ("wo.weight", "w2.weight")


@pytest.fixture
def write(tiny, tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny Llama in Meta's manner: Llama 2 splits the embedding over its columns, Llama 3 over its rows."""

    def write(
        parts: int = 1,
        *,
        embedding_axis: int = 1,
        dtype: torch.dtype = torch.float32,
        drop: tuple[str, ...] = (),
        extra: dict[str, torch.Tensor] | None = None,
        **params: object,
    ) -> Path:
        folder = tmp_path / "meta"
        folder.mkdir(exist_ok=True)
        (folder / "params.json").write_text(json.dumps(PARAMS | params))
        files: list[dict[str, torch.Tensor]] = [OrderedDict() for _ in range(parts)]
        for name, w in tiny.meta_weights().items():
            axis = embedding_axis if name.startswith("tok_") else 1 if name.endswith(ROW_PARALLEL) else 0
            tensor = torch.from_numpy(w.copy()).to(dtype)
            pieces = [tensor] * parts if w.ndim == 1 else tensor.chunk(parts, axis)
            for file, piece in zip(files, pieces, strict=True):
                if name not in drop:
                    file[name] = piece.clone()
        for i, file in enumerate(files):
            file["rope.freqs"] = torch.ones(8)
            torch.save(file | (extra or {}), folder / f"consolidated.{i:02}.pth")
        return folder

    return write


@pytest.mark.parametrize(
    ("parts", "embedding_axis", "dtype"),
    [(1, 1, torch.float32), (2, 1, torch.bfloat16), (2, 0, torch.float32), (2, 1, torch.float16)],
)
def test_every_tensor_comes_back_in_hugging_faces_layout(write, tiny, parts, embedding_axis, dtype) -> None:
    reader = meta.open_reader(write(parts, embedding_axis=embedding_axis, dtype=dtype))
    numpy_dtype = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}[dtype]
    assert reader.tensors.keys() == tiny.weights.keys()
    assert reader.kind is SourceKind.FLOAT
    for name, w in tiny.weights.items():
        expected = w.astype(numpy_dtype)
        found = reader.read(name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        for start, stop in ((0, 5), (30, 40), (len(w) - 3, len(w)), (7, 7)):  # (30, 40) spans two files
            np.testing.assert_array_equal(reader.read_rows(name, start, min(stop, len(w))), expected[start:stop])
        assert reader.tensors[name].shape == w.shape
        assert reader.read_quantized(name) is None
        assert reader.quantized_bits(name) is None
    assert reader.tokenizer() is None
    with pytest.raises(KeyError, match=r"no\.such"):
        reader.read("no.such")


def test_the_config(write) -> None:
    config = meta.open_reader(write()).hf_config
    assert config == {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "vocab_size": 128,
        "tie_word_embeddings": False,
    }


def test_variants_of_the_config(write) -> None:
    scaled = meta.open_reader(write(rope_theta=500000.0, use_scaled_rope=True)).hf_config
    assert scaled["rope_theta"] == 500000.0
    assert scaled["max_position_embeddings"] == 131072
    assert scaled["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,  # the tiny model is smaller than Llama 3.1's smallest
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert meta.open_reader(write(use_scaled_rope=True, rope_scaling_factor=8)).hf_config["rope_scaling"]["factor"] == 8
    assert meta.open_reader(write(rope_theta=1e6)).hf_config["max_position_embeddings"] == 16384
    assert meta.open_reader(write(max_seq_len=777)).hf_config["max_position_embeddings"] == 777
    assert meta.open_reader(write(drop=("output.weight",))).hf_config["tie_word_embeddings"] is True


def test_the_fingerprint_follows_weights_and_params(write) -> None:
    prints = {meta.open_reader(write()).fingerprint(), meta.open_reader(write()).fingerprint()}
    assert len(prints) == 1
    prints.add(meta.open_reader(write(rope_theta=5.0)).fingerprint())
    prints.add(meta.open_reader(write(dtype=torch.bfloat16)).fingerprint())
    assert len(prints) == 3


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        meta.open_reader(folder)
    for word in words:
        assert word in str(caught.value)


def test_missing_files_are_refused(write) -> None:
    folder = write(2)
    (folder / "consolidated.01.pth").rename(folder / "consolidated.02.pth")
    refused(folder, "consolidated.02.pth", "without a gap")
    (folder / "consolidated.02.pth").unlink()
    refused(folder, "A file is missing")
    (folder / "params.json").unlink()
    refused(folder, "has no params.json")
    (folder / "consolidated.00.pth").unlink()
    refused(folder, "empty folder", "consolidated.00.pth")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_heads": 8, "n_kv_heads": 3}, ["k_proj", "32 rows", "expected 24"]),
        ({"n_layers": 3}, ["2 layers", "n_layers = 3"]),
        ({"dim": None}, ["dim in params.json is None"]),
        ({"dim": 128}, ["tok_embeddings", "128 columns"]),
        ({"norm_eps": "small"}, ["norm_eps", "'small'"]),
        ({"extra": {"layers.0.experts.gate.weight": torch.ones(2)}}, ["layers.0.experts.gate.weight", "Only Llama"]),
        ({"drop": ("layers.1.feed_forward.w2.weight",)}, ["lacks 1", "layers.1.feed_forward.w2.weight"]),
        ({"extra": {"norm.weight": torch.ones(64, 2)}}, ["norm.weight", "1 axes"]),
    ],
)
def test_what_does_not_fit_a_llama_is_refused(write, changes: dict[str, object], words: list[str]) -> None:
    refused(write(**changes), *words)


def test_files_of_different_models_are_refused(write, tiny) -> None:
    folder = write(2)
    second = folder / "consolidated.01.pth"
    tensors = torch.load(second)
    torch.save(tensors | {"norm.weight": tensors["norm.weight"] + 1}, second)
    reader = meta.open_reader(folder)
    with pytest.raises(CheckpointError, match=r"norm.weight in .*consolidated.01.pth differs"):
        reader.read("model.norm.weight")
    torch.save(tensors | {"output.weight": torch.ones(3, 64)}, second)
    refused(folder, "output.weight has the shapes [(3, 64), (64, 64)]")
    del tensors["output.weight"]
    torch.save(tensors, second)
    refused(folder, "do not hold the same tensors", "output.weight")


def save(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


def torch_file_refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        TorchFile(path)
    for word in (path.name, *words):
        assert word in str(caught.value)


def test_views_of_shared_storage_and_strides_are_read(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32)
    tensors = {"t": base.reshape(6, 10).T, "cut": base.reshape(6, 10)[1:, 3:9:2], "scalar": base[7], "none": base[:0]}
    file = TorchFile(save(tmp_path / "x.pth", tensors))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(file.read(name), tensor.numpy())
    assert not file.read("t").flags.writeable


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path) -> None:
    witness = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {witness}",)

    torch_file_refused(save(tmp_path / "x.pth", {"w": Evil()}), "asks for posix.system", "not run")
    assert not witness.exists()


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "torch.load", "torch._utils._rebuild_parameter", "torch.CharStorage", "copyreg._reconstructor"],
)
def test_every_other_name_is_refused(tmp_path: Path, name: str) -> None:
    module, attribute = name.rsplit(".", 1)
    path = tmp_path / "x.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b".")
    torch_file_refused(path, f"asks for {name}")


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        REBUILD + b"(K\x00K\x00K\x00tR",  # no storage
        REBUILD + b"(" + STORAGE + b"K\x00(K\x05t(K\x01ttR",  # five elements of four
        REBUILD + b"(" + STORAGE + b"K\x01(K\x04t(K\x01ttR",  # from the second on
        REBUILD + b"(" + STORAGE + b"K\x00(K\x02t(J\xff\xff\xff\xffttR",  # a negative stride
        REBUILD + b"}X\x01\x00\x00\x00aK\x01sb",  # sets an attribute of the stand-in for torch's function
        b"ctorch\nFloatStorage\n)R",  # calls the stand-in for a storage's type
        b"ccollections\nOrderedDict\nN}X\x04\x00\x00\x00evilK\x01s\x86b",  # sets an attribute of a class
        b"X\x01\x00\x00\x00aQ",  # a storage that is a text
    ],
)
def test_malformed_pickles_are_refused(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "x.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + body + b".")
        archive.writestr("x/data/0", bytes(16))
    torch_file_refused(path, "pickle that cannot be read")


def test_other_contents_are_refused(tmp_path: Path) -> None:
    torch_file_refused(save(tmp_path / "list.pth", [torch.ones(2)]), "holds a list")
    torch_file_refused(save(tmp_path / "nested.pth", {"model": {"w": torch.ones(2)}}), "'model' is a dict")
    torch_file_refused(save(tmp_path / "int.pth", {"w": torch.ones(2, dtype=torch.int8)}), "torch.CharStorage")


def test_other_containers_are_refused(tmp_path: Path) -> None:
    legacy = tmp_path / "legacy.pth"
    torch.save({"w": torch.ones(2)}, legacy, _use_new_zipfile_serialization=False)
    torch_file_refused(legacy, "legacy pickle", "save it again")
    for name, content, word in (
        ("tar.pth", bytes(257) + b"ustar" + bytes(10), "tar file"),
        ("text.pth", b"hello", "expected a zip file"),
        ("empty.pth", b"", "is empty"),
        ("plain.pth", pickle.dumps({}), "legacy pickle"),
    ):
        (tmp_path / name).write_bytes(content)
        torch_file_refused(tmp_path / name, word)
    with zipfile.ZipFile(tmp_path / "zip.pth", "w") as archive:
        archive.writestr("readme", "hello")
    torch_file_refused(tmp_path / "zip.pth", "0 data.pkl")


def rewritten(source: Path, target: Path, compression: int = zipfile.ZIP_STORED, **changes: bytes | None) -> Path:
    """A copy of a file with entries changed (None: left out), by the last part of their names."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            content = changes.get(name.rsplit("/", 1)[-1], old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    good = save(tmp_path / "good.pth", {"w": torch.ones(1000)})
    cut = tmp_path / "cut.pth"
    cut.write_bytes(good.read_bytes()[:-500])
    torch_file_refused(cut, "truncated or damaged")
    torch_file_refused(rewritten(good, tmp_path / "a.pth", zipfile.ZIP_DEFLATED), "compressed")
    torch_file_refused(rewritten(good, tmp_path / "b.pth", byteorder=b"big"), "big-endian")
    torch_file_refused(rewritten(good, tmp_path / "c.pth", **{"0": None}), "lacks the storage data/0")
    torch_file_refused(rewritten(good, tmp_path / "d.pth", **{"0": bytes(3996)}), "w ends beyond its storage of 3996")
    data = bytearray(good.read_bytes())
    with zipfile.ZipFile(good) as archive:
        data[archive.getinfo("good/data/0").header_offset] = 0
    (tmp_path / "e.pth").write_bytes(data)
    torch_file_refused(tmp_path / "e.pth", "good/data/0 is not where its index says")


def test_damaged_files_are_read_or_refused_but_raise_nothing_else(tmp_path: Path, damage) -> None:
    path = save(tmp_path / "x.pth", {"a": torch.ones(4, 4), "b": torch.ones(3)})
    data, rng, refusals = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(400):
        path.write_bytes(damage(data, rng, within=len(data)))
        try:
            file = TorchFile(path)
        except CheckpointError:
            refusals += 1
        else:
            for name in file.tensors:
                file.read(name).sum()
    assert 100 < refusals < 400


def test_storages_at_odd_offsets_are_read(tmp_path: Path) -> None:
    good = save(tmp_path / "good.pth", {"w": torch.arange(8, dtype=torch.float32)})
    for pad in range(4):
        file = TorchFile(rewritten(good, tmp_path / f"{pad}.pth", version=b"3" * pad))
        np.testing.assert_array_equal(file.read("w"), np.arange(8, dtype=np.float32))
